"""A table that is trained as recommenders are: each interval changes a share of its rows, drawn by Zipf's law."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_cpr.spec import RowBlock, Shard, ShardSpec, StateSpec, TableSpec

FQN = "model.embedding_bags.items"
TOUCHED = 0.26
ZIPF = 1.05


class Trained:
    """``rows`` x ``cols`` float32 with row-wise Adagrad. Each interval changes about ``touched`` of the rows."""

    def __init__(self, rows: int, cols: int, touched: float = TOUCHED) -> None:
        self.g = torch.Generator().manual_seed(0)
        self.touched = touched
        self.spec = TableSpec(
            FQN, rows, cols, torch.float32, "rowwise_adagrad", (StateSpec("sum", "row", torch.float32),)
        )
        self.weight = torch.randn(rows, cols, generator=self.g)
        self.sum = torch.rand(rows, generator=self.g)
        chances = torch.arange(1, rows + 1, dtype=torch.float64).pow(-ZIPF)
        self.cdf = torch.cumsum(chances / chances.sum(), 0)
        self.order = torch.randperm(rows, generator=self.g)

    def touch(self) -> Tensor:
        """Train an interval; the rows that it changed."""
        count, cols = self.weight.shape
        seen = torch.zeros(count, dtype=torch.bool)
        while int(seen.sum()) < self.touched * count:
            draws = torch.rand(count // 50, dtype=torch.float64, generator=self.g)
            seen[self.order[torch.searchsorted(self.cdf, draws).clamp_(max=count - 1)]] = True
        rows = torch.nonzero(seen)[:, 0]
        self.weight[rows] += 0.01 * torch.randn(len(rows), cols, generator=self.g)
        self.sum[rows] += 1.0
        return rows

    def block(self, rows: Tensor) -> RowBlock:
        return RowBlock(FQN, rows, 0, self.weight[rows], {"sum": self.sum[rows]})

    def target(self) -> Shard:
        count, cols = self.weight.shape
        shard = ShardSpec(FQN, 0, count, 0, cols, owner=0)
        return Shard(shard, torch.zeros(count, cols), {"sum": torch.zeros(count)})

    def check(self, target: Shard) -> None:
        assert torch.equal(target.weight, self.weight)
        assert torch.equal(target.states["sum"], self.sum)
