"""Accuracy after many restores from quantized saves, against the same run without any.

    python -m benchmarks.restored_accuracy --data synthetic --seeds 3
    python -m benchmarks.restored_accuracy --data movielens --seeds 5
    python -m benchmarks.restored_accuracy --small

A DLRM trains on synthetic Criteo or MovieLens-100k. At evenly spaced steps all rows of all tables are overwritten
with what a quantized save of them restores to, as if the whole job had been restored then. A raw save restores every
bit, so the run without restores is the raw one. Results are written as they come in; a run that was cut off goes on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cpr_paper.emulation import evaluate, init_process
from benchmarks.cpr_paper.experiment import data, machine
from lightning_cpr.policy.bits import choose_bits
from lightning_cpr.saving.saver import CODECS, state_codecs
from lightning_cpr.spec import Shard
from lightning_cpr.store.codec import get_codec, tune
from lightning_cpr.tables.sharding import World, build_plan, shard
from lightning_cpr.tables.shards import local_shards
from recipes.batch import Batch
from recipes.dlrm import DLRMModule

HERE = Path(__file__).parent
RESTORES, BITS = (1, 3, 20, 100), (2, 3, 4, 8)
TARGET = 1e-4


def through(codec_name: str, rows: Tensor) -> None:
    """Overwrite rows with what a save of them restores to; rows that do not fit are saved raw."""
    two_d = rows if rows.dim() == 2 else rows[:, None]
    codec = tune(get_codec(codec_name), two_d[:: max(1, len(two_d) // 512)])
    fits = codec.fits(two_d)
    picked = two_d[fits]
    two_d[fits] = codec.decode(codec.encode(picked), two_d.shape[1], two_d.dtype)


def restore(shards: Sequence[Shard], bits: int) -> None:
    with torch.no_grad():
        for live in shards:
            through(CODECS[bits], live.weight)
            for name, codec in state_codecs(bits).items():
                if name in live.states:
                    through(codec, live.states[name])


Data = tuple[dict[str, Any], list[Batch], list[Batch]]


def train(bits: int, restores: int, seed: int, trained_on: Data) -> dict[str, Any]:
    """The AUC of a run that is restored so many times. restores 0: undisturbed."""
    started = time.monotonic()
    arguments, batches, test = trained_on
    torch.manual_seed(seed)
    model = DLRMModule(**arguments)
    torch.manual_seed(seed)
    world = World(1, 1, torch.device("cpu"))
    wrapped = shard(model, build_plan(model, world, "table_wise"), world.device)
    optimizer = model.configure_optimizers()
    shards = local_shards(model)
    at = {round(len(batches) * (k + 1) / (restores + 1)) for k in range(restores)}
    for step, batch in enumerate(batches, 1):
        _step(wrapped, optimizer, batch)
        if step in at:
            restore(shards, bits)
    return {"auc": evaluate(wrapped, test), "restores": len(at), "seconds": time.monotonic() - started}


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels).backward()
    optimizer.step()


def show(runs: dict[str, Any], seeds: int) -> None:
    """Mean change of the AUC, and its standard error over the seeds."""
    print(f"{'restores':>9}" + "".join(f"{bits:>20} bit" for bits in BITS))
    for restores in RESTORES:
        line = f"{restores:9}"
        for bits in BITS:
            pairs = [
                runs[f"{bits}-{restores}-{seed}"]["auc"] - runs[f"0-0-{seed}"]["auc"]
                for seed in range(seeds)
                if f"{bits}-{restores}-{seed}" in runs and f"0-0-{seed}" in runs
            ]
            mark = "*" if choose_bits(restores) == bits else " "
            error = statistics.stdev(pairs) / len(pairs) ** 0.5 if len(pairs) > 1 else float("nan")
            line += f"{100 * statistics.mean(pairs):+12.4f} +- {error * 100:.4f}{mark}" if pairs else " " * 24
        print(line)
    print("in % of AUC; * the width that bits='auto' takes for so many restores; target: no worse than -0.01 %")


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.restored_accuracy", description=__doc__.partition("\n")[0])
    parser.add_argument("--data", choices=("movielens", "synthetic"), default="movielens")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="one seed, little data, the widths of bits='auto' alone")
    parser.add_argument("--out", type=Path, help="default: <data>.json beside this file")
    args = parser.parse_args()
    init_process()
    args.out = args.out or HERE / f"{args.data}.json"
    seeds, trained_on = 1 if args.small else args.seeds, data(args.data, args.small)
    runs: dict[str, Any] = {}
    if args.out.exists() and not args.small:
        runs = json.loads(args.out.read_text())["runs"]
    chosen = [(choose_bits(restores), restores) for restores in RESTORES]
    others = [] if args.small else [pair for pair in product(BITS, RESTORES) if pair not in chosen]
    todo = [(*pair, seed) for group in ([(0, 0)], chosen, others) for seed in range(seeds) for pair in group]
    for bits, restores, seed in todo:
        key = f"{bits}-{restores}-{seed}"
        if key not in runs:
            runs[key] = train(bits, restores, seed, trained_on)
            print(f"{len(runs)}/{len(todo)} {key}: {runs[key]}", flush=True)
            if not args.small:
                args.out.write_text(json.dumps({"machine": machine(), "target": TARGET, "runs": runs}, indent=1) + "\n")
    show(runs, seeds)


if __name__ == "__main__":
    main()
