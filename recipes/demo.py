"""The main job on real data, with a failure in it: ``python -m recipes.demo``.

Trains a DLRM on MovieLens-100k with two processes, twice: once undisturbed, once with one rank's shards overwritten
with garbage on the way. Prints what failed, what came back from where, and what it cost, beside the undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_cpr.store.manifest import split_version

CONFIG = Path(__file__).with_name("movielens.yaml")
WIPED_RANK, WIPE_STEP, SAVE_EVERY = 1, 230, 50


def job(root: str, wipe: bool, out: str) -> None:
    """One run: fit and test, under Lightning's own launcher. Rank 0 writes the result to ``out``."""
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
    trainer.callbacks += [cpr, *([FaultInjector().wipe(WIPED_RANK, WIPE_STEP)] if wipe else [])]
    started = time.monotonic()
    trainer.fit(cli.model, cli.datamodule)
    seconds = time.monotonic() - started
    (metrics,) = trainer.test(cli.model, cli.datamodule, verbose=False)
    if trainer.is_global_zero:
        result = {"auc": metrics["test/auc"], "pls": cpr.pls, "seconds": seconds, "steps": trainer.global_step}
        Path(out).write_text(json.dumps(result))


def run(console: Console, root: str, wipe: bool) -> dict[str, Any]:
    """Start `job` in processes of its own and wait for it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-W", "ignore", "-m", "recipes.demo", "--job", root, "--out", str(out)]
        label = "with one rank's shards wiped" if wipe else "undisturbed"
        with console.status(f"training on 2 processes, {label} ..."):
            done = subprocess.run(
                [*command, *(["--wipe"] if wipe else [])], capture_output=True, text=True, timeout=900, check=False
            )
        if done.returncode:
            raise SystemExit(f"the run failed:\n{done.stdout}\n{done.stderr}")
        return json.loads(out.read_text())


def show(console: Console, root: str, plain: dict[str, Any], wiped: dict[str, Any]) -> None:
    """What the event log says of the failure, and the two runs side by side."""
    from lightning_cpr.report.events import read_events
    from lightning_cpr.store.storage import Storage

    events = read_events(Storage(root))
    start = events[0]["time"]
    for event in events:
        text = describe(event)
        if text:
            console.print(f"[dim]{event['time'] - start:6.2f} s[/dim]  {text}", highlight=False)
    table = Table(title="MovieLens-100k, DLRM, 2 processes, CPU")
    for column in ("run", "test AUC", "PLS", "steps", "seconds"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for name, result in (("undisturbed", plain), ("a shard wiped and recovered", wiped)):
        table.add_row(
            name, f"{result['auc']:.4f}", f"{result['pls']:.4f}", f"{result['steps']}", f"{result['seconds']:.1f}"
        )
    console.print(table)
    console.print(f"AUC difference: {wiped['auc'] - plain['auc']:+.4f}", highlight=False)


def describe(event: dict[str, Any]) -> str:
    """One line for a person, or nothing."""
    match event["event"]:
        case "save_committed":
            size = f"{event['bytes'] / 1e6:.2f} MB"
            return (
                f"step {event['step']:>4}: saved a {event['kind']}, {size};"
                f" training waited {1e3 * event['stall_s']:.1f} ms"
            )
        case "fault":
            return f"[bold red]step {event['step']:>4}: rank {event['rank']} lost its shards ({event['kind']})[/]"
        case "recovery":
            ranks = ", ".join(str(rank) for rank in event["failed"])
            return (
                f"[bold green]step {event['step']:>4}: rank {ranks} restored from step"
                f" {split_version(event['version']).step}: {event['rows']} rows, {event['bytes_read'] / 1e6:.2f} MB,"
                f" {1e3 * event['seconds']:.0f} ms; the others kept theirs; PLS {event['pls']:.4f}[/]"
            )
        case _:
            return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--job", metavar="ROOT", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parser.add_argument("--wipe", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        job(args.job, args.wipe, args.out)
        return
    console = Console(width=120)
    with tempfile.TemporaryDirectory() as folder:
        plain = run(console, f"{folder}/plain", wipe=False)
        wiped = run(console, f"{folder}/wiped", wipe=True)
        show(console, f"{folder}/wiped", plain, wiped)


if __name__ == "__main__":
    main()
