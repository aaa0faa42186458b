"""What rank 0 announces while saves take longer than their slots, or fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_cpr.errors import CommitError
from lightning_cpr.policy.due import Moment, Schedule
from lightning_cpr.saving import cycle as module
from lightning_cpr.saving.chain import Chain
from lightning_cpr.saving.cycle import SaveCycle
from lightning_cpr.saving.saver import SavePlan


class Saves:
    """A save takes ``takes`` steps; what was announced is begun at once."""

    def __init__(self) -> None:
        self.chain = Chain("v0", "manifests/v0", 1000)
        self.failed_in_a_row, self.first_failure = 0, None
        self.announced: list[SavePlan] = []
        self.until = 0
        self.now = 0

    @property
    def busy(self) -> bool:
        return self.now < self.until

    def announce(self, plan: SavePlan, epoch: int) -> None:
        self.announced.append(plan)


def make(steps: int, ratio: float) -> tuple[SaveCycle, Saves]:
    saves = Saves()
    settings = SimpleNamespace(max_failed_saves=3, incremental="intermittent", exact_close=True)
    controller = SimpleNamespace(schedule=Schedule(steps=steps, ratio=ratio), bits=lambda base: None)
    job = SimpleNamespace(rank=0, incarnation="i")
    counts = dict.fromkeys(("skipped", "commits", "failed"), 0)
    made: Any = SaveCycle(settings, job, saves, controller, lambda *a, **k: None, counts, 0.0)  # type: ignore[arg-type]
    made.closed = Moment(0, 0.0)
    return made, saves


def begin(cycle: Any, saves: Saves, step: int, takes: int) -> None:
    """What `SaveCycle.start` notes of an announced save, without its bytes."""
    plan = saves.announced[-1]
    cycle._failed_at, cycle._writes_priority = None, plan.content.rows == "priority"
    cycle._note(plan.content.rows == "priority", cycle.now(step))
    saves.until = step + takes


@pytest.mark.parametrize("takes", range(1, 9))
def test_every_cycle_is_closed_however_long_a_priority_save_takes(takes: int) -> None:
    cycle, saves = make(steps=16, ratio=0.125)
    for step in range(1, 160):
        saves.now = step
        before = len(saves.announced)
        cycle.announce_next(step, 0)
        if len(saves.announced) > before:
            begin(cycle, saves, step, takes)
    closes = [plan.step for plan in saves.announced if plan.content.rows != "priority"]
    assert len(closes) >= 160 // (16 + takes) - 1
    assert all(later - earlier <= 16 + takes for earlier, later in zip([0, *closes], closes, strict=False))


def test_a_failed_save_is_made_up_for_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    cycle, saves = make(steps=10_000, ratio=1.0)
    saves.failed_in_a_row = 1
    cycle.take(CommitError("disk"))
    for seconds, announced in ((1.0, 0), (module.RETRY_S - 2, 0), (2.0, 1)):
        clock[0] += seconds
        cycle.announce_next(5, 0)
        assert len(saves.announced) == announced
    begin(cycle, saves, 5, 0)
    clock[0] += 10 * module.RETRY_S
    cycle.announce_next(6, 0)
    assert len(saves.announced) == 1
