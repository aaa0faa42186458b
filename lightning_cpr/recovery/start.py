"""One token for each start of a job: what its ranks write in torchrun's store lies under it, and meets nothing older.

torchrun keeps one store over restarts, and PyTorch no longer prefixes its keys by the attempt: a process that comes up
first reads the address that its peer had before the restart, and fails. Restart counts cannot tell starts apart either,
since agents of several nodes count differently (pytorch#135712). So rank 0 hands every start a token.

A guardian is of one start, too. A trainer tells it the token, and it hands that to each replacement.

An error of the user's code ends the run, whatever restarts are left: ``error`` lies under the run, and under the start
too, for those who are in it.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import MutableMapping
from datetime import timedelta

import torch.distributed as dist

from lightning_cpr.errors import RecoveryError, UnsupportedError
from lightning_cpr.recovery import guardian

START_ENV = "LIGHTNING_CPR_START"
"""The token, once this process has it."""
_POLL_S = 0.01


def agree(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> str:
    """A token that this start of the job alone has. All ranks of the start call it, on a store that they share.

    Every rank says hello under a nonce. Rank 0 answers each nonce with its token, stale ones too, which nobody hears,
    until all other ranks have joined under it.

    Raises:
        RecoveryError: ranks, named, did not come up within ``timeout_s``, or one has failed with an error of its own.
    """
    nonce = secrets.token_hex(guardian.TOKEN_BYTES // 2)
    deadline = time.monotonic() + timeout_s
    if rank:
        store.set(f"hello/{rank}", nonce)
        answer = f"answer/{nonce}"
        while not store.check([answer]):
            _wait(store, deadline, [0], timeout_s)
        token = store.get(answer).decode()
        store.set(f"joined/{token}/{rank}", "")
        return token
    waiting, answered = list(range(1, world_size)), set[str]()
    while waiting:
        for other in waiting:
            if store.check([f"hello/{other}"]):
                heard = store.get(f"hello/{other}").decode()
                if heard not in answered:
                    store.set(f"answer/{heard}", nonce)
                    answered.add(heard)
        waiting = [r for r in waiting if not store.check([f"joined/{nonce}/{r}"])]
        if waiting:
            _wait(store, deadline, waiting, timeout_s)
    return nonce


def token_of(env: MutableMapping[str, str], timeout_s: float) -> str:
    """The token of the start that this process is of: a replacement was given it, all others agree on it, once.

    Raises:
        RecoveryError: as `agree`.
        UnsupportedError: as `run_store`.
    """
    if START_ENV not in env:
        token = agree(run_store(env, timeout_s), int(env["RANK"]), int(env["WORLD_SIZE"]), timeout_s)
        guardian.tell_start(token)
        env[START_ENV] = token
    return env[START_ENV]


def run_store(env: MutableMapping[str, str], timeout_s: float, below: str = "") -> dist.Store:
    """A new client of the job's store, which lives in a launcher and outlives every trainer, under the run's prefix, or
    one ``below`` it.

    Raises:
        UnsupportedError: the store is in rank 0's process, where it dies with it.
    """
    if guardian.STORE_ENV in env:
        host, _, port = env[guardian.STORE_ENV].rpartition(":")
    elif env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        host, port = env["MASTER_ADDR"], env["MASTER_PORT"]
    else:
        raise UnsupportedError(
            "live recovery needs the store of torchrun's agent; start the job with 'lightning-cpr run' and leave"
            " TORCH_DISABLE_SHARE_RDZV_TCP_STORE unset"
        )
    client = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
    return dist.PrefixStore("/".join(filter(None, ("cpr", env["TORCHELASTIC_RUN_ID"], below))), client)


def publish_error(rank: int, error: str, timeout_s: float, env: MutableMapping[str, str] = os.environ) -> None:
    """Say that this rank ends with an error of the user's code. The first one stands.

    Raises:
        RuntimeError: the store is gone.
        UnsupportedError: as `run_store`.
    """
    told = json.dumps({"rank": rank, "error": error})
    for below in {"", env.get(START_ENV, "")}:
        run_store(env, timeout_s, below).compare_set("error", "", told)


def published_error(store: dist.Store) -> tuple[int, str] | None:
    """The rank that failed and its error, if one did (`publish_error`): of a start or of a run, as ``store`` is."""
    if not store.check(["error"]):
        return None
    told = json.loads(store.get("error"))
    return told["rank"], told["error"]


def _wait(store: dist.Store, deadline: float, missing: list[int], timeout_s: float) -> None:
    if (failed := published_error(store)) is not None:
        raise RecoveryError(f"rank {failed[0]} failed with {failed[1]}; no peer was lost")
    if time.monotonic() > deadline:
        raise RecoveryError(f"ranks {missing} did not come up within {timeout_s:g} s; see why in their logs")
    time.sleep(_POLL_S)
