from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_cpr.errors import RecoveryError
from lightning_cpr.recovery.election import Decision, Holding, Standing, elect, is_lost_peer
from lightning_cpr.recovery.parity.agree import RankState


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


def parity(rank: int, loop: int, closed: int, received: int, acknowledged: int, again: bool = True) -> Holding:
    """A survivor with parity of every step: exchange e is the one of step e."""
    applied = min(received, acknowledged + 1)
    state = RankState(rank, False, closed, received, applied, acknowledged)
    steps = {exchange: exchange for exchange in range(acknowledged, closed + 1)}
    return Holding(rank, 100 + rank, loop, standing=Standing(loop, again, state, steps))


DEAD = Holding(2, 7, None)


def test_all_go_back_to_the_newest_exchange_that_everybody_has() -> None:
    # both are in batch 9; the exchange of batch 8 did not reach rank 1 before its sender died
    decision = elect([parity(0, 8, 8, 8, 7), parity(1, 8, 8, 7, 7), DEAD])
    assert decision == Decision(step=7, donor=0, lost=(2,), behind=(), exchange=7)


def test_the_donor_is_where_the_loops_are_farthest() -> None:
    decision = elect([parity(0, 7, 7, 7, 7), parity(1, 8, 8, 8, 7), DEAD])
    assert (decision.step, decision.exchange, decision.donor, decision.behind) == (7, 7, 1, ())


@pytest.mark.parametrize(
    "holding",
    [
        parity(1, 8, 7, 7, 6, again=False),  # it would have to run a batch again that it does not have
        parity(1, 9, 7, 7, 7),  # two batches
        Holding(1, 101, 8),  # no parity
    ],
)
def test_nobody_goes_back_where_one_cannot(holding: Holding) -> None:
    decision = elect([parity(0, 8, 8, 8, 7), holding, DEAD])
    assert decision.exchange is None
    assert decision.step == max(8, holding.step or 0)


def test_a_standing_survives_the_store() -> None:
    holding = parity(0, 8, 8, 8, 7)
    assert Holding.from_json(holding.to_json()) == holding
    assert Holding.from_json(DEAD.to_json()) == DEAD
