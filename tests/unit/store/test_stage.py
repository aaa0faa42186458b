"""Staging copies rows with their optimizer state, reuses its memory, and never aliases live tensors."""

from __future__ import annotations

import pytest
import torch

from lightning_cpr.spec import Shard, ShardSpec
from lightning_cpr.store.stage import Stager


def make_shard(rows: int = 10, cols: int = 4, row_start: int = 100, dtype: torch.dtype = torch.float32) -> Shard:
    spec = ShardSpec("t", row_start, rows, 0, cols, owner=0)
    weight = torch.arange(rows * cols).reshape(rows, cols).to(dtype)
    return Shard(spec, weight, {"sum": torch.arange(rows, dtype=torch.float32) * 10})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_whole_shard_is_copied_not_aliased(dtype: torch.dtype) -> None:
    shard = make_shard(dtype=dtype)
    expected = shard.weight.clone()
    (block,) = Stager().stage([shard])
    shard.weight.add_(1)
    shard.states["sum"].zero_()
    assert torch.equal(block.weight, expected)
    assert torch.equal(block.rows, torch.arange(100, 110))
    assert torch.equal(block.states["sum"], torch.arange(10, dtype=torch.float32) * 10)


def test_chosen_rows_carry_global_numbers_and_their_state() -> None:
    shard = make_shard()
    (block,) = Stager().stage([shard], {shard.spec: torch.tensor([1, 7])})
    assert block.rows.tolist() == [101, 107]
    assert torch.equal(block.weight, shard.weight[[1, 7]])
    assert block.states["sum"].tolist() == [10.0, 70.0]


def test_buffers_are_reused_and_grow_only_when_they_must() -> None:
    shard, stager = make_shard(), Stager()
    (first,) = stager.stage([shard])
    held = stager.nbytes
    (second,) = stager.stage([shard], {shard.spec: torch.tensor([3])})
    assert second.weight.data_ptr() == first.weight.data_ptr()
    assert stager.nbytes == held == shard.weight.nbytes + shard.states["sum"].nbytes


def test_shards_without_rows_are_left_out() -> None:
    empty, shard = make_shard(rows=0), make_shard()
    assert Stager().stage([empty, shard], {shard.spec: torch.tensor([], dtype=torch.int64)}) == []
