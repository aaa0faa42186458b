from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_cpr.errors import ConfigError
from lightning_cpr.policy.due import Moment, Schedule, due


def at(step: int, seconds: float | None = None) -> Moment:
    return Moment(step, float(step) if seconds is None else seconds)


def walk(schedule: Schedule, steps: int, skip: frozenset[int] = frozenset()) -> list[tuple[int, str]]:
    """What a training loop of one second a step would save; saves at ``skip`` are not taken (one is in flight)."""
    taken: list[tuple[int, str]] = []
    closed: Moment | None = None
    saved: Moment | None = None
    for step in range(steps + 1):
        kind = due(schedule, at(step), closed, saved)
        if kind is None or step in skip:
            continue
        taken.append((step, kind))
        if kind == "priority":
            saved = at(step)
        else:
            closed = at(step)
    return taken


def test_without_a_valid_version_a_base_is_due_at_once() -> None:
    assert due(Schedule(seconds=1e9), at(0), None) == "base"


@pytest.mark.parametrize("schedule", [Schedule(steps=10), Schedule(seconds=10.0)])
def test_a_cycle_closes_every_interval(schedule: Schedule) -> None:
    assert walk(schedule, 30) == [(0, "base"), (10, "close"), (20, "close"), (30, "close")]


def test_seven_priority_saves_and_an_exact_close_make_a_cycle() -> None:
    taken = walk(Schedule(steps=80, ratio=0.125), 160)
    assert taken[1:9] == [(10 * i, "priority") for i in range(1, 8)] + [(80, "close")]
    assert [kind for _, kind in taken].count("close") == 2


def test_a_save_skipped_while_one_is_in_flight_stays_due() -> None:
    assert walk(Schedule(steps=10), 14, frozenset({10, 11})) == [(0, "base"), (12, "close")]
    taken = walk(Schedule(steps=40, ratio=0.25), 40, frozenset(range(10, 25)))
    assert taken[1:] == [(25, "priority"), (30, "priority"), (40, "close")]  # the missed one is not made up for


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"steps": 1, "seconds": 1.0},
        {"steps": 0},
        {"seconds": -1.0},
        {"steps": 5, "ratio": 0},
        {"steps": 5, "ratio": 2},
    ],
)
def test_bad_schedules_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Schedule(**options)  # type: ignore[arg-type]


@given(st.integers(1, 10), st.integers(1, 40))
def test_a_cycle_holds_one_close_and_one_over_r_minus_one_priority_saves(parts: int, width: int) -> None:
    taken = walk(Schedule(steps=parts * width, ratio=1 / parts), 3 * parts * width)
    kinds = [kind for _, kind in taken]
    assert kinds.count("close") == 3
    assert kinds.count("priority") == 3 * (parts - 1)
    assert all(b - a == width for (a, _), (b, _) in pairwise(taken))
