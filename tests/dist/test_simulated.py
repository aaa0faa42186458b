"""The simulator says what a real job with the same failures shows: PLS, saves, work done again, overhead."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_cpr import FaultInjector
from lightning_cpr.faults import RandomFaults
from lightning_cpr.report.events import read_events
from lightning_cpr.simulate import terms
from lightning_cpr.simulate.montecarlo import run
from lightning_cpr.simulate.scenario import Failures, Job, SimulatedCosts, Strategy
from lightning_cpr.store.storage import Storage
from tests._ranks import run_ranks
from tests.dist.test_incremental import fit

STEPS, INTERVAL = 48, 6
FAULTS = RandomFaults(mtbf_steps=12.0, seed=6)
EQUAL_OWNERS = {"a": "row_wise", "b": "data_parallel", "c": "data_parallel"}
MODES = ("partial", "full")


def injected(rank: int, world: int, root: str) -> dict[str, Any]:
    return {
        mode: fit(
            rank, world, f"{root}/{mode}", STEPS, FaultInjector(random=FAULTS), EQUAL_OWNERS,
            save_every_n_steps=INTERVAL, recovery=mode, incremental="consecutive",
        )
        for mode in MODES
    }  # fmt: skip


def simulated(mode: str, steps: list[int], costs: SimulatedCosts, folder: Path) -> dict[str, float]:
    """One run, a step a second, with failures just before the saves of these steps."""
    ends = [step - 1e-6 for step in steps]
    gaps = [end - start for start, end in zip([0.0, *ends], ends, strict=False)] + [float(STEPS)]
    (folder / "trace.txt").write_text("".join(f"{gap!r}s\n" for gap in gaps))
    failures = Failures(float(np.mean(gaps)), kind="trace", trace=str(folder / "trace.txt"))
    job, strategy = Job(float(STEPS), owners=2), Strategy(mode, mode=mode, interval=float(INTERVAL))
    # The seed with which the trace starts at its first gap.
    seed = next(s for s in count() if np.random.default_rng(s).integers(len(gaps), size=1)[0] == len(gaps) - 1)
    tally = run(job, strategy, failures, [terms(job, failures, costs, strategy, {})], np.random.default_rng(seed), 1)
    return {name: float(values[0]) for name, values in tally.items()}


@pytest.mark.slow
def test_the_simulator_against_injected_runs_of_the_same_failures(tmp_path: Path) -> None:
    faults = [fault.step for fault in FAULTS.schedule(2, STEPS)]
    slots = [(step - 1) // INTERVAL for step in faults]
    assert len(faults) >= 3
    assert len(set(slots)) == len(slots)  # else the PLS depended on who fails, which the simulator draws
    results = run_ranks(injected, 2, str(tmp_path), timeout=150)
    for mode in MODES:
        real, events = results[0][mode], read_events(Storage(str(tmp_path / mode)))
        recoveries = [e for e in events if e["event"] == "recovery"]
        assert [e["step"] for e in recoveries] == faults
        assert {e["mode"] for e in recoveries} == {mode}
        stalls = [e["stall_s"] for e in events if e["event"] == "save_started" and e["step"]]
        again = sum(e["step"] - int(e["version"].split(".")[2]) for e in recoveries) if mode == "full" else 0
        took = sum(e["seconds"] for e in recoveries)
        costs = SimulatedCosts(save=float(np.mean(stalls)), load=took / len(recoveries), restart=0.0)
        told = simulated(mode, faults, costs, tmp_path)
        assert told["failures"] == len(recoveries)
        assert told["pls"] == pytest.approx(real["pls"], rel=1e-4)
        assert (told["pls"] > 0) == (mode == "partial")
        assert told["lost"] == pytest.approx(again, abs=1e-4)
        assert told["save"] / costs.save == pytest.approx(len(stalls)) == STEPS / INTERVAL
        parts = ("save", "load", "restart", "lost")
        assert sum(told[part] for part in parts) == pytest.approx(sum(stalls) + took + again, rel=1e-4)
