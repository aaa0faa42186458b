"""Draws ``results.json``: the pause by way, growing with table size and ranks, and its phases.

python -m benchmarks.recovery.plot results.json pause.png
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

COLOURS = {"spare": "#2a9d5c", "cold": "#8ab17d", "restart": "#c44e52", "handover": "#e9a03b", "stock": "#7f7f7f"}
NAMES = {
    "spare": "live, warm spare",
    "cold": "live, new process",
    "restart": "full restart from a version",
    "handover": "restart with hand-over",
    "stock": "stock restart, torch.save by rank",
}
PHASES = {
    "spare": ("detect", "replacement_start", "replacement_build", "rebuild", "restore", "first_step"),
    "restart": ("relaunch", "imports", "build", "restore", "first_step"),
}
SHADES = ("#264653", "#2a9d8f", "#8ab17d", "#e9c46a", "#f4a261", "#e76f51")


def medians(results: list[dict[str, Any]]) -> dict[tuple[str, int, int], float]:
    by: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for r in results:
        by[r["way"], r["world"], r["mb"]].append(r["seconds"])
    return {key: statistics.median(seconds) for key, seconds in by.items()}


def growth(axes: Axes, middle: dict[tuple[str, int, int], float], worlds: list[int]) -> None:
    for way, colour in COLOURS.items():
        for world, style in zip(worlds, ("-", "--", ":"), strict=False):
            points = sorted((mb, s) for (w, n, mb), s in middle.items() if (w, n) == (way, world))
            if points:
                label = NAMES[way] if world == worlds[0] else None
                axes.plot(*zip(*points, strict=True), style, marker="o", color=colour, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend(fontsize=7, loc="center left")
    axes.set_xlabel("tables, MB a rank")
    axes.set_ylabel("seconds")
    lines = ", ".join(f"{s} {n} ranks" for n, s in zip(worlds, ("solid", "dashed", "dotted"), strict=False))
    axes.set_title(f"From SIGKILL to the first step of all ranks\n({lines})", fontsize=10)


def phases(axes: Axes, results: list[dict[str, Any]], way: str, world: int, sizes: list[int]) -> None:
    left = [0.0] * len(sizes)
    for phase, colour in zip(PHASES[way], SHADES, strict=False):
        widths = []
        for mb in sizes:
            told = [r["phases"][phase] for r in results if (r["way"], r["world"], r["mb"]) == (way, world, mb)]
            widths.append(statistics.median(told) if told else 0.0)
        axes.barh([f"{mb} MB" for mb in sizes], widths, left=left, color=colour, label=phase.replace("_", " "))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_xlabel("seconds")
    axes.set_title(f"{NAMES[way]}, {world} ranks: median phases", fontsize=10)
    axes.legend(fontsize=7)


def main() -> None:
    results = json.loads(Path(sys.argv[1]).read_text())
    worlds = sorted({r["world"] for r in results})
    sizes = sorted({r["mb"] for r in results if r["world"] == worlds[0]})
    figure, (first, second, third) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    growth(first, medians(results), worlds)
    phases(second, results, "spare", worlds[0], sizes)
    phases(third, results, "restart", worlds[0], sizes)
    figure.savefig(sys.argv[2], dpi=110)


if __name__ == "__main__":
    main()
