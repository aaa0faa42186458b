"""A whole host dies, its launcher too: the other one hands its rows over, or the job is resharded onto it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_cpr.checkpoint_io import find_version
from lightning_cpr.report.events import read_events
from lightning_cpr.store.storage import Storage
from tests.dist._hosts import two_hosts, wait_for, why_no_hosts
from tests.dist._jobs import ROOT, Job, read_logs, still_running

JOB = ROOT / "tests" / "dist" / "killed_job.py"
# torchrun keeps the address of a store that died with its host, unless rank 0's process has the store.
ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "-"),
]


def options(nodes: str, address: str, endpoint: str) -> list[str]:
    is_host = int(address == endpoint)  # of the rendezvous store
    conf = f"keep_alive_interval=2,keep_alive_max_attempt=3,last_call_timeout=2,join_timeout=300,is_host={is_host}"
    return [
        f"--nnodes={nodes}", "--nproc-per-node=1", "--max-restarts=2", "--rdzv-backend=c10d", "--rdzv-id=job",
        f"--rdzv-endpoint={endpoint}:29400", f"--local-addr={address}", f"--rdzv-conf={conf}", "--monitor-interval=0.1",
    ]  # fmt: skip


def run(out: Path, nodes: str, replaced: bool, *args: str, guarded: bool = False) -> Job:
    """Host 1 is killed while its rank stands in batch 24, and comes back empty if ``replaced``.

    guarded: under ``lightning-cpr run``.
    """
    how: Any = {"launcher": ("lightning_cpr.cli", "run")} if guarded else {"env": ENV}
    spares = ["--spares=0"] if guarded else []
    with two_hosts(out) as (first, second):
        script = [*spares, str(JOB), "--out", str(out), *args]
        hang = [a for rank in (0, 1) for a in ("--hang", f"{rank}:24:forward")]
        one = first.launch([*options(nodes, first.address, first.address), *script], **how)
        two = second.launch([*options(nodes, second.address, first.address), *script, *hang], **how)

        def told() -> str:
            return f"{first.log()[-6000:]}\n{second.log()[-3000:]}"

        def hangs() -> bool:
            assert one.poll() is None, told()
            assert two.poll() is None, told()
            logs = read_logs(out)
            return len(logs) == 2 and all(any(e.get("step") == 24 for e in log) for log in logs.values())

        wait_for(hangs, 300, told)
        second.kill()
        if replaced:
            second.launch([*options(nodes, second.address, first.address), *script], **how)
        code = one.wait(timeout=300)
        assert code == 0, told()
        return Job(code, f"{first.log()}\n{second.log()}", read_logs(out))


def first_of(job: Job, pid: int, event: str) -> dict[str, object]:
    return next(e for (_, p), log in job.logs.items() if p == pid for e in log if e["event"] == event)


@pytest.mark.parametrize("guarded", [False, True], ids=["torchrun", "lightning-cpr run"])
def test_the_other_hosts_rows_are_handed_over_to_whatever_rank_takes_them(guarded: bool, tmp_path: Path) -> None:
    job = run(tmp_path, "2", True, guarded=guarded)
    broke = next(e | {"rank": rank} for (rank, _), log in job.logs.items() for e in log if e["event"] == "broke")
    owner = broke["rank"]
    (recovery,) = [e for e in read_events(Storage(str(tmp_path / "root"))) if e["event"] == "recovery"]
    assert (recovery["handed_over"], recovery["failed"], recovery["step"]) == ([owner], [1 - owner], 23)
    # Keyed by shard: whichever rank has the survivor's shards now, has them bit for bit.
    kept = next(e for e in job.events(owner, "before") if e["pid"] == job.pids(owner)[-1])
    assert (kept["step"], kept["rows"], kept["dense"]) == (24, broke["rows"], broke["dense"])
    assert [e["step"] for rank in (0, 1) for e in job.events(rank, "end")] == [40, 40]
    version = find_version(str(tmp_path / "root")).manifest
    assert (version.step, version.epoch) == (40, 1)
    assert recovery["bytes_read"] < 10_000
    assert still_running(tmp_path) == []


def test_fewer_hosts_go_on_from_the_store(tmp_path: Path) -> None:
    job = run(tmp_path, "1:2", False, "--resume", "reshard")
    assert "refused and removed: it is of run" in job.stderr  # another plan
    (end,) = job.events(0, "end")
    assert end["step"] == 40
    manifest = find_version(str(tmp_path / "root")).manifest
    assert (manifest.step, manifest.world_size, manifest.epoch) == (40, 1, 1)
    started = [e for e in read_events(Storage(str(tmp_path / "root"))) if e["event"] == "run_started"]
    assert [e["world_size"] for e in started] == [2, 1]
    assert len({e["run_id"] for e in started}) == 1
    assert started[1]["step"] in (10, 20)
    assert still_running(tmp_path) == []
