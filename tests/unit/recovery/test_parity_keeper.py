"""Whole jobs of parity in one process: random layouts and updates, a death at every point, bits compared."""

from __future__ import annotations

import logging
import threading
from itertools import combinations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lightning_cpr.errors import ConfigError, RecoveryError
from lightning_cpr.recovery.parity import code, groups, pace
from lightning_cpr.recovery.parity.ahead import Coming
from lightning_cpr.recovery.parity.config import ParityConfig
from lightning_cpr.recovery.parity.exchange import POINTS
from lightning_cpr.recovery.parity.keeper import ParityKeeper, Rebuilt
from lightning_cpr.recovery.parity.window import Change
from tests.parity_job import (
    Died,
    Hub,
    HubChannel,
    bits,
    everywhere,
    make_shards,
    random_layout,
    rich_layout,
    touched_rows,
    train,
)


class Job:
    """All ranks of a job, driven in lockstep. ``history[step][rank]``: the bits after each step.

    Rows are handed over ahead: in the step itself, or in the one before, as by a pipeline.
    """

    def __init__(self, config: ParityConfig, world: int = 5, layout: int | None = None) -> None:
        self.config, self.world = config, world
        self.tables, self.specs = rich_layout(world) if layout is None else random_layout(layout, world)
        self.hosts = [f"h{rank}" for rank in range(world)]
        self.hub = Hub(world)
        self.shards = [make_shards(self.tables, self.specs, rank, seed=1) for rank in range(world)]
        self.deaths: set[tuple[int, str, int]] = set()
        self.keepers = [self.keeper(rank) for rank in range(world)]
        self.step = 0
        self.coming: dict[tuple[int, int], Coming] = {}  # by rank and step
        for keeper in self.keepers:
            keeper.start(0, samples=0)
        self.history = {0: [bits(shards) for shards in self.shards]}

    def keeper(self, rank: int) -> ParityKeeper:
        def probe(point: str, exchange: int) -> None:
            if (rank, point, exchange) in self.deaths:
                self.deaths.remove((rank, point, exchange))
                self.hub.kill(rank)
                raise Died(f"{rank} died at {point} of {exchange}")

        return ParityKeeper(
            self.config,
            self.shards[rank],
            self.tables,
            self.specs,
            self.hosts,
            rank,
            lambda: HubChannel(self.hub, rank),
            probe,
        )

    def look(self, rank: int, step: int) -> Coming:
        touched = touched_rows(self.shards[rank], rank, step)
        known = [(spec, rows) for spec, rows in touched.items() if rows is not None]
        return self.keepers[rank].look_ahead(torch.empty(0), lambda: known)

    def compute(self) -> None:
        self.step += 1
        for rank, keeper in enumerate(self.keepers):
            touched = touched_rows(self.shards[rank], rank, self.step)
            coming = self.coming.pop((rank, self.step), None) or self.look(rank, self.step)
            if (rank + self.step) % 3 == 0:
                self.coming[rank, self.step + 1] = self.look(rank, self.step + 1)
            keeper.before_step(coming)
            keeper.before_step({spec: None for spec, rows in touched.items() if rows is None})
            train(self.shards[rank], touched, rank, self.step)
        self.history[self.step] = [bits(shards) for shards in self.shards]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.compute()
            for keeper in self.keepers:
                keeper.after_step(self.step, samples=10 * self.step)

    def settle(self) -> None:
        everywhere(lambda rank: self.keepers[rank].encode(), range(self.world))
        everywhere(lambda rank: self.keepers[rank].flush(), range(self.world))

    def run_into_failure(self, steps: int) -> None:
        """Until some rank's exchange has failed and the others are in the step after, or at its end."""
        with pytest.raises(RecoveryError):
            self.run(steps)

    def replace(self, lost: list[int]) -> list[Rebuilt]:
        self.kill(lost)
        return everywhere(lambda rank: self.keepers[rank].rebuild(lost), range(self.world))

    def kill(self, lost: list[int]) -> None:
        """These ranks are processes that hold nothing from here on."""
        for keeper in self.keepers:
            keeper.abort()
        self.hub = Hub(self.world)
        for rank in lost:
            self.keepers[rank].close()
            self.shards[rank] = make_shards(self.tables, self.specs, rank, seed=None)
            self.keepers[rank] = self.keeper(rank)

    def check_parity(self) -> None:
        """Parity is the code of what the shards hold, word by word."""
        for rank, keeper in enumerate(self.keepers):
            holder = keeper._holder
            for piece in holder.pieces:
                second = piece.holders.index(rank) == 1
                expected = torch.zeros(piece.words, dtype=torch.int64)
                for member in piece.members:
                    for part in member.parts:
                        window = self.keepers[member.rank]._owner.windows[part.spec]
                        words = window.read(slice(part.row_lo, part.row_hi)).view(-1)
                        weighted = code.times(words, member.column if second else 0)
                        expected[part.offset : part.offset + part.words] ^= weighted
                assert torch.equal(expected, holder.parity(piece))

    def close(self) -> None:
        for keeper in self.keepers:
            keeper.abort()
            keeper.close()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a few rows, so that small tables make many groups."""
    monkeypatch.setattr(groups, "MIN_PIECE_WORDS", 40)


@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    st.integers(0, 10_000), st.integers(2, 6), st.sampled_from([1, 2, 4]), st.integers(1, 2), st.sampled_from([1, 3])
)
def test_parity_follows_training_and_any_rank_comes_back(layout: int, world: int, k: int, m: int, every: int) -> None:
    if world <= m:
        return
    job = Job(ParityConfig(k=k, m=m, every_n_steps=every, scrub_every=2), world, layout)
    try:
        job.run(4)  # training goes on while parity is encoded
        job.settle()
        assert all(keeper.protected for keeper in job.keepers)
        job.run(5)
        everywhere(lambda rank: job.keepers[rank].flush(), range(world))
        job.check_parity()
        assert all(keeper.metrics()["mismatches"] == 0 for keeper in job.keepers)
        for lost in list(combinations(range(world), m))[:4]:
            job.settle()
            exchanged = [bits(shards) for shards in job.shards]
            job.compute()  # survivors hold changes that no exchange has seen
            live = job.history[job.step]
            for result in job.replace(list(lost)):
                assert result.point.step == job.step - 1
            for rank in range(world):
                assert bits(job.shards[rank]) == (exchanged if rank in lost else live)[rank]
            assert not any(keeper.protected for keeper in job.keepers)
            for keeper in job.keepers:
                keeper.after_step(job.step)
        job.settle()
        job.check_parity()
    finally:
        job.close()


SWEEP = [(point, victim, every) for point in POINTS for victim, every in ((0, 1), (3, 3))]


@pytest.mark.parametrize(("point", "victim", "every"), SWEEP)
@pytest.mark.parametrize("m", [1, 2])
def test_death_at_every_point_of_an_exchange(point: str, victim: int, every: int, m: int) -> None:
    job = Job(ParityConfig(k=3, m=m, every_n_steps=every))
    try:
        job.settle()
        job.run(4 * every)
        everywhere(lambda rank: job.keepers[rank].flush(), range(job.world))
        number = job.keepers[0]._exchanges.progress.closed
        job.deaths.add((victim, point, number + 2))
        job.run_into_failure(4 * every)
        assert job.hub.dead == {victim}
        results = job.replace([victim])
        exchange, step = results[0].exchange, results[0].point.step
        assert {(r.exchange, r.point.step, r.lost) for r in results} == {(exchange, step, (victim,))}
        assert exchange >= number + (2 if point in ("applied", "acknowledged") else 1)
        assert bits(job.shards[victim]) == job.history[step][victim]
        assert results[victim].restored == tuple(
            s.spec for s in job.shards[victim] if s.spec.rows and not s.spec.replicated
        )
        for rank, keeper in enumerate(job.keepers):
            assert keeper.roll_back() == (step, 10 * step)
            assert bits(job.shards[rank]) == job.history[step][rank]
        job.step = step
        job.run(2)
        job.settle()
        job.check_parity()
        assert all(keeper.protected for keeper in job.keepers)
    finally:
        job.close()


@pytest.mark.parametrize("swap", [0, 1, 2])
@pytest.mark.parametrize("reached", [frozenset(), frozenset({1}), frozenset({2, 3}), frozenset({1, 2, 3, 4})])
def test_death_in_the_middle_of_a_message_round(swap: int, reached: frozenset[int]) -> None:
    """Sizes, differences or votes reach only some of the peers."""
    job = Job(ParityConfig(k=4))
    try:
        job.settle()
        job.run(2)
        everywhere(lambda rank: job.keepers[rank].flush(), range(job.world))
        job.hub.partial = (0, job.keepers[0]._exchanges.channel.count + swap, reached)
        job.run_into_failure(6)
        results = job.replace([0])
        step = results[0].point.step
        for rank, keeper in enumerate(job.keepers):
            keeper.roll_back()
            assert bits(job.shards[rank]) == job.history[step][rank]
        assert job.step - step <= 2
    finally:
        job.close()


def test_two_lost_with_one_parity_point_to_the_store_and_leave_survivors_alone() -> None:
    job = Job(ParityConfig(k=4, m=1))
    try:
        job.settle()
        job.run(3)
        everywhere(lambda rank: job.keepers[rank].flush(), range(job.world))
        with pytest.raises(RecoveryError, match=r"k=4, m=1.*ranks \[0, 2\] lost.*Restore these shards from the store"):
            job.replace([0, 2])
        for rank in (1, 3, 4):
            assert bits(job.shards[rank]) == job.history[job.step][rank]
        for rank in (0, 2):  # the store brings them back
            for shard, saved in zip(job.shards[rank], make_shards(job.tables, job.specs, rank, seed=5), strict=True):
                shard.weight.copy_(saved.weight)
                for name, state in shard.states.items():
                    state.copy_(saved.states[name])
        for keeper in job.keepers:
            keeper.start(job.step)
            assert not keeper.protected
        job.settle()
        job.check_parity()
        assert all(keeper.protected for keeper in job.keepers)
    finally:
        job.close()


def test_failure_before_parity_is_encoded_is_refused() -> None:
    job = Job(ParityConfig(k=4))
    try:
        with pytest.raises(RecoveryError, match="store"):
            job.replace([1])
    finally:
        job.close()


def test_a_second_death_during_the_rebuild_with_two_parities() -> None:
    job = Job(ParityConfig(k=3, m=2))
    try:
        job.settle()
        job.run(3)
        everywhere(lambda rank: job.keepers[rank].flush(), range(job.world))
        step = job.step
        job.compute()
        hub = Hub(job.world)
        for keeper in job.keepers:
            keeper.abort()
        job.hub, hub.partial = hub, (2, 5, frozenset({0, 1}))
        job.shards[1] = make_shards(job.tables, job.specs, 1, seed=None)
        job.keepers[1].close()
        job.keepers[1] = job.keeper(1)
        with pytest.raises((RecoveryError, Died)):
            everywhere(lambda rank: job.keepers[rank].rebuild([1]), range(job.world))
        assert hub.dead == {2}
        assert {r.lost for r in job.replace([2])} == {(1, 2)}
        for rank, keeper in enumerate(job.keepers):
            assert keeper.roll_back()[0] == step
            assert bits(job.shards[rank]) == job.history[step][rank]
    finally:
        job.close()


@pytest.mark.parametrize("exchanges", [0, 1, 2])
def test_a_second_death_while_the_parity_of_the_first_is_encoded_anew(
    exchanges: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces that hold several parts of one rank, each encoded up to a row of its own."""
    monkeypatch.setattr(groups, "MIN_PIECE_WORDS", 1024)
    monkeypatch.setattr(pace, "FLOOR_BYTES", 600)
    job = Job(ParityConfig(k=1, m=2, scrub_every=1), world=4)
    assert any(len(member.parts) > 1 for piece in job.keepers[0].plan.pieces for member in piece.members)
    try:
        job.settle()
        job.run(2)
        everywhere(lambda rank: job.keepers[rank].flush(), range(job.world))
        for lost in (0, 1):
            step = job.replace([lost])[0].point.step
            for rank, keeper in enumerate(job.keepers):
                keeper.roll_back()
                assert bits(job.shards[rank]) == job.history[step][rank]
            assert any(keeper._owner.unfinished for keeper in job.keepers)
            job.run(exchanges)
            for keeper in job.keepers:
                keeper.join()
        job.settle()
        job.check_parity()
        assert all(keeper.protected for keeper in job.keepers)
    finally:
        job.close()


def first_word(job: Job, rank: int) -> torch.Tensor:
    return job.keepers[rank]._holder._parity[:1]


def test_corrupt_parity_is_found_by_the_scrub(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(ParityConfig(k=4, scrub_every=3))
    try:
        job.settle()
        first_word(job, 2).bitwise_xor_(1 << 40)
        with caplog.at_level(logging.ERROR):
            job.run(2)
            everywhere(lambda rank: job.keepers[rank].flush(), range(job.world))
        assert [keeper.metrics()["mismatches"] for keeper in job.keepers] == [1] * job.world
        assert not any(keeper.protected for keeper in job.keepers)
        assert "on rank 2 does not match its members" in caplog.text
        piece = job.keepers[2]._holder.pieces[0]
        with pytest.raises(RecoveryError, match="store"):
            job.replace([piece.members[0].rank])
    finally:
        job.close()


def test_a_row_changed_behind_our_back_is_found_by_the_scrub(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(ParityConfig(k=4, scrub_every=2))
    try:
        job.settle()
        spec = next(s.spec for s in job.shards[1] if s.spec.rows and not s.spec.replicated)
        shard = next(s for s in job.shards[1] if s.spec == spec)
        shard.weight[0, 0] += 1
        with caplog.at_level(logging.ERROR):
            for _ in range(3):
                everywhere(lambda rank: job.keepers[rank].flush(), range(job.world))
        assert job.keepers[4].metrics()["mismatches"] >= 1
        assert f"of table {spec.table} on rank 1 are not what their owner last sent" in caplog.text
    finally:
        job.close()


@pytest.mark.parametrize("corrupt", ["parity", "survivor"])
def test_corruption_met_by_a_rebuild_is_refused_and_never_written(corrupt: str) -> None:
    job = Job(ParityConfig(k=4, scrub_every=0))
    try:
        job.settle()
        holder = job.keepers[2]._holder
        piece = next(p for p in holder.pieces if p.holders == (2,) and len(p.members) > 1)
        lost, other = piece.members[0].rank, piece.members[1]
        if corrupt == "parity":
            holder.parity(piece)[0] ^= 1
        else:
            part = other.parts[0]
            next(s for s in job.shards[other.rank] if s.spec == part.spec).weight[part.row_lo] = float("nan")
        with pytest.raises(RecoveryError, match=r"1 pieces .* refused. Restore the lost shards from the store"):
            job.replace([lost])
        part = piece.members[0].parts[0]
        shard = next(s for s in job.shards[lost] if s.spec == part.spec)
        fresh = make_shards(job.tables, [part.spec], lost, seed=None)[0]
        rows = slice(part.row_lo, part.row_hi)
        assert torch.equal(shard.weight[rows].view(torch.uint8), fresh.weight[rows].view(torch.uint8))
    finally:
        job.close()


def test_nan_and_inf_are_bits_like_any_other() -> None:
    job = Job(ParityConfig(k=4))
    try:
        spec = next(s for s in job.specs if s.rows and not s.replicated)
        victim = spec.owner
        shard = next(s for s in job.shards[victim] if s.spec == spec)
        job.settle()
        job.keepers[victim].before_step({spec: torch.tensor([0, spec.rows - 1])})
        shard.weight[0], shard.weight[spec.rows - 1] = float("nan"), float("-inf")
        everywhere(lambda rank: job.keepers[rank].flush(), range(job.world))
        expected = [bits(shards) for shards in job.shards]
        job.replace([victim])
        assert [bits(shards) for shards in job.shards] == expected
    finally:
        job.close()


def test_traffic_counts_distinct_rows_of_an_interval() -> None:
    job = Job(ParityConfig(k=4, every_n_steps=4))
    try:
        job.settle()
        spec = next(s for s in job.specs if s.rows > 3 and not s.replicated)
        keeper, shard = job.keepers[spec.owner], next(s for s in job.shards[spec.owner] if s.spec == spec)
        start = keeper.metrics()["rows"]
        for step in range(1, 5):
            keeper.before_step({spec: torch.tensor([1, 2, 2, 1])})
            shard.weight[1:3] += step
            for k in job.keepers:
                k.after_step(job.step + step)
        everywhere(lambda rank: job.keepers[rank].join(), range(job.world))
        assert keeper.metrics()["rows"] - start == 2
    finally:
        job.close()


def test_rows_are_kept_ahead_while_the_exchange_has_not_read_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    job, take, go_on = Job(ParityConfig(k=4)), Change.take, threading.Event()

    def slow(change: Change) -> None:
        assert go_on.wait(20)
        take(change)

    try:
        job.settle()
        before = bits(job.shards[1])
        monkeypatch.setattr(Change, "take", slow)
        job.run(1)
        coming = job.look(1, job.step + 1)
        assert coming.job.result(20)
        change = threading.Thread(target=lambda: job.keepers[1].before_step(coming))
        change.start()
        change.join(0.05)
        assert change.is_alive()
        go_on.set()
        change.join(20)
        assert not change.is_alive()
        everywhere(lambda rank: job.keepers[rank].flush(), range(job.world))
        job.check_parity()
        assert bits(job.shards[1]) == job.history[job.step][1] != before
    finally:
        go_on.set()
        job.close()


def test_calls_out_of_order_and_unknown_shards_are_refused() -> None:
    tables, specs = rich_layout(3)
    hub = Hub(3)
    shards = make_shards(tables, specs, 0, seed=1)
    keeper = ParityKeeper(ParityConfig(k=2), shards, tables, specs, ["a", "b", "c"], 0, lambda: HubChannel(hub, 0))
    with pytest.raises(RecoveryError, match="call start or rebuild first"):
        keeper.flush()
    keeper.close()
    known = [s for s in specs if s.owner != 0]
    with pytest.raises(ConfigError, match="disagree"):
        ParityKeeper(ParityConfig(k=2), shards, tables, known, ["a", "b", "c"], 0, lambda: HubChannel(hub, 0))


def test_rows_that_could_not_be_read_stop_the_next_step_and_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(ParityConfig(k=4))
    take = Change.take

    def no_memory_on_rank_1(change: Change) -> None:
        if change.shard.spec.owner == 1:
            raise MemoryError("no room")
        take(change)

    try:
        job.settle()
        with monkeypatch.context() as patch:
            patch.setattr(Change, "take", no_memory_on_rank_1)
            job.run(1)
            with pytest.raises(RecoveryError, match=r"failed on rank 1: .*no room"):
                job.keepers[1].before_step({})
        assert {result.point.step for result in job.replace([2])} == {job.step - 1}
        for rank, keeper in enumerate(job.keepers):
            keeper.roll_back()
            assert bits(job.shards[rank]) == job.history[job.step - 1][rank]
    finally:
        job.close()
