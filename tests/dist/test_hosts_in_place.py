"""Two hosts, each under its own ``lightning-cpr run``: a process that dies on either is replaced in place."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_cpr.checkpoint_io import find_version
from lightning_cpr.report.events import read_events
from lightning_cpr.store.manifest import split_version
from lightning_cpr.store.storage import Storage
from tests.dist._hosts import Host, two_hosts, wait_for, why_no_hosts
from tests.dist._jobs import ROOT, Job, read_logs, still_running
from tests.dist.test_killed_process import STEPS, check_batches, check_pls, kills

JOB = ROOT / "tests" / "dist" / "killed_job.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "-"),
]


def launch(host: Host, first: Host, script: list[str]) -> None:
    """One rank on this host. ``first``: has the rendezvous."""
    options = [
        "--nnodes=2", "--nproc-per-node=1", "--max-restarts=2", "--rdzv-backend=c10d", "--rdzv-id=job",
        f"--rdzv-endpoint={first.address}:29400", f"--local-addr={host.address}", "--monitor-interval=0.1",
        f"--rdzv-conf=is_host={int(host is first)}", "--spares=0",
    ]  # fmt: skip
    host.launch([*options, *script], launcher=("lightning_cpr.cli", "run"))


def run(out: Path, *args: str) -> Job:
    with two_hosts(out) as hosts:
        for host in hosts:
            launch(host, hosts[0], [str(JOB), "--out", str(out), *args])
        launchers = [host.launchers[0] for host in hosts]

        def told() -> str:
            return "\n".join(host.log()[-6000:] for host in hosts)

        wait_for(lambda: all(launcher.poll() is not None for launcher in launchers), 150, told)
        assert [launcher.returncode for launcher in launchers] == [0, 0], told()
        return Job(0, "\n".join(host.log() for host in hosts), read_logs(out))


def test_processes_are_replaced_though_the_agents_count_restarts_differently(tmp_path: Path) -> None:
    """Rank 1 dies as it starts: a restart that only its own agent counts. Then it is replaced in place, then rank 0."""
    job = run(tmp_path, *kills("1:0:start:0", "1:24:forward:1", "0:31:backward:0"))
    died = [(e["pid"], e["point"], e["step"]) for e in job.events(1, "kill")]
    assert died == [(job.pids(1)[0], "start", 0)]
    assert f"trainer {job.pids(1)[0]}: killed by SIGKILL while the job started" in job.stderr
    assert job.stderr.count("takes over") == 2
    assert [e["attempt"] for e in job.events(0, "start")][-2:] == ["0", "0"]
    assert [e["attempt"] for e in job.events(1, "start")] == ["0", "1", "1"]
    ends = [job.events(rank, "end")[0] for rank in (0, 1)]
    assert [(e["step"], e["samples"]) for e in ends] == [(STEPS, 2 * 4 * STEPS)] * 2
    assert ends[0]["dense"] == ends[1]["dense"]
    events = read_events(Storage(str(tmp_path / "root")))
    first, second = (e for e in events if e["event"] == "recovery")
    assert [(e["failed"], e["mode"]) for e in (first, second)] == [([1], "partial"), ([0], "partial")]
    assert not [e for e in events if e["event"] == "stepped_down"]
    # On either host the other's trainer went on, in its process.
    before, after = job.pids(0)[-2:]
    assert {e["pid"] for e in job.events(0, "step") if e["step"] <= second["step"]} == {before}
    assert job.events(0, "end")[0]["pid"] == after
    assert job.events(1, "end")[0]["pid"] == job.pids(1)[-1]
    assert [e["step"] for e in job.events(1, "step") if e["pid"] == job.pids(1)[-1]][-1] == STEPS
    for recovery, lost in ((first, 1), (second, 0)):
        restored = {rank: next(e for e in job.events(rank, "restored") if e["lost"] == [lost]) for rank in (0, 1)}
        kept, new = restored[1 - lost], restored[lost]
        assert kept["rows"] == kept["rows_before"]
        saved = split_version(recovery["version"]).step
        rows = next(e["rows"] for e in job.events(lost, "step") if e["step"] == saved)
        assert {k: v for k, v in new["rows"].items() if ".c[" not in k} == {
            k: v for k, v in rows.items() if ".c[" not in k
        }
    check_batches(job, 2)
    check_pls(events, ends, 2 * 4 * STEPS)
    manifest = find_version(str(tmp_path / "root")).manifest
    assert (manifest.step, manifest.epoch) == (STEPS, 2)
    assert still_running(tmp_path) == []
