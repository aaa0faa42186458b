"""SIGTERM on one rank: all ranks stop after the same step."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch.distributed as dist

from lightning_cpr.errors import RecoveryError
from lightning_cpr.recovery.preempt import Preemption, steps_ahead
from tests._ranks import init_gloo, run_ranks


def _run(rank: int, world: int, step_s: float) -> tuple[int, int]:
    init_gloo()
    store = dist.distributed_c10d._get_default_store()
    before = signal.getsignal(signal.SIGTERM)
    preemption = Preemption(store, "test")
    preemption.install()
    step, asked = 0, 0
    while True:
        step += 1
        time.sleep(step_s)  # the work of a step
        dist.barrier()
        if rank == 1 and step == 5:
            asked = step
            os.kill(os.getpid(), signal.SIGTERM)
        if preemption.due(step):
            break
    preemption.remove()
    assert signal.getsignal(signal.SIGTERM) == before
    dist.barrier()
    return step, asked


@pytest.mark.parametrize("step_s", [0.002, 0.1])
def test_all_ranks_stop_after_the_same_step(step_s: float) -> None:
    results = run_ranks(_run, 3, step_s)
    (stop,) = {step for step, _ in results}
    assert max(asked for _, asked in results) == 5
    assert 5 + 2 <= stop <= 5 + steps_ahead(step_s / 2)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_a_rank_that_is_told_too_late_says_so_and_a_first_word_stands() -> None:
    store = dist.HashStore()
    early, late = (Preemption(store, "run", Clock()) for _ in range(2))
    early._on_signal(signal.SIGTERM, None)
    assert not early.due(10)
    late._on_signal(signal.SIGTERM, None)
    assert not late.due(11)
    assert early._stop_after == late._stop_after == 13
    assert not early.due(12)
    assert early.due(13)
    with pytest.raises(RecoveryError, match="the last version stands"):
        late.due(14)
    assert not Preemption(store, "another run", Clock()).due(13)
