"""Which saves are bases and which are deltas (Check-N-Run, section 4.2). Sizes are shares of a full save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_cpr.policy import check

BaselinePolicy = Literal["full", "one_shot", "consecutive", "intermittent"]
POLICIES: tuple[str, ...] = get_args(BaselinePolicy)
MOST_READ = 1.3
"""A restore should read no more than this many times a base."""


def next_kind(policy: str, increments: Sequence[float] | None) -> Literal["base", "delta"]:
    """The kind of the next save. ``increments``: sizes of the deltas since the newest base, None where there is none.

    intermittent: after increment i, a base is next when ``F_c <= I_c`` with ``F_c = 1 + S_1 + ... + S_i``, what this
    chain has cost, and ``I_c = (i + 1) * S_i``, what the next chain would cost if each save stayed as large as the
    last.
    """
    check.one_of("policy", policy, POLICIES)
    if increments is None or policy == "full":
        return "base"
    for size in increments:
        check.not_negative("increment", size)
    if policy == "intermittent" and increments and _spent(len(increments), sum(increments), increments[-1]):
        return "base"
    return "delta"


def _spent(count: int, written: float, last: float) -> bool:
    return 1 + written <= (count + 1) * last


def delta_since(policy: str) -> Literal["base", "last"]:
    """Whose dirty rows a delta holds: all since the base, or those since the previous save (consecutive)."""
    check.one_of("policy", policy, POLICIES)
    return "last" if policy == "consecutive" else "base"


def compaction_due(policy: str, read: float) -> bool:
    """Whether a chain should be compacted. read: rows that its files hold for each row there is, 1 for a base.

    Only consecutive chains grow without end; the others' restores read a base and one delta.
    """
    return delta_since(policy) == "last" and read > MOST_READ


def read_size(policy: str, increments: Sequence[float]) -> float:
    """What a restore reads: the base and the newest delta, or (consecutive) the base and the whole chain."""
    if not increments or policy == "full":
        return 1.0
    return 1.0 + (sum(increments) if delta_since(policy) == "last" else increments[-1])


@dataclass(frozen=True)
class ChainCost:
    """Means over the saves of a run: ``write`` a save and ``read`` a restore, in full saves."""

    write: float
    read: float


def chain_cost(policy: str, saves: int, touched: Callable[[int], float]) -> ChainCost:
    """Forecast of ``saves`` saves in a row. ``touched(i)``: share of the rows changed over i intervals."""
    check.one_of("policy", policy, POLICIES)
    check.positive("saves", saves)
    since_last = delta_since(policy) == "last"
    write, read = 1.0, 1.0
    count, written, last = 0, 0.0, 0.0  # of the deltas since the newest base
    for _ in range(saves - 1):
        if policy == "full" or (policy == "intermittent" and count and _spent(count, written, last)):
            count, written, last = 0, 0.0, 0.0
            write += 1.0
        else:
            last = touched(1 if since_last else count + 1)
            count, written = count + 1, written + last
            write += last
        read += 1.0 + (written if since_last else last)
    return ChainCost(write / saves, read / saves)
