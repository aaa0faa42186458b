"""FaultInjector by itself: copies of it, and which attempt of a job a wipe strikes."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_cpr import FaultInjector


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda injector: pickle.loads(pickle.dumps(injector))])
def test_a_copy_has_the_schedule_and_fires_it(copied: Any) -> None:
    injector = FaultInjector().slow(0, 3, 0.0).kill(rank=1, step=5)
    injector.connect(lambda *_, **__: None, list)
    twin = copied(injector)
    assert twin.faults == injector.faults
    twin.at_point("pre_write", 3)
    assert bytes(twin.intercept("chunk", [b"rows"])[0]) == b"rows"
    assert (twin.count("slow"), injector.count("slow")) == (1, 0)


@pytest.mark.parametrize(("attempt", "wiped"), [("0", [1]), ("1", [])])
def test_a_restarted_job_is_not_wiped_again(attempt: str, wiped: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
    injector = FaultInjector().wipe(rank=1, step=3)
    trainer: Any = SimpleNamespace(fit_loop=SimpleNamespace(total_batch_idx=2))
    injector.on_train_batch_end(trainer)
    assert injector.take_wiped() == wiped
