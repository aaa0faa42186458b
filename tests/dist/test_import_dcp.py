"""DCP checkpoints as TorchRec users write them, on two ranks, become bases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from lightning_cpr import cli
from lightning_cpr.checkpoint_io import CPRCheckpointIO
from lightning_cpr.errors import IncompatiblePlanError
from lightning_cpr.store import read_into
from lightning_cpr.store.find import find_version
from lightning_cpr.tables.shards import local_shards
from tests._ranks import init_gloo, run_ranks
from tests._tiny import TinyNet

PLANS: dict[str, tuple[str, Any]] = {
    "row_wise": ("rowwise_adagrad", row_wise()),
    "column_wise": ("rowwise_adagrad", column_wise(ranks=[1, 0])),
    "element_states": ("adagrad", column_wise(ranks=[0, 1])),
    "no_states": ("sgd", table_wise(rank=1)),
}

Saved = list[tuple[str, int, int, Tensor, dict[str, Tensor]]]


def _save(rank: int, world: int, folder: str) -> dict[str, Saved]:
    """Train a little under each plan, save with DCP, and tell what this rank's shards are."""
    init_gloo()
    torch.set_num_threads(1)
    told = {}
    for name, (optimizer, plan_a) in PLANS.items():
        net, sharder = TinyNet(optimizer), EmbeddingBagCollectionSharder()
        per_table = {"a": plan_a, "b": table_wise(rank=1), "c": table_wise(rank=0)}
        plan = construct_module_sharding_plan(
            net.ebc, per_table, sharder, world_size=2, local_size=2, device_type="cpu"
        )
        dmp = DistributedModelParallel(
            net, ShardingEnv.from_process_group(dist.group.WORLD), torch.device("cpu"),
            ShardingPlan({"ebc": plan}), [sharder],
        )  # fmt: skip
        shards = local_shards(dmp)
        g = torch.Generator().manual_seed(rank)
        for shard in shards:
            for tensor in (shard.weight, *shard.states.values()):
                tensor.copy_(torch.rand(tensor.shape, generator=g))
        with torch.no_grad():
            for parameter in dmp.module.mlp.parameters():
                parameter.fill_(0.25)
        content = {"model": dmp.state_dict(), "optim": dmp.fused_optimizer.state_dict()}
        dcp.save(content, checkpoint_id=f"{folder}/{name}")
        told[name] = [
            (
                s.spec.table,
                s.spec.row_start,
                s.spec.col_start,
                s.weight.clone(),
                {k: v.clone() for k, v in s.states.items()},
            )
            for s in shards
        ]
    dist.destroy_process_group()
    return told


def test_every_shard_is_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = run_ranks(_save, 2, str(tmp_path))
    for name, (optimizer, _) in PLANS.items():
        assert cli.main(["import", f"{tmp_path}/{name}", f"{tmp_path}/root-{name}", "--step", "5"]) == 0
        assert "3 tables, " in capsys.readouterr().out
        version = find_version(f"{tmp_path}/root-{name}")
        assert {spec.optimizer for spec in version.manifest.tables} == {optimizer if optimizer != "sgd" else "none"}
        seen = 0
        for table, row, col, weight, states in [shard for told in ranks for shard in told[name]]:
            spec = version.manifest.table(table)
            (target,) = _targets(table, row, col, weight, states)
            read_into(version.storage, version.manifest, [target])
            assert torch.equal(target.weight, weight), (name, table)
            assert {s.name for s in spec.states} == states.keys()
            for key, state in states.items():
                assert torch.equal(target.states[key], state), (name, table, key)
            seen += weight.numel()
        assert seen == 100 * 8 + 7 * 8 + 4
        assert cli.main(["verify", f"{tmp_path}/root-{name}"]) == 0
    model = CPRCheckpointIO.load_model(TinyNet(None, device="cpu"), f"{tmp_path}/root-row_wise")
    assert all((p == 0.25).all() for p in model.mlp.parameters())
    with pytest.raises(IncompatiblePlanError, match=r"was imported.*warm_start"):
        CPRCheckpointIO().load_checkpoint(f"{tmp_path}/root-row_wise")
    table, row, _, weight, _ = ranks[1]["row_wise"][0]
    assert (table, row) == ("ebc.embedding_bags.a", 50)
    assert torch.equal(model.ebc.embedding_bags["a"].weight[50:], weight)


def _targets(table: str, row: int, col: int, weight: Tensor, states: dict[str, Tensor]) -> list[Any]:
    from lightning_cpr.spec import Shard, ShardSpec

    spec = ShardSpec(table, row, weight.shape[0], col, weight.shape[1], owner=0)
    return [Shard(spec, torch.full_like(weight, -1), {k: torch.full_like(v, -1) for k, v in states.items()})]
