from __future__ import annotations

import pytest
import torch

from lightning_cpr.spec import ShardSpec
from lightning_cpr.strategy import TorchRecStrategy
from lightning_cpr.tables.shards import global_shards, local_shards
from tests._ranks import run_ranks
from tests._tiny import Tiny, make_loader, make_trainer

A, B, C = (f"net.ebc.embedding_bags.{name}" for name in "abc")


def _fit(rank: int, world: int, plan: object) -> tuple[list[ShardSpec], list[ShardSpec], list[tuple[int, ...]]]:
    model = Tiny()
    make_trainer(world, TorchRecStrategy(plan=plan), max_steps=2).fit(model, make_loader(rank))
    shards = local_shards(model)
    for shard in shards:
        assert shard.states.keys() == {"sum"}
        assert shard.states["sum"].shape == (shard.spec.rows,)
        assert torch.isfinite(shard.weight).all()
    return global_shards(model), [s.spec for s in shards], [tuple(s.weight.shape) for s in shards]


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("table_wise", [(A, 0, 100, 0, 8, 0), (B, 0, 7, 0, 8, 1), (C, 0, 1, 0, 4, 1)]),
        (
            {"net.ebc": "row_wise", "c": "table_wise"},
            [(A, 0, 50, 0, 8, 0), (A, 50, 50, 0, 8, 1), (B, 0, 4, 0, 8, 0), (B, 4, 3, 0, 8, 1), (C, 0, 1, 0, 4, 0)],
        ),
        (
            "column_wise",
            [
                (A, 0, 100, 0, 4, 0),
                (A, 0, 100, 4, 4, 1),
                (B, 0, 7, 0, 4, 0),
                (B, 0, 7, 4, 4, 1),
                (C, 0, 1, 0, 4, 0),
            ],
        ),
    ],
)
def test_shards_of_a_plan(plan: object, expected: list[tuple[str, int, int, int, int, int]]) -> None:
    specs = [ShardSpec(*item) for item in expected]
    results = run_ranks(_fit, 2, plan)
    for rank, (everywhere, mine, shapes) in enumerate(results):
        assert everywhere == specs
        assert mine == [spec for spec in specs if spec.owner == rank]
        assert shapes == [(spec.rows, spec.cols) for spec in mine]
