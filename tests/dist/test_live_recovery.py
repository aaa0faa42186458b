"""Live recovery of a TorchRec loop without Lightning: processes are really killed, the others keep pid and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist._forked import Zygote
from tests.dist._jobs import ROOT, Job, still_running

JOB = ROOT / "tests" / "dist" / "recovery_job.py"
STEPS = 40


def run(zygote: Zygote, out: Path, world: int, *args: str, options: tuple[str, ...] = (), restarts: int = 0) -> Job:
    return zygote.run(JOB, out, ["--steps", str(STEPS), *args], world, restarts, ["--spares=0", *options])


def check_recovered(job: Job, world: int, kills: dict[int, int]) -> None:
    """All ranks ended together, killed ranks once replaced, and nobody else was started again."""
    assert job.code == 0, job.stderr[-3000:]
    ends = [job.events(rank, "end") for rank in range(world)]
    assert [len(e) for e in ends] == [1] * world
    assert {e[0]["step"] for e in ends} == {STEPS}
    assert len({e[0]["dense"] for e in ends}) == 1
    for rank in range(world):
        assert len(job.pids(rank)) == 1 + kills.get(rank, 0), job.stderr[-3000:]
        assert len(job.events(rank, "kill")) == kills.get(rank, 0)


def check_survivors_kept_rows(job: Job, world: int) -> None:
    """Around each recovery survivors' rows are bit-identical, and everybody's dense part is the donor's own."""
    for epoch in {e["epoch"] for rank in range(world) for e in job.events(rank, "restored")}:
        restored = {r: e for r in range(world) for e in job.events(r, "restored") if e["epoch"] == epoch}
        before = {r: last_before(job, r, restored[r]) for r in restored if r not in restored[r]["lost"]}
        donor = restored[0]["donor"]
        assert before
        for rank, told in before.items():
            assert told["rows"] == restored[rank]["rows"]
        assert {e["dense"] for e in restored.values()} == {before[donor]["dense"]}


def last_before(job: Job, rank: int, restored: dict[str, Any]) -> dict[str, Any]:
    own = [e for e in job.events(rank, "before") if e["pid"] == restored["pid"] and e["time"] <= restored["time"]]
    return own[-1]


@pytest.mark.slow
def test_one_of_two_is_killed_then_rank_0(tmp_path: Path, zygote: Zygote) -> None:
    job = run(zygote, tmp_path, 2, "--kill", "1:10:backward", "--kill", "0:25:forward")
    check_recovered(job, 2, {0: 1, 1: 1})
    check_survivors_kept_rows(job, 2)
    assert still_running(tmp_path) == []


@pytest.mark.slow
def test_four_ranks_two_at_once_and_one_during_recovery(tmp_path: Path, zygote: Zygote) -> None:
    """Rank 2's first replacement is killed as it joins; 1 and 3 die at the same step; then 0 between two batches."""
    kills = ["2:8:optimizer", "2:join", "1:20:backward", "3:20:backward", "0:30:batch_end"]
    job = run(zygote, tmp_path, 4, *[a for k in kills for a in ("--kill", k)])
    check_recovered(job, 4, {0: 1, 1: 1, 2: 2, 3: 1})
    check_survivors_kept_rows(job, 4)
    assert still_running(tmp_path) == []


@pytest.mark.slow
def test_a_stopped_rank_is_ended_by_its_guardian_and_replaced(tmp_path: Path, zygote: Zygote) -> None:
    job = run(zygote, tmp_path, 2, "--kill", "1:10:stop", options=("--hang-timeout", "8"))
    check_recovered(job, 2, {1: 1})
    check_survivors_kept_rows(job, 2)
    assert "is silent for" in job.stderr
    assert still_running(tmp_path) == []


@pytest.mark.slow
def test_a_rank_that_is_stuck_while_its_heart_beats_is_found_by_the_others(tmp_path: Path, zygote: Zygote) -> None:
    job = run(zygote, tmp_path, 2, "--kill", "1:10:stall", "--collective", "8", "--free", "3")
    check_recovered(job, 2, {1: 1})
    check_survivors_kept_rows(job, 2)
    assert len(job.events(0, "broke")) == 1
    assert "rank 1 is stuck" in job.stderr
    assert still_running(tmp_path) == []


@pytest.mark.slow
def test_a_bug_in_the_users_code_is_no_lost_peer(tmp_path: Path, zygote: Zygote) -> None:
    """The job ends with that error; no process is replaced, and torchrun's restarts do not repeat the training."""
    job = run(zygote, tmp_path, 2, "--raise-at", "1:10", restarts=2)
    assert job.code != 0
    assert "ValueError: a bug in the user's code" in job.stderr
    assert "takes over" not in job.stderr
    assert [len(job.pids(rank)) for rank in (0, 1)] == [1, 1]
    assert "1 failed with ValueError" in job.stderr or not job.events(0, "broke")
    assert still_running(tmp_path) == []
