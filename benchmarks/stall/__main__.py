"""How long training stands still for a save: CPRCallback beside other ways, on one model in one run.

    python -m benchmarks.stall [--small] [--out results.json]             # stall per save
    python -m benchmarks.stall --throughput 320 [--out throughput.json]   # what saves every 30 s cost in all

Stall: from the end of a batch until the next may begin. CPRCallback's is its whole hook of that batch. By turns; ratios
are of medians. On a machine that does other work too, the CPU seconds of the training thread say more than the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from benchmarks.stall.cow import CopyOnWrite
from benchmarks.stall.model import WIDTH, fit
from benchmarks.stall.peers import Peers
from lightning_cpr import CPRCallback
from lightning_cpr.report.events import read_events
from lightning_cpr.store.storage import Storage

SHARE, PERIOD = 0.15, 20
WINDOW_S = 30.0
SETTLE_S, NEAR_S = 3.0, 9.0
TARGETS = {"CPRCallback, delta": 0.03, "CPRCallback, base": 0.15}


class Timed(CPRCallback):
    """CPRCallback with its hook timed; between two saves the others take their turns."""

    def __init__(self, folder: str, incremental: Any) -> None:
        super().__init__(
            f"{folder}/{incremental}", save_every_n_steps=PERIOD, incremental=incremental, priority="vanilla"
        )
        self._folder = folder
        self.saves: list[tuple[float, float]] = []
        self.idle: list[tuple[float, float]] = []
        self.others: dict[str, list[tuple[float, float]]] = {}
        self.cow: list[tuple[float, float]] = []
        self.cow_batches: list[int] = []
        self._peers: Peers | None = None
        self._prototype: CopyOnWrite | None = None
        self._boundary: torch.Tensor | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, model: Any, batch: Any, batch_idx: int) -> None:
        if self._prototype is not None:
            self._prototype.before_batch(batch.values())

    def on_train_batch_end(self, trainer: pl.Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        started, cpu = time.perf_counter(), time.thread_time()
        super().on_train_batch_end(trainer, model, outputs, batch, batch_idx)
        took = time.perf_counter() - started, time.thread_time() - cpu
        step = batch_idx + 1
        (self.saves if step % PERIOD == 0 else self.idle).append(took)
        if step % PERIOD == PERIOD // 4:
            self._settle()
            self._turns(trainer)
        if step % PERIOD == PERIOD - 1:
            self._end_prototype()

    def _settle(self) -> None:
        thread = self._cycle.saves._writer._thread
        if thread is not None:
            thread.join()

    def _turns(self, trainer: pl.Trainer) -> None:
        self._peers = self._peers or Peers(trainer, self.job.owned, self._folder)
        for name, way in self._peers.ways.items():
            self.others.setdefault(name, []).append(way())
        if self._prototype is None:
            self._prototype = CopyOnWrite(self.job.owned[0])
        else:
            self._boundary = self.job.owned[0].weight.clone()
            self._prototype.boundary()

    def _end_prototype(self) -> None:
        if self._prototype is not None and self._boundary is not None:
            self._prototype.wait()
            assert torch.equal(self._prototype.buffers[0], self._boundary)
            self.cow.append((self._prototype.stall, self._prototype.cpu))
            self.cow_batches.append(self._prototype.batches)
            self._boundary = None


def stalls(rows: int, rounds: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"rows": rows, "cols": WIDTH, "share": SHARE, "rounds": rounds}
    times: dict[str, list[tuple[float, float]]] = {}
    batches: list[int] = []
    for kind, incremental in (("delta", "intermittent"), ("base", "full")):
        timed = Timed(folder, incremental)
        # One more save than rounds, which warms buffers up.
        fit(rows, SHARE, PERIOD, [timed], max_steps=PERIOD * (rounds + 1))
        times[f"CPRCallback, {kind}"] = timed.saves[1:]
        times.setdefault("CPRCallback, no save", []).extend(timed.idle)
        times.setdefault("copy-on-write, base", []).extend(timed.cow)
        batches += timed.cow_batches
        for name, took in timed.others.items():
            times.setdefault(name, []).extend(took[1:])
    medians = {name: [statistics.median(part) for part in zip(*took, strict=True)] for name, took in times.items()}
    sync = medians["dcp.save"]
    found["ways"] = {
        name: {
            "stall": wall, "cpu": cpu, "of_sync_dcp_save": wall / sync[0], "of_its_cpu": cpu / sync[1],
            "each": times[name] if name != "CPRCallback, no save" else [], "target": TARGETS.get(name),
        }
        for name, (wall, cpu) in medians.items()
    }  # fmt: skip
    found["copy_on_write_batches"] = batches
    return found


class Steps(pl.Callback):
    """When each batch ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.ends.append(time.time())


def throughput(rows: int, seconds: float, folder: str) -> dict[str, Any]:
    """What each save takes from the training: the batches from its stall until a while after its commit, as far as they
    took longer than those of the seconds before and after it. Whole windows differ by more than that among themselves.
    """
    steps, root = Steps(), f"{folder}/throughput"
    saves = CPRCallback(root, save_interval=WINDOW_S, priority="vanilla")
    fit(rows, SHARE, PERIOD, [saves, steps], max_time={"seconds": seconds})
    ends = torch.tensor(steps.ends, dtype=torch.float64)
    took, began = ends.diff(), ends[:-1]
    found = []
    for event in read_events(Storage(root)):
        # The save of a batch runs after `Steps` has seen it.
        if event["event"] != "save_committed" or not 0 < event["step"] < len(ends) - 1:
            continue
        start, stop = steps.ends[event["step"] - 1], event["time"] + SETTLE_S
        if start - NEAR_S < steps.ends[0] or stop + NEAR_S > steps.ends[-1]:
            continue
        near = took[(began >= start - NEAR_S) & (began < start) | (began >= stop) & (began < stop + NEAR_S)]
        during = took[(began >= start) & (began < stop)]
        lost = float(during.sum() - len(during) * near.mean())
        found.append(
            {"kind": event["kind"], "bytes": event["bytes"], "commit_s": event["time"] - start, "lost_s": lost}
        )
    each = [save["lost_s"] / WINDOW_S for save in found]
    return {
        "rows": rows, "cols": WIDTH, "share": SHARE, "interval_s": WINDOW_S, "saves": found, "lost": each,
        "median_lost": statistics.median(each), "mean_lost": statistics.mean(each), "target": 0.01,
        "batches_a_second": 1 / float(took.mean()),
    }  # fmt: skip


def show(found: dict[str, Any]) -> None:
    if "lost" in found:
        share = ", ".join(f"{lost:.2%}" for lost in found["lost"])
        print(
            f"lost throughput at a save every {WINDOW_S:g} s: median {found['median_lost']:.2%}, mean"
            f" {found['mean_lost']:.2%} (target 1 %): {share}"
        )
        return
    print(f"{'':22}{'stall':>10}{'of dcp.save':>13}{'CPU':>12}{'of dcp.save':>13}")
    for name, way in found["ways"].items():
        target = f"   target {way['target']:.0%}" if way["target"] else ""
        print(f"{name:22}{1e3 * way['stall']:7.1f} ms{way['of_sync_dcp_save']:13.1%}{1e3 * way['cpu']:9.1f} ms"
              f"{way['of_its_cpu']:13.1%}{target}")  # fmt: skip
    print(f"copy-on-write gathered over {found['copy_on_write_batches']} batches")


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.stall", description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="100 k rows, 2 rounds")
    parser.add_argument("--rows", type=int, default=1_500_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--throughput", type=float, metavar="SECONDS", help="measure lost throughput for so long")
    parser.add_argument("--out", help="write the numbers there as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows, rounds = (100_000, 2) if args.small else (args.rows, args.rounds)
    with tempfile.TemporaryDirectory(prefix="stall-") as folder:
        found = throughput(rows, args.throughput, folder) if args.throughput else stalls(rows, rounds, folder)
    found |= {"cpus": os.cpu_count(), "torch": torch.__version__, "load_average": os.getloadavg()[0]}
    show(found)
    if args.out:
        Path(args.out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
