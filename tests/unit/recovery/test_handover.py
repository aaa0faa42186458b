"""Which rows of a broken job a restart takes: the last start's, from wherever they lie, or none."""

from __future__ import annotations

import pytest

from lightning_cpr.errors import RecoveryError
from lightning_cpr.recovery.handover import Offer, choose
from lightning_cpr.recovery.stash import Key, Stash

HOSTS = ["a", "a", "b", "b"]


def offer(owner: int, host: str, step: int = 30, epoch: int = 2, incarnation: str = "x", pid: int = 7) -> Offer:
    key = Key("run", "config", "plan", f"agent-{host}")
    return Offer(host, Stash(key, epoch, incarnation, 4, owner, pid, step, (), (0, 0, "")))


def test_each_owner_reads_its_own_or_gets_it_from_a_process_on_the_host_that_has_it() -> None:
    # Ranks were renumbered: host b's processes are ranks 2 and 3 now and hold the shards of ranks 0 and 1.
    take = choose([offer(0, "b"), offer(1, "b"), offer(3, "a"), offer(2, "b")], HOSTS, (2, 20), "plan")
    assert take.decision.lost == ()
    assert take.readers == {0: 2, 1: 3, 2: 2, 3: 1}
    take = choose([offer(1, "a", step=31), offer(2, "b", step=30)], HOSTS, (2, 30), "plan")
    assert (take.decision.step, take.decision.donor) == (31, 1)
    assert (take.decision.lost, take.decision.behind) == ((0, 3), (2,))
    assert take.readers == {1: 1, 2: 2}


def test_under_another_plan_owners_are_those_of_the_plan_that_broke() -> None:
    # Four ranks on two hosts were there, two are left on host a; then the other way round, with a new host c.
    take = choose([offer(0, "a"), offer(1, "a")], ["a", "a"], (2, 20), "another")
    assert (take.resharded, take.decision.lost, take.readers) == (True, (2, 3), {0: 0, 1: 1})
    take = choose([offer(3, "a", step=31), offer(2, "a")], ["c", "c", "c", "a", "a", "c"], (2, 20), "another")
    assert (take.decision.step, take.decision.donor, take.decision.lost) == (31, 3, (0, 1))
    assert (take.decision.behind, take.readers) == ((2,), {2: 3, 3: 3})
    assert not choose([offer(0, "a")], HOSTS, (2, 20), "plan").resharded
    # One of two ranks may hold all tables: the plan is the same without the other.
    take = choose([offer(0, "a"), offer(3, "a")], ["a", "a"], (2, 20), "plan")
    assert (take.resharded, take.decision.lost) == (True, (1, 2))


def test_only_the_last_start_counts() -> None:
    take = choose(
        [offer(0, "a", epoch=1, step=90), offer(1, "a"), offer(1, "a", step=29, pid=6)], HOSTS, (1, 95), "plan"
    )
    assert set(take.sources) == {1}
    assert take.sources[1].stash.step == 30
    with pytest.raises(RecoveryError, match="several starts"):
        choose([offer(0, "a"), offer(1, "a", incarnation="y")], HOSTS, (0, 0), "plan")


@pytest.mark.parametrize(
    ("offers", "newest", "why"),
    [
        ([], (0, 0), "no process"),
        ([offer(0, "a", step=30)], (2, 31), "the store has epoch 2, step 31"),
        ([offer(0, "a", step=30)], (3, 10), "the store has epoch 3, step 10"),
        ([offer(0, "a", step=30), offer(1, "a", step=28)], (0, 0), "more than one step apart"),
        ([offer(4, "a")], (0, 0), r"ranks \[4\]"),
    ],
)
def test_what_does_not_serve_is_refused(offers: list[Offer], newest: tuple[int, int], why: str) -> None:
    with pytest.raises(RecoveryError, match=why):
        choose(offers, HOSTS, newest, "plan")
    with pytest.raises(RecoveryError, match=why):
        choose(offers, HOSTS, newest, "another")
