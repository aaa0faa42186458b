"""A process is killed for real: it is replaced, gets its shard from the newest version, and nobody else restarts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_cpr.checkpoint_io import find_version
from lightning_cpr.report.events import read_events
from lightning_cpr.spec import ShardSpec
from lightning_cpr.store.storage import Storage
from tests._tiny import make_batch
from tests.dist._jobs import ROOT, run_job, still_running

JOB = ROOT / "tests" / "dist" / "killed_job.py"


def lookups(step: int, shards: set[ShardSpec]) -> int:
    """Ids of both ranks' batches of a step that fall on these shards."""
    batches = [make_batch(step - 1, source).sparse_features for source in (0, 1)]
    ids = {table: torch.cat([batch[f"f_{table}"].values() for batch in batches]) for table in "ab"}
    found = {spec: ids[spec.table.rsplit(".", 1)[1]] for spec in shards}
    return sum(int(((i >= s.row_start) & (i < s.row_end)).sum()) for s, i in found.items())


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
    # the row updates that went with the process: told by it at its last save, of step 20
    mine = {r.spec for r in find_version(root).manifest.shards if r.spec.owner == rank and not r.spec.replicated}
    per_batch = sum(lookups(k, mine) for k in range(1, 21)) / 20
    assert recovery["lost_row_updates"] == round(per_batch * (recovery["step"] - step))
    assert recovery["lost_row_updates_exact"] is False
    truly = sum(lookups(k, mine) for k in range(step + 1, recovery["step"] + 1))
    assert recovery["lost_row_updates"] == pytest.approx(truly, rel=0.5)
    # the survivor trained every step, in one process
    assert [e["step"] for e in job.events(other, "step")] == list(range(1, 41))
    # saving went on after the recovery, in the new epoch
    version = find_version(root)
    assert (version.manifest.step, version.manifest.epoch) == (40, 1)
    assert still_running(tmp_path) == []
