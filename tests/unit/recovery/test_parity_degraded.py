"""Degraded reads: a replacement trains on rows that come back while it does; bits are compared with what they were."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lightning_cpr.errors import RecoveryError
from lightning_cpr.recovery.parity import degraded, exchanges, groups
from lightning_cpr.recovery.parity.absent import _PART_BIT, _PIECE_BIT, Absent, places_of
from lightning_cpr.recovery.parity.config import ParityConfig
from lightning_cpr.recovery.parity.rebuild import Rebuild
from tests.parity_job import bits, everywhere, touched_rows, train
from tests.unit.recovery.test_parity_keeper import Job


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a few rows and blocks of one or two, so that small tables make many of both."""
    monkeypatch.setattr(groups, "MIN_PIECE_WORDS", 40)
    monkeypatch.setattr(groups, "BLOCK_WORDS", 6)
    monkeypatch.setattr(degraded, "_MOST_BLOCKS", 7)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set, nothing comes back behind the training."""
    gate, round = threading.Event(), Rebuild.round

    def wait_at_the_gate(rebuild: Rebuild, now: Sequence[Any], before: Sequence[Any]) -> None:
        assert gate.wait(20)
        round(rebuild, now, before)

    monkeypatch.setattr(Rebuild, "round", wait_at_the_gate)
    return gate


class Behind(Job):
    """A job whose lost ranks come back behind its steps."""

    def replace_behind(self, lost: list[int]) -> None:
        self.kill(lost)
        everywhere(lambda rank: self.keepers[rank].rebuild(lost, behind=True), range(self.world))

    def step_together(self) -> None:
        """A step as a job of processes runs it: all look up, then all update, then all end it."""
        self.step += 1
        touched = [touched_rows(shards, rank, self.step) for rank, shards in enumerate(self.shards)]
        everywhere(lambda rank: self.look_up(rank, touched[rank]), range(self.world))
        for rank, keeper in enumerate(self.keepers):
            keeper.before_step(touched[rank])
            train(self.shards[rank], touched[rank], rank, self.step)
        everywhere(lambda rank: self.keepers[rank].after_step(self.step, 10 * self.step), range(self.world))

    def look_up(self, rank: int, touched: dict) -> None:
        for spec, rows in touched.items():
            if not spec.replicated and spec.rows:
                self.keepers[rank].wait_for(spec, torch.arange(spec.rows) if rows is None else rows)


def bits_of_a_run_without_a_failure(world: int, layout: int, steps: int) -> list[list[bytes]]:
    job = Behind(ParityConfig(k=2, m=1), world, layout)
    try:
        for _ in range(steps):
            job.step_together()
        return [bits(shards) for shards in job.shards]
    finally:
        job.close()


@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.integers(0, 10_000), st.integers(3, 6), st.sampled_from([1, 2, 4]), st.integers(1, 2), st.data())
def test_steps_on_rows_that_come_back_meanwhile(layout: int, world: int, k: int, m: int, data: st.DataObject) -> None:
    expected = bits_of_a_run_without_a_failure(world, layout, 9)
    job = Behind(ParityConfig(k=k, m=m, scrub_every=2), world, layout)
    try:
        for _ in range(2):
            job.step_together()
        job.settle()
        lost = data.draw(st.lists(st.integers(0, world - 1), min_size=1, max_size=m, unique=True))
        job.replace_behind(lost)
        for _ in range(7):
            job.step_together()
        job.settle()
        assert [bits(shards) for shards in job.shards] == expected
        job.check_parity()
        assert all(keeper.protected and keeper.whole for keeper in job.keepers)
        assert all(keeper.metrics()["mismatches"] == 0 for keeper in job.keepers)
    finally:
        job.close()


@pytest.fixture
def job() -> Iterator[Behind]:
    job = Behind(ParityConfig(k=4, scrub_every=0))
    yield job
    job.close()


def test_rows_that_do_not_decode_are_refused_on_all_ranks_and_never_written(job: Behind) -> None:
    job.settle()
    holder = job.keepers[2]._holder
    piece = next(p for p in holder.pieces if p.holders == (2,))
    lost = piece.members[0].rank
    holder.parity(piece)[0] ^= 1
    job.replace_behind([lost])
    part = piece.members[0].parts[0]
    keeper = job.keepers[lost]

    def look_up_the_wrong_row(rank: int) -> str:
        try:
            if rank == lost:
                keeper.wait_for(part.spec, torch.tensor([part.row_lo]))
            job.keepers[rank].join()
        except RecoveryError as error:
            return str(error)
        return ""

    for told in everywhere(look_up_the_wrong_row, range(job.world)):
        assert "did not decode to what their owner had published, and were refused" in told
    shard = next(s for s in job.shards[lost] if s.spec == part.spec)
    assert bool(shard.weight[part.row_lo].isnan().all())
    assert not keeper.whole
    assert all(other.whole for rank, other in enumerate(job.keepers) if rank != lost)


def test_a_lookup_that_waits_is_told_of_a_death(job: Behind, gate: threading.Event) -> None:
    job.settle()
    job.replace_behind([1])
    spec = next(s for s in job.specs if s.owner == 1 and s.rows and not s.replicated)
    job.keepers[3].abort()
    job.hub.kill(3)
    gate.set()
    with pytest.raises(RecoveryError, match="no message from rank 3"):
        job.keepers[1].wait_for(spec, torch.arange(spec.rows))
    assert not job.keepers[1].whole


def test_a_replacement_that_another_death_finds_without_rows_says_so(job: Behind, gate: threading.Event) -> None:
    job.settle()
    job.replace_behind([1])
    for keeper in job.keepers:
        keeper.abort()
    gate.set()
    for rank, keeper in enumerate(job.keepers):
        keeper.hold()
        assert keeper.whole == (rank != 1)


def test_whoever_needs_all_rows_waits_for_them_alone(job: Behind) -> None:
    """As a save does, which the other ranks may have left already."""
    for _ in range(2):
        job.step_together()
    job.settle()
    expected = bits(job.shards[1])
    job.replace_behind([1])
    job.keepers[1].wait_for_rows()
    assert bits(job.shards[1]) == expected


def test_all_ranks_wait_until_all_have_their_rows(job: Behind) -> None:
    job.settle()
    job.replace_behind([1])
    everywhere(lambda rank: job.keepers[rank].wait_for_rows(), range(job.world))
    for keeper in job.keepers:
        keeper.join()
        assert keeper.degraded is None


def test_rows_come_back_where_steps_leave_the_exchanges_no_time(job: Behind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is over before the exchange of the one before has ended."""
    job.settle()
    stopped, stop, run = threading.Event(), Absent.stop, exchanges.run_exchange

    def tell(absent: Absent, over: bool) -> None:
        stop(absent, over)
        (stopped.set if over else stopped.clear)()

    def end_late(*args: Any) -> Any:
        outcome = run(*args)
        assert stopped.wait(20)
        return outcome

    with monkeypatch.context() as patch:
        patch.setattr(Absent, "stop", tell)
        patch.setattr(exchanges, "run_exchange", end_late)
        job.replace_behind([1])
        rounds = len(job.keepers[1].degraded._rounds)
        steps = 0
        while not job.keepers[1].whole and steps < rounds + 2:
            steps += 1
            everywhere(lambda rank, step=steps: job.keepers[rank].after_step(step), range(job.world))
        stopped.set()
        assert job.keepers[1].whole
        for keeper in job.keepers:
            keeper.join()


def test_any_error_of_the_exchanges_thread_reaches_the_lookup_that_waits(
    job: Behind, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.settle()

    def fail(absent: Absent) -> Any:
        raise ValueError("no such block")

    monkeypatch.setattr(Absent, "told", fail)
    job.replace_behind([1])
    spec = next(s for s in job.specs if s.owner == 1 and s.rows and not s.replicated)
    with pytest.raises(RecoveryError, match=r"failed on rank 1: .*no such block"):
        job.keepers[1].wait_for(spec, torch.arange(spec.rows))
    with pytest.raises(RecoveryError, match="rank 1, a replacement, does not have all its rows"):
        job.keepers[1].start(0)


@given(
    st.lists(st.tuples(st.integers(0, 2**18), st.integers(0, 2**19), st.integers(0, 2**23)), min_size=1, max_size=20)
)
def test_blocks_go_by_keys_in_their_order(places: list[tuple[int, int, int]]) -> None:
    keys = np.array([piece << _PIECE_BIT | part << _PART_BIT | block for piece, part, block in sorted(places)])
    assert (np.diff(keys) >= 0).all()
    assert list(zip(*(found.tolist() for found in places_of(keys)), strict=True)) == sorted(places)
