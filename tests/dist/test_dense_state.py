"""The dense state is the same for the plain, sharded and wrapped model; a state that does not fit changes nothing."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.model_parallel import DMPCollection

from lightning_cpr.checkpoint_io import CPRCheckpointIO
from lightning_cpr.errors import IncompatiblePlanError, UnsupportedError
from lightning_cpr.strategy import TorchRecStrategy
from lightning_cpr.tables import sharding
from lightning_cpr.tables.dense import (
    dense_optimizer_state,
    dense_state,
    load_dense_optimizer_state,
    load_dense_state,
)
from lightning_cpr.tables.rebind import tables_uninitialised
from lightning_cpr.tables.shards import local_shards, table_specs
from tests._ranks import init_gloo, run_ranks
from tests._tiny import Tiny, TinyNet, make_batch, make_loader, make_trainer


class Normed(TinyNet):
    """A buffer, a nested dense part beside the collection, and a name that looks like a wrapper's."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.register_buffer("scale", torch.tensor([3.0]))


def _sharded(world: int) -> nn.Module:
    where = sharding.World(world, world, torch.device("cpu"))
    net = Normed()
    return sharding.shard(net, sharding.build_plan(net, where, "table_wise"), torch.device("cpu"))


def _states(rank: int, world: int) -> None:
    init_gloo()
    logging.disable(logging.WARNING)
    plain, wrapped = Normed(), _sharded(world)
    state = dense_state(wrapped)
    expected = [k for k in plain.state_dict() if not k.startswith("ebc.")]
    assert sorted(state) == sorted(dense_state(plain)) == sorted(dense_state(wrapped.module)) == sorted(expected)
    assert table_specs(plain).keys() == table_specs(wrapped).keys()

    for value in state.values():
        value.copy_(torch.full_like(value, 7))
    assert load_dense_state(plain, state) == ([], [])
    assert all(bool((v == 7).all()) for v in dense_state(plain).values())

    before = {k: v.clone() for k, v in dense_state(plain).items()}
    odd = {k: torch.zeros_like(v) for k, v in before.items() if k != "scale"} | {"extra": torch.zeros(1)}
    with pytest.raises(IncompatiblePlanError, match=r"missing scale.*unexpected extra"):
        load_dense_state(plain, odd)
    wrong = before | {"scale": torch.zeros(2)}
    with pytest.raises(IncompatiblePlanError, match=r"wrong shape scale: saved \(2,\), here \(1,\)"):
        load_dense_state(plain, wrong, strict=False)
    assert all(torch.equal(v, before[k]) for k, v in dense_state(plain).items())
    assert load_dense_state(plain, odd, strict=False) == (["scale"], ["extra"])
    assert torch.equal(dense_state(plain)["scale"], torch.tensor([7.0]))
    assert not dense_state(plain)["mlp.0.weight"].any()

    _optimizers(wrapped)
    inner = DMPCollection.__new__(DMPCollection)
    nn.Module.__init__(inner)
    with pytest.raises(UnsupportedError, match="inner is a DMPCollection"):
        sharding.refuse_unsupported(nn.ModuleDict({"inner": inner}))

    torch.manual_seed(1)
    generator = torch.get_rng_state()
    with tables_uninitialised():
        quiet = _sharded(world)
    assert local_shards(quiet)[0].weight.shape == (100, 8)
    _sharded(world)
    undrawn = torch.equal(torch.get_rng_state(), generator)
    assert not undrawn
    with tables_uninitialised():
        net = Tiny().net
        where = sharding.World(world, world, torch.device("cpu"))
        torch.manual_seed(1)
        sharding.shard(net, sharding.build_plan(net, where, "table_wise"), torch.device("cpu"))
        assert torch.equal(torch.get_rng_state(), generator)


def _optimizers(wrapped: Any) -> None:
    def make(*groups: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam([{"params": group} for group in groups], lr=0.1)

    mlp = wrapped.module.mlp
    optimizer = make(list(mlp[0].parameters()), list(mlp[2].parameters()))
    wrapped(make_batch(0))[0].backward()
    optimizer.step()
    saved = dense_optimizer_state(wrapped, optimizer)
    assert [g["params"] for g in saved["param_groups"]] == [
        ["mlp.0.weight", "mlp.0.bias"],
        ["mlp.2.weight", "mlp.2.bias"],
    ]
    # In another order of parameters: names decide, not positions.
    other = make(list(mlp[0].parameters())[::-1], list(mlp[2].parameters()))
    load_dense_optimizer_state(wrapped, other, saved)
    for parameter in mlp.parameters():
        assert torch.equal(other.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])
    wrong = make(list(mlp[0].parameters()), list(mlp[2].parameters())[:1])
    with pytest.raises(IncompatiblePlanError, match=r"only saved \['mlp.2.bias'\]"):
        load_dense_optimizer_state(wrapped, wrong, saved)
    assert not wrong.state
    with pytest.raises(IncompatiblePlanError, match="has 1 param groups, 2 were saved"):
        load_dense_optimizer_state(wrapped, make(list(mlp.parameters())), saved)
    groups = [{"params": list(layer.parameters())} for layer in (mlp[0], mlp[2])]
    sgd = torch.optim.SGD(groups, lr=0.1)
    with pytest.raises(
        IncompatiblePlanError, match=r"not saved by SGD: it has \['amsgrad', 'betas', .*lacks \['dampening'"
    ):
        load_dense_optimizer_state(wrapped, sgd, saved)
    load_dense_optimizer_state(wrapped, torch.optim.AdamW(groups, lr=0.1), saved)  # has the same settings


def test_dense_state_and_optimizer_state_go_by_canonical_names() -> None:
    run_ranks(_states, 1)


class BrokenTeardown(CPRCheckpointIO):
    def teardown(self) -> None:
        raise RuntimeError("the second error")


class Breaks(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise ValueError("the first error")


def _errors(rank: int, world: int) -> None:
    logging.disable(logging.ERROR)
    model = Breaks()
    with pytest.raises(ValueError, match="the first error"):
        make_trainer(world, TorchRecStrategy(plan="table_wise"), plugins=[BrokenTeardown()]).fit(
            model, make_loader(0, 2)
        )
    with pytest.raises(RuntimeError, match="the second error"):
        make_trainer(world, TorchRecStrategy(plan="table_wise"), plugins=[BrokenTeardown()], max_steps=1).fit(
            Tiny(), make_loader(0, 2)
        )


def test_teardown_does_not_hide_the_first_error() -> None:
    run_ranks(_errors, 1)
