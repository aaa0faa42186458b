"""Is a save due, and which: a pure function of where training stands and of the last saves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lightning_cpr.errors import ConfigError
from lightning_cpr.policy import check

Due = Literal["base", "close", "priority"]


@dataclass(frozen=True)
class Moment:
    """Global step and training seconds. All ranks must pass the same seconds: rank 0's, or the job drifts apart."""

    step: int
    seconds: float


@dataclass(frozen=True)
class Schedule:
    """A full cycle (``T_save``) every ``steps`` or every ``seconds``, whichever of the two is set, and within it a
    priority save every ``ratio`` of a cycle (1.0: none). A planner's interval goes into ``seconds``.
    """

    steps: int | None = None
    seconds: float | None = None
    ratio: float = 1.0

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise ConfigError(f"steps={self.steps}, seconds={self.seconds}: set exactly one of the two")
        check.positive("steps" if self.seconds is None else "seconds", self.length)
        check.share("ratio", self.ratio)

    @property
    def length(self) -> float:
        return float(self.steps if self.steps is not None else self.seconds or 0.0)

    def since(self, start: Moment, now: Moment) -> float:
        """The share of a cycle from ``start`` to ``now``."""
        spent = now.step - start.step if self.steps is not None else now.seconds - start.seconds
        return spent / self.length


def due(schedule: Schedule, now: Moment, closed: Moment | None, saved: Moment | None = None) -> Due | None:
    """What is due at ``now``, None if nothing.

    closed: when the newest save that closed a cycle (a base or an exact delta) was taken, None if no valid version
    exists: then a base is due at once, so that there always is one. saved: when the newest priority save was taken. A
    save that was skipped or aborted is not passed in, so it stays due. Priority slots that were missed are not made
    up for.
    """
    if closed is None:
        return "base"
    spent = schedule.since(closed, now)
    if _slot(spent, 1.0) >= 1:
        return "close"
    done = max(schedule.since(closed, saved), 0.0) if saved is not None else 0.0
    if schedule.ratio < 1 and _slot(spent, schedule.ratio) > _slot(done, schedule.ratio):
        return "priority"
    return None


def _slot(spent: float, width: float) -> int:
    return math.floor(spent / width + 1e-9)
