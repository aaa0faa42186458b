"""An unmodified ``trainer.fit`` that recovers in place: what the tests of live recovery in Lightning run and kill.

    lightning-cpr run --nproc-per-node 2 fit_job.py --out DIR --kill rank:step:point

Points: forward, backward, optimizer, batch_end. Steps count from 1. A rank's very first process fires a kill only.
``--lose rank:step`` makes a rank believe before its dense step that a peer is gone. ``--kind``: the model. With
``--sync`` manual and pipelined ones run a collective after their optimizer step.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_cpr.pipeline import PipelinedModule
from lightning_cpr.recovery.live import Recovery
from lightning_cpr.recovery.membership import REPLACES_ENV
from lightning_cpr.spec import Shard, ShardSpec
from lightning_cpr.strategy import TorchRecStrategy
from lightning_cpr.tables.dense import dense_state
from lightning_cpr.tables.replicas import replicated_state
from lightning_cpr.tables.shards import local_shards
from tests._tiny import Tiny, TinyNet, fill_tables, make_loader, make_trainer


class Model(Tiny):
    """Tiny with dropout, a metric, and a schedule, so that RNG, metrics and rates are part of what must come back."""

    sync = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(dense="adam", **kwargs)
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) * (1 + torch.rand(()))
        self.mean.update(torch.tensor(float(batch_idx)))
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=4)
        return loss

    def configure_optimizers(self) -> Any:
        return scheduled(self.net)


class Manual(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = Tiny.training_step(self, batch, batch_idx) * (1 + torch.rand(()))
        self.mean.update(torch.tensor(float(batch_idx)))
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step()  # type: ignore[union-attr, call-arg]
        self.log("loss", loss.detach(), on_step=True, on_epoch=True, sync_dist=Model.sync, batch_size=4)


class Pipelined(PipelinedModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = TinyNet()
        self.mean = MeanMetric()
        self.seen: list[int] = []

    def on_fit_start(self) -> None:
        fill_tables(self)

    def forward(self, batch: Any) -> Any:
        loss, _ = self.net(batch)
        return loss, loss.detach()

    def training_output(self, output: Any, batch_idx: int) -> None:
        self.mean.update(torch.tensor(float(batch_idx)))
        self.seen.append(batch_idx)
        self.log("loss", output, on_step=True, on_epoch=True, sync_dist=Model.sync, batch_size=4)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch)

    def configure_optimizers(self) -> Any:
        return scheduled(self.net)


def scheduled(net: TinyNet) -> Any:
    optimizer = torch.optim.Adam(net.mlp.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


KINDS = {"automatic": Model, "manual": Manual, "pipelined": Pipelined}


def digest(tensors: dict[str, Any]) -> str:
    h = hashlib.sha256()
    for name in sorted(tensors):
        h.update(name.encode())
        h.update(tensors[name].detach().contiguous().numpy().tobytes())
    return h.hexdigest()


class Probe(pl.Callback):
    """Kills as told, records what happens, and restores lost rows with a constant."""

    def __init__(self, out: Path, kills: Sequence[str], raise_at: str, lose: str) -> None:
        self.rank = int(os.environ["RANK"])
        self.file = (out / f"{self.rank}-{os.getpid()}.jsonl").open("a", buffering=1)
        fresh = REPLACES_ENV in os.environ
        first = not fresh and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        self.kills = {tuple(k.split(":")) for k in kills} if first else set()
        self.raise_at = raise_at
        self.lose = lose
        self.trainer: Any = None
        self.record("start", fresh=fresh)

    def record(self, event: str, **told: Any) -> None:
        self.file.write(json.dumps({"event": event, "time": time.time(), **told}) + "\n")

    def strike(self, trainer: pl.Trainer, point: str) -> None:
        step = trainer.fit_loop.total_batch_idx + 1
        if (str(self.rank), str(step), point) in self.kills:
            self.record("kill", step=step, point=point)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.raise_at == f"{self.rank}:{step}" and point == "forward":
            raise ValueError("a bug in the user's code")

    def rows(self) -> str:
        shards = [s for s in local_shards(self.trainer.strategy.model) if not s.spec.replicated]
        named = {f"{s.spec.table}.{n}": t for s in shards for n, t in (("weight", s.weight), *s.states.items())}
        return digest(named)

    def dense(self) -> str:
        model, (optimizer,) = self.trainer.strategy.model, self.trainer.optimizers
        replicas = {f"{f}.{n}": t for f, held in replicated_state(model).items() for n, t in held.items()}
        moments = {f"{i}.{n}": t for i, held in enumerate(optimizer.state.values()) for n, t in held.items()}
        return digest(dense_state(self.trainer.lightning_module) | replicas | moments)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.trainer = trainer

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.record("before", rows=self.rows(), dense=self.dense(), step=trainer.fit_loop.total_batch_idx + 1)
        self.strike(trainer, "forward")

    def on_before_backward(self, trainer: pl.Trainer, *args: Any) -> None:
        self.strike(trainer, "backward")

    def on_before_optimizer_step(self, trainer: pl.Trainer, *args: Any) -> None:
        if self.lose == f"{self.rank}:{trainer.fit_loop.total_batch_idx + 1}":
            self.lose = ""
            raise RuntimeError("Connection closed by peer, says the test")
        self.strike(trainer, "optimizer")

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loop = trainer.fit_loop
        counts = {"total": loop.total_batch_idx, "stepped": loop.epoch_loop._batches_that_stepped}
        where = {"step": trainer.global_step, "batch": batch_idx, "epoch": trainer.current_epoch}
        data = float(batch.dense_features.double().sum())
        self.record("step", skipped=not outputs, data=data, **where, **counts)
        self.strike(trainer, "batch_end")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.record("validation", step=trainer.global_step, sanity=trainer.sanity_checking)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        (optimizer,) = trainer.optimizers
        self.record(
            "end", step=trainer.global_step, dense=self.dense(), lr=optimizer.param_groups[0]["lr"],
            metric=float(pl_module.mean.weight), last=pl_module.seen[-1], epoch=trainer.current_epoch,
        )  # fmt: skip

    # RecoveryHook

    def restore_shards(self, recovery: Recovery, lost: Sequence[ShardSpec], shards: Sequence[Shard]) -> None:
        if recovery.lost:
            for shard in shards:
                if shard.spec in lost:
                    for tensor in (shard.weight, *shard.states.values()):
                        tensor.fill_(0.5)

    def on_recovered(self, recovery: Recovery, lost: Sequence[ShardSpec]) -> None:
        d = recovery.decision
        self.record(
            "restored", rows=self.rows(), dense=self.dense(), epoch=recovery.epoch, donor=d.donor, lost=list(d.lost),
            behind=list(d.behind), step=d.step, seconds=recovery.seconds, shards=len(lost),
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kill", action="append", default=[])
    parser.add_argument("--raise-at", default="")
    parser.add_argument("--lose", default="")
    parser.add_argument("--kind", choices=list(KINDS), default="automatic")
    parser.add_argument("--sync", action="store_true")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    Model.sync = options.sync
    faulthandler.register(signal.SIGUSR1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    strategy = TorchRecStrategy(plan={"a": "row_wise", "b": "table_wise", "c": "data_parallel"})
    probe = Probe(options.out, options.kill, options.raise_at, options.lose)
    trainer = make_trainer(
        world, strategy, callbacks=[probe], max_epochs=options.epochs, val_check_interval=0.5, limit_val_batches=2,
        num_sanity_val_steps=1,
    )  # fmt: skip
    trainer.fit(KINDS[options.kind](), make_loader(rank, options.batches), make_loader(rank, 2))


if __name__ == "__main__":
    main()
