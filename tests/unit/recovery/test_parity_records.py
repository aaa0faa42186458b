"""Rows as records of raw bits, and first-touch windows over them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cpr.recovery.parity.records import ShardRows, record_of
from lightning_cpr.recovery.parity.window import Window
from lightning_cpr.spec import Shard, ShardSpec
from tests.parity_job import bits, make_shards, table

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def one_shard(
    rows: int, cols: int, optimizer: str, dtype: torch.dtype, seed: int | None = 3
) -> tuple[Shard, ShardRows]:
    t = table("t", rows, cols, optimizer, dtype)
    spec = ShardSpec("t", 0, rows, 0, cols, 0)
    shard = make_shards({"t": t}, [spec], 0, seed)[0]
    return shard, ShardRows(shard, record_of(t, spec))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adagrad"])
@pytest.mark.parametrize("cols", [1, 3, 4])
@pytest.mark.parametrize("rows", [1, 9])
def test_rows_go_out_and_come_back_exactly(dtype: torch.dtype, optimizer: str, cols: int, rows: int) -> None:
    shard, source = one_shard(rows, cols, optimizer, dtype)
    other, target = one_shard(rows, cols, optimizer, dtype, seed=None)
    order = torch.randperm(rows)
    target.write(order, source.read(order))
    assert bits([other]) == bits([shard])
    third, target = one_shard(rows, cols, optimizer, dtype, seed=None)
    target.write(slice(0, rows), source.read(slice(0, rows)))
    assert bits([third]) == bits([shard])


def test_views_with_odd_offsets_and_strides_are_read_in_place() -> None:
    t = table("t", 5, 3, "sgd", torch.float16)
    spec = ShardSpec("t", 0, 5, 0, 3, 0)
    memory = torch.arange(41, dtype=torch.float16)
    weight = memory[1:].view(5, 8)[:, :3]
    rows = ShardRows(Shard(spec, weight), record_of(t, spec))
    rows.write(torch.tensor([4]), rows.read(torch.tensor([0])))
    assert weight.tolist()[4] == [1, 2, 3]
    assert memory[36:].tolist() == [36, 37, 38, 39, 40]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 19), max_size=9), min_size=1, max_size=6), st.integers(0, 5))
def test_a_window_remembers_the_first_bits_of_each_row(steps: list[list[int]], cut: int) -> None:
    """Close after ``cut`` steps, go on, then go back: once to the cut, once before it."""
    shard, rows = one_shard(20, 3, "adagrad", torch.float32)
    window, start = Window(rows), bits([shard])
    first = rows.read(slice(0, 20))
    middle, change = start, None
    for number, touched in enumerate(steps):
        if number == cut:
            middle, middle_words, change = bits([shard]), rows.read(slice(0, 20)), window.close()
            change.take()
            change.tidy()
        window.touch(torch.tensor(touched, dtype=torch.int64))
        shard.weight[touched] += 1
        shard.states["sum"][touched] *= 2
    if change is not None:
        distinct = {row for touched in steps[:cut] for row in touched}
        assert change.rows.tolist() == sorted(distinct)
        assert torch.equal(window.read(slice(0, 20)), middle_words)
        window.reopen(change)
    assert torch.equal(window.read(slice(0, 20)), first)
    window.roll_back()
    assert bits([shard]) == start
    assert window.close().rows.numel() == 0
    assert middle is not None


def test_touching_everything_keeps_every_row_once() -> None:
    shard, rows = one_shard(6, 2, "sgd", torch.float32)
    window, before = Window(rows), bits([shard])
    window.touch(torch.tensor([[4, 4], [1, 4]]))
    window.touch(None)
    shard.weight.zero_()
    assert sorted(window.touched.tolist()) == list(range(6))
    window.roll_back()
    assert bits([shard]) == before


def test_rows_that_the_shard_has_not_are_refused() -> None:
    window = Window(one_shard(6, 2, "sgd", torch.float32)[1])
    for row in (-1, 6):
        with pytest.raises(IndexError, match="of 6"):
            window.touch(torch.tensor([0, row]))


def test_a_row_that_kept_its_bits_is_not_in_the_change_and_order_is_by_row() -> None:
    shard, rows = one_shard(6, 2, "rowwise_adagrad", torch.float32)
    window = Window(rows)
    window.touch(torch.tensor([5, 2]))
    window.touch(torch.tensor([0, 3]))
    before = rows.read(slice(0, 6))
    shard.weight[[0, 5]] += 1
    shard.states["sum"][2] += 1  # the weight, which is looked at first, stays
    change = window.close()
    change.take()
    change.tidy()
    assert change.rows.tolist() == [0, 2, 5]
    words = torch.empty((2, rows.record.words), dtype=torch.int64)
    change.join(torch.tensor([1, 2]), words)
    assert torch.equal(words, (rows.read(slice(0, 6)) ^ before)[[2, 5]])


def test_a_range_read_while_a_step_changes_rows_is_of_the_windows_start() -> None:
    shard, rows = one_shard(8, 2, "sgd", torch.float32)
    window, start = Window(rows), rows.read(slice(0, 8))
    window.touch(torch.tensor([1]))
    shard.weight[1] += 1
    window.close().take()
    opened = rows.read(slice(0, 8))
    window.touch(torch.tensor([1, 4]))
    shard.weight[[1, 4]] += 1
    assert torch.equal(window.read(slice(0, 8)), opened)
    assert not torch.equal(opened, start)
