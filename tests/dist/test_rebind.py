"""Rebinding a sharded model from a stand-in group to a real one leaves no trace of the first and changes no value."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_cpr.errors import RecoveryError
from lightning_cpr.tables.rebind import STAND_IN, built_apart, check_rebindable, rebind, stand_in_group
from lightning_cpr.tables.sharding import World, build_plan, shard
from lightning_cpr.tables.shards import local_shards
from tests._ranks import init_gloo, run_ranks
from tests._tiny import TinyNet, make_batch
from tests.dist.test_lookup_hook import Net, _kjt

TABLES = {"a": (100, 8), "b": (70, 8), "c": (10, 8)}
PLANS: list[Any] = ["row_wise", "column_wise", {"a": "row_wise", "b": "table_wise", "c": "data_parallel"}]


SEQUENCES: Any = {"p": "row_wise", "q": "table_wise", "r": "column_wise"}


def _build(world: int, plan: Any) -> nn.Module:
    net = Net(sequence=True) if plan == SEQUENCES else TinyNet(tables=TABLES)
    model = shard(net, build_plan(net, World(world, world, torch.device("cpu")), plan), torch.device("cpu"))
    for held in local_shards(model):
        held.weight.fill_(0.25)
    return model


def _train(model: nn.Module, rank: int) -> list[float]:
    losses = []
    for step in range(3):
        if isinstance(model.module, Net):
            loss = model(_kjt([step, 7], [rank, 5], [3]))
        else:
            loss, _ = model(make_batch(step, rank, tables=TABLES))
        loss.backward()
        losses.append(loss.item())
    return losses


def _compare(rank: int, world: int, plan: Any) -> tuple[list[float], list[float]]:
    stand_in_group(rank, world)
    with built_apart():
        model = _build(world, plan)
    memory = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    old = dist.group.WORLD
    assert dist.get_backend() == STAND_IN
    dist.destroy_process_group()
    init_gloo()
    assert rebind(model, dist.group.WORLD) >= 10
    check_rebindable(model, dist.group.WORLD)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == memory
    gc.collect()
    frame = locals()
    assert [type(r) for r in gc.get_referrers(old) if r is not frame and type(r).__name__ != "frame"] == []
    moved = _train(model, rank)
    return moved, _train(_build(world, plan), rank)


@pytest.mark.parametrize("plan", [*PLANS, SEQUENCES], ids=["row_wise", "column_wise", "mixed", "sequences"])
def test_a_model_built_apart_trains_like_one_built_together(plan: Any) -> None:
    for moved, plain in run_ranks(_compare, 2, plan):
        assert moved == plain


def _gradients(rank: int, world: int) -> list[torch.Tensor]:
    """Of the same batch four times: in the first two steps of a model that was moved, and of one that was not."""

    def build() -> nn.Module:
        net = TinyNet(tables=TABLES, sparse=None)
        net.mlp = nn.Sequential(nn.Linear(net.mlp[0].in_features, 64), nn.ReLU(), nn.Linear(64, 1))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            for parameter in net.mlp.parameters():
                nn.init.normal_(parameter)
        model = shard(net, build_plan(net, World(world, world, torch.device("cpu")), PLANS[2]), torch.device("cpu"))
        for held in local_shards(model):
            held.weight.fill_(0.25)
        return model

    stand_in_group(rank, world)
    with built_apart():
        moved = build()
    dist.destroy_process_group()
    init_gloo()
    rebind(moved, dist.group.WORLD)
    found = []
    for model in (moved, build()):
        for _ in range(2):
            model.zero_grad()
            model(make_batch(0, rank, tables=TABLES))[0].backward()
            found.append(torch.cat([p.grad.flatten() for name, p in model.named_parameters() if "mlp" in name]))
    return found


def test_three_ranks_add_gradients_in_the_same_order_in_the_first_step_as_later() -> None:
    """DDP alone does not: a resumed or recovered run would differ in the last bits from the uninterrupted one."""
    for first, *others in run_ranks(_gradients, 3):
        assert first.count_nonzero() > 500
        assert all(torch.equal(first, other) for other in others)


def _other_size(rank: int, world: int) -> str:
    stand_in_group(rank, world + 1)
    module = nn.Module()
    module.pg = dist.group.WORLD
    dist.destroy_process_group()
    init_gloo()
    with pytest.raises(RecoveryError, match="process group of 3 of 2 ranks"):
        check_rebindable(module, dist.group.WORLD)
    with pytest.raises(RecoveryError, match="process group of 3 of 2 ranks") as info:
        rebind(module, dist.group.WORLD)
    return str(info.value)


def test_a_group_of_other_ranks_is_refused() -> None:
    assert all("restarts in full" in message for message in run_ranks(_other_size, 2))
