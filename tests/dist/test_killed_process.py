"""A process is killed for real: it is replaced, gets its shard from the newest version, and nobody else restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_cpr.checkpoint_io import find_version
from lightning_cpr.report.events import read_events
from lightning_cpr.store.storage import Storage
from tests.dist._jobs import ROOT, run_job, still_running

JOB = ROOT / "tests" / "dist" / "killed_job.py"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 0])
def test_only_the_lost_shard_comes_back(rank: int, tmp_path: Path) -> None:
    options = ["--max-restarts=0", "--nproc-per-node=2", "--spares=1"]
    job = run_job(JOB, tmp_path, ["--kill", f"{rank}:24:forward"], options, timeout=240)
    assert job.code == 0, job.stderr[-5000:]
    other, root = 1 - rank, str(tmp_path / "root")
    assert (len(job.pids(rank)), len(job.pids(other))) == (2, 1)
    ends = [job.events(r, "end")[0] for r in (0, 1)]
    assert [e["step"] for e in ends] == [40, 40]
    events = read_events(Storage(root))
    (recovery,) = [e for e in events if e["event"] == "recovery"]
    assert (recovery["failed"], recovery["mode"]) == ([rank], "partial")
    step = int(recovery["version"].split(".")[2])
    assert step in (10, 20)
    # the replacement goes on with the rows that were saved
    saved = next(e["rows"] for e in job.events(rank, "step") if e["step"] == step)
    first = next(e for e in job.events(rank, "restored"))
    assert first["pid"] == job.pids(rank)[1]
    assert {k: v for k, v in first["rows"].items() if ".c[" not in k} == {
        k: v for k, v in saved.items() if ".c[" not in k
    }
    # the survivor's rows did not change
    kept = job.events(other, "restored")[0]
    assert kept["rows"] == kept["rows_before"]
    assert recovery["bytes_read"] < 10_000
    # PLS of the formula: the lost rank's share of the sharded elements, since the version
    (charge,) = recovery["ledger"]["losses"]
    elements = sum(r.spec.elements for r in find_version(root).manifest.shards if not r.spec.replicated)
    assert recovery["pls"] == pytest.approx(charge["elements"] / elements * (recovery["step"] - step) / 40, rel=1e-9)
    assert [e["pls"] for e in ends] == [recovery["pls"]] * 2
    # the survivor trained every step, in one process
    assert [e["step"] for e in job.events(other, "step")] == list(range(1, 41))
    # saving went on after the recovery, in the new epoch
    version = find_version(root)
    assert (version.manifest.step, version.manifest.epoch) == (40, 1)
    assert still_running(tmp_path) == []
