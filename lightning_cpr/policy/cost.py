"""The closed forms of CPR (section 4): what an interval costs and loses.

Times in seconds, overheads as shares of useful time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lightning_cpr.policy import check


@dataclass(frozen=True)
class Recovery:
    """Seconds that one failure stops the job: ``O_load`` and ``O_res`` (rescheduling, restart, new process group)."""

    load: float = 60.0
    restart: float = 240.0

    def __post_init__(self) -> None:
        check.not_negative("load", self.load)
        check.not_negative("restart", self.restart)


@dataclass(frozen=True)
class Parity:
    """Parity in memory. ``upkeep``: share of useful time that its exchange takes. ``uncovered``: share of failures that
    lose more than the parity holds; these fall back to partial recovery from the store.
    """

    upkeep: float
    recovery: Recovery = field(default_factory=Recovery)
    uncovered: float = 0.0

    def __post_init__(self) -> None:
        check.not_negative("upkeep", self.upkeep)
        check.share("uncovered", self.uncovered, zero=True)


@dataclass(frozen=True)
class Costs:
    """``save``: seconds that training stands still for the saves of one whole interval (``O_save``). Defaults hold
    until measured.
    """

    save: float = 10.0
    full: Recovery = field(default_factory=Recovery)
    partial: Recovery = field(default_factory=Recovery)
    parity: Parity | None = None

    def __post_init__(self) -> None:
        check.not_negative("save", self.save)


@dataclass(frozen=True)
class Overhead:
    """Shares of useful time; `total` may exceed 1."""

    save: float = 0.0
    load: float = 0.0
    lost: float = 0.0
    restart: float = 0.0
    upkeep: float = 0.0

    @property
    def total(self) -> float:
        return self.save + self.load + self.lost + self.restart + self.upkeep


def interval_full(save: float, mtbf: float) -> float:
    """``sqrt(2 * O_save * T_fail)``: the least overhead with full recovery."""
    return math.sqrt(2 * save * mtbf)


def interval_partial(target_pls: float, mtbf: float, lost_share: float) -> float:
    """``2 * PLS_target * T_fail / E[sum of w per failure]``, inf where a failure loses no sharded row."""
    return 2 * target_pls * mtbf / lost_share if lost_share else math.inf


def holds(interval: float, mtbf: float, total: float | None) -> bool:
    """Whether the closed forms are good to about 2 %: many intervals in a run, few failures in an interval."""
    return (total is None or total >= 20 * interval) and interval <= 0.05 * mtbf


def mean_loss(interval: float, total: float | None) -> float:
    """Mean useful seconds between the last save and a failure, uniform over the run. ``T_save / 2``; in runs of less
    than 20 intervals, n whole ones and a last one L, exactly ``(n * T_save**2 + L**2) / (2 * T_total)``. ``total``
    None: no end.
    """
    if total is None or total >= 20 * interval:
        return interval / 2
    whole = math.floor(total / interval)
    rest = total - whole * interval
    return (whole * interval**2 + rest**2) / (2 * total) if whole else total / 2


def expected_pls(interval: float, mtbf: float, total: float | None, lost_share: float) -> float:
    """``E[sum of w] * mean loss / T_fail``: with N equal owners and many intervals ``0.5 * T_save / (T_fail * N)``."""
    return lost_share * mean_loss(interval, total) / mtbf


def overhead_full(costs: Costs, interval: float, mtbf: float, total: float | None) -> Overhead:
    """``O_save / T_save + (O_load + mean loss + O_res) / T_fail``."""
    lost = mean_loss(interval, total) / mtbf
    return Overhead(costs.save / interval, costs.full.load / mtbf, lost, costs.full.restart / mtbf)


def overhead_partial(costs: Costs, interval: float, mtbf: float) -> Overhead:
    """``O_save / T_save + (O_load + O_res) / T_fail``: nothing is done again."""
    return Overhead(costs.save / interval, costs.partial.load / mtbf, 0.0, costs.partial.restart / mtbf)


def overhead_parity(costs: Costs, parity: Parity, interval: float, mtbf: float) -> Overhead:
    """Upkeep all the time; a failure costs a rebuild, or where the parity does not cover it, a partial recovery."""
    u = parity.uncovered
    load = (1 - u) * parity.recovery.load + u * costs.partial.load
    restart = (1 - u) * parity.recovery.restart + u * costs.partial.restart
    return Overhead(costs.save / interval, load / mtbf, 0.0, restart / mtbf, parity.upkeep)
