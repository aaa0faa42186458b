"""Measured costs put through the job simulator: what fault tolerance costs in all, by parity and by full checkpoints.

A full checkpoint stops training for the time that one took here, at the interval that costs least; a failure costs a
restart, the load, and the work since. Parity costs its upkeep all the time, and a rebuild per failure. Two upkeeps are
shown: ``here``, as measured, where all ranks and their exchanges share two cores; ``cluster``, where an exchange runs
beside a step of ``STEP_S`` on a core and a network of its own, and a step waits for what its own thread does.
"""

from __future__ import annotations

from typing import Any

from lightning_cpr.simulate import simulate
from lightning_cpr.simulate.scenario import Failures, Job, Scenario, SimulatedCosts, Strategy

H = 3600.0
MTBFS_H = (0.5, 2.0, 8.0, 20.0)
STEP_S = 0.1
NETWORK_BYTES_S = 25e9 / 8
RESTART_S = 7.4
"""Of a whole job of four ranks, to the first step: `benchmarks/recovery` on an idle machine."""
DETECT_S = 0.5
"""From a kill to the first step with a warm spare, without the rows: the same benchmark."""


def upkeep(mode: dict[str, float]) -> dict[str, float]:
    """Share of useful time. ``mode``: what the benchmark measured of an ``every_n_steps``."""
    here = max(0.0, mode["run_s"] / mode["off_run_s"] - 1)
    wire = mode["bytes_sent_a_step"] / NETWORK_BYTES_S
    late = max(0.0, mode["hidden_core_ms_a_step"] / 1e3 + wire - STEP_S)
    return {"here": here, "cluster": (mode["unhidden_core_ms_a_step"] / 1e3 + late) / STEP_S}


def overheads(results: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """For each MTBF and each mode: overheads as shares of useful time, and how far below full checkpoints."""
    store, rebuild = results["store"], results["rebuild"]
    costs = SimulatedCosts(save=store["save_s"], load=store["load_s"], restart=RESTART_S)
    rows = []
    for mtbf in MTBFS_H:
        strategies = [Strategy("full")]
        for every in (1, 8, 64):
            for where, share in upkeep(results[f"every_{every}"]).items():
                strategies.append(
                    Strategy(
                        f"every {every}, {where}", "parity", upkeep=share, rebuild=rebuild["seconds"],
                        rebuild_restart=DETECT_S,
                    )
                )  # fmt: skip
        scenario = Scenario(Job(56 * H, owners=4), Failures(mtbf * H), costs, tuple(strategies), runs=500)
        outcomes = simulate(scenario)
        full = outcomes[0].overhead.total
        for outcome in outcomes:
            total = outcome.overhead.total
            rows.append(
                {
                    "mtbf_h": mtbf,
                    "strategy": outcome.strategy,
                    "save_every_s": round(outcome.interval, 1),
                    "overhead": round(total, 6),
                    "below_full": round(1 - total / full, 4),
                }
            )
    return rows


def recovery_ratio(results: dict[str, dict[str, float]], mtbf_h: float = 20.0) -> dict[str, float]:
    """A failure's cost by restart and reload, lost work counted, over its cost by parity."""
    full = next(r for r in overheads(results) if r["mtbf_h"] == mtbf_h and r["strategy"] == "full")
    restart = RESTART_S + results["store"]["load_s"] + full["save_every_s"] / 2
    parity = DETECT_S + results["rebuild"]["seconds"]
    return {
        "restart_and_reload_s": round(restart, 2),
        "of_it_lost_work_s": round(full["save_every_s"] / 2, 2),
        "parity_s": round(parity, 3),
        "ratio": round(restart / parity, 1),
        "ratio_without_lost_work": round((RESTART_S + results["store"]["load_s"]) / parity, 1),
    }
