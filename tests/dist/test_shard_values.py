"""Writing through a shard's views is what a lookup reads, a state_dict shows and the optimizer continues from."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import sharding_plan as generators
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from lightning_cpr.spec import Shard
from lightning_cpr.tables import sharding
from lightning_cpr.tables.scalars import fused_scalars, load_fused_scalars
from lightning_cpr.tables.shards import global_shards, local_shards, plan_fingerprint, table_specs
from lightning_cpr.tables.table_optim import claim_tables
from tests._ranks import init_gloo, run_ranks
from tests._tiny import OPTIMIZERS

ROWS, COLS = 11, 16


class Net(nn.Module):
    def __init__(self, sparse: str | None, sequence: bool) -> None:
        super().__init__()
        self.sequence = sequence
        if sequence:
            config = EmbeddingConfig(name="t", num_embeddings=ROWS, embedding_dim=COLS, feature_names=["f"])
            self.inner = EmbeddingCollection(tables=[config], device=torch.device("meta"))
        else:
            bag = EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=COLS, feature_names=["f"])
            self.inner = EmbeddingBagCollection(tables=[bag], device=torch.device("meta"))
        if sparse is not None:
            optimizer, arguments = OPTIMIZERS[sparse]
            apply_optimizer_in_backward(optimizer, self.inner.parameters(), dict(arguments))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, ids: list[int]) -> Tensor:
        """The rows of ``ids``, ``[n, COLS]``."""
        kjt = KeyedJaggedTensor(keys=["f"], values=torch.tensor(ids), lengths=torch.ones(len(ids), dtype=torch.long))
        out = self.inner(kjt)
        return (out["f"].values() if self.sequence else out.values()) * self.scale


def _pattern(shard: Shard, offset: float) -> Tensor:
    """A number for each cell that names its global row and column."""
    spec = shard.spec
    rows = torch.arange(spec.row_start, spec.row_end, dtype=torch.float32)[:, None]
    cols = torch.arange(spec.col_start, spec.col_end, dtype=torch.float32)[None, :]
    return offset + rows + cols / 64


WHOLE = torch.arange(ROWS, dtype=torch.float32)[:, None] + torch.arange(COLS, dtype=torch.float32)[None, :] / 64


def _sharded(world: int, plan: Any, sparse: str | None, sequence: bool) -> nn.Module:
    where = sharding.World(world, world, torch.device("cpu"))
    net = Net(sparse, sequence)
    return sharding.shard(net, sharding.build_plan(net, where, plan), torch.device("cpu"))


def _gathered(model: nn.Module, key: str) -> Tensor:
    value = model.state_dict()[key]
    if not isinstance(value, ShardedTensor):
        return value.detach()
    out = torch.empty(value.size()) if torch.distributed.get_rank() == 0 else None
    value.gather(dst=0, out=out)
    return WHOLE if out is None else out


def _kinds(world: int, sequence: bool) -> list[tuple[str, Any]]:
    # torchrec takes several column shards of a table on one rank for pooled collections only.
    columns = [0, 1] if sequence else [1, 0, 1, 0]
    kinds = [
        ("table_wise", generators.table_wise(rank=world - 1, compute_kernel="fused")),
        ("row_wise", generators.row_wise(compute_kernel="fused")),
        ("column_wise", generators.column_wise(ranks=columns, compute_kernel="fused")),
        ("data_parallel", generators.data_parallel()),
        ("dense table_wise", generators.table_wise(rank=0, compute_kernel="dense")),
    ]
    # torchrec's own forward fails for these two on sequences.
    pooled = [
        ("dense row_wise", generators.row_wise(compute_kernel="dense")),
        ("table_row_wise", generators.table_row_wise(host_index=0)),
    ]
    return kinds if sequence else kinds + pooled


def _views(rank: int, world: int) -> dict[str, Any]:
    init_gloo()
    logging.disable(logging.WARNING)
    seen = {}
    ids = [(rank + 3 * i) % ROWS for i in range(4)]
    for sparse in ("rowwise_adagrad", "adagrad", "sgd"):
        for sequence in (False, True) if sparse == "rowwise_adagrad" else (False,):
            for name, generator in _kinds(world, sequence):
                model = _sharded(world, {"t": generator}, sparse, sequence)
                made, untrained = claim_tables(model, [])
                assert untrained == []
                shards = local_shards(model)
                for shard in shards:
                    shard.weight.copy_(_pattern(shard, 0.0))
                with torch.no_grad():
                    assert torch.equal(model(ids), WHOLE[ids]), (sparse, name, sequence)
                key = f"inner.{'embeddings' if sequence else 'embedding_bags'}.t"
                assert torch.equal(_gathered(model, f"{key}.weight"), WHOLE), (sparse, name, sequence)
                _check_states(model, shards, made, ids, sparse)
                specs = table_specs(model)
                seen[f"{sparse} {name} {sequence}"] = (specs, global_shards(model), plan_fingerprint(model))
                assert list(specs) == [key]
                assert specs[key].row_sparse is (name[:5] != "dense" and name != "data_parallel")
    return seen


def _check_states(model: nn.Module, shards: list[Shard], made: list[Any], ids: list[int], sparse: str) -> None:
    """One step from a state of 100: Adagrad adds the squared gradient and divides by the root of the new sum."""
    for shard in shards:
        for state in shard.states.values():
            state.fill_(100.0)
    model(ids).sum().backward()
    for optimizer in made:
        optimizer.step()
    counts = torch.zeros(ROWS)
    for r in range(torch.distributed.get_world_size()):
        for i in range(4):
            counts[(r + 3 * i) % ROWS] += 1
    # The mean over ranks of a gradient of one per lookup.
    gradient = counts / torch.distributed.get_world_size()
    total = 100 + gradient**2 if sparse != "sgd" else torch.ones(ROWS)
    for shard in shards:
        rows = slice(shard.spec.row_start, shard.spec.row_end)
        expected = _pattern(shard, 0.0) - (0.1 * gradient / total.sqrt())[rows, None]
        assert torch.allclose(shard.weight, expected, atol=1e-6)
        if sparse == "sgd":
            assert shard.states == {}
            continue
        assert list(shard.states) == ["sum"]
        state = shard.states["sum"]
        assert state.shape == (shard.weight.shape[:1] if sparse == "rowwise_adagrad" else shard.weight.shape)
        wanted = total[rows] if state.dim() == 1 else total[rows, None].expand_as(state)
        assert torch.allclose(state, wanted, atol=1e-5)


def test_views_are_live_for_every_sharding() -> None:
    first, second = run_ranks(_views, 2, timeout=150)
    assert first == second
    fingerprints = {key: fingerprint for key, (_, _, fingerprint) in first.items()}
    assert fingerprints["sgd row_wise False"] == fingerprints["sgd table_row_wise False"]
    assert len(set(fingerprints.values())) == len(_kinds(2, False)) - 1 + len(_kinds(2, True))
    for key, (specs, shards, _) in first.items():
        (spec,) = specs.values()
        assert spec.optimizer == key.split()[0]
        assert [s.kind for s in spec.states] == {"rowwise_adagrad": ["row"], "adagrad": ["element"], "sgd": []}[
            spec.optimizer
        ]
        covered = sum(s.elements for s in shards)
        assert covered == ROWS * COLS
    assert len(first["sgd column_wise False"][1]) == 4


def _scalars(rank: int, world: int) -> tuple[dict[str, Any], dict[str, Any]]:
    init_gloo()
    logging.disable(logging.WARNING)
    model = _sharded(world, "row_wise", "rowwise_adagrad", False)
    for _ in range(3):
        model([1, 2]).sum().backward()
    for _, group in enumerate(model.fused_optimizer.param_groups):
        group["lr"] = 0.05
    model.fused_optimizer.step()
    saved = fused_scalars(model)
    fresh = _sharded(world, "data_parallel", "rowwise_adagrad", False)
    claim_tables(fresh, [])
    load_fused_scalars(fresh, saved)
    again = _sharded(world, "row_wise", "rowwise_adagrad", False)
    load_fused_scalars(again, saved)
    assert fused_scalars(again) == saved
    assert [g["lr"] for g in again.fused_optimizer.param_groups] == [saved["inner.embedding_bags.t"]["lr"]]
    return saved["inner.embedding_bags.t"], fused_scalars(fresh)["inner.embedding_bags.t"]


def test_scalars_travel_between_plans() -> None:
    for saved, replica in run_ranks(_scalars, 2):
        assert saved["iter"] == 3
        assert abs(saved["lr"] - 0.05) < 1e-8
        assert replica == {"iter": 3, "lr": saved["lr"]}
