"""The tracker's bits are the rows that changed, exactly, whatever is looked up, when, and by whom a save is aborted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.sharding_plan import data_parallel, table_row_wise
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from lightning_cpr.errors import ConfigError
from lightning_cpr.policy.priority import PriorityConfig
from lightning_cpr.spec import ShardSpec
from lightning_cpr.tables import sharding
from lightning_cpr.tables.shards import local_shards, table_specs
from lightning_cpr.tables.tracker import RowTracker, Selection
from tests._ranks import init_gloo, run_ranks

Dirty = dict[tuple[str, int, int], list[int]]


class Net(nn.Module):
    """Tables: p (features x, y), q (feature y too), r (feature z); 8 columns each."""

    def __init__(self, sequence: bool = False, weighted: bool = False) -> None:
        super().__init__()
        names = {"p": (40, ["x", "y"]), "q": (24, ["y"]), "r": (3, ["z"])}
        config: Any = EmbeddingConfig if sequence else EmbeddingBagConfig
        tables = [
            config(name=n, num_embeddings=rows, embedding_dim=8, feature_names=features)
            for n, (rows, features) in names.items()
        ]
        meta = torch.device("meta")
        self.ec: nn.Module = (
            EmbeddingCollection(tables=tables, device=meta)
            if sequence
            else EmbeddingBagCollection(tables=tables, device=meta, is_weighted=weighted)
        )
        apply_optimizer_in_backward(RowWiseAdagrad, self.ec.parameters(), {"lr": 0.5})
        self.sequence = sequence
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        out = self.ec(features)
        values = [jagged.values() for jagged in out.values()] if self.sequence else [out.values()]
        return torch.cat([v.reshape(-1) for v in values]).sum() * self.scale.sum()


def kjt(x: list[int], y: list[int], z: list[int], weighted: bool = False) -> KeyedJaggedTensor:
    values = torch.tensor([*x, *y, *z], dtype=torch.long)
    return KeyedJaggedTensor(
        keys=["x", "y", "z"],
        values=values,
        lengths=torch.tensor([len(x), 0, len(y), 0, len(z), 0]),
        weights=torch.full((len(values),), 0.5) if weighted else None,
    )


def sharded(world: int, plan: Any, **kwargs: bool) -> nn.Module:
    where = sharding.World(world, world, torch.device("cpu"))
    net = Net(**kwargs)
    return sharding.shard(net, sharding.build_plan(net, where, plan), torch.device("cpu"))


def tracker_of(model: nn.Module, rank: int, **kwargs: Any) -> RowTracker:
    owned = [s for s in local_shards(model) if s.spec.owner == rank]
    tracker = RowTracker(model, owned, table_specs(model), **kwargs)
    tracker.take("base", "all", 0)
    tracker.settle("base")
    return tracker


def copies(model: nn.Module) -> dict[ShardSpec, Tensor]:
    return {s.spec: s.weight.clone() for s in local_shards(model)}


def changed(model: nn.Module, before: dict[ShardSpec, Tensor]) -> dict[ShardSpec, list[int]]:
    after = copies(model)
    return {
        spec: torch.nonzero((after[spec] != old).any(dim=1)).flatten().tolist()
        for spec, old in before.items()
        if not spec.replicated
    }


def listed(rows: dict[ShardSpec, Tensor]) -> dict[ShardSpec, list[int]]:
    return {spec: ids.tolist() for spec, ids in rows.items()}


def rows_of(selection: Selection) -> dict[ShardSpec, list[int]]:
    return listed(dict(selection.rows))


def bits_are_changes(rank: int, world: int) -> int:
    init_gloo()
    checks = 0
    batches = [kjt([1, 17, 1, 39], [2, 2], []), kjt([9], [], [2, 2, 0])]
    plans: list[tuple[Any, dict[str, bool]]] = [
        ("row_wise", {}),
        ("row_wise", {"sequence": True}),
        ("column_wise", {}),
        ("table_wise", {"weighted": True}),
        ({"p": "row_wise", "q": data_parallel(), "r": "table_wise"}, {}),
        ({n: table_row_wise(host_index=0) for n in "pqr"}, {}),
    ]
    for plan, kwargs in plans:
        model = sharded(world, plan, **kwargs)
        tracker = tracker_of(model, rank)
        weighted = kwargs.get("weighted", False)
        before = copies(model)
        with torch.no_grad():
            model(kjt([5], [6], [1], weighted))
        model(kjt([7], [8], [1], weighted))  # never run backward: nothing changed
        assert not any(changed(model, before).values())
        assert not any(listed(tracker.dirty("last")).values())
        batch = batches[rank]
        if weighted:
            batch = kjt(*([[1, 17], [2], []], [[9], [], [2]])[rank], True)
        model(batch).backward()
        now = changed(model, before)
        assert any(now.values()) or rank
        tracked = listed(tracker.dirty("last"))
        assert tracked == {spec: rows for spec, rows in now.items() if spec in tracked}, plan
        # data-parallel tables alone are never told apart by row
        assert {s for s in before if not s.replicated} == set(tracked)
        # an empty batch on every rank
        before = copies(model)
        model(kjt([], [], [], weighted)).backward()
        assert not any(changed(model, before).values())
        assert listed(tracker.dirty("last")) == tracked
        tracker.close()
        checks += 1
    return checks


def test_bits_are_the_changed_rows_under_every_plan() -> None:
    assert run_ranks(bits_are_changes, 2, timeout=120) == [6, 6]


def early_lookups_and_aborts(rank: int, world: int) -> None:
    init_gloo()
    model = sharded(world, "row_wise")
    tracker = tracker_of(model, rank, count=True)
    empty: dict[ShardSpec, list[int]] = {spec: [] for spec in tracker.dirty("last")}

    # an early-lookup pipeline: batch 2 is looked up before batch 1's backward, and a save comes between
    before = copies(model)
    first, second = model(kjt([1, 2, 30], [3], [0])), model(kjt([2, 4, 31], [3], [1]))
    first.backward()
    of_first = changed(model, before)
    assert listed(tracker.dirty("last")) == of_first
    assert tracker.lost_updates() == (sum_of(world, of_first, {30: 1}), True)
    selection = tracker.take("v1", "since_base", 1)
    assert rows_of(selection) == of_first
    assert set(selection.complete.values()) == {1}
    assert listed(tracker.dirty("last")) == empty
    before = copies(model)
    second.backward()
    of_second = changed(model, before)
    assert listed(tracker.dirty("last")) == of_second

    # the save is aborted: its bits come back, and the lookups with them
    tracker.settle("base")
    union = {spec: sorted({*of_first[spec], *of_second[spec]}) for spec in of_first}
    assert listed(tracker.dirty("last")) == listed(tracker.dirty("base")) == union
    lost, exact = tracker.lost_updates()
    assert exact
    selection = tracker.take("v2", "since_last", 2)
    assert rows_of(selection) == union
    tracker.settle("v2")
    assert tracker.lost_updates() == (0, True)
    assert lost > 0
    # since the last: nothing; since the base: still all of it
    assert rows_of(tracker.take("v3", "since_last", 3)) == empty
    tracker.settle("v3")
    assert rows_of(tracker.take("v4", "since_base", 4)) == union
    tracker.settle("v4")

    # a base owns the bits of both, and its abort loses none
    assert tracker.take("v5", "all", 5).rows == {}
    assert listed(tracker.dirty("base")) == empty
    tracker.settle(None)
    assert listed(tracker.dirty("base")) == union
    assert listed(tracker.dirty("last")) == empty

    # rows written by hand, and a restore
    tracker.mark("r")
    assert all(
        rows == list(range(s.rows)) for s, rows in listed(tracker.dirty("last")).items() if s.table.endswith("r")
    )
    tracker.mark("ec.embedding_bags.p", torch.tensor([[0, 39]]))
    marked = {s: rows for s, rows in listed(tracker.dirty("last")).items() if s.table.endswith("p")}
    assert list(marked.values()) == [[0] if rank == 0 else [19]]
    with pytest.raises(ConfigError, match=r"table 'nope': must be one of ec\.embedding_bags\.p, "):
        tracker.mark("nope")
    with pytest.raises(ConfigError, match=r"rows 0..40 of table ec\.embedding_bags\.p: it has rows 0..39"):
        tracker.mark("p", torch.tensor([0, 40]))
    tracker.restored("v7", lambda spec: torch.tensor([1] if spec.rows > 1 else []).long(), lambda spec: 7)
    assert listed(tracker.dirty("last")) == empty
    assert set(map(tuple, listed(tracker.dirty("base")).values())) <= {(1,), ()}

    # hooks that a reshard took away are noticed
    assert tracker.hooks_lost() == []
    for module in model.modules():
        module._forward_hooks.clear()
    for handle_owner in [m for _, m in _lookups(model)]:
        handle_owner._forward_hooks.clear()
    assert tracker.hooks_lost() == ["ec.embedding_bags.p", "ec.embedding_bags.q", "ec.embedding_bags.r"]
    assert tracker.hooks_lost() == []


def sum_of(world: int, rows: dict[ShardSpec, list[int]], extra: dict[int, int]) -> int:
    """Lookups of both ranks' equal batches: each changed row once a rank, row 3 of p by feature y."""
    return world * sum(len(r) for r in rows.values())


def _lookups(model: nn.Module) -> list[tuple[str, nn.Module]]:
    from lightning_cpr.tables._modules import lookups, sharded_collections

    return [(name, lookup) for name, module in sharded_collections(model) for lookup in lookups(module)]


def priorities(rank: int, world: int) -> None:
    init_gloo()
    model = sharded(world, "row_wise")
    config = PriorityConfig("mfu", 0.1)
    tracker = tracker_of(model, rank, priority=config, tables=["ec.embedding_bags.p"])
    p = next(s.spec for s in local_shards(model) if s.spec.table.endswith("p"))
    q = next(s.spec for s in local_shards(model) if s.spec.table.endswith("q"))
    # on each rank's half of p: rows 1 (4 lookups), 2 (2), 3 (2 + y), 5 (2); 10 % of 20 rows are two
    for _ in range(2):
        model(kjt([1, 1, 2, 3, 21, 21, 22, 23], [], [])).backward()
    model(kjt([5, 25], [3, 23], [])).backward()
    # of this rank's halves of p and q
    assert tracker.updates_per_batch == pytest.approx(world * (4 * 2 + 1 + 2) / 3)
    selection = tracker.take("m1", "priority", 3)
    assert selection.rows[p].tolist() == [1, 3]
    assert selection.lacking == world * 2 * 1 + world * 1  # rows 2 and 5
    assert selection.complete[p] == 0
    assert selection.rows[q].tolist() == [3 if rank == 0 else 11]
    assert selection.complete[q] == 3
    tracker.settle(None)
    assert tracker.take("m2", "priority", 4).rows[p].tolist() == [1, 3]
    tracker.settle("m2")
    # the rest fits: the shard is complete
    selection = tracker.take("m3", "priority", 5)
    assert selection.rows[p].tolist() == [2, 5]
    assert selection.complete[p] == 5
    assert selection.lacking == 0
    tracker.settle("m3")
    assert rows_of(tracker.take("c", "since_base", 6))[p] == [1, 2, 3, 5]
    tracker.settle("c")
    assert tracker.memory_bytes == sum(s.spec.rows for s in local_shards(model)) + 4 * p.rows


def test_saves_own_their_bits_and_pending_ids_stay_dirty() -> None:
    run_ranks(early_lookups_and_aborts, 2, timeout=120)


def test_priority_saves_take_the_most_used_rows() -> None:
    run_ranks(priorities, 2, timeout=120)
