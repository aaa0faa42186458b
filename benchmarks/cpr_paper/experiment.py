"""The CPR paper's experiment: overhead and AUC of full and partial recovery with every row priority.

    python -m benchmarks.cpr_paper --data movielens --seeds 5
    python -m benchmarks.cpr_paper --small

Writes ``<out>/<data>.json`` as results come in, then the table and the figures of all results there are. A run that was
cut off goes on where it stopped; with ``--target-pls`` and ``--lost`` the settings can be done one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.cpr_paper.emulation import Case, Clock, emulate, init_process, overhead
from benchmarks.cpr_paper.figures import write_figures, write_table
from recipes.batch import Batch
from recipes.dlrm import DLRMModule
from recipes.movielens import MovieLensDataModule
from recipes.synthetic import SyntheticDataModule

HERE = Path(__file__).parent
CONFIG = HERE.parents[1] / "recipes" / "cpr_paper.yaml"
STRATEGIES = ("vanilla", "scar", "mfu", "ssu")


def cases(setting: dict[str, Any], seeds: int) -> list[Case]:
    """Undisturbed and full once a seed and share (the AUC of full is the undisturbed one), partial in every setting."""
    partial = [
        Case(strategy, pls, lost, seed)
        for seed, strategy, pls, lost in product(range(seeds), STRATEGIES, setting["target_pls"], setting["lost"])
    ]
    full = [Case("full", 0.0, lost, seed) for seed, lost in product(range(seeds), setting["lost"])]
    return [*[Case("none", 0.0, 0, seed) for seed in range(seeds)], *full, *partial]


def data(name: str, small: bool) -> tuple[dict[str, Any], list[Batch], list[Batch]]:
    """(model arguments, training batches in order of the epochs, test batches)."""
    setting = yaml.safe_load(CONFIG.read_text())[name]
    arguments = dict(setting["data"])
    if small:
        arguments |= setting.get("small", {})
    epochs = arguments.pop("epochs", 1)
    module = (MovieLensDataModule if name == "movielens" else SyntheticDataModule)(**arguments)
    module.setup("fit")
    loader = module.train_dataloader()
    train = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        train += list(loader)
    model = {**setting["model"], "tables": dict(module.tables), "dense_features": module.dense_features}
    return model, train, list(module.test_dataloader())


def outcomes(name: str, small: bool, todo: Sequence[Case], clock: Clock) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Of each case, seed by seed."""
    model, train, test = data(name, small)
    for case in todo:
        if case.strategy == "full":  # no update is lost: only its time is accounted
            yield case, {"auc": None, "pls": 0.0, "overhead": overhead(case, clock), "seconds": 0.0}
    for seed in sorted({case.seed for case in todo}):
        torch.manual_seed(seed)
        mine = [case for case in todo if case.seed == seed and case.strategy != "full"]
        if not mine:
            continue
        for case, outcome in emulate(mine, DLRMModule(**model), train, test, clock):
            yield case, asdict(outcome)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", choices=("movielens", "synthetic"), default="movielens")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--target-pls", type=float, nargs="+", help="only these, in place of the setting's")
    parser.add_argument("--lost", type=int, nargs="+", help="only these numbers of failed owners")
    parser.add_argument("--small", action="store_true", help="one seed, one share, small data: minutes")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    setting = yaml.safe_load(CONFIG.read_text())["setting"]
    if args.small:
        setting |= {"lost": setting["lost"][:1]}
        args.seeds = 1
    setting |= {name: chosen for name in ("target_pls", "lost") if (chosen := getattr(args, name))}
    clock = Clock(**setting["clock"])
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{args.data}{'-small' if args.small else ''}.json"
    done: dict[str, Any] = json.loads(path.read_text())["runs"] if path.exists() else {}
    todo = [case for case in cases(setting, args.seeds) if _key(case) not in done]
    init_process()
    for number, (case, outcome) in enumerate(outcomes(args.data, args.small, todo, clock), 1):
        done[_key(case)] = asdict(case) | outcome
        _write(path, {"machine": machine(), "clock": asdict(clock), "runs": done})
        print(f"{number}/{len(todo)} {_key(case)}: {outcome}", flush=True)
    print(write_table(path))
    write_figures(path)


def _key(case: Case) -> str:
    return f"{case.strategy}-{case.target_pls:g}-{case.lost}-{case.seed}"


def _write(path: Path, value: dict[str, Any]) -> None:
    temp = path.with_suffix(".tmp")
    temp.write_text(json.dumps(value, indent=1))
    os.replace(temp, path)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    names = ("torch", "torchrec", "fbgemm-gpu-cpu", "pytorch-lightning")
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in names},
    }
