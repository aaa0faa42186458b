"""Local files: S01 (fsspec PR2108), S02 (fsspec#1797), S03 (fsspec#544), S11 (NeMo-Automodel PR3686) and S12
(safetensors PR764).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors import safe_open

from lightning_cpr.errors import ConfigError
from lightning_cpr.store import Storage, list_versions, load_manifest, newest, read_table
from tests.unit.store.helpers import files_of, save_one, table


@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_s01_a_cached_filesystem_left_in_a_transaction_swallows_nothing(tmp_path: Path, protocol: str) -> None:
    shared = fsspec.filesystem(protocol)
    shared.start_transaction()
    try:
        root = {"file": str(tmp_path / "root"), "memory": "memory://s01"}[protocol]
        manifest = save_one(Storage(root), [table("a", 9, 4)], 1)
        assert newest(Storage(root)).require() == manifest
        if protocol == "memory":
            with pytest.raises(ConfigError, match="inside a transaction"):
                Storage("memory://s01", fs=shared).put("x", b"")
    finally:
        shared.transaction.files.clear()
        shared.end_transaction()
    assert newest(Storage(root)).require() == manifest


def test_s02_every_file_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        save_one(Storage(str(tmp_path)), [table("a", 9, 4)], 1, blobs={"dense": b"x"})
    finally:
        os.umask(old)
    modes = {name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in files_of(tmp_path)}
    assert len(modes) == 3
    assert set(modes.values()) == {0o644}


def test_s03_temporary_files_lie_beside_their_target(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("tmpdir")
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    moves: list[tuple[str, str]] = []
    replace = os.replace

    def spy(source: str, target: str) -> None:
        moves.append((source, target))
        assert os.listdir(elsewhere) == []
        replace(source, target)

    monkeypatch.setattr(os, "replace", spy)
    save_one(Storage(str(tmp_path)), [table("a", 9, 4)], 1)
    assert len(moves) == 3
    assert all(os.path.dirname(source) == os.path.dirname(target) for source, target in moves)
    assert [name for name in files_of(tmp_path) if name.endswith(".tmp")] == []


def test_s11_a_lost_race_for_a_folder_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = []
    makedirs = os.makedirs

    def race(path: str, exist_ok: bool = False) -> None:
        if not failures:
            failures.append(path)
            raise FileExistsError(path)
        makedirs(path, exist_ok=exist_ok)

    monkeypatch.setattr(os, "makedirs", race)
    storage = Storage(str(tmp_path / "root"))
    save_one(storage, [table("a", 9, 4)], 1)
    assert len(failures) == 1
    assert [ref.step for ref in list_versions(storage)] == [1]


def test_s12_saving_over_a_path_whose_chunks_are_mapped(tmp_path: Path) -> None:
    storage, t = Storage(str(tmp_path)), table("a", 5000, 16)
    old = save_one(storage, [t], 1, path="last.ckpt")
    with safe_open(tmp_path / old.files[0].path, "pt") as lazy:
        mapped = lazy.get_tensor("weight.values")
        before = t.weight.clone()
        t.weight += 1
        save_one(storage, [t], 2, path="last.ckpt")
        assert torch.equal(mapped, before)
    assert torch.equal(read_table(storage, load_manifest(storage, "last.ckpt"), "a")[0], t.weight)
