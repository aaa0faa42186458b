"""The main job on real data, with failures in it: ``python -m recipes.demo``.

Trains a DLRM on MovieLens-100k with two processes, three times: undisturbed; with one rank's shards overwritten with
garbage on the way; and with one process killed, which `lightning-cpr run` replaces while the other one lives on. Prints
what failed, what came back from where, and what it cost, beside the undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_cpr.report.events import read_events
from lightning_cpr.store.manifest import split_version
from lightning_cpr.store.storage import Storage

CONFIG = Path(__file__).with_name("movielens.yaml")
RANK, STEP, SAVE_EVERY = 1, 330, 50
# What `job` imports below: a warm spare has it imported already.
PRELOAD = "pytorch_lightning.cli,lightning_cpr.callback,recipes.dlrm,recipes.movielens"
PHASES = ("detect", "replacement_start", "replacement_build", "rebuild", "restore")
LABELS = {"none": "undisturbed", "wipe": "a shard wiped", "kill": "a process killed"}


def job(root: str, fault: str, out: str) -> None:
    """One run: fit and test. Rank 0 writes the result to ``out``."""
    from lightning_cpr import CPRCallback, FaultInjector
    from lightning_cpr._lightning import PACKAGE, pl

    cli = import_module(f"{PACKAGE}.cli").LightningCLI(
        run=False,
        args=["--config", str(CONFIG), "--trainer.callbacks=null", "--trainer.logger=false"],
        trainer_defaults={"strategy": "torchrec", "enable_checkpointing": False, "enable_progress_bar": False},
        save_config_callback=None,
        auto_configure_optimizers=False,
    )
    cpr = CPRCallback(root, save_every_n_steps=SAVE_EVERY)
    trainer: pl.Trainer = cli.trainer
    faults = {"none": [], "wipe": [FaultInjector().wipe(RANK, STEP)], "kill": [FaultInjector().kill(RANK, STEP)]}
    trainer.callbacks += [cpr, *faults[fault]]
    started = time.monotonic()
    trainer.fit(cli.model, cli.datamodule)
    seconds = time.monotonic() - started
    (metrics,) = trainer.test(cli.model, cli.datamodule, verbose=False)
    if trainer.is_global_zero:
        result = {"auc": metrics["test/auc"], "pls": cpr.pls, "seconds": seconds}
        Path(out).write_text(json.dumps(result))


def run(console: Console, root: str, fault: str) -> dict[str, Any]:
    """Start `job` in processes of its own and wait for it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        spares = int(fault == "kill")
        options = ["--nproc-per-node=2", "--max-restarts=0", f"--spares={spares}", f"--preload={PRELOAD}"]
        start = ["-m", "lightning_cpr.cli", "run", *options, "-m", "recipes.demo"]
        command = [sys.executable, "-W", "ignore", *start, "--job", root, "--out", str(out), "--fault", fault]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        with console.status(f"training on 2 processes: {LABELS[fault]} ..."):
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode:
            raise SystemExit(f"the run failed:\n{done.stdout}\n{done.stderr}")
        return json.loads(out.read_text())


def show(console: Console, root: str, fault: str) -> None:
    """What the event log says of a run, from the last save before the failure to the first after it."""
    events = read_events(Storage(root))
    struck = next(i for i, event in enumerate(events) if event["event"] == "fault")
    saves = [i for i, event in enumerate(events) if event["event"] == "save_committed"]
    first = max((i for i in saves if i < struck), default=struck)
    after = [i for i in saves if events[i]["time"] > events[struck]["time"] and events[i]["step"] > STEP]
    console.print(f"\n[bold]{LABELS[fault]}[/]")
    for event in events[first : after[0] + 1 if after else None]:
        if text := describe(event):
            console.print(f"  [dim]{event['time'] - events[0]['time']:6.2f} s[/]  {text}", highlight=False)


def compare(console: Console, results: dict[str, dict[str, Any]]) -> None:
    """The runs side by side."""
    table = Table(title="MovieLens-100k, DLRM, 2 processes, CPU")
    for column in ("run", "test AUC", "difference", "PLS", "seconds"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for fault, result in results.items():
        delta = result["auc"] - results["none"]["auc"]
        cells = (f"{result['auc']:.4f}", f"{delta:+.4f}", f"{result['pls']:.4f}", f"{result['seconds']:.1f}")
        table.add_row(LABELS[fault], *cells)
    console.print()
    console.print(table)


def describe(event: dict[str, Any]) -> str:
    """One line for a person, or nothing."""
    at = f"step {event.get('step', 0):>4}:"
    match event["event"]:
        case "save_committed":
            return f"{at} saved a {event['kind']} of {event['bytes'] / 1e6:.2f} MB behind the training"
        case "fault":
            what = "process killed (SIGKILL)" if event["kind"] == "kill" else "shards overwritten with garbage"
            return f"[bold red]{at} rank {event['rank']}: {what}[/]"
        case "recovery":
            ranks = ", ".join(str(rank) for rank in event["failed"])
            doubled = event.get("double_row_updates", 0)
            twice = f"; at most {doubled} row updates of the broken batch are made twice" if doubled else ""
            others = "the other process lives on" if event.get("replaced") else "the others kept theirs"
            return (
                f"[bold green]{at} rank {ranks}: {event['rows']} rows restored from step"
                f" {split_version(event['version']).step} ({event['bytes_read'] / 1e6:.2f} MB read,"
                f" {1e3 * event['seconds']:.0f} ms); {others}; PLS {event['pls']:.4f}{twice}[/]"
            )
        case "rejoined":
            took = {phase: f"{1e3 * event[f'{phase}_s']:.0f} ms" for phase in PHASES}
            return (
                f"[green]{at} both train on, {event['total_s']:.2f} s after the kill: noticed {took['detect']},"
                f" replacement up {took['replacement_start']}, data and model {took['replacement_build']},"
                f" new group {took['rebuild']}, rows {took['restore']}[/]"
            )
        case _:
            return ""


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on MovieLens-100k with failures on the way.")
    for hidden in ("--job", "--out", "--fault"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        job(args.job, args.fault, args.out)
        return
    console = Console(width=150)
    with tempfile.TemporaryDirectory() as folder:
        results = {fault: run(console, f"{folder}/{fault}", fault) for fault in LABELS}
        for fault in ("wipe", "kill"):
            show(console, f"{folder}/{fault}", fault)
        compare(console, results)


if __name__ == "__main__":
    main()
