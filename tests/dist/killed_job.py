"""A CPRCallback job for ``lightning-cpr run`` whose ranks are killed for real: see test_killed_process.py.

``--kill rank:step:point[:attempt]``: in this attempt of the job (0). Points: those of `FaultInjector`; backward,
optimizer; start (of the process), sanity, validation, checkpoint (Lightning's own), epoch_end; restore (of the rank's
first replacement).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_cpr import CPRCallback, FaultInjector, ParityConfig, TorchRecStrategy
from lightning_cpr._lightning import Callback
from lightning_cpr.faults import Point
from lightning_cpr.recovery.membership import REPLACES_ENV
from lightning_cpr.tables.dense import dense_state
from lightning_cpr.tables.scalars import fused_scalars
from tests._tiny import Tiny, make_loader, make_trainer
from tests.dist.test_main_job import rows_of
from tests.parity_job import come_back_slowly

RANK = int(os.environ.get("RANK", "0"))


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()[:16]


def digests(model: Any) -> dict[str, str]:
    return {name: digest(rows) for name, rows in rows_of(model).items()}


def dense_digests(module: Any) -> dict[str, str]:
    return {name: digest(value) for name, value in dense_state(module).items()}


class Recorded(CPRCallback):
    """Tells `Record` what this rank's rows were right before and after a recovery."""

    record: Record

    def restore_shards(self, recovery: Any, lost: Any, shards: Any) -> None:
        before = digests(self.job.module)
        if recovery.lost:
            self.record.strike(0, "restore")
        super().restore_shards(recovery, lost, shards)
        self.record.write(
            "restored", rows=digests(self.job.module), rows_before=before, lost=list(recovery.decision.lost)
        )


class Record(Callback):
    """Writes what this process sees, one JSON line each: pid, digests of its rows, steps. Kills it as told."""

    def __init__(self, out: Path, kills: list[list[str]]) -> None:
        self.out = out
        self.file = (out / f"{RANK}-{os.getpid()}.jsonl").open("a", buffering=1)
        self.kills = kills
        self.write("start", attempt=os.environ["TORCHELASTIC_RESTART_COUNT"])

    def write(self, event: str, **told: Any) -> None:
        self.file.write(json.dumps({"event": event, "time": time.time(), **told}) + "\n")

    def strike(self, step: int, point: str) -> None:
        attempt, mark = os.environ["TORCHELASTIC_RESTART_COUNT"], self.out / f"killed-{RANK}-{step}-{point}"
        fresh = REPLACES_ENV in os.environ
        told = [str(RANK), str(step), point, attempt] in self.kills
        if told and not mark.exists() and fresh == (point == "restore"):
            mark.touch()
            self.write("kill", step=step, point=point)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        step = trainer.fit_loop.total_batch_idx + 1
        self.write("before", step=step, rows=digests(trainer.model), dense=dense_digests(trainer.lightning_module))

    def on_before_backward(self, trainer: Any, *args: Any) -> None:
        self.strike(trainer.fit_loop.total_batch_idx + 1, "backward")

    def on_before_optimizer_step(self, trainer: Any, *args: Any) -> None:
        self.strike(trainer.fit_loop.total_batch_idx + 1, "optimizer")

    def on_validation_batch_start(self, trainer: Any, *args: Any) -> None:
        self.strike(trainer.global_step, "sanity" if trainer.sanity_checking else "validation")

    def on_save_checkpoint(self, trainer: Any, *args: Any) -> None:
        self.strike(trainer.global_step, "checkpoint")

    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        self.strike(trainer.global_step, "epoch_end")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.fit_loop.total_batch_idx + 1
        data = float(batch.dense_features.double().sum())
        self.write("step", step=step, rows=digests(trainer.model), batch=batch_idx, data=data)

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.write("broke", rows=digests(trainer.model), dense=dense_digests(module), error=repr(exception))


class Rate(Callback):
    """Sets the tables' rate after five batches, as a user may; in the replacement it does not."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == 5:
            for group in trainer.strategy.fused_optimizer.param_groups:
                group["lr"] = self.rate


class Meet(Callback):
    """A collective between two batches."""

    def on_train_batch_end(self, *args: Any) -> None:
        dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--meet-at-batch-end", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kill", action="append", default=[])
    parser.add_argument("--validate", action="store_true", help="and let ModelCheckpoint save every 5 steps")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--hang", action="append", default=[])
    parser.add_argument("--resume", default="auto")
    parser.add_argument("--recovery", default="auto")
    parser.add_argument("--max-pls", type=float)
    parser.add_argument("--parity", action="store_true", help="a replacement's rows come back behind the training")
    parser.add_argument("--rate", type=float, help="of all tables, set by hand at step 5")
    options = parser.parse_args()
    torch.set_num_threads(1)
    injector, kills = FaultInjector(), []
    for kill in options.kill:
        rank, step, point, attempt = [*kill.split(":"), "0"][:4]
        if point in get_args(Point):
            injector.kill(int(rank), int(step), point, int(attempt))
        else:
            kills.append([rank, step, point, attempt])
    for hang in options.hang:
        rank, step, point = hang.split(":")
        injector.hang(int(rank), int(step), point)  # type: ignore[arg-type]
    limits: dict[str, Any] = {
        "target_pls": options.max_pls or 0.1,
        "max_pls": options.max_pls,
        "recovery": options.recovery,
    }
    if options.parity:
        come_back_slowly()
        limits["parity"] = ParityConfig(k=2, behind_mb=0)
    cpr = Recorded(str(options.out / "root"), save_every_n_steps=10, timeout_s=30, resume=options.resume, **limits)
    cpr.record = record = Record(options.out, kills)
    record.strike(0, "start")
    callbacks: list[Any] = [cpr, record, injector, *([Meet()] if options.meet_at_batch_end else [])]
    if options.rate is not None:
        callbacks.append(Rate(options.rate))
    loaders, more = [make_loader(RANK, options.steps)], {}
    if options.validate:
        callbacks.append(ModelCheckpoint(str(options.out / "checkpoints"), every_n_train_steps=5, save_top_k=1))
        loaders.append(make_loader(RANK, 2))
        more = {"num_sanity_val_steps": 1, "val_check_interval": 15, "enable_checkpointing": True}
    local, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    strategy = TorchRecStrategy(plan={"a": "row_wise", "b": "table_wise", "c": "data_parallel"})
    trainer = make_trainer(local, strategy, callbacks=callbacks, num_nodes=world // local, **more)
    trainer.fit(Tiny(dense="adam"), *loaders)
    dense = dense_digests(trainer.lightning_module)
    scalars = fused_scalars(trainer.lightning_module, trainer.optimizers)
    told = {"pls": cpr.pls, "counts": cpr.counts, "samples": cpr.samples, "dense": dense, "scalars": scalars}
    record.write("end", step=trainer.global_step, **told)


if __name__ == "__main__":
    main()
