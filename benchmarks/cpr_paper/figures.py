"""The experiment's table and figures from its JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cpr_paper.emulation import Case, Clock, expected_overhead

ORDER = ("full", "vanilla", "scar", "mfu", "ssu")
# two-sided 95 % of Student's t, by degrees of freedom
T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


def groups(path: Path) -> dict[tuple[str, float, int], list[dict[str, Any]]]:
    """Runs by (strategy, target PLS, owners lost), with ``delta``: its AUC less the same seed's undisturbed.

    Seeds whose undisturbed run is not done yet are left out.
    """
    runs = list(json.loads(path.read_text())["runs"].values())
    plain = {run["seed"]: run["auc"] for run in runs if run["strategy"] == "none"}
    found: dict[tuple[str, float, int], list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        if run["strategy"] != "none" and run["seed"] in plain:
            auc = plain[run["seed"]] if run["auc"] is None else run["auc"]
            key = (run["strategy"], run["target_pls"], run["lost"])
            found[key].append(run | {"auc": auc, "delta": auc - plain[run["seed"]]})
    return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half width of its 95 % confidence interval (nan for one value)."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.nan
    return mean, T95[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))


def write_table(path: Path) -> str:
    """Markdown, also written beside the JSON."""
    lines = [
        "| strategy | target PLS | owners lost | overhead % (expected) | AUC | AUC - undisturbed (95 % CI) | PLS |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    found, clock = groups(path), Clock(**json.loads(path.read_text())["clock"])
    for key in sorted(found, key=lambda k: (k[2], k[1], ORDER.index(k[0]))):
        runs = found[key]
        mean, half = interval([run["delta"] for run in runs])
        delta = f"{mean:+.5f} ± {half:.5f}" if len(runs) > 1 else f"{mean:+.5f}"
        strategy, target, lost = key
        overhead = 100 * statistics.fmean(run["overhead"] for run in runs)
        expected = 100 * expected_overhead(Case(strategy, target, lost, seed=0), clock)
        lines.append(
            f"| {strategy} | {target or ''} | {lost}/8 | {overhead:.2f} ({expected:.2f}) |"
            f" {statistics.fmean(r['auc'] for r in runs):.4f} | {delta} |"
            f" {statistics.fmean(r['pls'] for r in runs):.4f} |"
        )
    text = "\n".join(lines) + "\n"
    path.with_suffix(".md").write_text(text)
    return text


def write_figures(path: Path) -> None:
    """``<name>-overhead.png`` and ``<name>-auc.png`` beside the JSON."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found = groups(path)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    lost = sorted({key[2] for key in found})
    targets = sorted({key[1] for key in found if key[0] != "full"})
    labels = ["full", *[f"partial, PLS {target:g}" for target in targets]]
    for index, count in enumerate(lost):
        keys = [("full", 0.0, count), *[("ssu", target, count) for target in targets]]
        heights = [100 * statistics.fmean(r["overhead"] for r in found[key]) if found.get(key) else 0 for key in keys]
        axes.bar(
            [i + 0.8 * index / len(lost) for i in range(len(keys))], heights, 0.8 / len(lost), label=f"{count}/8 lost"
        )
    axes.set_xticks([i + 0.4 - 0.4 / len(lost) for i in range(len(labels))], labels)
    axes.set_ylabel("overhead, % of useful time")
    axes.set_yscale("log")
    axes.legend()
    axes.set_title(f"Overhead of failures ({path.stem})")
    figure.savefig(path.with_name(f"{path.stem}-overhead.png"), dpi=120)
    plt.close(figure)

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for strategy in ORDER[1:]:
        runs = [run for key, group in found.items() if key[0] == strategy for run in group]
        if not runs:
            continue
        x, y = [run["pls"] for run in runs], [run["delta"] for run in runs]
        r = statistics.correlation(x, y) if len(set(x)) > 1 and len(set(y)) > 1 else math.nan
        axes.scatter(x, y, s=14, alpha=0.7, label=f"{strategy}, r = {r:.2f}")
    axes.axhline(0, color="0.6", lw=0.8)
    axes.set_xlabel("PLS")
    axes.set_ylabel("AUC - AUC of the undisturbed run")
    axes.legend()
    axes.set_title(f"Accuracy against PLS ({path.stem})")
    figure.savefig(path.with_name(f"{path.stem}-auc.png"), dpi=120)
    plt.close(figure)
