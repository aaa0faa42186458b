"""torchrec#2394: optimizer state changes its name, and its place, with the sharding type; a resume loses it."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from lightning_cpr.strategy import TorchRecStrategy
from lightning_cpr.tables.shards import local_shards, table_specs
from tests._ranks import run_ranks
from tests._tiny import Tiny, make_loader, make_trainer

TABLE = "net.ebc.embedding_bags.b"


def _run(rank: int, world: int) -> dict[str, Any]:
    logging.disable(logging.WARNING)
    plans: dict[str, Any] = {
        "table_wise": "table_wise",
        "data_parallel": {"net.ebc": "table_wise", "b": "data_parallel"},
    }
    found: dict[str, Any] = {}
    for name, plan in plans.items():
        model = Tiny()
        make_trainer(world, TorchRecStrategy(plan=plan), max_steps=10).fit(model, make_loader(rank))
        specs = table_specs(model)
        states: dict[str, Tensor] = {}
        for shard in local_shards(model):
            if shard.spec.table == TABLE:
                states = {key: value.clone() for key, value in shard.states.items()}
        found[name] = ({fqn: (s.optimizer, s.states) for fqn, s in specs.items()}, states)
    return found


def test_the_state_has_one_name_and_is_found_under_every_plan() -> None:
    results = run_ranks(_run, 2, timeout=120)
    owner = next(r for r in results if r["table_wise"][1])
    sharded_names, sharded = owner["table_wise"]
    for result in results:
        names, replica = result["data_parallel"]
        assert names == sharded_names == result["table_wise"][0]
        assert replica.keys() == sharded.keys() == {"sum"}
        # The accumulators of a trained table, in one shape, equal up to the order of additions.
        assert replica["sum"].shape == (7,)
        assert replica["sum"].abs().max() > 0
        assert torch.allclose(replica["sum"], sharded["sum"], rtol=1e-3, atol=1e-9)
