"""A new job that begins with tables of another one, on two ranks and in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from lightning_cpr.errors import CorruptShardError, IncompatiblePlanError
from lightning_cpr.store import Storage
from lightning_cpr.store.blob import JOB_BLOB, encode_blob, rank_blob
from lightning_cpr.tables.shards import local_shards
from lightning_cpr.warm_start import WarmStart, warm_start
from tests._ranks import init_gloo, run_ranks
from tests._tiny import TinyNet
from tests.unit.store.helpers import Table, save_one, table

A, B, C = (f"ebc.embedding_bags.{name}" for name in "abc")


def old_job(root: str) -> dict[str, Table]:
    """Tables items 90 x 8, b 7 x 8 and users 30 x 8, trained with row-wise Adagrad."""
    names = {"m.embedding_bags.items": 90, B: 7, "m.embedding_bags.users": 30}
    tables = {name: table(name, rows, 8, seed=rows) for name, rows in names.items()}
    blobs = {
        JOB_BLOB: encode_blob({"state_dict": {"mlp.2.bias": torch.tensor([9.0]), "other": torch.ones(2)}}),
        rank_blob(0): encode_blob({"loops": None, "rng": None, "scalars": {B: {"iter": 5, "lr": 99.0}}}),
    }
    save_one(Storage(root), list(tables.values()), 4, blobs=blobs)
    return tables


def _sharded(rank: int, world: int, root: str) -> tuple[WarmStart, dict[str, list[tuple[int, Tensor, Tensor]]]]:
    init_gloo()
    net, sharder = TinyNet(), EmbeddingBagCollectionSharder()
    per_table = {"a": row_wise(), "b": table_wise(rank=1), "c": table_wise(rank=0)}
    plan = construct_module_sharding_plan(net.ebc, per_table, sharder, world_size=2, local_size=2, device_type="cpu")
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    dmp = DistributedModelParallel(net, env, torch.device("cpu"), ShardingPlan({"ebc": plan}), [sharder])
    for shard in local_shards(dmp):
        for tensor in (shard.weight, *shard.states.values()):
            tensor.fill_(-5.0)
    report = warm_start(dmp, root, tables={"a": "items", "b": "b"}, grow=True)
    told: dict[str, list[tuple[int, Tensor, Tensor]]] = {}
    for shard in local_shards(dmp):
        told.setdefault(shard.spec.table, []).append(
            (shard.spec.row_start, shard.weight.clone(), shard.states["sum"].clone())
        )
    dist.destroy_process_group()
    return report, told


def test_renamed_and_grown_under_a_plan(tmp_path: Path) -> None:
    saved = old_job(str(tmp_path))
    results = run_ranks(_sharded, 2, str(tmp_path))
    for report, told in results:
        assert report.tables == {A: "m.embedding_bags.items", B: B}
        assert report.new_rows == {A: 10}
        for row, weight, sums in told.get(A, []):
            items = saved["m.embedding_bags.items"]
            count = min(90 - row, 50)
            assert torch.equal(weight[:count], items.weight[row : row + count])
            assert torch.equal(sums[:count], items.states["sum"][row : row + count])
            assert (weight[count:] == -5).all()
            assert (sums[count:] == -5).all()
    assert sorted(row for _, told in results for row, *_ in told[A]) == [0, 50]
    ((_, weight, sums),) = results[1][1][B]
    assert torch.equal(weight, saved[B].weight)
    assert torch.equal(sums, saved[B].states["sum"])
    ((_, untouched, _),) = results[0][1][C]
    assert (untouched == -5).all()


def net() -> TinyNet:
    return TinyNet(None, device="cpu")


def test_one_process_takes_what_both_have(tmp_path: Path) -> None:
    saved, model = old_job(str(tmp_path)), net()
    before = model.ebc.embedding_bags["a"].weight.clone()
    report = warm_start(model, f"{tmp_path}@4", states=False, dense=True)
    assert report.tables == {B: B}
    assert torch.equal(model.ebc.embedding_bags["b"].weight, saved[B].weight)
    assert torch.equal(model.ebc.embedding_bags["a"].weight, before)
    assert model.mlp[2].bias.item() == 9.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tables": {"a": "items"}}, ["a has 10 rows more than saved", "grow=True"]),
        ({"tables": {"b": "items", "c": "users"}, "grow": True}, ["b is 7 x 8, saved", "c is 1 x 4, saved"]),
        ({"tables": {"x": "items", "a": "y"}}, ["0 tables of the model are named 'x'", "are named 'y'"]),
        ({"tables": ["b"], "states": True}, ["sum is absent here"]),
    ],
)
def test_what_does_not_fit_changes_nothing(tmp_path: Path, options: dict[str, object], words: list[str]) -> None:
    old_job(str(tmp_path))
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(IncompatiblePlanError) as info:
        warm_start(model, str(tmp_path), **{"states": False, **options})  # type: ignore[arg-type]
    assert all(word in str(info.value) for word in words)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_damaged_version_changes_nothing(tmp_path: Path) -> None:
    old_job(str(tmp_path))
    for path in (tmp_path / "chunks").rglob("*.safetensors"):
        raw = bytearray(path.read_bytes())
        raw[len(raw) * 2 // 3] ^= 1
        path.write_bytes(raw)
    model = net()
    before = model.ebc.embedding_bags["b"].weight.clone()
    with pytest.raises(CorruptShardError):
        warm_start(model, str(tmp_path), states=False)
    assert torch.equal(model.ebc.embedding_bags["b"].weight, before)
