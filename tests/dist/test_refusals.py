"""What would train or save wrongly is refused at set-up, by name, with the remedy."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed import sharding_plan as generators
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

from lightning_cpr._lightning import pl
from lightning_cpr.errors import ConfigError, UnsupportedError
from lightning_cpr.job.training_checks import check_training
from lightning_cpr.strategy import TorchRecStrategy
from tests._ranks import run_ranks
from tests._tiny import Tiny, dense_optimizer, make_loader, make_trainer

FUSED = {"compute_kernel": "fused"}


class Zch(Tiny):
    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=8, feature_names=["f"])
        remap = MCHManagedCollisionModule(
            zch_size=8, device=torch.device("cpu"), eviction_interval=1, eviction_policy=DistanceLFU_EvictionPolicy()
        )
        self.remapped = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables=[config], device=torch.device("meta")),
            ManagedCollisionCollection({"t": remap}, [config]),
        )


class OnlyTables(Tiny):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if hasattr(p, "_in_backward_optimizers")])


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3, device="meta"))


class MetaWithoutReset(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.extra = NoReset()


def _uvm(kernel: str) -> dict[str, Any]:
    return {"net.ebc": "table_wise", "a": generators.table_wise(rank=0, compute_kernel=kernel)}


Case = tuple[Callable[[], pl.LightningModule], dict[str, Any], dict[str, Any], type[Exception], str]

CASES: dict[str, Case] = {
    "managed collision": (Zch, {}, {}, UnsupportedError, r"remapped is a ManagedCollision.*remap ids"),
    "uvm caching": (Tiny, {"plan": _uvm("fused_uvm_caching")}, {}, UnsupportedError, r"embedding_bags.a: .*UVM"),
    "ssd": (Tiny, {"plan": _uvm("key_value")}, {}, UnsupportedError, r"embedding_bags.a: .*SSD"),
    "accumulation": (Tiny, {}, {"accumulate_grad_batches": 2}, UnsupportedError, r"accumulate_grad_batches > 1.*every"),
    "scheduled accumulation": (
        Tiny,
        {},
        {"callbacks": [pl.callbacks.GradientAccumulationScheduler({0: 2})]},
        UnsupportedError,
        r"accumulate_grad_batches > 1",
    ),
    "only tables": (OnlyTables, {}, {}, ConfigError, r"Adam holds fused tables only.*add_fused_groups"),
    "meta without reset": (
        MetaWithoutReset,
        {},
        {},
        UnsupportedError,
        r"net.extra|extra \(NoReset\) has scale on meta",
    ),
    "unknown table": (Tiny, {"plan": {"net.ebc": "row_wise", "zz": "row_wise"}}, {}, ConfigError, r"\['zz'\]"),
    "table without sharding": (Tiny, {"plan": {"a": "row_wise"}}, {}, ConfigError, r"no sharding for table .*\.b"),
    "unknown sharding": (Tiny, {"plan": "diagonal"}, {}, ConfigError, r"'diagonal'.*table_wise"),
    "rank beyond the world": (
        Tiny,
        {"plan": {"net.ebc": "table_wise", "a": generators.table_wise(rank=3, **FUSED)}},
        {},
        ConfigError,
        r"table net.ebc.embedding_bags.a: .*rank 3.*1 ranks",
    ),
    "unknown argument": (Tiny, {"find_unused": 1}, {}, TypeError, r"find_unused"),
}


def _refusals(rank: int, world: int) -> dict[str, tuple[str, str]]:
    logging.disable(logging.WARNING)
    seen = {}
    for name, (make, strategy, trainer, _, _) in CASES.items():
        options = {"plan": "table_wise"} | strategy
        try:
            make_trainer(world, TorchRecStrategy(**options), max_steps=1, **trainer).fit(make(), make_loader(rank, 2))
        except Exception as error:
            seen[name] = (type(error).__name__, str(error))
        else:
            seen[name] = ("nothing", "")
    return seen


@pytest.fixture(scope="module")
def refused() -> dict[str, tuple[str, str]]:
    return run_ranks(_refusals, 1, timeout=120)[0]


@pytest.mark.parametrize("name", sorted(CASES))
def test_refused_with_a_reason(refused: dict[str, tuple[str, str]], name: str) -> None:
    *_, kind, pattern = CASES[name]
    assert refused[name][0] == kind.__name__, refused[name]
    with pytest.raises(AssertionError, match=pattern):
        raise AssertionError(refused[name][1])


def _half_precision(rank: int, world: int) -> list[str]:
    """16-mixed needs a GPU for Lightning to allow it: the strategy is asked alone."""
    strategy = TorchRecStrategy(plan="table_wise")
    trainer = make_trainer(world, strategy, max_steps=1)
    trainer.fit(Tiny(), make_loader(rank, 2))
    strategy.precision_plugin.precision = "16-mixed"
    messages = []
    model = trainer.lightning_module
    try:
        check_training(trainer, model, other_tables=False)
    except UnsupportedError as error:
        messages.append(str(error))
    bf16 = make_trainer(world, TorchRecStrategy(plan="table_wise"), max_steps=2, precision="bf16-mixed")
    bf16.fit(Tiny(), make_loader(rank, 4))
    return messages


def test_half_precision_is_refused_and_bfloat_is_not() -> None:
    ((message,),) = run_ranks(_half_precision, 1)
    assert "bf16-mixed" in message


class Undeclared(Tiny):
    def __init__(self) -> None:
        super().__init__(sparse=None)


class AllParameters(Tiny):
    def configure_optimizers(self) -> Any:
        return dense_optimizer("adam", self.parameters())


def _warnings(rank: int, world: int) -> dict[str, Any]:
    logging.disable(logging.WARNING)
    found: dict[str, Any] = {}

    def fit(name: str, model: pl.LightningModule, plan: Any, **kwargs: Any) -> pl.Trainer:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = make_trainer(world, TorchRecStrategy(plan=plan), max_steps=3, **kwargs)
            trainer.fit(model, make_loader(rank, 4))
        found[name] = [str(w.message) for w in caught]
        return trainer

    fused = {"net.ebc": generators.table_wise(rank=0, **FUSED)}
    fit("clip", Tiny(), "table_wise", gradient_clip_val=0.5)
    fit("undeclared", Undeclared(), fused)
    fit("untrained", Undeclared(), "table_wise")
    model = AllParameters()
    trainer = fit("all parameters", model, "table_wise")
    held = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    found["dense only"] = held == {id(p) for p in model.net.mlp.parameters()}
    return found


def test_warnings_name_the_tables_and_the_remedy() -> None:
    (found,) = run_ranks(_warnings, 1)
    assert sum("max_gradient" in text for text in found["clip"]) == 1
    assert any("SGD at a rate of 0.01" in text and "embedding_bags.a" in text for text in found["undeclared"])
    assert any("Nothing updates net.ebc.embedding_bags.a" in text for text in found["untrained"])
    assert not any("Nothing updates" in text for text in found["all parameters"])
    assert found["dense only"]


def _rowless(rank: int, world: int) -> str:
    logging.disable(logging.WARNING)
    with pytest.raises(ConfigError) as caught:
        make_trainer(world, TorchRecStrategy(plan="row_wise"), max_steps=1).fit(Tiny(), make_loader(rank, 2))
    return str(caught.value)


def test_a_kernel_that_ends_without_rows_is_refused_on_every_rank() -> None:
    first, second = run_ranks(_rowless, 2)
    assert first == second
    assert "net.ebc.embedding_bags.c" in first
    assert "rank 1" in first
