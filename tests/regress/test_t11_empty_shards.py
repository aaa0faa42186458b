"""Row-wise with fewer rows than ranks gives a shard without rows; uneven sizes broke other collections."""

from __future__ import annotations

import logging
from typing import Any

import torch

from lightning_cpr.spec import ShardSpec
from lightning_cpr.strategy import TorchRecStrategy
from lightning_cpr.tables.lookup import register_lookup_hook
from lightning_cpr.tables.shards import global_shards, local_shards
from tests._ranks import run_ranks
from tests._tiny import Tiny, make_batch, make_loader, make_trainer

# c comes first: fbgemm takes a shard without rows only before one that has some.
TABLES = {"c": (1, 8), "a": (4091, 8)}


class Tracked(Tiny):
    def __init__(self) -> None:
        super().__init__(tables=TABLES, filled=False)
        self.seen: list[tuple[str, int]] = []  # type: ignore[assignment]

    def on_train_start(self) -> None:
        register_lookup_hook(self, lambda shard, ids: self.seen.append((shard.table, shard.rows)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch)[0]


def _run(rank: int, world: int) -> tuple[list[ShardSpec], list[tuple[int, ...]], bool]:
    logging.disable(logging.WARNING)
    model = Tracked()
    batches = [make_batch(index, rank, tables=TABLES) for index in range(4)]
    make_trainer(world, TorchRecStrategy(plan="row_wise"), max_steps=4).fit(model, make_loader(batches=batches))
    shards = local_shards(model)
    for shard in shards:
        assert shard.states["sum"].shape == (shard.spec.rows,)
        assert torch.isfinite(shard.weight).all()
    return global_shards(model), [tuple(s.weight.shape) for s in shards], all(rows > 0 for _, rows in model.seen)


def test_shards_without_rows_are_listed_and_never_touched() -> None:
    results = run_ranks(_run, 3, timeout=90)
    everywhere = results[0][0]
    assert all(result[0] == everywhere for result in results)
    a = [(s.row_start, s.rows) for s in everywhere if s.table.endswith(".a")]
    c = [(s.row_start, s.rows) for s in everywhere if s.table.endswith(".c")]
    assert a == [(0, 1364), (1364, 1364), (2728, 1363)]
    assert c == [(0, 1), (1, 0), (1, 0)]
    assert [result[1] for result in results] == [
        [(1364, 8), (1, 8)],
        [(1364, 8), (0, 8)],
        [(1363, 8), (0, 8)],
    ]
    assert all(result[2] for result in results)
