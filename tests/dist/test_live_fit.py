"""Live recovery inside an unmodified ``trainer.fit``: loops, schedules and data stand where they would have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests._tiny import make_batch
from tests.dist._forked import Zygote
from tests.dist._jobs import ROOT, Job, run_job, still_running

JOB = ROOT / "tests" / "dist" / "fit_job.py"
BATCHES, EPOCHS = 20, 2
STEPS = BATCHES * EPOCHS


def run(zygote: Zygote, out: Path, world: int, *args: str, restarts: int = 0) -> Job:
    return zygote.run(JOB, out, args, world, restarts)


def check_run(job: Job, world: int) -> None:
    """Every step was trained once on each rank, in order, and the ranks end alike."""
    assert job.code == 0, job.stderr[-3000:]
    ends = [job.events(rank, "end")[0] for rank in range(world)]
    for name, value in (("step", STEPS), ("epoch", EPOCHS), ("last", BATCHES - 1)):
        assert [e[name] for e in ends] == [value] * world
    assert len({e["dense"] for e in ends}) == 1
    assert [e["lr"] for e in ends] == pytest.approx([0.01 * 0.98**STEPS] * world)
    for rank in range(world):
        for told in job.events(rank, "step"):
            k = told["step"] - 1
            assert (told["batch"], told["total"], told["stepped"], told["epoch"]) == (k % BATCHES, k, k, k // BATCHES)
            assert told["data"] == float(make_batch(k % BATCHES, rank).dense_features.double().sum())
        validated = [e["step"] for e in job.events(rank, "validation") if not e["sanity"]]
        assert validated == list(range(BATCHES // 2, STEPS + 1, BATCHES // 2))


def trained(job: Job, rank: int) -> list[int]:
    return [e["step"] for e in job.events(rank, "step")]


@pytest.mark.slow
def test_two_ranks_die_in_turn_and_the_run_is_as_if_nothing_happened(tmp_path: Path) -> None:
    """With the real launcher."""
    kills = ["--kill", "1:17:optimizer", "--kill", "0:33:backward"]
    job = run_job(JOB, tmp_path, kills, ["--max-restarts=0", "--nproc-per-node=2", "--spares=1"], timeout=240)
    check_run(job, 2)
    assert [len(job.pids(rank)) for rank in (0, 1)] == [2, 2]
    assert job.stderr.count("spare") >= 2
    # Rank 0 had finished step 17 when rank 1 died in it: nobody trains its dense part again.
    assert trained(job, 0) == list(range(1, STEPS + 1))
    assert trained(job, 1) == [k for k in range(1, STEPS + 1) if k != 17]
    first, second = job.events(0, "restored")
    assert (first["lost"], first["step"], first["donor"]) == ([1], 17, 0)
    assert (second["lost"], second["step"], second["donor"]) == ([0], 32, 1)
    for rank, told in ((0, first), (1, job.events(1, "restored")[1])):
        start = next(e for e in job.events(rank, "before") if e["step"] == told["step"] + 1)
        assert start["dense"] == told["dense"]
        assert start["rows"] == told["rows"] or told is first  # rank 1's own backward of 33 may have applied
    assert {e["dense"] for rank in (0, 1) for e in job.events(rank, "restored") if e["epoch"] == 1} == {first["dense"]}
    assert still_running(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["manual", "pipelined"])
def test_a_manual_step_is_run_again_from_its_start(kind: str, tmp_path: Path, zygote: Zygote) -> None:
    """Rank 1 dies before its optimizer step; rank 0 has made its own when it hears of that."""
    job = run(zygote, tmp_path, 2, "--kind", kind, "--sync", "--kill", "1:17:optimizer", "--kill", "0:33:backward")
    check_run(job, 2)
    assert [len(job.pids(rank)) for rank in (0, 1)] == [2, 2]
    assert [trained(job, rank) for rank in (0, 1)] == [list(range(1, STEPS + 1))] * 2
    first, second = job.events(0, "restored")
    assert (first["lost"], first["step"], second["lost"], second["step"]) == ([1], 16, [0], 32)
    for rank, told in ((0, first), (1, job.events(1, "restored")[1])):
        start = next(e for e in job.events(rank, "before") if e["step"] == told["step"] + 1)
        assert start["dense"] == told["dense"]
    assert [e["metric"] for e in (job.events(1, "end")[0],)] == [STEPS - 16]  # what its first process had seen is gone
    assert still_running(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["automatic", "manual", "pipelined"])
def test_a_survivor_that_is_a_step_behind_takes_the_newer_dense_state(
    kind: str, tmp_path: Path, zygote: Zygote
) -> None:
    job = run(zygote, tmp_path, 3, "--kind", kind, "--lose", "1:7", "--kill", "2:8:forward")
    check_run(job, 3)
    assert [len(job.pids(rank)) for rank in range(3)] == [1, 1, 2]
    (told,) = job.events(0, "restored")
    assert (told["step"], told["donor"], told["behind"], told["lost"]) == (7, 0, [1], [2])
    assert {job.events(rank, "restored")[0]["dense"] for rank in range(3)} == {told["dense"]}
    if kind == "automatic":
        assert [e["step"] for e in job.events(1, "step") if e["skipped"]] == [7]
    assert trained(job, 1) == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_a_bug_in_the_users_model_ends_the_job_with_that_error(tmp_path: Path, zygote: Zygote) -> None:
    job = run(zygote, tmp_path, 2, "--raise-at", "1:7", restarts=2)
    assert job.code != 0
    assert "ValueError: a bug in the user's code" in job.stderr
    assert [len(job.pids(rank)) for rank in (0, 1)] == [1, 1]
    assert still_running(tmp_path) == []


@pytest.mark.slow
def test_a_loss_that_cannot_be_mended_in_place_restarts_the_job(tmp_path: Path, zygote: Zygote) -> None:
    """Rank 1 dies after its last step of an epoch, so that rank 0 meets the failure in validation."""
    job = run(zygote, tmp_path, 2, "--kill", "1:10:batch_end", restarts=1)
    assert "this rank steps down" in job.stderr
    assert job.code == 0, job.stderr[-3000:]
    assert len(job.events(0, "end")) == 1
    assert [e["step"] for e in job.events(0, "end")] == [STEPS]
