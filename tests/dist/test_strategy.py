"""TorchRecStrategy through a real Trainer: stages, checkpoints, learning rates, wrapped modules."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed import sharding_plan as generators
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingPlan

from lightning_cpr._lightning import Callback, pl
from lightning_cpr.checkpoint_io import find_version
from lightning_cpr.store.blob import JOB_BLOB
from lightning_cpr.strategy import TorchRecStrategy
from lightning_cpr.tables.scalars import fused_kernels, fused_scalars
from lightning_cpr.tables.shards import dense_state, local_shards, table_specs
from tests._ranks import run_ranks
from tests._tiny import Tiny, dense_optimizer, make_batch, make_loader, make_trainer

PLAN = {"net.ebc": "row_wise", "c": "table_wise"}


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {f"{s.spec.table} {s.spec.row_start}": s.weight.clone() for s in local_shards(model)}


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# Stages.


def _wrappers(module: nn.Module) -> tuple[int, int]:
    modules = list(module.modules())
    return (
        sum(isinstance(m, DistributedModelParallel) for m in modules),
        sum(isinstance(m, DistributedDataParallel) for m in modules),
    )


class Look(Callback):
    def __init__(self) -> None:
        self.wrappers: list[tuple[int, int]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.wrappers.append(_wrappers(trainer.strategy.model))

    on_validation_start = on_test_start = on_predict_start = on_train_start


def _stages(rank: int, world: int) -> None:
    look = Look()
    model = Tiny()
    trainer = make_trainer(world, TorchRecStrategy(plan=PLAN), max_steps=4, callbacks=[look], limit_val_batches=2)
    trainer.fit(model, make_loader(rank), make_loader(rank, 2))
    trained, dense = _weights(model), {k: v.clone() for k, v in dense_state(model).items()}
    assert trainer.strategy.model is model
    (validated,) = trainer.validate(model, make_loader(rank, 2), verbose=False)
    (tested,) = trainer.test(model, make_loader(rank, 2), verbose=False)
    predictions = trainer.predict(model, make_loader(rank, 2))
    assert look.wrappers
    assert set(look.wrappers) == {(1, 1)}
    assert _equal(_weights(model), trained)
    assert _equal(dense_state(model), dense)
    with torch.no_grad():
        outputs = [model.net(make_batch(i, rank)) for i in range(2)]
    local = torch.stack([loss for loss, _ in outputs]).mean()
    everywhere = local.clone()
    torch.distributed.all_reduce(everywhere)
    assert abs(validated["val_loss"] - (everywhere / world).item()) < 1e-6
    assert validated["val_loss"] == tested["test_loss"]
    for prediction, (_, logits) in zip(predictions, outputs, strict=True):
        assert torch.equal(prediction, logits.sigmoid())

    # Evaluation of a model that never trained, its tables still on meta; default plan of the planner.
    fresh = Tiny()
    predictions = make_trainer(world, "torchrec").predict(fresh, make_loader(rank, 1))
    assert torch.isfinite(predictions[0]).all()
    assert dense_state(fresh).keys() == dense.keys()


def test_every_stage_sees_one_wrapped_model() -> None:
    run_ranks(_stages, 2, timeout=120)


# Checkpoints.


class SaveAt(Callback):
    def __init__(self, step: int, path: str) -> None:
        self.step = step
        self.path = path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def _resume(rank: int, world: int, folder: str) -> None:
    path = str(Path(folder) / "at5")
    whole, rest = Tiny("adam"), Tiny("adam", filled=False)
    trainer = make_trainer(world, TorchRecStrategy(plan=PLAN), max_steps=10, callbacks=[SaveAt(5, path)])
    trainer.fit(whole, make_loader(rank))
    checkpoint = find_version(path).blob(JOB_BLOB)
    assert list(checkpoint["state_dict"]) == [f"net.mlp.{i}.{name}" for i in (0, 2) for name in ("weight", "bias")]
    (optimizer,) = checkpoint["optimizer_states"]
    assert optimizer["param_groups"][0]["params"] == list(checkpoint["state_dict"])
    assert set(optimizer["state"]) == set(checkpoint["state_dict"])

    trainer = make_trainer(world, TorchRecStrategy(plan=PLAN), max_steps=10)
    loader = make_loader(rank)
    loader.dataset.batches = loader.dataset.batches[5:]  # type: ignore[attr-defined]
    trainer.fit(rest, loader, ckpt_path=path)
    assert trainer.global_step == 10
    assert rest.losses == whole.losses[5:]
    assert _equal(_weights(rest), _weights(whole))
    assert _equal(dense_state(rest), dense_state(whole))


def test_all_ranks_save_and_a_resume_continues(tmp_path: Path) -> None:
    run_ranks(_resume, 2, str(tmp_path), timeout=120)


# Learning rates.


class Scheduled(Tiny):
    """Warms the dense rate and the tables' up over four steps, from a tenth."""

    def configure_optimizers(self) -> Any:
        optimizer = self.trainer.strategy.add_fused_groups(dense_optimizer("sgd", self.net.mlp.parameters()))
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Rates(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self.seen += [round(k.emb_module.get_learning_rate(), 6) for _, k in fused_kernels(pl_module)][:1]


class SetRate(Callback):
    """Sets the tables' rate by hand once, through the optimizer or on the kernel itself."""

    def __init__(self, on_kernel: bool) -> None:
        self.on_kernel = on_kernel

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step != 2:
            return
        if self.on_kernel:
            for _, kernel in fused_kernels(pl_module):
                kernel.emb_module.set_learning_rate(0.05)
        for group in [] if self.on_kernel else trainer.strategy.fused_optimizer.param_groups:
            group["lr"] = 0.05


def _rates(rank: int, world: int, folder: str) -> dict[str, Any]:
    seen = Rates()
    csv = pl.loggers.CSVLogger(folder, name="", version="")
    monitor = pl.callbacks.LearningRateMonitor("step")
    trainer = make_trainer(
        world, TorchRecStrategy(plan=PLAN), max_steps=6, callbacks=[seen, monitor], logger=csv, log_every_n_steps=1
    )
    trainer.fit(Scheduled(), make_loader(rank))
    by_hand = []
    for on_kernel in (False, True):
        rates = Rates()
        trainer = make_trainer(world, TorchRecStrategy(plan=PLAN), max_steps=4, callbacks=[rates, SetRate(on_kernel)])
        trainer.fit(Tiny(), make_loader(rank))
        by_hand.append(rates.seen)
    return {"scheduled": seen.seen, "by hand": by_hand}


def test_the_tables_rate_can_be_scheduled_monitored_and_set(tmp_path: Path) -> None:
    for result in run_ranks(_rates, 2, str(tmp_path), timeout=120):
        assert result["scheduled"] == [0.01, 0.0325, 0.055, 0.0775, 0.1, 0.1]
        assert result["by hand"] == [[0.1, 0.1, 0.05, 0.05]] * 2
    header, first, *_ = (tmp_path / "metrics.csv").read_text().splitlines()
    logged = dict(zip(header.split(","), first.split(","), strict=True))
    assert abs(float(logged["lr-SGD/fused"]) - 0.01) < 1e-9
    assert abs(float(logged["lr-SGD/pg1"]) - 0.005) < 1e-9


# Modules that come wrapped, several optimizers, other ways to declare the tables' optimizer.


class Wrapped(Tiny):
    """Wraps its net in DistributedModelParallel itself; a head of its own stays outside."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 1)

    def configure_model(self) -> None:
        if isinstance(self.net, DistributedModelParallel):
            return
        plan = generators.construct_module_sharding_plan(
            self.net.ebc,
            {
                "a": generators.row_wise(compute_kernel="fused"),
                "b": generators.row_wise(compute_kernel="fused"),
                "c": generators.table_wise(rank=0, compute_kernel="fused"),
            },
            local_size=self.trainer.world_size,
            world_size=self.trainer.world_size,
            device_type="cpu",
        )
        self.net = DistributedModelParallel(self.net, device=torch.device("cpu"), plan=ShardingPlan({"ebc": plan}))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits = self.net(batch)
        return loss + self.head(logits[:, None]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class TwoOptimizers(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss, _ = self.net(batch)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        self.losses.append(loss.item())

    def configure_optimizers(self) -> Any:
        first, last = self.net.mlp[0], self.net.mlp[2]
        return [torch.optim.SGD(first.parameters(), lr=0.05), torch.optim.SGD(last.parameters(), lr=0.05)]


class MetaDense(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.net.mlp = self.net.mlp.to("meta")

    def configure_optimizers(self) -> Any:
        return dense_optimizer("sgd", self.parameters())


def _others(rank: int, world: int) -> None:
    logging.disable(logging.INFO)
    reference, two = Tiny(), TwoOptimizers()
    make_trainer(world, TorchRecStrategy(plan=PLAN), max_steps=5).fit(reference, make_loader(rank))
    make_trainer(world, TorchRecStrategy(plan=PLAN), limit_train_batches=5).fit(two, make_loader(rank))
    assert two.losses == reference.losses
    assert _equal(_weights(two), _weights(reference))

    wrapped = Wrapped()
    trainer = make_trainer(world, "torchrec", max_steps=3)
    trainer.fit(wrapped, make_loader(rank))
    assert _wrappers(wrapped) == (1, 1)
    assert sorted(dense_state(wrapped)) == sorted([*dense_state(reference), "head.weight", "head.bias"])
    assert table_specs(wrapped).keys() == table_specs(reference).keys()
    for name, value in dense_state(wrapped).items():
        other = value.clone()
        torch.distributed.broadcast(other, src=0)
        assert torch.equal(value, other), f"{name} is not the same on all ranks"

    meta = MetaDense()
    make_trainer(world, TorchRecStrategy(plan=PLAN), max_steps=2).fit(meta, make_loader(rank))
    for value in dense_state(meta).values():
        other = value.clone()
        torch.distributed.broadcast(other, src=0)
        assert torch.equal(value, other)
        assert value.abs().max() < 1

    # The same optimizer, declared in a sharder's fused params.
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    )
    by_sharder = Tiny(sparse=None)
    strategy = TorchRecStrategy(plan=PLAN, sharders=[sharder])
    make_trainer(world, strategy, max_steps=5).fit(by_sharder, make_loader(rank))
    assert by_sharder.losses == reference.losses
    assert table_specs(by_sharder) == table_specs(reference)


def test_wrapped_modules_and_other_declarations() -> None:
    run_ranks(_others, 2, timeout=150)


def _replicas(rank: int, world: int) -> None:
    """A data-parallel table whose optimizer was declared: trained, also in a second fit, and its rate can be set."""
    logging.disable(logging.WARNING)
    model = Tiny()
    plan = {"net.ebc": "row_wise", "c": "data_parallel"}
    for fit in (1, 2):
        before = _weights(model) if fit == 2 else {}
        rates = SetRate(on_kernel=False)
        make_trainer(world, TorchRecStrategy(plan=plan), max_steps=4, callbacks=[rates]).fit(model, make_loader(rank))
        (replica,) = [s for s in local_shards(model) if s.spec.replicated]
        key = f"{replica.spec.table} 0"
        assert fit == 1 or not torch.equal(before[key], replica.weight)
        if fit == 1:
            model.filled = False
        scalars = fused_scalars(model)[replica.spec.table]
        assert scalars == {"iter": 4 * fit, "lr": 0.05}
        everywhere = replica.weight.clone()
        torch.distributed.broadcast(everywhere, src=0)
        assert torch.equal(everywhere, replica.weight)


def test_replicated_tables_with_a_declared_optimizer_train() -> None:
    run_ranks(_replicas, 2)
