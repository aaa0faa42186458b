"""A CPRCallback job for ``lightning-cpr run`` whose ranks are killed for real: see test_killed_process.py."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_cpr import CPRCallback, FaultInjector, TorchRecStrategy
from lightning_cpr._lightning import Callback
from tests._tiny import Tiny, make_loader, make_trainer
from tests.dist.test_main_job import rows_of


def sums(model: Any) -> dict[str, float]:
    return {name: rows.double().sum().item() for name, rows in rows_of(model).items()}


def dense_sum(module: Any) -> float:
    return sum(p.double().sum().item() for p in module.net.mlp.parameters())


class Recorded(CPRCallback):
    """Tells `Record` what this rank's rows were right before and after a recovery."""

    record: Record

    def restore_shards(self, recovery: Any, lost: Any, shards: Any) -> None:
        before = sums(self.job.module)
        super().restore_shards(recovery, lost, shards)
        self.record.write("restored", rows=sums(self.job.module), rows_before=before)


class Record(Callback):
    """Writes what this process sees, one JSON line each: pid, digests of its rows, steps."""

    def __init__(self, out: Path) -> None:
        self.file = (out / f"{os.environ['RANK']}-{os.getpid()}.jsonl").open("a", buffering=1)
        self.write("start")

    def write(self, event: str, **told: Any) -> None:
        self.file.write(json.dumps({"event": event, "time": time.time(), **told}) + "\n")

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        step = trainer.fit_loop.total_batch_idx + 1
        self.write("before", step=step, rows=sums(trainer.model), dense=dense_sum(trainer.lightning_module))

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        step = trainer.fit_loop.total_batch_idx + 1
        self.write("step", step=step, rows=sums(trainer.model), batch=args[-1])

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.write("broke", rows=sums(trainer.model), dense=dense_sum(module), error=repr(exception))


class Meet(Callback):
    """A collective between two batches."""

    def on_train_batch_end(self, *args: Any) -> None:
        dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--meet-at-batch-end", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kill", action="append", default=[])
    parser.add_argument("--hang", action="append", default=[])
    parser.add_argument("--resume", default="auto")
    options = parser.parse_args()
    torch.set_num_threads(1)
    injector = FaultInjector()
    for kill in options.kill:
        rank, step, point = kill.split(":")
        injector.kill(int(rank), int(step), point)  # type: ignore[arg-type]
    for hang in options.hang:
        rank, step, point = hang.split(":")
        injector.hang(int(rank), int(step), point)  # type: ignore[arg-type]
    cpr = Recorded(str(options.out / "root"), save_every_n_steps=10, timeout_s=30, resume=options.resume)
    cpr.record = record = Record(options.out)
    local, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    meet = [Meet()] if options.meet_at_batch_end else []
    strategy = TorchRecStrategy(plan={"a": "row_wise", "b": "table_wise", "c": "data_parallel"})
    trainer = make_trainer(local, strategy, callbacks=[cpr, record, injector, *meet], num_nodes=world // local)
    trainer.fit(Tiny(dense="adam"), make_loader(int(os.environ["RANK"]), 40))
    record.write("end", step=trainer.global_step, pls=cpr.pls, counts=cpr.counts, samples=cpr.samples)


if __name__ == "__main__":
    main()
