from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests._ranks import RanksFailedError, init_gloo, rank_outcomes, run_ranks


def _sum(rank: int, world: int, offset: int) -> tuple[int, float]:
    init_gloo()
    value = torch.tensor(float(rank + offset))
    dist.all_reduce(value)
    return rank, value.item()


def _fail(rank: int, world: int) -> None:
    init_gloo()
    if rank == 1:
        raise ValueError("the cause")
    dist.barrier()


def _die(rank: int, world: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def _hang(rank: int, world: int) -> None:
    threading.Event().wait()


def test_results_come_back_in_rank_order() -> None:
    assert run_ranks(_sum, 3, 10) == [(0, 33.0), (1, 33.0), (2, 33.0)]


def test_a_failing_rank_shows_its_traceback() -> None:
    with pytest.raises(RanksFailedError, match="the cause"):
        run_ranks(_fail, 2)


def test_a_killed_rank_is_told_apart() -> None:
    alive, dead = rank_outcomes(_die, 2)
    assert alive.value == "alive"
    assert dead.exitcode == -signal.SIGKILL


def test_a_hanging_rank_is_killed_at_the_deadline() -> None:
    started = time.monotonic()
    (outcome,) = rank_outcomes(_hang, 1, timeout=1.0)
    assert outcome.error is not None
    assert "deadline" in outcome.error
    assert time.monotonic() - started < 20
