"""Keys of their own for each start of a job.

torchrun keeps one store over restarts, and PyTorch no longer prefixes its keys by the attempt: a process that comes up
first reads the address that its peer had before the restart, and fails. Restart counts cannot tell starts apart either,
since agents of several nodes count differently (pytorch#135712). So rank 0 hands every start a token.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_cpr.errors import RecoveryError
from lightning_cpr.recovery.sockets import new_listeners

_POLL_S = 0.01


def join_afresh(
    backend: str, rank: int, world_size: int, timeout: timedelta, device_id: torch.device | None = None
) -> tuple[frozenset[int], frozenset[int]]:
    """``init_process_group`` under torchrun, free of what an earlier start left in the agent's store.

    Returns the TCP ports that this rank's group listens on, and those of all ranks' groups.

    Raises:
        RecoveryError: ranks, named, did not come up within ``timeout``.
    """
    store, rank, world_size = next(dist.rendezvous("env://", rank=rank, world_size=world_size, timeout=timeout))
    own = fresh_store(store, rank, world_size, timeout.total_seconds())
    ports: set[int] = set()
    with new_listeners(ports):
        dist.init_process_group(
            backend, store=own, rank=rank, world_size=world_size, timeout=timeout, device_id=device_id
        )
    everybody: list[Any] = [None] * world_size
    dist.all_gather_object(everybody, ports)
    return frozenset(ports), frozenset().union(*everybody)


def fresh_store(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """``store`` under a prefix that this start of the job alone has. All ranks of the start call it.

    Every rank says hello under a nonce. Rank 0 answers each nonce with its token, stale ones too, which nobody hears,
    until all other ranks have joined under it.
    """
    nonce = secrets.token_hex(8)
    deadline = time.monotonic() + timeout_s
    if rank:
        store.set(f"lightning_cpr/hello/{rank}", nonce)
        answer = f"lightning_cpr/answer/{nonce}"
        while not store.check([answer]):
            _wait(deadline, [0], timeout_s)
        token = store.get(answer).decode()
        store.set(f"lightning_cpr/joined/{token}/{rank}", "")
        return dist.PrefixStore(f"lightning_cpr/start/{token}", store)
    waiting, answered = list(range(1, world_size)), set[str]()
    while waiting:
        for other in waiting:
            if store.check([f"lightning_cpr/hello/{other}"]):
                heard = store.get(f"lightning_cpr/hello/{other}").decode()
                if heard not in answered:
                    store.set(f"lightning_cpr/answer/{heard}", nonce)
                    answered.add(heard)
        waiting = [r for r in waiting if not store.check([f"lightning_cpr/joined/{nonce}/{r}"])]
        if waiting:
            _wait(deadline, waiting, timeout_s)
    return dist.PrefixStore(f"lightning_cpr/start/{nonce}", store)


def _wait(deadline: float, missing: list[int], timeout_s: float) -> None:
    if time.monotonic() > deadline:
        raise RecoveryError(f"ranks {missing} did not come up within {timeout_s:g} s; see why in their logs")
    time.sleep(_POLL_S)
