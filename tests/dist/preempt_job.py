"""A CPRCallback job that is asked to end: rank 1 signals itself, or its parent, in batch 12. See test_preempted.py."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from lightning_cpr import CPRCallback, TorchRecStrategy
from lightning_cpr._lightning import Callback
from tests._tiny import Tiny, make_loader, make_trainer


class Record(Callback):
    """Signals, slows the batches down a little, and writes the last step that this rank has finished."""

    def __init__(self, out: Path, target: str) -> None:
        self.out, self.target, self.step = out, target, 0

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        time.sleep(0.02)  # the work of a batch
        if trainer.global_rank == 1 and self.step == 11:
            os.kill(os.getppid() if self.target == "parent" else os.getpid(), signal.SIGTERM)

    def on_train_batch_end(self, *args: Any) -> None:
        self.step += 1

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        told = {"step": self.step, "error": repr(exception)}
        (self.out / f"rank{trainer.global_rank}.json").write_text(json.dumps(told))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", choices=("self", "parent"), default="self")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cpr = CPRCallback(str(options.out / "root"), save_every_n_steps=1000, timeout_s=30)
    strategy = TorchRecStrategy(plan={"a": "row_wise", "b": "table_wise", "c": "data_parallel"})
    trainer = make_trainer(2, strategy, callbacks=[cpr, Record(options.out, options.target)], max_epochs=20)
    rank = int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK", 0))
    trainer.fit(Tiny(dense="adam"), make_loader(rank, 40))


if __name__ == "__main__":
    main()
