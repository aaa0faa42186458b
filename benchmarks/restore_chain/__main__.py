"""Restore from a chain of 150 increments: against oldest-first replay, and against a full base of the same rows.

    python -m benchmarks.restore_chain [--full] [--out results.json]

naive: every file, oldest first. chain: `read_into`: each row from the newest file that has it. compacted: the
same after `compact`. tail: the worst moment where every tenth increment is compacted, nine increments on top. base: a
full base. All restores read the same data in the same process, by turns; every one is checked bit for bit. Ratios are
medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.zipf import TOUCHED, ZIPF, Trained
from lightning_cpr import __version__
from lightning_cpr.spec import Shard
from lightning_cpr.store import (
    LocalKeyValue,
    Manifest,
    RankPart,
    SaveIO,
    SaveSpec,
    Storage,
    load_manifest,
    new_version_id,
    read_into,
    save,
)
from lightning_cpr.store.compact import compact
from lightning_cpr.store.fetch import Fetcher
from lightning_cpr.store.resolve import Need

INCREMENTS = 150
TAIL = 9
TURNS = 5
QUICK = ("compacted", "tail", "base")
COLS = 64


def write(
    storage: Storage, table: Trained, step: int, rows: torch.Tensor, parent: Manifest | None, nonce: str = "n"
) -> Manifest:
    kind = "delta" if parent else "base"
    version = new_version_id("bench", 0, step, nonce)
    spec = SaveSpec(version, step, kind, "exact", 1, (table.spec,), parent=parent.path if parent else None)
    report = save(SaveIO(storage, LocalKeyValue(), partial(int, 0)), spec, RankPart(0, [table.block(rows)]))
    return load_manifest(storage, report.path)


def replay(storage: Storage, manifest: Manifest, target: Shard) -> None:
    """Naive: every file from the oldest on, all of its rows, checked and written over what was there."""
    fetcher = Fetcher(storage, {spec.fqn: spec for spec in manifest.tables})
    for entry in manifest.files:
        whole = Need(0, 0, COLS, range(entry.rows), range(entry.rows), whole=True)
        rows = fetcher.index(entry).rows()
        for piece in fetcher.pieces(entry, [whole]):
            weight, states = fetcher.decode(piece.index, fetcher.checked(piece))
            mine = rows[slice(*piece.row_span)]
            target.weight[mine] = weight
            target.states["sum"][mine] = states["sum"]


def smart(storage: Storage, manifest: Manifest, target: Shard) -> None:
    read_into(storage, manifest, [target])


def measure(folder: str, rows: int, rounds: int) -> dict[str, object]:
    chain_root, base_root = Storage(f"{folder}/chain"), Storage(f"{folder}/base")
    table = Trained(rows, COLS)
    every = torch.arange(rows)
    last = write(chain_root, table, 0, every, None)
    tail = None
    for step in range(1, INCREMENTS + 1):
        touched = table.touch()
        last = write(chain_root, table, step, touched, last)
        if step == INCREMENTS - TAIL:
            early = compact(chain_root, last)
            assert early is not None
            tail = early.manifest
        elif tail is not None:
            tail = write(chain_root, table, step, touched, tail, "tail")
    assert tail is not None
    base = write(base_root, table, INCREMENTS, every, None)
    started = time.perf_counter()
    done = compact(chain_root, last)
    assert done is not None
    compacting = time.perf_counter() - started
    ways: dict[str, Callable[[Shard], None]] = {
        "naive": partial(replay, chain_root, last),
        "chain": partial(smart, chain_root, last),
        "compacted": partial(smart, chain_root, done.manifest),
        "tail": partial(smart, chain_root, tail),
        "base": partial(smart, base_root, base),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(rounds):
        for turn in range(TURNS):
            for name in ways if turn == 0 else QUICK:
                target = table.target()
                started = time.perf_counter()
                ways[name](target)
                seconds[name].append(time.perf_counter() - started)
                table.check(target)
        print(f"round {round_ + 1} of {rounds}", file=sys.stderr)

    def ratio(one: str, two: str) -> float:
        """The median over the rounds; within one, of the medians."""
        per_round = []
        for at in range(rounds):
            a, b = (
                statistics.median(times[at * len(times) // rounds : (at + 1) * len(times) // rounds])
                for times in (seconds[one], seconds[two])
            )
            per_round.append(a / b)
        return statistics.median(per_round)

    return {
        "rows": rows, "cols": COLS, "increments": INCREMENTS, "touched": TOUCHED, "zipf": ZIPF, "rounds": rounds,
        "base_bytes": sum(f.bytes for f in base.files), "chain_bytes": sum(f.bytes for f in last.files),
        "median_s": {name: statistics.median(times) for name, times in seconds.items()}, "seconds": seconds,
        "compaction": {"seconds": compacting, "bytes_read": done.bytes_read, "bytes_written": done.bytes_written},
        "chain_faster_than_naive": ratio("naive", "chain"), "chain_of_base": ratio("chain", "base"),
        "tail": TAIL, "tail_faster_than_naive": ratio("naive", "tail"), "tail_of_base": ratio("tail", "base"),
        "compacted_faster_than_naive": ratio("naive", "compacted"), "compacted_of_base": ratio("compacted", "base"),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.restore_chain", description=__doc__.partition("\n")[0])
    parser.add_argument("--full", action="store_true", help="1 M rows (about 11 GB of increments) instead of 50 k")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to put the data; a temporary folder by default")
    parser.add_argument("--out", help="write the numbers there as JSON")
    args = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="restore_chain-", dir=args.folder)
    try:
        found = measure(folder, 1_000_000 if args.full else 50_000, args.rounds)
    finally:
        shutil.rmtree(folder)
    found["machine"] = {
        "cpus": os.cpu_count(), "processor": platform.machine(), "system": platform.system(),
        "python": platform.python_version(), "torch": torch.__version__, "lightning_cpr": __version__,
        "torch_threads": torch.get_num_threads(), "storage": "local disk, in the page cache",
    }  # fmt: skip
    for name in ("naive", "chain", "compacted", "tail", "base"):
        print(f"{name:10} {found['median_s'][name]:8.3f} s")
    for name in ("chain", "compacted", "tail"):
        faster, of_base = found[f"{name}_faster_than_naive"], found[f"{name}_of_base"]
        print(f"{name}: {faster:.2f}x faster than oldest-first replay, {of_base:.2f}x the time of a base")
    if args.out:
        Path(args.out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
