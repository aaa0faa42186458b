"""Stock torchrun: a rank is killed, all are restarted, and only the killed one's rows come from the store."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_cpr.checkpoint_io import find_version
from lightning_cpr.report.events import read_events
from lightning_cpr.store.storage import Storage
from tests.dist._jobs import ROOT, run_job, still_running

JOB = ROOT / "tests" / "dist" / "killed_job.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


@pytest.mark.slow
@pytest.mark.parametrize(("point", "finished"), [("forward", 23), ("batch_end", 24)])
def test_survivors_keep_their_rows_over_a_restart(point: str, finished: int, tmp_path: Path) -> None:
    args = ["--kill", f"1:24:{point}", "--meet-at-batch-end"]
    job = run_job(JOB, tmp_path, args, ["--max-restarts=1", "--nproc-per-node=2"], 280, launch=TORCHRUN)
    assert job.code == 0, job.stderr[-5000:]
    assert (len(job.pids(0)), len(job.pids(1))) == (2, 2)
    (broke,) = job.events(0, "broke")
    second = job.pids(0)[1], job.pids(1)[1]
    kept, restored = (next(e for e in job.events(rank, "before") if e["pid"] == pid) for rank, pid in enumerate(second))
    # the survivor: bit-identical rows, dense part and step of the moment that broke
    assert kept["step"] == restored["step"] == finished + 1
    assert kept["rows"] == broke["rows"]
    assert kept["dense"] == restored["dense"] == broke["dense"]
    # the lost one: the newest version's rows, the survivor's dense part and replicated table
    events = read_events(Storage(str(tmp_path / "root")))
    (recovery,) = [e for e in events if e["event"] == "recovery"]
    assert (recovery["failed"], recovery["handed_over"], recovery["mode"]) == ([1], [0], "partial")
    assert recovery["step"] == finished
    step = int(recovery["version"].split(".")[2])
    assert step in (10, 20)
    saved = next(e["rows"] for e in job.events(1, "step") if e["step"] == step)
    replicated = {name for name in saved if ".c[" in name}
    assert {k: v for k, v in restored["rows"].items() if k not in replicated} == {
        k: v for k, v in saved.items() if k not in replicated
    }
    assert {k: restored["rows"][k] for k in replicated} == {k: kept["rows"][k] for k in replicated}
    # batches go on where they broke, each is trained once
    for rank in (0, 1):
        assert [e["batch"] for e in job.events(rank, "step")] == list(range(40))
    # PLS of the formula
    (charge,) = recovery["ledger"]["losses"]
    ends = [job.events(r, "end")[0] for r in (0, 1)]
    version = find_version(str(tmp_path / "root"))
    elements = sum(r.spec.elements for r in version.manifest.shards if not r.spec.replicated)
    assert recovery["pls"] == pytest.approx(charge["elements"] / elements * (finished - step) / 40, rel=1e-9)
    assert [e["pls"] for e in ends] == [recovery["pls"]] * 2
    assert [e["step"] for e in ends] == [40, 40]
    assert (version.manifest.step, version.manifest.epoch) == (40, 1)
    # the lost shard alone is read
    assert recovery["bytes_read"] < 10_000
    assert still_running(tmp_path) == []


@pytest.mark.slow
def test_a_hand_over_beyond_what_the_user_bears_is_not_gone_on_with(tmp_path: Path) -> None:
    args = ["--kill", "1:24:forward", "--max-pls=0.01", "--steps=30"]
    job = run_job(JOB, tmp_path, args, ["--max-restarts=2", "--nproc-per-node=2"], 280, launch=TORCHRUN)
    assert job.code == 0, job.stderr[-5000:]
    assert (len(job.pids(0)), len(job.pids(1))) == (3, 3)
    events = read_events(Storage(str(tmp_path / "root")))
    assert [e["handed_over"] for e in events if e["event"] == "run_started" and "handed_over" in e] == [[0]]
    assert any("above max_pls=0.01: everybody goes back" in e["error"] for e in events if e["event"] == "stepped_down")
    assert not [e for e in events if e["event"] == "recovery"]
    for rank in (0, 1):
        assert [e["step"] for e in job.events(rank, "step")] == [*range(1, 24), *range(21, 31)]
        (end,) = job.events(rank, "end")
        assert (end["step"], end["pls"]) == (30, 0.0)
    assert still_running(tmp_path) == []
