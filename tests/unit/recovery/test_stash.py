"""Rows in shared memory for a restart: what is left is what is found, bit for bit, and nothing else is ever taken."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cpr.errors import ConfigError, CorruptShardError, StorageError
from lightning_cpr.recovery import stash
from lightning_cpr.recovery.stash import Key, agent_of, bytes_of
from lightning_cpr.spec import Shard, ShardSpec

KEY = Key("run1", "config", "plan", agent_of(os.getpid()))


def shard(rows: int, cols: int = 4, table: str = "t", start: int = 0, seed: int = 0) -> Shard:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.rand(rows, cols, generator=generator)
    return Shard(
        ShardSpec(table, start, rows, 0, cols, owner=1), weight, {"sum": torch.rand(rows, generator=generator)}
    )


def leave(folder: Path, key: Key, owner: int, step: int, shards: list[Shard], blob: bytes) -> stash.Stash:
    return stash.leave(folder, key, 3, "incarnation", 4, owner, step, shards, blob)


def contents(found: stash.Stash) -> list[tuple[stash.Part, torch.Tensor]]:
    with open(found.rows, "rb") as file:
        return [(part, data.clone()) for part, data in stash.read(found, file.fileno())]


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 9)), max_size=4), blob=st.binary(max_size=200))
def test_what_is_left_is_found_bit_for_bit(
    sizes: list[tuple[int, int]], blob: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("shm")
    shards = [shard(rows, cols, f"t{i}", seed=i) for i, (rows, cols) in enumerate(sizes)]
    left = leave(folder, KEY, 1, 17, shards, blob)
    (found,) = stash.find(folder, KEY)
    assert (found.key, found.owner, found.step, found.pid) == (KEY, 1, 17, os.getpid())
    assert (found.epoch, found.incarnation, found.world_size) == (3, "incarnation", 4)
    assert found.nbytes == stash.size_of(shards) + len(blob) == left.nbytes
    assert stash.check(found) == blob
    taken = {(part.shard.table, part.name): data for part, data in contents(found)}
    for one in shards:
        for name, tensor in (("weight", one.weight), *one.states.items()):
            assert torch.equal(taken[one.spec.table, name], bytes_of(tensor))
    stash.remove([found])
    assert names(folder) == []


def test_pieces_of_a_tensor_that_is_not_contiguous_are_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stash, "_PIECE", 40)
    wide = torch.arange(60.0).reshape(10, 6)
    view = Shard(ShardSpec("t", 0, 10, 0, 3, owner=0), wide[:, 1:4], {})
    leave(tmp_path, KEY, 0, 1, [view], b"")
    (found,) = stash.find(tmp_path, KEY)
    stash.check(found)
    ((_, data),) = contents(found)
    assert torch.equal(data.view(torch.float32).reshape(10, 3), wide[:, 1:4])


def test_one_of_another_plan_is_found_where_any_plan_will_do(tmp_path: Path) -> None:
    leave(tmp_path, KEY, 1, 17, [shard(5)], b"x")
    (found,) = stash.find(tmp_path, replace(KEY, plan="other"), any_plan=True)
    assert (found.key, stash.check(found)) == (KEY, b"x")
    assert stash.find(tmp_path, replace(KEY, plan="other", config="other"), any_plan=True) == []
    assert names(tmp_path) == []


@pytest.mark.parametrize("field", ["run_id", "config", "plan"])
def test_a_stale_one_of_this_launcher_is_refused_and_removed(
    field: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leave(tmp_path, KEY, 1, 17, [shard(5)], b"x")
    other = replace(KEY, **{field: "other"})
    assert stash.find(tmp_path, other) == []
    assert "refused and removed" in caplog.text
    assert names(tmp_path) == []


def test_one_of_another_job_that_runs_is_left_alone_and_goes_when_its_launcher_is_gone(tmp_path: Path) -> None:
    running = replace(KEY, agent=agent_of(os.getppid()))
    leave(tmp_path, running, 1, 17, [shard(5)], b"x")
    assert stash.find(tmp_path, KEY) == []
    assert len(names(tmp_path)) == 2
    pid, _, started = running.agent.partition("-")
    for gone in (f"{2**22 + 1}-1", f"{pid}-{int(started) + 1}"):  # no such process; its number is another's now
        leave(tmp_path, replace(KEY, agent=gone), 1, 17, [shard(5)], b"x")
        assert stash.find(tmp_path, KEY) == []
        assert names(tmp_path) == []


def test_a_torn_one_is_removed(tmp_path: Path) -> None:
    left = leave(tmp_path, KEY, 1, 17, [shard(50)], b"blob")
    left.path.rename(left.path.with_suffix(".torn"))
    assert stash.find(tmp_path, KEY) == []
    assert len(names(tmp_path)) == 2  # its process still lives
    for path in list(tmp_path.iterdir()):
        path.rename(str(path).replace(f".{os.getpid()}.", f".{2**22 + 1}."))
    assert stash.find(tmp_path, KEY) == []
    assert names(tmp_path) == []

    left = leave(tmp_path, KEY, 1, 17, [shard(50)], b"blob")
    os.truncate(left.rows, left.nbytes - 1)
    assert stash.find(tmp_path, KEY) == []
    assert names(tmp_path) == []


@pytest.mark.parametrize("where", ["weight", "state", "blob"])
def test_a_flipped_bit_is_found(where: str, tmp_path: Path) -> None:
    left = leave(tmp_path, KEY, 1, 17, [shard(50)], b"blob")
    at = {"weight": 10, "state": left.parts[1].offset + 3, "blob": left.nbytes - 1}[where]
    data = bytearray(left.rows.read_bytes())
    data[at] ^= 4
    left.rows.write_bytes(data)
    with pytest.raises(CorruptShardError, match="does not match its hash"):
        stash.check(stash.find(tmp_path, KEY)[0])


def test_damaged_metadata_is_removed_and_strangers_are_left_alone(tmp_path: Path) -> None:
    left = leave(tmp_path, KEY, 1, 17, [shard(5)], b"blob")
    left.path.write_text(json.dumps({"key": {}}))
    (tmp_path / "lightning-cpr-notes").write_text("not ours")
    (tmp_path / "lightning-cpr-run1.1.x.json").write_text("not ours")
    assert stash.find(tmp_path, KEY) == []
    assert names(tmp_path) == ["lightning-cpr-notes", "lightning-cpr-run1.1.x.json"]


def test_without_room_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match="has no room"):
        leave(tmp_path, KEY, 1, 17, [shard(5)], b"blob")
    assert names(tmp_path) == []
    with pytest.raises(ConfigError, match="run id"):
        leave(tmp_path, replace(KEY, run_id="../x"), 1, 17, [], b"")


def test_a_launcher_that_gives_up_takes_what_its_processes_left(tmp_path: Path) -> None:
    leave(tmp_path, KEY, 1, 17, [shard(5)], b"x")
    leave(tmp_path, replace(KEY, agent=agent_of(os.getppid())), 2, 17, [shard(5)], b"x")
    stash.remove_of_agent(tmp_path, KEY.agent)
    assert [n for n in names(tmp_path) if n.endswith(".json")] == [f"lightning-cpr-run1.2.{os.getpid()}.json"]
