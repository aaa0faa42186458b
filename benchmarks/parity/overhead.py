"""Measured costs put through the job simulator: what fault tolerance costs in all, by parity and by full checkpoints.

A full checkpoint stops training for the time that one took here, at the interval that costs least; a failure costs a
restart, the load, and the work since. Parity costs its upkeep all the time, and a rebuild per failure. Two upkeeps are
shown: ``here``, as measured, where all ranks and their exchanges share two cores; ``cluster``, where an exchange runs
beside a step of ``STEP_S`` on a core and a network of its own, and a step waits for what its own thread does, but for
what it does because the thread that keeps its rows had no core to begin on.
"""

from __future__ import annotations

from typing import Any

from lightning_cpr.simulate import simulate
from lightning_cpr.simulate.scenario import Failures, Job, Scenario, SimulatedCosts, Strategy

H = 3600.0
MTBFS_H = (0.5, 2.0, 8.0, 20.0)
SIZES_GB = (1.0, 10.0, 50.0)
STEP_S = 0.1
NETWORK_BYTES_S = 25e9 / 8
RESTART_S = 8.8
"""Of a whole job of four ranks, to the first step: `benchmarks/recovery` on an idle machine."""
DETECT_S = 0.25
"""From a kill to the first step with a warm spare, without the rows: the same benchmark."""


def upkeep(mode: dict[str, float]) -> dict[str, float]:
    """Share of useful time. ``mode``: what the benchmark measured of an ``every_n_steps``."""
    here = max(0.0, mode["run_s"] / mode["off_run_s"] - 1)
    wire = mode["bytes_sent_a_step"] / NETWORK_BYTES_S
    late = max(0.0, mode["hidden_core_ms_a_step"] / 1e3 + wire - STEP_S)
    own = (mode["unhidden_core_ms_a_step"] - mode["unbegun_core_ms_a_step"]) / 1e3
    return {"here": here, "cluster": (own + late) / STEP_S}


def overheads(runs: dict[int, dict[str, dict[str, float]]], shard_bytes: float) -> list[dict[str, Any]]:
    """For each shard size, MTBF and mode: overheads as shares of useful time, and how far below full checkpoints.

    Args:
        runs: measured, by k.
        shard_bytes: of a rank, as measured. A save, a load, a copy and a rebuild of other sizes are scaled linearly.
    """
    rows = []
    for size_gb in (round(shard_bytes / 1e9, 3), *SIZES_GB):
        scale = size_gb * 1e9 / shard_bytes
        for mtbf in MTBFS_H:
            rows += _compare(runs, scale, mtbf, {"gb_a_rank": size_gb, "mtbf_h": mtbf})
    return rows


def _compare(
    runs: dict[int, dict[str, dict[str, float]]], scale: float, mtbf_h: float, labels: dict[str, float]
) -> list[dict[str, Any]]:
    store = runs[2]["store"]
    costs = SimulatedCosts(save=scale * store["save_s"], load=scale * store["load_s"], restart=RESTART_S)
    strategies = [Strategy("full"), Strategy("full, written behind training", stall=scale * store["copy_s"])]
    for k, modes in runs.items():
        for every in (1, 8, 64):
            for where, share in upkeep(modes[f"every_{every}"]).items() if f"every_{every}" in modes else ():
                strategies.append(
                    Strategy(
                        f"k={k}, every {every}, {where}", "parity", upkeep=share,
                        rebuild=scale * modes["rebuild"]["seconds"], rebuild_restart=DETECT_S,
                    )
                )  # fmt: skip
    outcomes = simulate(Scenario(Job(56 * H, owners=4), Failures(mtbf_h * H), costs, tuple(strategies), runs=500))
    full = outcomes[0].overhead.total
    return [
        labels
        | {
            "strategy": outcome.strategy,
            "save_every_s": round(outcome.interval, 1),
            "overhead": round(outcome.overhead.total, 6),
            "below_full": round(1 - outcome.overhead.total / full, 4),
        }
        for outcome in outcomes
    ]


def recovery_ratio(results: dict[str, dict[str, float]], mtbf_h: float = 20.0) -> dict[str, float]:
    """A failure's cost by restart and reload, lost work counted, over its cost by parity."""
    full = _compare({2: results}, 1.0, mtbf_h, {})[0]
    restart = RESTART_S + results["store"]["load_s"] + full["save_every_s"] / 2
    parity = DETECT_S + results["rebuild"]["seconds"]
    return {
        "restart_and_reload_s": round(restart, 2),
        "of_it_lost_work_s": round(full["save_every_s"] / 2, 2),
        "parity_s": round(parity, 3),
        "ratio": round(restart / parity, 1),
        "ratio_without_lost_work": round((RESTART_S + results["store"]["load_s"]) / parity, 1),
    }
