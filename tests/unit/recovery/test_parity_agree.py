"""Which exchange the ranks agree on, for every mixture of points that a failure can leave."""

from __future__ import annotations

from itertools import product

import pytest

from lightning_cpr.errors import RecoveryError
from lightning_cpr.recovery.parity.agree import RankState, agree, holder_move, owner_move

# where a rank can be while exchange 8 is under way; the last is before it closed exchange 8
BEFORE = (7, 7, 7, 7)
POINTS = {
    "before": BEFORE,
    "closed": (8, 7, 7, 7),
    "received": (8, 8, 7, 7),
    "applied": (8, 8, 8, 7),
    "done": (8, 8, 8, 8),
}


def possible(points: tuple[str, ...]) -> bool:
    """Nobody receives before all have closed, nobody is done before all have applied."""
    if any(p in ("received", "applied", "done") for p in points) and "before" in points:
        return False
    return "done" not in points or all(p in ("applied", "done") for p in points)


@pytest.mark.parametrize("lost", [0, 3])
def test_every_mixture_of_points_agrees_on_an_exchange_that_all_can_reach(lost: int) -> None:
    seen = set()
    for points in filter(possible, product(POINTS, repeat=4)):
        states = [RankState(rank, False, *POINTS[point]) for rank, point in enumerate(points)]
        states[lost] = RankState(lost, True, 0, 0, 0, 0)
        target = agree(states, [lost]).exchange
        parity = []
        for state in (s for s in states if s.rank != lost):
            move = holder_move(state, target)
            parity.append(state.applied + {"stay": 0, "apply": 1, "undo": -1}[move])
            if owner_move(state, target) == "reopen":
                assert state.acknowledged == state.closed - 1 == target
            else:
                assert state.closed == target
        assert parity == [target] * 3
        survivors = [p for rank, p in enumerate(points) if rank != lost]
        assert target == (8 if all(p in ("received", "applied", "done") for p in survivors) else 7)
        seen.add(target)
    assert seen == {7, 8}


def test_fresh_ranks_count_as_lost_even_if_nobody_said_so() -> None:
    states = [RankState(0, False, *BEFORE), RankState(1, True, 0, 0, 0, 0), RankState(2, False, *BEFORE)]
    assert agree(states, [2]).lost == (1, 2)
    assert agree(states, [2]).exchange == 7


def test_nobody_left_points_to_the_store() -> None:
    with pytest.raises(RecoveryError, match="store"):
        agree([RankState(0, True, 0, 0, 0, 0)], [])


def test_what_was_given_up_is_not_claimed() -> None:
    with pytest.raises(RecoveryError, match="rank 0 cannot stand at exchange 7"):
        holder_move(RankState(0, False, 8, 8, 8, 8), 7)
    with pytest.raises(RecoveryError, match="rank 0 cannot stand at exchange 6"):
        owner_move(RankState(0, False, 8, 8, 8, 7), 6)
