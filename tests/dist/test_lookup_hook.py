"""The lookup hook tells exactly the rows that the next backward may change."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed import sharding_plan as generators
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from lightning_cpr.spec import ShardSpec
from lightning_cpr.tables import sharding
from lightning_cpr.tables.lookup import LookupHook, register_lookup_hook
from lightning_cpr.tables.shards import local_shards
from tests._ranks import init_gloo, run_ranks

Seen = list[tuple[str, int, int, list[int]]]


class Net(nn.Module):
    """Tables: p (features x, y), q (feature y too, so y feeds two tables), r (feature z)."""

    def __init__(self, sequence: bool = False, weighted: bool = False) -> None:
        super().__init__()
        names = {"p": (10, ["x", "y"]), "q": (6, ["y"]), "r": (4, ["z"])}
        if sequence:
            self.ec = EmbeddingCollection(
                tables=[
                    EmbeddingConfig(name=n, num_embeddings=rows, embedding_dim=8, feature_names=features)
                    for n, (rows, features) in names.items()
                ],
                device=torch.device("meta"),
            )
        else:
            self.ec = EmbeddingBagCollection(
                tables=[
                    EmbeddingBagConfig(name=n, num_embeddings=rows, embedding_dim=8, feature_names=features)
                    for n, (rows, features) in names.items()
                ],
                device=torch.device("meta"),
                is_weighted=weighted,
            )
        apply_optimizer_in_backward(RowWiseAdagrad, self.ec.parameters(), {"lr": 0.5})
        self.sequence = sequence
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        out = self.ec(features)
        values = [jagged.values() for jagged in out.values()] if self.sequence else [out.values()]
        return torch.cat([v.reshape(-1) for v in values]).sum() * self.scale.sum()


def _kjt(x: list[int], y: list[int], z: list[int], weighted: bool = False) -> KeyedJaggedTensor:
    """Two samples a feature; all ids in the first."""
    lengths = [n for ids in (x, y, z) for n in (len(ids), 0)]
    values = torch.tensor([*x, *y, *z], dtype=torch.long)
    weights = torch.full((len(values),), 0.5) if weighted else None
    return KeyedJaggedTensor(keys=["x", "y", "z"], values=values, lengths=torch.tensor(lengths), weights=weights)


def _sharded(world: int, plan: Any, **kwargs: bool) -> nn.Module:
    where = sharding.World(world, world, torch.device("cpu"))
    net = Net(**kwargs)
    return sharding.shard(net, sharding.build_plan(net, where, plan), torch.device("cpu"))


def _track(model: nn.Module) -> tuple[LookupHook, Seen]:
    seen: Seen = []

    def fn(shard: ShardSpec, ids: Tensor) -> None:
        assert ids.dtype == torch.int64
        assert int(ids.min()) >= 0
        assert int(ids.max()) < shard.rows
        seen.append((shard.table.rsplit(".", 1)[1], shard.row_start, shard.col_start, sorted(ids.tolist())))

    return register_lookup_hook(model, fn), seen


def _step(model: nn.Module, batch: KeyedJaggedTensor) -> dict[tuple[str, int, int], list[int]]:
    """Trains one batch and returns the rows that changed, by shard."""
    shards = local_shards(model)
    before = [s.weight.clone() for s in shards]
    model(batch).backward()
    changed = {}
    for shard, old in zip(shards, before, strict=True):
        rows = torch.nonzero((shard.weight != old).any(dim=1)).flatten().tolist()
        if rows:
            changed[shard.spec.table.rsplit(".", 1)[1], shard.spec.row_start, shard.spec.col_start] = rows
    return changed


def _rows(seen: Seen) -> dict[tuple[str, int, int], list[int]]:
    return {(table, row, col): sorted(set(ids)) for table, row, col, ids in seen}


PLANS: dict[str, Any] = {
    "table_wise": {
        "p": generators.table_wise(rank=0, compute_kernel="fused"),
        "q": generators.table_wise(rank=1, compute_kernel="fused"),
        "r": generators.table_wise(rank=1, compute_kernel="fused"),
    },
    "row_wise": "row_wise",
    "column_wise": "column_wise",
    "mixed": {
        "p": "row_wise",
        "q": generators.table_wise(rank=0, compute_kernel="fused"),
        "r": generators.table_wise(rank=1, compute_kernel="fused"),
    },
}


def _exact(rank: int, world: int) -> dict[str, list[Any]]:
    init_gloo()
    logging.disable(logging.WARNING)
    results: dict[str, list[Any]] = {}
    # Rank 0 asks for p rows 1 and 7 (x) and 2 (y), q row 2 (y); rank 1 asks for r row 3 and p row 9.
    batches = [_kjt([1, 7, 1], [2], []), _kjt([9], [], [3, 3])]
    for name, plan in PLANS.items():
        for sequence in (False, True):
            model = _sharded(world, plan, sequence=sequence)
            _, seen = _track(model)
            changed = _step(model, batches[rank])
            assert _rows(seen) == changed, (name, sequence)
            results[f"{name} {sequence}"] = sorted(seen)
    return results


def test_hook_tells_exactly_the_changed_rows() -> None:
    first, second = run_ranks(_exact, 2, timeout=120)
    for sequence in ("False", "True"):
        assert first[f"table_wise {sequence}"] == [("p", 0, 0, [1, 1, 2, 7, 9])]
        assert second[f"table_wise {sequence}"] == [("q", 0, 0, [2]), ("r", 0, 0, [3, 3])]
        assert first[f"row_wise {sequence}"] == [("p", 0, 0, [1, 1, 2]), ("q", 0, 0, [2])]
        assert second[f"row_wise {sequence}"] == [("p", 5, 0, [2, 4]), ("r", 2, 0, [1, 1])]
        for col, side in ((0, first), (4, second)):
            assert side[f"column_wise {sequence}"] == [
                ("p", 0, col, [1, 1, 2, 7, 9]),
                ("q", 0, col, [2]),
                ("r", 0, col, [3, 3]),
            ]
        assert first[f"mixed {sequence}"] == [("p", 0, 0, [1, 1, 2]), ("q", 0, 0, [2])]


def _corners(rank: int, world: int) -> None:
    init_gloo()
    logging.disable(logging.WARNING)
    # Ids beyond the table, and a negative one: the kernel clamps them to a row 0, which changes.
    for plan in ("table_wise", "row_wise", "column_wise"):
        model = _sharded(world, plan)
        _, seen = _track(model)
        changed = _step(model, _kjt([10, 3], [], [-7]))
        assert _rows(seen) == changed, plan
        if plan == "table_wise":
            assert {k: v for k, v in changed.items() if k[0] == "p"} in ({("p", 0, 0): [0, 3]}, {})

    # Nothing looked up; no gradient; a weighted collection.
    model = _sharded(world, "row_wise")
    _, seen = _track(model)
    assert _step(model, _kjt([], [], [])) == {}
    assert seen == []
    with torch.no_grad():
        model(_kjt([1], [1], [1]))
    assert seen == []
    weighted = _sharded(world, "row_wise", weighted=True)
    _, seen = _track(weighted)
    assert _rows(seen) == {}
    changed = _step(weighted, _kjt([1], [], [], weighted=True))
    assert _rows(seen) == changed == ({("p", 0, 0): [1]} if rank == 0 else {})

    # A data-parallel table: this rank's ids only, though all ranks' gradients reach the rows.
    replicas = _sharded(world, "data_parallel")
    _, seen = _track(replicas)
    replicas(_kjt([rank + 1], [], [])).backward()
    assert seen == [("p", 0, 0, [rank + 1])]

    # A tracker of TorchRec's own does not take the hook away; a lost hook is noticed and put back.
    model = _sharded(world, "row_wise")
    hook, seen = _track(model)
    ModelDeltaTrackerTrec(model._dmp_wrapped_module)
    _step(model, _kjt([1], [], []))
    assert hook.still_ours() == []
    assert (seen == [("p", 0, 0, [1, 1])]) is (rank == 0)
    seen.clear()
    for lookup in model.module.ec._lookups:
        lookup._forward_hooks.clear()
    assert hook.still_ours() == ["ec.embedding_bags.p", "ec.embedding_bags.q", "ec.embedding_bags.r"]
    _step(model, _kjt([1], [], []))
    assert seen == []
    hook.rechain()
    assert hook.still_ours() == []
    _step(model, _kjt([1], [], []))
    assert (seen == [("p", 0, 0, [1, 1])]) is (rank == 0)
    hook.remove()
    seen.clear()
    _step(model, _kjt([1], [], []))
    assert seen == []


def test_hook_corner_cases() -> None:
    run_ranks(_corners, 2, timeout=120)
