"""SIGTERM on one rank of a fit: both ranks save the same step, which a new job resumes from, and leave with 143."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lightning_cpr.checkpoint_io import find_version
from lightning_cpr.recovery.preempt import EXIT_PREEMPTED
from tests.dist._jobs import ROOT, run_job, still_running

JOB = ROOT / "tests" / "dist" / "preempt_job.py"
GUARDED = ["-m", "lightning_cpr.cli", "run", "--standalone", "--max-restarts=0", "--nproc-per-node=2", "--spares=0"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=0", "--nproc-per-node=2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "target"),
    [(GUARDED, "parent"), (TORCHRUN, "self"), ([], "self")],
    ids=["lightning-cpr run", "torchrun", "Lightning's launcher"],
)
def test_both_ranks_save_the_same_step_and_leave(launcher: list[str], target: str, tmp_path: Path) -> None:
    job = run_job(JOB, tmp_path, ["--target", target], [], timeout=240, launch=[sys.executable, *launcher])
    told = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert {t["error"] for t in told} == {f"SystemExit({EXIT_PREEMPTED})"}, job.stderr[-4000:]
    (stop,) = {t["step"] for t in told}
    assert 14 <= stop < 120
    manifest = find_version(str(tmp_path / "root")).manifest
    assert (manifest.step, manifest.consistency) == (stop, "exact")
    assert job.code == (1 if launcher == TORCHRUN else EXIT_PREEMPTED)
    if launcher:
        assert f"exitcode  : {EXIT_PREEMPTED}" in job.stderr
    assert "takes over" not in job.stderr
    assert still_running(tmp_path) == []
