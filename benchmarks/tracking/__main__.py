"""What it costs a training step to track the rows that it touches: bits alone, and with the counters of MFU and SSU.

    python -m benchmarks.tracking [--model terabyte] [--rounds 30] [--batch 2048] [--rows 1000000] [--out results.json]

One process, one thread: Facebook's DLRM for Criteo Kaggle (bottom 13-512-256-64-16, top 512-256-1, 26 tables of 16
columns) or MLPerf's for Criteo Terabyte (bottom 13-512-256-128, top 1024-1024-512-256-1, 128 columns), the tables in
Kaggle's proportions, row-wise Adagrad, with Zipf ids. The kinds of tracking take turns with none, a few
steps each. Two figures of CPU time a kind, as shares of an untracked step: what its own code takes within a step
(``own``, exact to a few per cent of itself), and how much longer its steps are than the untracked ones of the same
round (``longer``, as noisy as the machine).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpr_paper.emulation import Trainee, init_process
from lightning_cpr.policy.priority import PriorityConfig, select_tables
from lightning_cpr.tables import lookup
from lightning_cpr.tables.shards import table_specs
from lightning_cpr.tables.tracker import RowTracker
from recipes.batch import Batch
from recipes.dlrm import DLRMModule
from recipes.synthetic import SyntheticDataModule

# columns, bottom layers but the last, top layers but the last
MODELS = {"kaggle": (16, [512, 256, 64], [512, 256]), "terabyte": (128, [512, 256], [1024, 1024, 512, 256])}
KINDS = ("off", "bits", "mfu", "ssu")
LIMIT = 0.01


class Stopwatch:
    """CPU seconds spent in the calls of `wrap`'s function on this thread."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args)
            finally:
                self.seconds += time.thread_time() - started

        return timed


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


Times = dict[str, list[tuple[float, float]]]
"""By kind, for each round: CPU seconds of a step, and of the tracking within it."""


def measure(trainee: Trainee, batches: Sequence[Batch], rounds: int, steps: int) -> Times:
    """Each round starts with another kind."""
    seconds: Times = {kind: [] for kind in KINDS}
    watch = Stopwatch()
    lookup.LookupHook._on_lookup = watch.wrap(lookup.LookupHook._on_lookup)  # type: ignore[method-assign]
    RowTracker._observe = watch.wrap(RowTracker._observe)  # type: ignore[method-assign]
    tracked = trackers(trainee)  # which keep the wrapped function
    position = 0
    for number in range(rounds + 1):  # the first is for warming up
        for kind in KINDS[number % len(KINDS) :] + KINDS[: number % len(KINDS)]:
            if kind != "off":
                tracked[kind].hooks_lost()  # hooks it
            mine = [batches[(position + i) % len(batches)] for i in range(steps)]
            position += steps
            watch.seconds = 0.0
            started = time.process_time()
            for batch in mine:
                trainee.train(batch)
            took = (time.process_time() - started) / steps
            if kind != "off":
                tracked[kind].close()
            if number:
                seconds[kind].append((took, watch.seconds / steps))
    return seconds


def report(seconds: Times) -> dict[str, dict[str, float]]:
    """By kind: milliseconds a step and of tracking in it, both shares, and the standard error of ``longer``."""
    untracked = _undisturbed([step for step, _ in seconds["off"]])
    found = {}
    for kind, values in seconds.items():
        longer = [step / off - 1 for (step, _), (off, _) in zip(values, seconds["off"], strict=True)]
        own = _undisturbed([tracking for _, tracking in values])
        found[kind] = {
            "ms": 1e3 * _undisturbed([step for step, _ in values]),
            "own_ms": 1e3 * own,
            "own": own / untracked,
            "longer": statistics.median(longer),
            "longer_error": statistics.stdev(longer) / len(longer) ** 0.5 if len(longer) > 1 else float("nan"),
        }
    return found


def _undisturbed(values: Sequence[float]) -> float:
    """The lower quartile: other work on the machine only adds."""
    return sorted(values)[len(values) // 4]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=tuple(MODELS), default="kaggle")
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
    columns, bottom, top = MODELS[args.model]
    model = DLRMModule(module.tables, columns, 13, dense_layers=bottom, over_layers=top)
    found = report(measure(Trainee(model), list(module.train_dataloader()), args.rounds, args.steps))
    for kind, figures in found.items():
        line = f"{kind:5} {figures['ms']:8.2f} ms a step"
        if kind != "off":
            line += f", own {figures['own_ms']:.3f} ms = {100 * figures['own']:.2f} % (at most {100 * LIMIT:g} %),"
            line += f" longer by {100 * figures['longer']:+.2f} % ± {100 * figures['longer_error']:.2f}"
        print(line)
    if args.out is not None:
        versions = {name: version(name) for name in ("torch", "torchrec", "fbgemm-gpu-cpu")}
        machine = {"cpu": platform.machine(), "cores": os.cpu_count(), "versions": versions}
        setting = {
            "model": args.model,
            "batch": args.batch,
            "rows": args.rows,
            "rounds": args.rounds,
            "steps": args.steps,
        }
        args.out.write_text(json.dumps({"machine": machine, "setting": setting, "kinds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
