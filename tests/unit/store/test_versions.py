from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest
import torch

from lightning_cpr.errors import CommitError, CorruptShardError, ForeignRunError, ManifestError
from lightning_cpr.store import (
    Storage,
    clean_torn,
    fence,
    list_versions,
    load_manifest,
    newest,
    read_table,
    relative_to,
    remove,
    torn_versions,
)
from lightning_cpr.store.manifest import manifest_path
from tests.unit.store.helpers import files_of, save_one, table, version


def test_newest_first_by_epoch_then_step(storage: Storage) -> None:
    t = table("a", 4, 2)
    for epoch, step in [(0, 50), (0, 7), (1, 10), (1, 30), (2, 3)]:
        save_one(storage, [t], step, epoch=epoch)
    assert [(ref.epoch, ref.step) for ref in list_versions(storage)] == [(2, 3), (1, 30), (1, 10), (0, 50), (0, 7)]
    assert newest(storage).require().step == 3


def test_other_objects_under_manifests_are_ignored(storage: Storage) -> None:
    save_one(storage, [table("a", 4, 2)], 1)
    for name in ("latest", "000000000009-000000-x.json.tmp", ".000000000009-000000-x.json.1.tmp", "z.json"):
        storage.put(f"manifests/{name}", b"junk")
    assert [ref.step for ref in list_versions(storage)] == [1]


def test_mixed_versions_serve_only_who_asks(storage: Storage) -> None:
    t = table("a", 4, 2)
    save_one(storage, [t], 1)
    save_one(storage, [t], 2, consistency="mixed")
    assert newest(storage).require().step == 1
    assert newest(storage, consistency="mixed").require().step == 2
    assert newest(storage, consistency=None).require().step == 2


def test_damaged_versions_are_walked_past_by_name(storage: Storage, caplog: pytest.LogCaptureFixture) -> None:
    t = table("a", 30, 2)
    versions = [save_one(storage, [t], step, blobs={"dense": b"x" * step}) for step in range(1, 6)]
    root = Path(storage.root)
    (root / versions[4].path).write_bytes(b"")
    raw = bytearray((root / versions[3].path).read_bytes())
    raw[len(raw) // 2] ^= 1
    (root / versions[3].path).write_bytes(raw)
    (root / versions[2].files[0].path).write_bytes(b"short")
    (root / versions[1].blobs[0].path).unlink()
    with caplog.at_level(logging.WARNING):
        found = newest(storage)
    assert found.require().step == 1
    assert [problem.path for problem in found.skipped] == [versions[i].path for i in (4, 3, 2, 1)]
    words = ["is empty", "do not match the digest", r"(table a) has 5 bytes", "(dense) is missing"]
    assert all(word in problem.message for word, problem in zip(words, found.skipped, strict=True))
    assert all(versions[i].version in caplog.text for i in (4, 3, 2, 1))
    assert newest(storage, exclude=[versions[0].path]).manifest is None
    with pytest.raises(ManifestError, match="no usable version; 4 damaged"):
        newest(storage, exclude=[versions[0].path]).require()


def test_runs_are_kept_apart(storage: Storage) -> None:
    t = table("a", 4, 2)
    save_one(storage, [t], 9, run="other")
    save_one(storage, [t], 5, run="mine")
    assert newest(storage, run_id="mine").require().step == 5
    assert newest(storage).require().step == 9
    with pytest.raises(ManifestError, match="no version of run 'third', only of other runs"):
        newest(storage, run_id="third").require()


def test_a_manifest_that_is_not_there(storage: Storage) -> None:
    with pytest.raises(ManifestError, match="no such version"):
        load_manifest(storage, manifest_path(version(3)))


def test_a_version_published_after_the_next_epoch_began_is_ignored(storage: Storage) -> None:
    t = table("a", 4, 2)
    save_one(storage, [t], 10)
    late = save_one(storage, [t], 20)
    raw = storage.get(late.path)
    storage.delete([late.path])
    fence(storage, "run", 1, "job")
    storage.put(late.path, raw)  # from a rank that hung in the middle of its commit
    other = save_one(storage, [t], 15, run="other")
    assert [ref.step for ref in list_versions(storage, "run")] == [10]
    assert newest(storage, run_id="run").require().step == 10
    assert newest(storage, run_id="other").require() == other
    save_one(storage, [t], 12, epoch=1)
    fence(storage, "run", 2, "job")
    assert [(ref.epoch, ref.step) for ref in list_versions(storage, "run")] == [(1, 12), (0, 10)]
    assert late.version not in {ref.version for ref in list_versions(storage)}


def test_of_two_jobs_at_one_run_the_earlier_one_saves_and_recovers_no_more(storage: Storage) -> None:
    t = table("a", 4, 2)
    save_one(storage, [t], 10)
    fence(storage, "run", 1, "second")  # a second job goes on with the run
    fence(storage, "run", 1, "second")  # a recovery of it that was broken off begins again
    with pytest.raises(CommitError, match="another job goes on with run run"):
        save_one(storage, [t], 20)
    with pytest.raises(ForeignRunError, match="epoch 1; this job is in 0"):
        fence(storage, "run", 1, "first")  # a recovery of the first job
    save_one(storage, [t], 30, epoch=1)
    with pytest.raises(ForeignRunError, match="another job"):
        fence(storage, "run", 1, "first")
    assert [(ref.epoch, ref.step) for ref in list_versions(storage, "run")] == [(1, 30), (0, 10)]


def test_a_damaged_fence_hides_nothing(storage: Storage, caplog: pytest.LogCaptureFixture) -> None:
    t = table("a", 4, 2)
    save_one(storage, [t], 10)
    fence(storage, "run", 1, "job")
    storage.put("manifests/000001-run.fence", b"")
    assert [ref.step for ref in list_versions(storage)] == [10]
    assert "the fence is unreadable" in caplog.text


def test_torn_saves_are_reported_and_cleaned_after_the_next_commit(storage: Storage) -> None:
    t = table("a", 4, 2)
    first = save_one(storage, [t], 1)
    torn = [version(step, run=run) for step, run in [(2, "run"), (3, "run"), (2, "other"), (9, "run")]]
    for name in torn:
        storage.put(f"chunks/{name}/r0-00000.safetensors", b"half")
    storage.put("chunks/not-ours/x", b"")
    found = newest(storage, run_id="run")
    assert found.manifest == first
    assert [problem.path for problem in found.skipped] == [f"chunks/{torn[i]}" for i in (3, 1, 0)]
    assert {ref.version for ref in torn_versions(storage)} == set(torn)
    second = save_one(storage, [t], 5, rows={"a": torch.tensor([1])}, parent=first.path)
    # A version whose manifest is gone, but whose rows a kept delta needs, stays.
    storage.delete([first.path])
    assert set(clean_torn(storage, second)) == {torn[0], torn[1]}
    assert clean_torn(storage, second) == []
    assert {ref.version for ref in torn_versions(storage)} == {torn[2], torn[3], first.version}
    assert torch.equal(read_table(storage, second, "a")[0], t.weight)


def test_cleaning_stops_at_an_unreadable_manifest(storage: Storage) -> None:
    t = table("a", 4, 2)
    bad = save_one(storage, [t], 1)
    storage.put(f"chunks/{version(1)}/x", b"")
    good = save_one(storage, [t], 2)
    storage.put(bad.path, b"torn")
    with pytest.raises(ManifestError):
        clean_torn(storage, good)
    assert len(torn_versions(storage)) == 1


def lightning_save(path: Path, step: int) -> Storage:
    root, name = relative_to(str(path))
    storage = Storage(root)
    save_one(storage, [table("a", 20, 4, seed=step)], step, path=name)
    return storage


def test_a_manifest_at_a_path_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "ckpt" / "epoch=1-step=10.ckpt"
    storage = lightning_save(path, 10)
    assert path.is_file()
    assert list_versions(storage) == []
    manifest = load_manifest(storage, path.name)
    assert torch.equal(read_table(storage, manifest, "a")[0], table("a", 20, 4, seed=10).weight)
    # The folder can be moved as a whole.
    shutil.move(tmp_path / "ckpt", tmp_path / "elsewhere")
    moved = Storage(str(tmp_path / "elsewhere"))
    assert torch.equal(read_table(moved, load_manifest(moved, path.name), "a")[0], table("a", 20, 4, seed=10).weight)
    remove(moved, path.name)
    assert files_of(tmp_path) == {}


def test_removal_deletes_the_manifest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = lightning_save(tmp_path / "a.ckpt", 1)
    deleted: list[str] = []
    monkeypatch.setattr(storage, "delete", lambda paths: deleted.extend(paths))
    remove(storage, "a.ckpt")
    assert deleted[0] == "a.ckpt"
    assert all(path.startswith("cpr-chunks/") for path in deleted[1:])
    assert len(deleted) == 2


def test_saving_over_a_path_removes_what_it_replaced(tmp_path: Path) -> None:
    storage = lightning_save(tmp_path / "last.ckpt", 1)
    old = load_manifest(storage, "last.ckpt")
    lightning_save(tmp_path / "last.ckpt", 2)
    assert load_manifest(storage, "last.ckpt").step == 2
    assert set(files_of(tmp_path)) == {"last.ckpt", load_manifest(storage, "last.ckpt").files[0].path}
    assert not (tmp_path / old.files[0].path).exists()


@pytest.mark.parametrize("kind", ["copy", "symlink"])
def test_copies_and_links_of_a_manifest_keep_its_files(tmp_path: Path, kind: str) -> None:
    storage = lightning_save(tmp_path / "best.ckpt", 1)
    if kind == "copy":
        shutil.copy(tmp_path / "best.ckpt", tmp_path / "last.ckpt")
    else:
        os.symlink("best.ckpt", tmp_path / "last.ckpt")
    # A new save at last.ckpt replaces the copy or the link, and leaves best.ckpt whole.
    lightning_save(tmp_path / "last.ckpt", 2)
    assert torch.equal(
        read_table(storage, load_manifest(storage, "best.ckpt"), "a")[0], table("a", 20, 4, seed=1).weight
    )
    assert load_manifest(storage, "last.ckpt").step == 2
    shutil.copy(tmp_path / "best.ckpt", tmp_path / "copy.ckpt")
    remove(storage, "best.ckpt")
    assert torch.equal(
        read_table(storage, load_manifest(storage, "copy.ckpt"), "a")[0], table("a", 20, 4, seed=1).weight
    )


def test_versions_of_a_root_are_not_removed_one_by_one(storage: Storage) -> None:
    manifest = save_one(storage, [table("a", 4, 2)], 1)
    with pytest.raises(ManifestError, match="gc"):
        remove(storage, manifest.path)
    assert newest(storage).require() == manifest


def test_removing_a_damaged_manifest_leaves_foreign_files_alone(tmp_path: Path) -> None:
    storage = lightning_save(tmp_path / "a.ckpt", 1)
    (tmp_path / "a.ckpt").write_bytes(b"torn")
    (tmp_path / "notes.txt").write_text("keep")
    remove(storage, "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()
    assert (tmp_path / "notes.txt").exists()
    with pytest.raises((ManifestError, CorruptShardError)):
        load_manifest(storage, "a.ckpt")
