"""Chunks beside the checkpoints of Lightning's ModelCheckpoint that no checkpoint needs: their save was killed.

A save that fails removes its own files; one whose process was killed cannot, and the job that comes after it cannot
know whether another is still writing. Only age tells.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from lightning_cpr.errors import CorruptShardError, ManifestError
from lightning_cpr.store.manifest import HEAD, SIBLING, split_version
from lightning_cpr.store.retention import GRACE_S, UNREADABLE, is_old
from lightning_cpr.store.storage import Listed, Storage
from lightning_cpr.store.versions import load_manifest, remove_files


@dataclass(frozen=True)
class Orphan:
    """The files of a version that has no manifest."""

    version: str
    files: tuple[Listed, ...]


def find_orphans(storage: Storage, grace_s: float = GRACE_S, now: float | None = None) -> list[Orphan]:
    """Those of a folder with checkpoints, none of whose files is younger than the grace period. Changes nothing.

    Raises:
        ManifestError, CorruptShardError: a checkpoint cannot be read, so what it needs is unknown.
    """
    now = time.time() if now is None else now
    folders = [entry.path for entry in storage.list(SIBLING) or [] if entry.is_dir]
    versions = [name for path in folders if _is_version(name := path.rpartition("/")[2])]
    needed = _needed(storage) if versions else set()
    lone = [version for version in versions if version not in needed]
    found = [Orphan(each, tuple(f for f in storage.list(f"{SIBLING}/{each}") or [] if not f.is_dir)) for each in lone]
    return [each for each in found if each.files and all(is_old(file, now, grace_s) for file in each.files)]


def remove_orphans(storage: Storage, orphans: list[Orphan]) -> None:
    for orphan in orphans:
        remove_files(storage, orphan.version)


def _needed(storage: Storage) -> set[str]:
    """The versions that the checkpoints of a folder name."""
    needed = set()
    for file in storage.list() or []:
        if file.is_dir or storage.get(file.path, 0, min(file.bytes, len(HEAD))) != HEAD:
            continue
        try:
            needed.add(load_manifest(storage, file.path).version)
        except (ManifestError, CorruptShardError) as error:
            raise type(error)(f"{error}; {UNREADABLE}") from error
    return needed


def _is_version(name: str) -> bool:
    try:
        return bool(split_version(name))
    except ManifestError:
        return False
