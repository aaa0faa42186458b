"""Processes are killed for real: they are replaced, get their shards from the newest version, and nobody else restarts.

What lies outside a training step restarts the job, by the rule in docs/recovery.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_cpr.checkpoint_io import find_version
from lightning_cpr.policy.ledger import event_from_json, replay
from lightning_cpr.report.events import read_events
from lightning_cpr.spec import ShardSpec
from lightning_cpr.store.manifest import split_version
from lightning_cpr.store.reader import read_table
from lightning_cpr.store.storage import Storage
from lightning_cpr.store.versions import newest
from tests._tiny import make_batch
from tests.dist._forked import Zygote
from tests.dist._jobs import ROOT, Job, run_job, still_running

JOB = ROOT / "tests" / "dist" / "killed_job.py"
STEPS = 40
PHASES = ("detect_s", "rendezvous_s", "rebuild_s", "restore_s", "first_step_s", "total_s")


def kills(*kills: str) -> list[str]:
    return [part for kill in kills for part in ("--kill", kill)]


def check_batches(job: Job, world: int) -> None:
    """Each rank's data went on without a gap; a batch that a rank left out (others had finished it) is none."""
    for rank in range(world):
        for told in job.events(rank, "step"):
            assert told["batch"] == told["step"] - 1
            assert told["data"] == float(make_batch(told["batch"], rank).dense_features.double().sum())


def check_pls(events: list[dict[str, Any]], ends: list[dict[str, Any]], samples: int) -> None:
    """The reported PLS is that of the event log, charge by charge from what each version held."""
    recoveries = [e for e in events if e["event"] == "recovery"]
    start = next(e for e in events if e["event"] == "run_started")
    ledger = replay(start["total_elements"], [event_from_json(e["ledger"]) for e in recoveries])
    assert {e["pls"] for e in ends} == {ledger.pls(samples)}
    recovered: dict[int, int] = {}
    for event, charge in zip(recoveries, ledger.charges, strict=True):
        version = split_version(event["version"]).step * samples // STEPS
        for loss in charge.losses:
            assert loss.held == (
                charge.samples - samples // STEPS if loss.kept else max(version, recovered.get(loss.owner, 0))
            )
            if not loss.kept:
                recovered[loss.owner] = charge.samples


def lookups(step: int, shards: set[ShardSpec]) -> int:
    """Ids of both ranks' batches of a step that fall on these shards."""
    batches = [make_batch(step - 1, source).sparse_features for source in (0, 1)]
    ids = {table: torch.cat([batch[f"f_{table}"].values() for batch in batches]) for table in "ab"}
    found = {spec: ids[spec.table.rsplit(".", 1)[1]] for spec in shards}
    return sum(int(((i >= s.row_start) & (i < s.row_end)).sum()) for s, i in found.items())


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 0])
def test_only_the_lost_shard_comes_back(rank: int, tmp_path: Path) -> None:
    """With the real launcher."""
    options = ["--nproc-per-node=2", "--max-restarts=0", "--spares=1"]
    job = run_job(JOB, tmp_path, kills(f"{rank}:24:forward"), options, timeout=240)
    assert job.code == 0, job.stderr[-5000:]
    other, root = 1 - rank, str(tmp_path / "root")
    assert (len(job.pids(rank)), len(job.pids(other))) == (2, 1)
    ends = [job.events(r, "end")[0] for r in (0, 1)]
    assert [e["step"] for e in ends] == [STEPS] * 2
    events = read_events(Storage(root))
    (recovery,) = [e for e in events if e["event"] == "recovery"]
    assert (recovery["failed"], recovery["mode"]) == ([rank], "partial")
    step = split_version(recovery["version"]).step
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
    assert {(s["rank"], s["source"], s["name"]) for s in recovery["sources"]} == {(rank, "store", recovery["version"])}
    # both ranks broke before their backward: no update is doubled; lost ones are as many as the other rank's
    assert (recovery["double_row_updates"], recovery["left_out_by"]) == (0, [])
    (told,) = [e for e in events if e["event"] == "rejoined"]
    assert told["step"] == recovery["step"] + 1
    assert all(told[phase] >= 0 for phase in PHASES)
    assert told["total_s"] >= max(told[phase] for phase in PHASES)
    check_pls(events, ends, 2 * 4 * STEPS)
    check_batches(job, 2)
    # PLS of the formula: the lost rank's share of the sharded elements, since the version
    (charge,) = recovery["ledger"]["losses"]
    elements = sum(r.spec.elements for r in find_version(root).manifest.shards if not r.spec.replicated)
    assert recovery["pls"] == pytest.approx(charge["elements"] / elements * (recovery["step"] - step) / 40, rel=1e-9)
    assert [e["pls"] for e in ends] == [recovery["pls"]] * 2
    # the row updates that went with the process: told by it at its last save, of step 20
    mine = {r.spec for r in find_version(root).manifest.shards if r.spec.owner == rank and not r.spec.replicated}
    per_batch = sum(lookups(k, mine) for k in range(1, 21)) / 20
    assert recovery["lost_row_updates"] == round(per_batch * (recovery["step"] - step))
    assert recovery["lost_row_updates_exact"] is False
    truly = sum(lookups(k, mine) for k in range(step + 1, recovery["step"] + 1))
    assert recovery["lost_row_updates"] == pytest.approx(truly, rel=0.5)
    # the survivor trained every step, in one process
    assert [e["step"] for e in job.events(other, "step")] == list(range(1, STEPS + 1))
    # saving went on after the recovery, in the new epoch
    version = find_version(root)
    assert (version.manifest.step, version.manifest.epoch) == (STEPS, 1)
    assert still_running(tmp_path) == []


def test_a_second_death_while_rows_come_back_behind_the_training(tmp_path: Path, zygote: Zygote) -> None:
    """Nobody has the first one's rows as they were: the job starts again, and hands over what is whole."""
    job = zygote.run(
        JOB, tmp_path, [*kills("1:18:forward", "2:18:backward"), "--parity", "--steps=20"], 3, max_restarts=1
    )
    assert job.code == 0, job.stderr[-5000:]
    ends = [job.events(rank, "end")[0] for rank in range(3)]
    assert [e["step"] for e in ends] == [20] * 3
    assert all(e["dense"] == ends[0]["dense"] for e in ends)
    assert "another process was lost before all rows of rank 1, a replacement, were back" in job.stderr
    events = read_events(Storage(str(tmp_path / "root")))
    recoveries = [e for e in events if e["event"] == "recovery"]
    assert [(e["failed"], e["source"]) for e in recoveries] == [([1], "parity"), ([1, 2], "store")]
    assert recoveries[1]["handed_over"] == [0]
    check_batches(job, 3)


@pytest.mark.slow
def test_deaths_in_every_phase_of_a_step_and_of_a_save_on_every_rank(tmp_path: Path, zygote: Zygote) -> None:
    """In a save; two at once, in forward and backward; before an optimizer step; and in the recovery from that."""
    told = kills("1:10:mid_write", "2:18:backward", "3:18:forward", "0:27:optimizer", "0:0:restore")
    job = zygote.run(JOB, tmp_path, told, 4)
    assert job.code == 0, job.stderr[-5000:]
    assert [len(job.pids(rank)) for rank in range(4)] == [3, 2, 2, 2]
    ends = [job.events(rank, "end")[0] for rank in range(4)]
    assert [e["step"] for e in ends] == [STEPS] * 4
    assert [e["samples"] for e in ends] == [4 * 4 * STEPS] * 4
    assert all(e["dense"] == ends[0]["dense"] for e in ends)
    for rank in range(4):
        kept = [e for e in job.events(rank, "restored") if rank not in e["lost"]]
        assert kept
        assert all(e["rows"] == e["rows_before"] for e in kept)
        new = [e for e in job.events(rank, "restored") if rank in e["lost"]]
        assert new
    events = read_events(Storage(str(tmp_path / "root")))
    failed = [e["failed"] for e in events if e["event"] == "recovery"]
    assert failed[0] == [1]
    assert failed[-1] == [0]
    assert {rank for ranks in failed for rank in ranks} == {0, 1, 2, 3}
    # the planner has heard of each
    assert len([e for e in events if e["event"] == "replan" and e["because"] == "failed"]) == len(failed)
    check_pls(events, ends, 4 * 4 * STEPS)
    check_batches(job, 4)
    assert still_running(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kill", "where"),
    [("1:0:sanity", "in the sanity check"), ("0:15:validation", "in validation")],
)
def test_a_death_outside_a_training_step_restarts_the_job(
    kill: str, where: str, tmp_path: Path, zygote: Zygote
) -> None:
    """By the rule in docs/recovery.md: no recovery in place."""
    job = zygote.run(JOB, tmp_path, [*kills(kill), "--validate", "--steps=20"], 2, max_restarts=1)
    assert job.code == 0, job.stderr[-5000:]
    rank, step, point = kill.split(":")
    assert [(e["point"], e["step"]) for e in job.events(int(rank), "kill")] == [(point, int(step))]
    assert [e["step"] for r in (0, 1) for e in job.events(r, "end")] == [20, 20]
    events = read_events(Storage(str(tmp_path / "root")))
    assert not [e for e in events if e["event"] == "recovery"]
    assert {e["where"] for e in events if e["event"] == "stepped_down"} == {where}
    assert "this rank steps down" in job.stderr
    assert still_running(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "why"),
    [
        ("--recovery=full", r"CPRCallback\(recovery='full'\)"),
        ("--max-pls=0.01", r"the PLS would be 0\.\d+, above max_pls=0.01"),
    ],
)
def test_a_death_beyond_what_the_user_bears_restarts_the_job(
    limit: str, why: str, tmp_path: Path, zygote: Zygote
) -> None:
    """Everybody goes back to the last exact version: nothing is handed over, and nothing is lost."""
    job = zygote.run(JOB, tmp_path, [*kills("1:15:backward"), limit, "--steps=20"], 2, max_restarts=1)
    assert job.code == 0, job.stderr[-5000:]
    events = read_events(Storage(str(tmp_path / "root")))
    assert [(e["point"], e["step"]) for e in events if e["event"] == "fault"] == [("backward", 15)]
    assert not [e for e in events if e["event"] == "recovery"]
    errors = {e["error"] for e in events if e["event"] == "stepped_down"}
    assert all(re.match(f"{why}: everybody goes back", error) for error in errors), errors
    assert errors
    assert not any("handed_over" in e for e in events)
    for rank in (0, 1):
        assert [e["step"] for e in job.events(rank, "step")] == [*range(1, 15), *range(11, 21)]
        (end,) = job.events(rank, "end")
        assert (end["step"], end["pls"]) == (20, 0.0)
    assert still_running(tmp_path) == []


@pytest.mark.slow
def test_max_pls_is_passed_where_no_restart_is_left(tmp_path: Path, zygote: Zygote) -> None:
    job = zygote.run(JOB, tmp_path, [*kills("1:15:backward"), "--max-pls=0.01", "--steps=20"], 2)
    assert job.code == 0, job.stderr[-5000:]
    (recovery,) = [e for e in read_events(Storage(str(tmp_path / "root"))) if e["event"] == "recovery"]
    assert (recovery["mode"], recovery["failed"]) == ("partial", [1])
    assert "the PLS passes max_pls=0.01" in job.stderr
    assert job.events(0, "end")[0]["pls"] > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 0])
def test_a_death_in_the_last_save_restarts_the_job_at_once(rank: int, tmp_path: Path, zygote: Zygote) -> None:
    """The survivor waits for the save, in no collective: it was taken for stuck. No batch is left, so that rows which
    are handed over would be all that comes back.
    """
    job = zygote.run(JOB, tmp_path, [*kills(f"{rank}:20:pre_write"), "--steps=20"], 2, max_restarts=1)
    assert job.code == 0, job.stderr[-5000:]
    events = read_events(Storage(str(tmp_path / "root")))
    assert [(e["point"], e["step"]) for e in events if e["event"] == "fault"] == [("pre_write", 20)]
    assert "is stuck" not in job.stderr
    assert "hands nothing over (training is over" in job.stderr
    for each in (0, 1):  # once, and again from the version before
        assert [e["step"] for e in job.events(each, "step")] == [*range(1, 21), *range(11, 21)]
    assert [e["step"] for r in (0, 1) for e in job.events(r, "end")] == [20, 20]
    assert newest(Storage(str(tmp_path / "root"))).require().step == 20
    assert still_running(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 0])
def test_lightnings_own_checkpoints_go_on_after_a_recovery_in_place(rank: int, tmp_path: Path, zygote: Zygote) -> None:
    job = zygote.run(JOB, tmp_path, [*kills(f"{rank}:8:forward"), "--validate", "--steps=20"], 2)
    assert job.code == 0, job.stderr[-5000:]
    root = Storage(str(tmp_path / "root"))
    assert [e["failed"] for e in read_events(root) if e["event"] == "recovery"] == [[rank]]
    (checkpoint,) = (tmp_path / "checkpoints").glob("*step=20*.ckpt")
    saved, last = find_version(str(checkpoint)), find_version(str(tmp_path / "root"))
    assert (saved.manifest.step, last.manifest.step) == (20, 20)
    for table in saved.manifest.tables:
        weight, states = read_table(saved.storage, saved.manifest, table.fqn)
        expected, sums = read_table(last.storage, last.manifest, table.fqn)
        assert torch.equal(weight, expected)
        assert states.keys() == sums.keys()
        assert all(torch.equal(states[name], sums[name]) for name in sums)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 0])
def test_rates_and_step_counters_of_tables_that_nobody_else_holds_come_back(
    rank: int, tmp_path: Path, zygote: Zygote
) -> None:
    job = zygote.run(JOB, tmp_path, [*kills(f"{rank}:24:forward"), "--rate=0.25"], 2)
    assert job.code == 0, job.stderr[-5000:]
    assert len(job.pids(rank)) == 2
    ends = [job.events(r, "end")[0]["scalars"] for r in (0, 1)]
    for scalars in ends:
        assert {values["lr"] for values in scalars.values()} == {0.25}
    assert ends[0].keys() != ends[1].keys()
    counters = {values["iter"] for scalars in ends for values in scalars.values() if "iter" in values}
    assert counters <= {STEPS, STEPS + 1}  # a survivor's kernel may have made the broken batch's step
