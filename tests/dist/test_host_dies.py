"""A whole host dies, its launcher too: the other one's rows go to the host that takes its place, or are resharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_cpr.checkpoint_io import find_version
from lightning_cpr.report.events import read_events
from lightning_cpr.store.reader import read_table
from lightning_cpr.store.storage import Storage
from lightning_cpr.store.versions import list_versions, load_manifest
from tests.dist._hosts import two_hosts, wait_for, why_no_hosts
from tests.dist._jobs import ROOT, Job, read_logs, still_running
from tests.dist.killed_job import digest

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


def test_fewer_hosts_go_on_with_the_rows_of_those_that_are_left(tmp_path: Path) -> None:
    job = run(tmp_path, "1:2", False, "--resume", "reshard")
    storage = Storage(str(tmp_path / "root"))
    broke = next(e | {"rank": rank} for (rank, _), log in job.logs.items() for e in log if e["event"] == "broke")
    owner = broke["rank"]
    (made,) = [load_manifest(storage, ref) for ref in list_versions(storage) if "-handed" in ref.version]
    parent = load_manifest(storage, str(made.parent))
    assert (made.step, made.world_size, made.consistency) == (23, 2, "mixed")
    assert parent.step in (10, 20)
    # Shard by shard: the survivor's as it left them, the lost one's as they were saved.
    saved = next(e["rows"] for e in job.events(1 - owner, "step") if e["step"] == parent.step)
    tables = {spec.fqn: read_table(storage, made, spec.fqn) for spec in made.tables}
    for spec in (record.spec for record in made.shards):
        weight, states = tables[spec.table]
        there = broke["rows"] if spec.owner == owner or spec.replicated else saved
        for name, values in {"": weight, **{f".{n}": state for n, state in states.items()}}.items():
            key = f"{spec.table}[{spec.row_start}:{spec.row_end},{spec.col_start}]{name}"
            assert digest(values[spec.row_start : spec.row_end]) == there[key], key
    # The one rank that is left trains on with all of them.
    now = next(e for e in job.events(0, "before") if e["pid"] == job.pids(0)[-1])
    assert (now["step"], now["dense"]) == (24, broke["dense"])
    for fqn, (weight, states) in tables.items():
        for name, values in {"": weight, **{f".{n}": state for n, state in states.items()}}.items():
            assert now["rows"][f"{fqn}[0:{len(weight)},0]{name}"] == digest(values)
    (end,) = job.events(0, "end")
    assert (end["step"], end["samples"]) == (40, 23 * 8 + 17 * 4)
    manifest = find_version(str(tmp_path / "root")).manifest
    assert (manifest.step, manifest.world_size, manifest.epoch) == (40, 1, 2)
    events = read_events(storage)
    started = [e for e in events if e["event"] == "run_started"]
    assert [(e["world_size"], e["step"]) for e in started] == [(2, 0), (1, 23)]
    assert len({e["run_id"] for e in started}) == 1
    (recovery,) = [e for e in events if e["event"] == "recovery"]
    assert (recovery["failed"], recovery["handed_over"], recovery["resharded"]) == ([1 - owner], [owner], True)
    sharded = {
        r: sum(s.spec.elements for s in made.shards if s.spec.owner == r and not s.spec.replicated) for r in (0, 1)
    }
    lost = sharded[1 - owner] * (23 * 8 - parent.samples) / sum(sharded.values()) / end["samples"]
    assert end["pls"] == pytest.approx(lost, rel=1e-9)
    assert still_running(tmp_path) == []
