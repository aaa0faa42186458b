"""Which lost shard comes back from which source: pure decisions, the same on whichever rank takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_cpr.errors import RecoveryError

SourceKind = Literal["live", "parity", "store"]
Mode = Literal["partial", "full"]

# At equal age the source that costs least wins.
_COST: dict[SourceKind, int] = {"live": 0, "parity": 1, "store": 2}


class RewindError(RecoveryError):
    """Everybody goes back to the newest exact version, by a restart of the job; no rank hands its rows over."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}: everybody goes back, by a restart of the job")


@dataclass(frozen=True)
class Source:
    """Something that holds an owner's shards.

    name: a version id or an exchange. step, samples: every row is at least this new. exact: every row is of that very
    step boundary, on every owner that the source covers.
    """

    kind: SourceKind
    name: str
    step: int
    samples: int
    exact: bool


@dataclass(frozen=True)
class RecoveryPlan:
    """What everybody does. partial: each failed owner takes its source, nobody else changes. full: all take one."""

    mode: Mode
    sources: Mapping[int, Source]
    reason: str


def plan_recovery(
    candidates: Mapping[int, Sequence[Source]], mode: Mode, pls_after: float = 0.0, max_pls: float | None = None
) -> RecoveryPlan:
    """The freshest source of each failed owner, or the newest exact version for everybody.

    Args:
        candidates: by failed owner, the sources that hold all of its shards.
        mode: what the planner wants.
        pls_after: the PLS if this failure is recovered partially.
        max_pls: above it a partial recovery would cost more accuracy than the user accepts: fall back to full.

    Raises:
        RecoveryError: an owner has no source that serves.
    """
    reason = f"the job recovers in mode {mode}"
    if mode == "partial" and max_pls is not None and pls_after > max_pls:
        mode, reason = "full", f"a partial recovery would bring the PLS to {pls_after:.4f}, above {max_pls:.4f}"
    usable = {
        owner: [s for s in sources if mode == "partial" or (s.exact and s.kind == "store")]
        for owner, sources in candidates.items()
    }
    for owner, sources in usable.items():
        if not sources:
            what = "no exact version" if mode == "full" else "no version and no parity"
            raise RecoveryError(
                f"rank {owner}'s shards are lost and there is {what} to bring them back from."
                " Save earlier or more often (save_every_n_steps, save_interval), or restart the job from scratch."
            )
    chosen = {owner: max(s, key=lambda source: (source.samples, -_COST[source.kind])) for owner, s in usable.items()}
    return RecoveryPlan(mode, chosen, reason)
