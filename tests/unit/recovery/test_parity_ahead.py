"""Rows kept ahead of their step: parity is right in every order of lookups, steps and closes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_cpr.recovery.parity.ahead import Ahead, Coming, Told
from lightning_cpr.recovery.parity.meter import Meter
from lightning_cpr.recovery.parity.records import ShardRows, record_of
from lightning_cpr.recovery.parity.window import Change, Window
from lightning_cpr.spec import Shard, ShardSpec
from tests.parity_job import bits, make_shards, table

ROWS, WAIT_S = 40, 20.0


class Rank:
    """One shard, its window, and the thread that touches ahead."""

    def __init__(self) -> None:
        t = table("t", ROWS, 3, "rowwise_adagrad")
        self.spec = ShardSpec("t", 0, ROWS, 0, 3, 0)
        self.shard: Shard = make_shards({"t": t}, [self.spec], 0, seed=3)[0]
        self.rows = ShardRows(self.shard, record_of(t, self.spec))
        self.window = Window(self.rows)
        self.ahead = Ahead({self.spec: self.window})
        self.meter = Meter()

    def look(self, ids: list[int]) -> Coming:
        return self.look_by(lambda: [(self.spec, torch.tensor(ids, dtype=torch.int64))])

    def look_by(self, rows: Callable[[], Told]) -> Coming:
        return self.ahead.hand_over(torch.empty(0), rows, self.meter)

    def change(self, ids: list[int]) -> None:
        rows = torch.tensor(ids, dtype=torch.int64).unique()
        self.shard.states["sum"][rows] += 1
        self.shard.weight[rows] -= self.shard.states["sum"][rows].unsqueeze(1)

    def step(self, coming: Coming, ids: list[int]) -> None:
        self.ahead.finish(coming, self.meter)
        self.change(ids)

    def words(self) -> Tensor:
        return self.rows.read(slice(0, ROWS))


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.ahead.close()


class Gate:
    """Rows whose touch begins, and then waits until it is let go."""

    def __init__(self, rank: Rank, ids: list[int]) -> None:
        self.begun, self.open = threading.Event(), threading.Event()
        self._rows = [(rank.spec, torch.tensor(ids))]
        self.coming = rank.look_by(self.told)
        assert self.begun.wait(WAIT_S)

    def told(self) -> Told:
        self.begun.set()
        assert self.open.wait(WAIT_S)
        return self._rows


BATCH = st.lists(st.integers(0, ROWS - 1), max_size=12)
ACTS = st.lists(st.tuples(st.sampled_from("llllsssscctrw"), st.integers(0, 3), BATCH), min_size=4, max_size=40)


@settings(max_examples=150, deadline=None)
@given(ACTS)
def test_parity_is_the_xor_of_what_changed_in_any_order(acts: list[tuple[str, int, list[int]]]) -> None:
    """l: a lookup; s: the step of one of those that are looked up, oldest or not; c: the window closes, is taken after
    other lookups; t: a step that may change any row; r: back to the window's start; w: what was looked up is dropped,
    as a recovery does, rows come from elsewhere and are encoded anew.
    """
    rank = Rank()
    opened = rank.words()
    parity = opened.clone()
    under_way: list[Change] = []
    coming: list[tuple[Coming, list[int]]] = []

    def take() -> None:
        """What the exchange's thread does, at the latest before rows change."""
        for change in under_way:
            change.take()
            change.tidy()
            words = torch.empty((change.rows.numel(), change.shard.record.words), dtype=torch.int64)
            change.join(torch.arange(change.rows.numel()), words)
            parity[change.rows] ^= words
        under_way.clear()

    def close() -> None:
        take()
        under_way.append(rank.window.close())

    try:
        for act, which, ids in acts:
            if act == "l":
                coming.append((rank.look(ids), ids))
            elif act == "s" and coming:
                take()
                rank.step(*coming.pop(which % len(coming)))
            elif act == "c":
                close()
                opened = rank.words()
            elif act == "t":
                take()
                rank.window.touch(None)
                rank.change(list(range(ROWS)))
            elif act == "r":
                take()
                rank.window.roll_back()
                assert torch.equal(rank.words(), opened)
            elif act == "w":
                take()
                rank.ahead.settle()
                rank.change(ids)
                rank.window.restart()
                opened = rank.words()
                parity.copy_(opened)
            assert torch.equal(rank.window.read(slice(0, ROWS)), opened)
        close()
        take()
        assert torch.equal(parity, rank.words())
    finally:
        rank.ahead.close()


def test_rows_kept_by_a_window_that_closed_are_kept_again(rank: Rank) -> None:
    first, second = rank.look([1, 2]), rank.look([2, 3])  # a pipeline looks up a batch ahead
    second.job.result(WAIT_S)
    rank.step(first, [1, 2])
    before, change = rank.words(), rank.window.close()
    change.take()
    change.tidy()
    assert change.rows.tolist() == [1, 2]
    rank.step(second, [2, 3])
    assert sorted(rank.window.touched.tolist()) == [2, 3]
    assert torch.equal(rank.window.read(slice(0, ROWS)), before)


def test_a_lookup_without_a_backward_sends_nothing(rank: Rank) -> None:
    rank.look([4, 5]).job.result(WAIT_S)
    rank.step(rank.look([1]), [1])
    change = rank.window.close()
    change.take()
    change.tidy()
    assert change.rows.tolist() == [1]


def test_a_step_that_a_busy_thread_keeps_waiting_touches_its_rows_itself(rank: Rank) -> None:
    gate, start = Gate(rank, [7]), bits([rank.shard])
    rank.step(rank.look([1, 1, 2]), [1, 2])
    assert rank.window.touched.tolist() == [1, 2]
    gate.open.set()
    rank.step(gate.coming, [7])
    rank.window.roll_back()
    assert bits([rank.shard]) == start


def test_nothing_is_touched_once_it_is_settled(rank: Rank) -> None:
    gate, late = Gate(rank, [7]), rank.look([8])
    settled = threading.Thread(target=rank.ahead.settle)
    settled.start()
    deadline = time.monotonic() + WAIT_S
    while not rank.ahead._settled:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert settled.is_alive()
    gate.open.set()
    settled.join(WAIT_S)
    assert not settled.is_alive()
    assert late.job.result(WAIT_S) is None
    assert rank.window.touched.tolist() == [7]
    rank.window.restart()
    for coming in (gate.coming, late):
        rank.ahead.finish(coming, rank.meter)
    assert rank.window.touched.tolist() == [7, 8]


def test_rows_of_another_shards_window_do_not_count(rank: Rank) -> None:
    """A replacement's windows, or those of a reshard."""
    other = Rank()
    coming = rank.look([3])
    coming.job.result(WAIT_S)
    other.ahead.finish(coming, other.meter)
    assert other.window.touched.tolist() == [3]
    other.ahead.close()


def test_rows_that_the_shard_has_not_are_refused_in_the_step(rank: Rank) -> None:
    coming = rank.look([0, ROWS])
    with pytest.raises(IndexError, match=f"of {ROWS}"):
        rank.ahead.finish(coming, rank.meter)


def test_what_the_thread_had_not_begun_is_told_apart(rank: Rank) -> None:
    gate = Gate(rank, [])
    coming = rank.look(list(range(ROWS)))
    rank.ahead.finish(coming, rank.meter)
    assert rank.window.touched.tolist() == list(range(ROWS))
    assert rank.meter.values()["unbegun_core_s"] > 0.0
    gate.open.set()


def test_replicated_and_empty_shards_are_none_of_its_business(rank: Rank) -> None:
    others = [ShardSpec("c", 0, 9, 0, 4, 0, replicated=True), ShardSpec("e", 0, 0, 0, 4, 0)]
    rank.ahead.finish(rank.look_by(lambda: [(spec, torch.tensor([0])) for spec in others]), rank.meter)
    assert rank.window.touched.tolist() == []


def test_its_time_is_told_as_hidden_and_its_thread_ends() -> None:
    rank = Rank()
    rank.look(list(range(ROWS))).job.result(WAIT_S)
    values = rank.meter.values()
    assert values["hidden_s"] > 0.0
    assert values["hidden_core_s"] > 0.0
    assert values["unhidden_s"] == 0.0
    rank.ahead.close()
    rank.ahead.settle()  # by a keeper that is closed twice
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("cpr-parity-ahead")]
