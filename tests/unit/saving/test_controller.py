from __future__ import annotations

from typing import Any

from lightning_cpr.policy.due import Schedule
from lightning_cpr.policy.setting import Mtbf, Setting
from lightning_cpr.saving.controller import Controller, Fixed


def controller(events: list[dict[str, Any]], mtbf: float = 1000.0) -> Controller:
    def emit(event: str, **fields: Any) -> None:
        events.append({"event": event, **fields})

    setting = Setting(owners=(1.0, 1.0), target_pls=0.1, mtbf=Mtbf(mtbf, None))
    return Controller(Fixed(Schedule(steps=10), "partial", "auto", None), setting, emit)


def halfway(made: Controller) -> None:
    """50 of 100 seconds are trained."""
    made.trained(0, 0.0, 1000)
    made.trained(500, 50.0, 1000)


def test_bits_are_few_where_no_restore_is_expected_and_8_once_more_came_than_forecast() -> None:
    events: list[dict[str, Any]] = []
    made = controller(events)
    halfway(made)
    assert made.bits(base=True) == 3
    (told,) = [e for e in events if e["event"] == "bits"]
    assert told["bits"] == 3
    assert 0 < told["expected_restores"] < 0.1
    made.recovered("partial", 1.0, 500, 0.01)
    assert made.bits(base=False) == 3  # the one that any forecast above 0 allows
    made.recovered("partial", 1.0, 500, 0.02)
    assert made.bits(base=False) == 8
    assert made.bits(base=False) == 8
    # a new base counts them in: two so far, and hardly any to come
    assert made.bits(base=True) == 4


def test_bits_are_8_while_the_end_of_the_run_is_unknown() -> None:
    events: list[dict[str, Any]] = []
    made = controller(events)
    assert made.bits(base=True) == 8
    halfway(made)
    assert made.bits(base=False) == 8  # of one chain
    assert made.bits(base=True) == 3


def test_a_job_that_fails_often_gets_8_bits() -> None:
    made = controller([], mtbf=0.5)
    halfway(made)
    assert made.bits(base=True) == 8
