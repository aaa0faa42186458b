"""Training through the Trainer equals a plain TorchRec loop, bit for bit."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed import sharding_plan as generators
from torchrec.distributed.types import ShardingPlan

from lightning_cpr.pipeline import PipelinedModule
from lightning_cpr.strategy import TorchRecStrategy
from lightning_cpr.tables.shards import dense_state, local_shards
from tests._ranks import run_ranks
from tests._tiny import (
    Tiny,
    TinyNet,
    dense_optimizer,
    fill_tables,
    make_batch,
    make_loader,
    make_trainer,
)

STEPS = 50


def _plan(name: str, world: int) -> dict[str, Any]:
    fused = {"compute_kernel": "fused"}
    here, there = generators.table_wise(rank=0, **fused), generators.table_wise(rank=world - 1, **fused)
    rows = generators.row_wise(**fused)
    return {
        "table_wise": {"a": here, "b": there, "c": here},
        "row_wise": {"a": rows, "b": rows, "c": here},
        "mixed": {"a": rows, "b": generators.data_parallel(), "c": there},
    }[name]


CASES = [
    ("automatic", "mixed", "adam"),
    ("automatic", "row_wise", "sgd"),
    ("manual", "mixed", "sgd"),
    ("pipelined", "table_wise", "adam"),
]


class DenseHoldsReplicas(Tiny):
    """Hands data-parallel tables to the dense optimizer, as TorchRec's own loops do."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return dense_optimizer(self.dense, _unfused(self.net))


class Manual(DenseHoldsReplicas):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Pipelined(PipelinedModule):
    def __init__(self, dense: str) -> None:
        super().__init__()
        self.net = TinyNet()
        self.dense = dense
        self.losses: list[float] = []
        self.flying: list[int] = []

    def on_fit_start(self) -> None:
        fill_tables(self)

    def forward(self, batch: Any) -> Any:
        loss, _ = self.net(batch)
        return loss, loss.detach()

    def training_output(self, output: Any, batch_idx: int) -> None:
        self.losses.append(output.item())
        self.flying.append(self.in_flight)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return dense_optimizer(self.dense, _unfused(self.net))


def _unfused(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.numel() and not hasattr(p, "_in_backward_optimizers")]


def _snapshot(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    found = {}
    for shard in local_shards(model, optimizers):
        key = f"{shard.spec.table.removeprefix('net.')} {shard.spec.row_start}"
        found[key] = shard.weight.clone()
        found |= {f"{key} {name}": state.clone() for name, state in shard.states.items()}
    found |= {key.removeprefix("net."): value.clone() for key, value in dense_state(model).items()}
    return found


def _plain_loop(rank: int, world: int, plan: dict[str, Any], dense: str, steps: int) -> tuple[list[float], Any]:
    """TorchRec without Lightning and without this package."""
    net = TinyNet()
    module_plan = generators.construct_module_sharding_plan(
        net.ebc, plan, local_size=world, world_size=world, device_type="cpu"
    )
    dmp = DistributedModelParallel(net, device=torch.device("cpu"), plan=ShardingPlan({"ebc": module_plan}))
    fill_tables(dmp)
    optimizer = dense_optimizer(dense, _unfused(dmp))
    losses = []
    for index in range(steps):
        optimizer.zero_grad()
        loss, _ = dmp(make_batch(index, rank))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, _snapshot(dmp, [optimizer])


def _compare(rank: int, world: int) -> list[list[str]]:
    logging.disable(logging.WARNING)
    return [_compare_one(rank, world, *case) for case in CASES]


def _compare_one(rank: int, world: int, kind: str, plan_name: str, dense: str) -> list[str]:
    plan = _plan(plan_name, world)
    model = {"automatic": DenseHoldsReplicas, "manual": Manual, "pipelined": Pipelined}[kind](dense=dense)
    trainer = make_trainer(world, TorchRecStrategy(plan=plan), max_steps=STEPS)
    trainer.fit(model, make_loader(rank))
    assert trainer.global_step == STEPS
    losses, expected = _plain_loop(rank, world, plan, dense, STEPS)
    assert len(losses) == STEPS
    assert model.losses == losses, kind
    got = _snapshot(model, [])
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(got[key], value), (kind, key)
    return sorted(got)


@pytest.mark.parametrize("world", [1, 2])
def test_trainer_equals_a_plain_loop(world: int) -> None:
    for case, keys in zip(CASES, run_ranks(_compare, world, timeout=150)[0], strict=True):
        assert any("sum" in key for key in keys), case
        assert "mlp.0.weight" in keys, case
