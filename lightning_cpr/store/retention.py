"""Retention: which versions of a run to keep, and removing the others with what only they needed.

The decision is pure. The doing removes manifests first, oldest first, and then files that no manifest names: a kill at
any point leaves versions that are whole, and files that the next call removes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_cpr.errors import ConfigError, CorruptShardError, ManifestError
from lightning_cpr.store.manifest import (
    CHUNKS,
    FOLDER,
    Manifest,
    VersionRef,
    parse_manifest_path,
    same_rows,
    split_version,
)
from lightning_cpr.store.storage import Listed, Storage
from lightning_cpr.store.versions import list_versions, load_manifest

log = logging.getLogger(__name__)

GRACE_S = 3600.0

UNREADABLE = "nothing was removed: what it needs is unknown. If it is beyond repair, delete that object"


@dataclass(frozen=True)
class Rules:
    """A version is kept if any rule says so; without rules all are.

    last: the newest so many. age_s: those saved within so many seconds. every: of each ``every`` training steps, the
    first exact version, so that calling again never thins further.
    """

    last: int | None = None
    age_s: float | None = None
    every: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("last", self.last), ("age_s", self.age_s), ("every", self.every)):
            if value is not None and value <= 0:
                raise ConfigError(f"retention: {name}={value} must be positive")

    @property
    def all(self) -> bool:
        return self.last is None and self.age_s is None and self.every is None


@dataclass(frozen=True)
class Held:
    """A committed version as the decision sees it."""

    ref: VersionRef
    exact: bool
    wall_time: float


@dataclass(frozen=True)
class Removal:
    """What is to go. ``keep``: why each kept version is kept, by version id. bytes: of the files."""

    run_id: str
    keep: dict[str, str]
    versions: tuple[VersionRef, ...]
    files: tuple[Listed, ...]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def decide(held: Sequence[Held], rules: Rules, now: float, grace_s: float = GRACE_S) -> dict[str, str]:
    """Version id -> why it is kept, for the versions of one run, newest first.

    The newest exact version is always kept, and so are the newest of all and any younger than the grace period. A
    version and its compaction are one: of the two the rules keep the compaction.
    """
    keep: dict[str, str] = {}
    seen: set[str] = set()
    compacted = []
    for one in held:
        name = same_rows(one.ref.version)
        if name in seen and not rules.all:
            compacted.append(one)
        seen.add(name)
    keep |= {one.ref.version: "grace period" for one in compacted if now - one.wall_time <= grace_s}
    held = [one for one in held if one not in compacted]
    newest_exact = next((one.ref.version for one in held if one.exact), None)
    buckets: dict[int, str] = {}
    for one in reversed(held):
        if rules.every is not None and one.exact:
            buckets.setdefault(one.ref.step // rules.every, one.ref.version)
    for place, one in enumerate(held):
        version = one.ref.version
        if version == newest_exact:
            keep[version] = "newest exact"
        elif place == 0:
            keep[version] = "newest"
        elif rules.all:
            keep[version] = "no rule"
        elif rules.last is not None and place < rules.last:
            keep[version] = f"of the last {rules.last}"
        elif rules.age_s is not None and now - one.wall_time <= rules.age_s:
            keep[version] = "young"
        elif version in buckets.values():
            keep[version] = f"first of {rules.every} steps"
        elif now - one.wall_time <= grace_s:
            keep[version] = "grace period"
    return keep


def run_of(storage: Storage, run_id: str | None = None) -> str:
    """The run whose versions a root holds; ConfigError if it holds several and none is chosen."""
    refs = [ref for entry in storage.list(FOLDER) or [] if (ref := parse_manifest_path(entry.path))]
    runs = sorted({ref.run_id for ref in refs})
    if run_id is not None and (run_id in runs or _folders(storage, run_id)):
        return run_id
    if not refs:
        raise ConfigError(f"{storage.root} holds no versions; check the path")
    if run_id is not None or len(runs) != 1:
        known = ", ".join(runs) or "none"
        raise ConfigError(f"{storage.root} holds versions of {len(runs)} runs ({known}): choose one of them")
    return runs[0]


def plan_removal(
    storage: Storage, run_id: str, rules: Rules, grace_s: float = GRACE_S, now: float | None = None
) -> Removal:
    """Decide for one run of a root. Reads manifests and listings only, changes nothing.

    Only files under ``manifests/`` and ``chunks/`` that carry the run's id are ever considered: not those of other
    runs, and no checkpoint of `CPRCheckpointIO`, which Lightning removes itself.

    Raises:
        ManifestError, CorruptShardError: a manifest of the run cannot be read, so what it needs is unknown.
    """
    now = time.time() if now is None else now
    versions = _manifests(storage, run_id)
    counted = {ref.version for ref in list_versions(storage, run_id)}
    held = [Held(m_ref, m.consistency == "exact", m.wall_time) for m_ref, m in versions if m_ref.version in counted]
    keep = decide(held, rules, now, grace_s)
    for ref, manifest in versions:
        # Not counted: published by an epoch that was over. Of no use, but its writer may still be at work.
        if ref.version not in counted and now - manifest.wall_time <= grace_s:
            keep[ref.version] = "grace period"
    going = tuple(ref for ref, _ in reversed(versions) if ref.version not in keep)
    needed = {stored.path for ref, m in versions if ref.version in keep for stored in m.stored}
    files = [
        file
        for folder in _folders(storage, run_id)
        for file in storage.list(folder) or []
        if not file.is_dir and file.path not in needed and is_old(file, now, grace_s)
    ]
    return Removal(run_id, keep, going, tuple(files))


def remove_planned(storage: Storage, removal: Removal) -> list[str]:
    """Do it. Returns the paths of the removed files; those that a version committed meanwhile needs stay."""
    storage.delete(ref.path for ref in removal.versions)
    needed = {stored.path for _, manifest in _manifests(storage, removal.run_id) for stored in manifest.stored}
    removed = [file.path for file in removal.files if file.path not in needed]
    storage.delete(removed)
    for folder in {path.rpartition("/")[0] for path in removed}:
        if not storage.list(folder):
            storage.delete_folder(folder)
    log.info("run %s: %d versions and %d files removed", removal.run_id, len(removal.versions), len(removed))
    return removed


def _manifests(storage: Storage, run_id: str) -> list[tuple[VersionRef, Manifest]]:
    """Every manifest of a run, newest first, whether fenced off or not."""
    refs = [ref for entry in storage.list(FOLDER) or [] if (ref := parse_manifest_path(entry.path))]
    mine = sorted(
        (ref for ref in refs if ref.run_id == run_id), key=lambda r: (r.epoch, r.step, r.version), reverse=True
    )
    found = []
    for ref in mine:
        try:
            found.append((ref, load_manifest(storage, ref)))
        except (ManifestError, CorruptShardError) as error:
            raise type(error)(f"{error}; {UNREADABLE}") from error
    return found


def is_old(file: Listed, now: float, grace_s: float) -> bool:
    """A file whose age is unknown may belong to a save in flight."""
    if not file.modified:
        log.warning("%s is not needed but stays: the storage does not say how old it is", file.path)
    return bool(file.modified) and now - file.modified > grace_s


def _folders(storage: Storage, run_id: str) -> list[str]:
    """The chunk folders of a run."""
    found = []
    for entry in storage.list(CHUNKS) or []:
        try:
            if entry.is_dir and split_version(entry.path.rpartition("/")[2]).run_id == run_id:
                found.append(entry.path)
        except ManifestError:
            log.debug("%s is not ours", entry.path)
    return found
