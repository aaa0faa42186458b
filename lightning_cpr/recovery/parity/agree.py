"""After a failure: which exchange do all ranks stand at? Pure.

An exchange goes through four points on each rank, in order: *closed* (its rows are taken from the shards), *received*
(all differences for the parity held here are in memory), *applied* (XORed into parity) and *acknowledged* (every rank
has told this one that it applied). Until the last one a rank keeps what it needs to go back: as an owner its
differences, as a holder those it received. An exchange begins only after the one before was acknowledged here, so ranks
are never more than one exchange apart, and the newest exchange that all surviving holders received can be reached by
all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_cpr.errors import RecoveryError


@dataclass(frozen=True)
class RankState:
    """The newest exchange that passed each point on a rank. ``fresh``: a replacement, which holds nothing."""

    rank: int
    fresh: bool
    closed: int
    received: int
    applied: int
    acknowledged: int


@dataclass(frozen=True)
class Agreement:
    """All survivors go to ``exchange``; ``lost`` ranks have neither rows nor parity."""

    exchange: int
    lost: tuple[int, ...]


def agree(states: Sequence[RankState], lost: Collection[int]) -> Agreement:
    """The same on every rank, from the states of all of them.

    Raises:
        RecoveryError: nobody survived.
    """
    gone = {state.rank for state in states if state.fresh} | set(lost)
    received = [state.received for state in states if state.rank not in gone]
    if not received:
        raise RecoveryError("parity: no rank kept its memory; restore all tables from the store")
    return Agreement(min(received), tuple(sorted(gone)))


def holder_move(state: RankState, exchange: int) -> Literal["stay", "apply", "undo"]:
    """What a surviving holder does to its parity to stand at ``exchange``."""
    if state.applied == exchange:
        return "stay"
    if state.applied == exchange - 1 and state.received == exchange:
        return "apply"
    if state.applied == exchange + 1 and state.acknowledged <= exchange:
        return "undo"
    raise _unreachable(state, exchange)


def owner_move(state: RankState, exchange: int) -> Literal["stay", "reopen"]:
    """What a surviving owner does to its window so that it opens at ``exchange``."""
    if state.closed == exchange:
        return "stay"
    if state.closed == exchange + 1 and state.acknowledged <= exchange:
        return "reopen"
    raise _unreachable(state, exchange)


def _unreachable(state: RankState, exchange: int) -> RecoveryError:
    return RecoveryError(
        f"parity: rank {state.rank} cannot stand at exchange {exchange} ({state}); restore from the store and start"
    )
