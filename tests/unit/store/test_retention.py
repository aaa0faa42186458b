from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_cpr.errors import ConfigError, CorruptShardError
from lightning_cpr.store import Manifest, Storage, fence, list_versions, load_manifest, newest, read_table, verify
from lightning_cpr.store.compact import compact
from lightning_cpr.store.manifest import compacted_version, split_version
from lightning_cpr.store.retention import Held, Removal, Rules, decide, plan_removal, remove_planned, run_of
from tests.unit.store.helpers import Table, files_of, save_one, table, version
from tests.unit.store.s3 import serve

HOUR = 3600.0


def held(step: int, age_h: float = 1000, exact: bool = True) -> Held:
    return Held(split_version(version(step)), exact, -age_h * HOUR)


def steps(versions: list[Held], rules: Rules, grace_s: float = HOUR) -> list[int]:
    keep = decide(versions, rules, 0.0, grace_s)
    return [one.ref.step for one in versions if one.ref.version in keep]


def test_rules_add_up() -> None:
    every = [held(step, age_h=100 - step / 10) for step in range(90, -1, -10)]
    assert steps(every, Rules()) == list(range(90, -1, -10))
    assert steps(every, Rules(last=3)) == [90, 80, 70]
    assert steps(every, Rules(age_s=92.5 * HOUR)) == [90, 80]
    assert steps(every, Rules(every=40)) == [90, 80, 40, 0]
    assert steps(every, Rules(last=2, every=40)) == [90, 80, 40, 0]
    assert steps(every, Rules(last=1), grace_s=93.5 * HOUR) == [90, 80, 70]


def test_the_newest_exact_is_kept_behind_mixed_ones() -> None:
    every = [held(9, exact=False), held(8, exact=False), held(7), held(6)]
    assert steps(every, Rules(last=1)) == [9, 7]
    assert steps(every, Rules(every=100)) == [9, 7, 6]


def test_a_version_and_its_compaction_count_as_one() -> None:
    every = [held(step) for step in (9, 8, 7, 6)]
    short = [Held(split_version(compacted_version(one.ref.version, "ab12")), True, one.wall_time) for one in every]
    both = [one for pair in zip(short, every, strict=True) for one in pair]
    assert list(decide(both, Rules(last=2), 0.0)) == [one.ref.version for one in short[:2]]
    assert list(decide(both, Rules(every=4), 0.0)) == [short[0].ref.version, short[1].ref.version, short[3].ref.version]
    assert set(decide(both, Rules(last=1), 0.0, 2000 * HOUR)) == {one.ref.version for one in both}
    assert set(decide(both, Rules(), 0.0)) == {one.ref.version for one in both}


@pytest.mark.parametrize("rules", [{"last": 0}, {"age_s": -1.0}, {"every": 0}])
def test_rules_that_keep_nothing_are_refused(rules: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be positive"):
        Rules(**rules)  # type: ignore[arg-type]


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 50)), max_size=20),
    st.one_of(st.none(), st.integers(1, 5)),
    st.one_of(st.none(), st.integers(1, 7)),
    st.one_of(st.none(), st.floats(1, 40)),
)
def test_deciding_twice_changes_nothing(
    saved: list[tuple[bool, int]], last: int | None, every: int | None, age: float | None
) -> None:
    rules = Rules(last, None if age is None else age * HOUR, every)
    all_of_them = [held(step, age_h, exact) for step, (exact, age_h) in reversed(list(enumerate(saved)))]
    keep = decide(all_of_them, rules, 0.0, HOUR)
    left = [one for one in all_of_them if one.ref.version in keep]
    assert set(decide(left, rules, 0.0, HOUR)) == set(keep)
    exact = [one.ref.version for one in all_of_them if one.exact]
    assert set(exact[:1]) | {one.ref.version for one in all_of_them[:1]} <= set(keep)


def history(storage: Storage) -> tuple[Table, list[Manifest]]:
    """base 0, deltas 1 and 2, base 3, delta 4: with its rows after the last."""
    t = table("a", 60, 4)
    saved = [save_one(storage, [t], 0, blobs={"job.pt": b"0"})]
    for step in (1, 2, 3, 4):
        rows = torch.arange(step, 60, 3)
        t.weight[rows] += step
        delta = {} if step == 3 else {"rows": {"a": rows}, "parent": saved[-1].path}
        saved.append(save_one(storage, [t], step, blobs={"job.pt": b"%d" % step}, **delta))  # type: ignore[arg-type]
    return t, saved


def plan(storage: Storage, rules: Rules, run: str = "run", hours: float = 24) -> Removal:
    """As if the clock had moved on."""
    newest_file = max(path.stat().st_mtime for path in Path(storage.root).rglob("*") if path.is_file())
    return plan_removal(storage, run, rules, HOUR, newest_file + hours * HOUR)


def whole(storage: Storage) -> list[int]:
    """The steps of the versions, each of which must be sound."""
    found = []
    for ref in list_versions(storage, "run"):
        assert verify(storage, load_manifest(storage, ref)) == []
        found.append(ref.step)
    return found


def test_what_kept_versions_need_stays(storage: Storage) -> None:
    t, saved = history(storage)
    before = files_of(storage.root)
    removal = plan(storage, Rules(every=2))
    assert files_of(storage.root) == before
    assert [ref.step for ref in removal.versions] == [1, 3]
    # 0 (first of [0, 2)), 2 (first of [2, 4)) and 4: delta 1's rows are needed by 2, base 3's by 4; blobs are not.
    assert {file.path for file in removal.files} == {saved[1].blobs[0].path, saved[3].blobs[0].path}
    removed = remove_planned(storage, removal)
    assert whole(storage) == [4, 2, 0]
    assert set(before) - set(files_of(storage.root)) == {*removed, saved[1].path, saved[3].path}
    assert torch.equal(read_table(storage, newest(storage).require(), "a")[0], t.weight)
    removal = plan(storage, Rules(last=1))
    remove_planned(storage, removal)
    assert whole(storage) == [4]
    kept = {saved[4].path, *(stored.path for stored in saved[4].stored)}
    assert set(files_of(storage.root)) == kept
    assert plan(storage, Rules(last=1)) == Removal("run", {saved[4].version: "newest exact"}, (), ())


def test_after_a_compaction_the_chain_can_go(storage: Storage) -> None:
    t, saved = history(storage)
    done = compact(storage, saved[-1])
    assert done is not None
    remove_planned(storage, plan(storage, Rules(last=1)))
    assert whole(storage) == [4]
    assert newest(storage).require() == done.manifest
    names = {path.split("/")[1] for path in files_of(storage.root) if path.startswith("chunks/")}
    assert names == {done.manifest.version, saved[4].version}  # of the latter, the blob
    assert torch.equal(read_table(storage, done.manifest, "a")[0], t.weight)


def test_other_runs_strangers_and_checkpoints_are_never_touched(storage: Storage) -> None:
    _, saved = history(storage)
    t = table("z", 9, 4)
    other = save_one(storage, [t], 1, run="other")
    save_one(storage, [t], 2, run="other")
    save_one(storage, [t], 1, path="last.ckpt")
    for name in ("notes.txt", "chunks/readme", "chunks/some.folder/x", "manifests/latest", "chunks/run.0.0.x/y"):
        storage.put(name, b"mine")
    fence(storage, "run", 1, "job")
    before = set(files_of(storage.root))
    remove_planned(storage, plan(storage, Rules(last=1)))
    gone = before - set(files_of(storage.root))
    assert gone
    assert all(saved[i].version in path for path in gone for i in range(5) if f"0{i}.n" in path)
    assert {path for path in gone if "/run." not in path and "-run." not in path} == set()
    assert [ref.step for ref in list_versions(storage, "other")] == [2, 1]
    assert verify(storage, other) == []
    with pytest.raises(ConfigError, match=r"2 runs \(other, run\): choose one"):
        run_of(storage)
    assert run_of(storage, "other") == "other"


def test_files_of_killed_saves_go_after_the_grace_period(storage: Storage) -> None:
    history(storage)
    torn = "chunks/run.000000.000000000009.dead/r0-00000.safetensors"
    storage.put(torn, b"torn")
    assert plan(storage, Rules(), hours=0.5).files == ()
    removal = plan(storage, Rules())
    assert [file.path for file in removal.files] == [torn]
    remove_planned(storage, removal)
    assert not (Path(storage.root) / torn).parent.exists()
    assert whole(storage) == [4, 3, 2, 1, 0]


def test_a_young_file_of_a_save_in_flight_stays_among_old_ones(storage: Storage) -> None:
    _, saved = history(storage)
    flight = "chunks/run.000000.000000000005.live/r0-00000.safetensors"
    storage.put(flight, b"in flight")
    now = os.stat(f"{storage.root}/{flight}").st_mtime
    for path in Path(storage.root).rglob("*"):
        if path.is_file() and "live" not in path.name and "live" not in path.parent.name:
            os.utime(path, (now - 2 * HOUR, now - 2 * HOUR))
    removal = plan_removal(storage, "run", Rules(last=1), 0.5 * HOUR, now + 0.1 * HOUR)
    assert removal.versions == ()  # wall_time: committed within the grace period
    assert removal.files == ()
    removal = plan_removal(storage, "run", Rules(last=1), 0.5 * HOUR, now + 0.55 * HOUR)
    assert [ref.step for ref in removal.versions] == [0, 1, 2, 3]
    assert flight in [file.path for file in removal.files]
    assert saved[3].files[0].path not in [file.path for file in removal.files]


def test_a_version_committed_between_plan_and_removal_keeps_its_files(storage: Storage) -> None:
    t, saved = history(storage)
    removal = plan(storage, Rules(last=1))
    late = save_one(storage, [t], 5, rows={"a": torch.arange(3)}, parent=saved[2].path)
    remove_planned(storage, removal)
    assert whole(storage) == [5, 4]
    assert verify(storage, late) == []


def test_an_unreadable_manifest_stops_it(storage: Storage) -> None:
    _, saved = history(storage)
    path = Path(storage.root) / saved[1].path
    path.write_bytes(path.read_bytes()[:-9])
    before = files_of(storage.root)
    with pytest.raises(CorruptShardError, match=f"{saved[1].path}.*nothing was removed"):
        plan(storage, Rules(last=1))
    assert files_of(storage.root) == before


class Killed(BaseException):
    pass


def kill_at(storage: Storage, monkeypatch: pytest.MonkeyPatch, deletes: int) -> Callable[[], int]:
    done = 0
    unlink = os.unlink

    def dying(path: str) -> None:
        nonlocal done
        if done == deletes:
            raise Killed
        done += 1
        unlink(path)

    monkeypatch.setattr(os, "unlink", dying)
    return lambda: done


def test_a_kill_at_any_delete_leaves_whole_versions_and_the_next_call_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = 0
    for deletes in range(40):
        storage = Storage(str(tmp_path / str(deletes)))
        t, saved = history(storage)
        removal = plan(storage, Rules(last=1))
        with monkeypatch.context() as patch:
            count = kill_at(storage, patch, deletes)
            try:
                remove_planned(storage, removal)
            except Killed:
                killed += 1
                assert count() == deletes
            else:
                break
        assert whole(storage) == [4, 3, 2, 1, 0][: 5 - min(deletes, 4)]
        assert torch.equal(read_table(storage, newest(storage).require(), "a")[0], t.weight)
        remove_planned(storage, plan(storage, Rules(last=1)))
        assert set(files_of(storage.root)) == {saved[4].path, *(stored.path for stored in saved[4].stored)}
    assert killed == len(removal.versions) + len(removal.files) == 11


def test_on_s3() -> None:
    with serve() as s3:
        storage = s3.storage()
        _, saved = history(storage)
        assert plan_removal(storage, "run", Rules(last=1)).files == ()
        removal = plan_removal(storage, "run", Rules(last=1), now=time.time() + 2 * HOUR)
        assert len(removal.versions) == 4
        remove_planned(storage, removal)
        kept = {saved[4].path, *(stored.path for stored in saved[4].stored)}
        left = s3.keys()
        assert {key.removeprefix("job/") for key in left} == kept
