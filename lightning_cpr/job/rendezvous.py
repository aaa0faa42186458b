"""The process group under stock torchrun, on keys of its own for each start of the job (`recovery.start`)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_cpr.recovery.sockets import new_listeners
from lightning_cpr.recovery.start import agree


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
    """``store`` under a prefix that this start of the job alone has. All ranks of the start call it, see `agree`."""
    token = agree(dist.PrefixStore("lightning_cpr", store), rank, world_size, timeout_s)
    return dist.PrefixStore(f"lightning_cpr/start/{token}", store)
