"""What it costs a training step to track the rows that it touches: bits alone, and with the counters of MFU and SSU.

    python -m benchmarks.tracking [--rounds 30] [--batch 2048] [--rows 1000000] [--out results.json]

One process, one thread: Facebook's DLRM for Criteo Kaggle (bottom 13-512-256-64-16, top 512-256-1, 26 tables of 16
columns in Kaggle's proportions, row-wise Adagrad), with Zipf ids. The kinds of tracking take turns with none, a few
steps each; a ratio is that of the CPU time of a kind's steps and of the untracked ones of the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpr_paper.emulation import Trainee, init_process
from lightning_cpr.policy.priority import PriorityConfig, select_tables
from lightning_cpr.tables.shards import table_specs
from lightning_cpr.tables.tracker import RowTracker
from recipes.batch import Batch
from recipes.dlrm import DLRMModule
from recipes.synthetic import SyntheticDataModule

KINDS = ("off", "bits", "mfu", "ssu")
LIMIT = 0.01


def trackers(trainee: Trainee) -> dict[str, RowTracker]:
    """One of each kind, none hooked."""
    specs = table_specs(trainee.model)
    found = {}
    for kind in KINDS[1:]:
        config = None if kind == "bits" else PriorityConfig(kind)
        tables = () if config is None else select_tables(list(specs.values()))
        found[kind] = RowTracker(trainee.model, trainee.shards, specs, priority=config, tables=tables)
        found[kind].close()
    return found


def measure(trainee: Trainee, batches: Sequence[Batch], rounds: int, steps: int) -> dict[str, list[float]]:
    """CPU seconds of a step by kind, one value a round. Each round starts with another kind."""
    tracked = trackers(trainee)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    position = 0
    for number in range(rounds + 1):  # the first is for warming up
        for kind in KINDS[number % len(KINDS) :] + KINDS[: number % len(KINDS)]:
            if kind != "off":
                tracked[kind].hooks_lost()  # hooks it
            mine = [batches[(position + i) % len(batches)] for i in range(steps)]
            position += steps
            started = time.process_time()
            for batch in mine:
                trainee.train(batch)
            took = (time.process_time() - started) / steps
            if kind != "off":
                tracked[kind].close()
            if number:
                seconds[kind].append(took)
    return seconds


def report(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """By kind: milliseconds a step, and the share that it adds to an untracked one, with its standard error."""
    found = {}
    for kind, values in seconds.items():
        shares = [value / off - 1 for value, off in zip(values, seconds["off"], strict=True)]
        error = statistics.stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else float("nan")
        found[kind] = {"ms": 1e3 * statistics.median(values), "share": statistics.median(shares), "error": error}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=8, help="of a kind in a round")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    init_process()
    torch.manual_seed(0)
    module = SyntheticDataModule(tables=args.rows, train=64 * args.batch, val=0, test=0, batch_size=args.batch)
    module.setup("fit")
    model = DLRMModule(module.tables, 16, 13, dense_layers=[512, 256, 64], over_layers=[512, 256])
    found = report(measure(Trainee(model), list(module.train_dataloader()), args.rounds, args.steps))
    for kind, figures in found.items():
        own = "" if kind == "off" else f"  {100 * figures['share']:+.2f} % ± {100 * figures['error']:.2f}"
        verdict = "" if kind == "off" else f"  (at most {100 * LIMIT:g} %)"
        print(f"{kind:5} {figures['ms']:8.2f} ms a step{own}{verdict}")
    if args.out is not None:
        versions = {name: version(name) for name in ("torch", "torchrec", "fbgemm-gpu-cpu")}
        machine = {"cpu": platform.machine(), "cores": os.cpu_count(), "versions": versions}
        setting = {"batch": args.batch, "rows": args.rows, "rounds": args.rounds, "steps": args.steps}
        args.out.write_text(json.dumps({"machine": machine, "setting": setting, "kinds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
