from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_cpr.errors import RecoveryError
from lightning_cpr.recovery.election import Decision, Holding, elect, is_lost_peer


def holdings(*steps: int | None) -> list[Holding]:
    return [Holding(rank, 100 + rank, step) for rank, step in enumerate(steps)]


def test_the_newest_finished_step_wins_and_its_lowest_rank_is_the_donor() -> None:
    assert elect(holdings(None, 6, 7, 7)) == Decision(step=7, donor=2, lost=(0,), behind=(1,))


@given(st.lists(st.sampled_from([None, 4, 5]), min_size=1, max_size=8).filter(lambda s: any(x is not None for x in s)))
def test_every_rank_is_lost_behind_or_as_new_as_the_donor(steps: list[int | None]) -> None:
    decision = elect(holdings(*steps))
    assert steps[decision.donor] == decision.step == max(s for s in steps if s is not None)
    level = {rank for rank, step in enumerate(steps) if step == decision.step}
    assert set(decision.lost) | set(decision.behind) | level == set(range(len(steps)))
    assert len(decision.lost) + len(decision.behind) + len(level) == len(steps)


def test_nobody_left_or_too_far_apart_or_other_plans_are_refused() -> None:
    with pytest.raises(RecoveryError, match="no rank kept"):
        elect(holdings(None, None))
    with pytest.raises(RecoveryError, match="more than one step apart"):
        elect(holdings(3, 5))
    with pytest.raises(RecoveryError, match="different plans"):
        elect([Holding(0, 1, 3, "x"), Holding(1, 2, None, "y")])


def test_holdings_survive_the_store() -> None:
    held = Holding(3, 42, None, "plan")
    assert Holding.from_json(held.to_json()) == held


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("Read error [127.0.0.1]:1: Connection reset by peer"), True),
        (RuntimeError("NCCL communicator was aborted on rank 1"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_what_counts_as_a_lost_peer(error: Exception, lost: bool) -> None:
    assert is_lost_peer(error) is lost
