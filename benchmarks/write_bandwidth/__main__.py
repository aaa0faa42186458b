"""Bytes written and bytes kept by incremental, quantized saves, against a full float32 save each interval.

    python -m benchmarks.write_bandwidth [--small] [--out results.json]

Every save goes through the store to disk as a job's do. Counted: each object put (chunks with row numbers, scales,
hashes and optimizer states, part manifests, manifests; compactions with all they rewrite). The full float32 save that
they are measured against is counted as the plain tensors alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.zipf import FQN, TOUCHED, ZIPF, Trained
from lightning_cpr.policy.baseline import MOST_READ
from lightning_cpr.saving.chain import Chain, next_content
from lightning_cpr.saving.saver import CODECS, state_codecs
from lightning_cpr.store import (
    LocalKeyValue,
    Manifest,
    RankPart,
    SaveIO,
    SaveSpec,
    Storage,
    load_manifest,
    new_version_id,
    save,
)
from lightning_cpr.store.compact import compact, read_factor
from lightning_cpr.store.storage import Buffer

# Consecutive chains compacted as CPRCallback does, and more rarely: above so many times the rows of a base.
COMPACTED = {"consecutive, compacted at 1.3": MOST_READ, "consecutive, compacted at 2": 2.0}
POLICIES = ("full", "one_shot", "consecutive", "intermittent", *COMPACTED)
TARGETS = {2: (20.0, 8.0), 8: (6.5, 2.6)}
PAPER = "6-17x, 2.5-8x"


class Counted(Storage):
    """Counts the bytes of every object that is put."""

    written = 0

    def put(self, path: str, data: Buffer | Iterable[Buffer]) -> int:
        size = super().put(path, data)
        self.written += size
        return size


class Run:
    """The saves of one policy at one width. Which rows changed is told as the tracker tells it."""

    def __init__(self, folder: str, policy: str, bits: int | None, rows: int) -> None:
        self.storage = Counted(folder)
        self.policy = policy.partition(",")[0]
        self.most_read = COMPACTED.get(policy)
        self.bits = bits
        self.chain = Chain()
        self.since_base = torch.zeros(rows, dtype=torch.bool)
        self.since_last = torch.zeros(rows, dtype=torch.bool)
        self.written: list[int] = []
        self.kept: list[int] = []
        self.kinds: list[str] = []

    def touched(self, rows: Tensor) -> None:
        self.since_base[rows] = self.since_last[rows] = True

    def save(self, table: Trained, step: int) -> None:
        before = self.storage.written
        content = next_content(self.chain, "close", self.policy)
        if content.kind == "base":
            rows = torch.arange(len(table.weight))
            self.since_base.zero_()
        else:
            rows = torch.nonzero(self.since_base if content.rows == "since_base" else self.since_last)[:, 0]
        self.since_last.zero_()
        spec = SaveSpec(
            new_version_id("bench", 0, step, "n"), step, content.kind, "exact", 1, (table.spec,),
            parent=content.parent, inherit=content.inherit,
        )  # fmt: skip
        part = RankPart(0, [table.block(rows)], codecs={FQN: CODECS[self.bits]}, state_codecs=state_codecs(self.bits))
        state = {"chain": self.chain.to_json()}
        report = save(SaveIO(self.storage, LocalKeyValue(), partial(int, 0)), spec, part, state)
        manifest = load_manifest(self.storage, report.path)
        if self.most_read is not None and read_factor(manifest) > self.most_read:
            done = compact(self.storage, manifest)
            manifest = done.manifest if done is not None else manifest
        self.chain = Chain.of(manifest)
        self.kinds.append(content.kind)
        self.written.append(self.storage.written - before)
        self.kept.append(needed(self.storage, manifest))


def needed(storage: Storage, manifest: Manifest) -> int:
    """Bytes of all objects that a restore of a version needs."""
    return sum(stored.bytes for stored in manifest.stored) + (storage.size(manifest.path) or 0)


def measure(folder: str, rows: int, cols: int, intervals: int, widths: list[int | None]) -> dict[str, object]:
    table = Trained(rows, cols)
    full = table.weight.nbytes + table.sum.nbytes
    runs = {(p, b): Run(f"{folder}/{p}-{b}", p, b, rows) for p in POLICIES for b in widths}
    shares = []
    for step in range(intervals):
        changed = table.touch()
        shares.append(len(changed) / rows)
        for run in runs.values():
            run.touched(changed)
            run.save(table, step)
        print(f"interval {step + 1} of {intervals}", file=sys.stderr)
    results = []
    for (policy, bits), run in runs.items():
        results.append({
            "policy": policy, "bits": bits or 32,
            "bandwidth": full / statistics.mean(run.written), "capacity": full / statistics.mean(run.kept),
            "peak_bandwidth": full / max(run.written[1:]), "least_capacity": full / max(run.kept),
            "written": run.written, "kept": run.kept, "kinds": run.kinds,
        })  # fmt: skip
    return {
        "rows": rows, "cols": cols, "optimizer": table.spec.optimizer, "intervals": intervals, "zipf": ZIPF,
        "touched_target": TOUCHED, "touched": statistics.mean(shares), "full_bytes": full, "results": results,
    }  # fmt: skip


def show(found: dict[str, object]) -> None:
    print(f"{'policy':32}{'bits':>5}{'bandwidth':>11}{'capacity':>10}   targets (paper, all widths: {PAPER})")
    results = found["results"]
    assert isinstance(results, list)
    for r in results:
        target = TARGETS.get(r["bits"]) if r["policy"] == "intermittent" else None
        said = f"   >= {target[0]:g}x, >= {target[1]:g}x" if target else ""
        print(f"{r['policy']:32}{r['bits']:5}{r['bandwidth']:10.2f}x{r['capacity']:9.2f}x{said}")


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.write_bandwidth", description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="20 k rows, 8 and 2 bits, instead of 50 k and all widths")
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--cols", type=int, default=64)
    parser.add_argument("--intervals", type=int, default=24)
    parser.add_argument("--folder", help="where to put the data; a temporary folder by default")
    parser.add_argument("--out", help="write the numbers there as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp(prefix="write_bandwidth-", dir=args.folder)
    try:
        rows, widths = (20_000, [8, 2]) if args.small else (args.rows, [None, 8, 4, 3, 2])
        found = measure(folder, rows, args.cols, args.intervals, widths)
    finally:
        shutil.rmtree(folder)
    show(found)
    if args.out:
        Path(args.out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
