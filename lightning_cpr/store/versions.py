"""Which versions a root holds, and which one to use. Reads manifests only, never rows."""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lightning_cpr.errors import CorruptShardError, ForeignRunError, ManifestError, StorageError
from lightning_cpr.store.manifest import (
    CHUNKS,
    FOLDER,
    SIBLING,
    Consistency,
    FileEntry,
    Manifest,
    VersionRef,
    is_compaction,
    parse_manifest,
    parse_manifest_path,
    seal,
    split_version,
    unseal,
)
from lightning_cpr.store.storage import Storage

log = logging.getLogger(__name__)

THREADS = 4


@dataclass(frozen=True)
class Problem:
    """Something wrong with a version: the object, the table where it is of one, and what."""

    path: str
    table: str | None
    message: str


@dataclass(frozen=True)
class Newest:
    """The outcome of `newest`: the manifest, or why there is none. ``skipped``: newer versions that cannot be used."""

    manifest: Manifest | None
    skipped: tuple[Problem, ...]
    why: str

    def require(self) -> Manifest:
        """The manifest; ManifestError saying why there is none."""
        if self.manifest is None:
            raise ManifestError(self.why)
        return self.manifest


def list_versions(storage: Storage, run_id: str | None = None) -> list[VersionRef]:
    """The committed versions, newest first by (epoch, step), from one uncached listing. Others of ``run_id`` only.

    A manifest that an earlier epoch published after a later epoch had put up its fence is left out.
    """
    return _versions(storage, [entry.path for entry in storage.list(FOLDER) or []], run_id)


def load_manifest(storage: Storage, ref: VersionRef | str) -> Manifest:
    """The manifest of a listed version, or of the object at a path relative to the root.

    Raises:
        ManifestError: there is none, it is malformed or of a newer schema.
        CorruptShardError: its bytes are not those that were written.
    """
    path = ref.path if isinstance(ref, VersionRef) else ref
    try:
        raw = storage.get(path)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            raise ManifestError(f"{storage.root}/{path}: no such version") from error
        raise
    return parse_manifest(raw, path)


def newest(
    storage: Storage,
    consistency: Consistency | None = "exact",
    run_id: str | None = None,
    exclude: Collection[str] = (),
) -> Newest:
    """The newest version that is whole as far as manifest and file sizes show, walking back over those that are not.

    consistency None takes any. exclude: manifest paths not to use, e.g. those whose rows turned out corrupt. Each
    version passed over for damage is logged as a warning and returned, and so is a newer save that was not committed.
    """
    top = storage.list()
    if top is None:
        return Newest(None, (), f"{storage.root}: no such folder (or nothing under that prefix); check the path")
    refs = list_versions(storage, run_id)
    skipped: list[Problem] = []
    for ref in refs:
        if ref.path in exclude:
            continue
        try:
            manifest = load_manifest(storage, ref)
            if consistency is not None and manifest.consistency != consistency:
                continue
            check_files(storage, manifest)
            return Newest(manifest, tuple(skipped + _torn_since(storage, manifest)), "")
        except (ManifestError, CorruptShardError) as error:
            skipped.append(Problem(ref.path, None, str(error)))
            log.warning("version %s is passed over: %s", ref.version, error)
    names = [entry.path for entry in top]
    return Newest(None, tuple(skipped), _why_none(storage, names, refs, skipped, consistency, run_id))


def check_files(storage: Storage, manifest: Manifest) -> None:
    """CorruptShardError naming the first file of a version that is missing or has another size than recorded."""
    folders = list(dict.fromkeys(entry.path.rpartition("/")[0] for entry in manifest.stored))
    with ThreadPoolExecutor(THREADS, thread_name_prefix="cpr-list") as pool:
        listings = list(pool.map(storage.list, folders))
    sizes = {entry.path: entry.bytes for listing in listings for entry in listing or []}
    for stored in manifest.stored:
        found = sizes.get(stored.path)
        if found != stored.bytes:
            of = f"table {stored.table}" if isinstance(stored, FileEntry) else stored.name
            state = "is missing" if found is None else f"has {found} bytes"
            raise CorruptShardError(f"{stored.path} ({of}) {state}, {stored.bytes} were written; use an older version")


def torn_versions(storage: Storage, run_id: str | None = None) -> list[VersionRef]:
    """Versions that have files but no manifest, newest first: saves that were killed, or are being written."""
    committed = {ref.version for entry in storage.list(FOLDER) or [] if (ref := parse_manifest_path(entry.path))}
    torn = []
    for entry in storage.list(CHUNKS) or []:
        version = entry.path.rpartition("/")[2]
        if entry.is_dir and version not in committed:
            try:
                torn.append(split_version(version))
            except ManifestError:
                log.debug("%s is not ours", entry.path)
    kept = [ref for ref in torn if run_id in (None, ref.run_id)]
    return sorted(kept, key=lambda ref: (*_age(ref), ref.version), reverse=True)


def clean_torn(storage: Storage, committed: Manifest) -> list[str]:
    """Remove what killed saves of this run left behind, from before a committed version. Returns the versions removed.

    Nothing is removed that any manifest names, nor of compactions, which may be in the making; an unreadable manifest
    (ManifestError, CorruptShardError) stops it. Call it on one rank, after a commit.
    """
    torn = [ref for ref in torn_versions(storage, committed.run_id) if _age(ref) < _age(committed)]
    torn = [ref for ref in torn if not is_compaction(ref.version)]
    if not torn:
        return []
    every = [ref for entry in storage.list(FOLDER) or [] if (ref := parse_manifest_path(entry.path))]
    needed = {stored.path.split("/")[1] for ref in every for stored in load_manifest(storage, ref).stored}
    removed = [ref.version for ref in torn if ref.version not in needed]
    for version in removed:
        storage.delete_folder(f"{CHUNKS}/{version}")
        log.info("version %s was never committed; its files are removed", version)
    return removed


def fence(storage: Storage, run_id: str, epoch: int, owner: str) -> None:
    """Begin an epoch: fix which versions of earlier epochs count, so that one published late is ignored.

    One rank calls it after the job's epoch has moved on and before the first save of the new one. owner: names the job.

    Raises:
        ForeignRunError: another job has begun this epoch or a later one.
    """
    check_ours(storage, run_id, epoch - 1, owner)
    known = [ref.version for ref in list_versions(storage, run_id) if ref.epoch < epoch]
    storage.put(_fence_path(run_id, epoch), seal({"versions": known, "owner": owner}))


def newest_epoch(storage: Storage, run_id: str) -> int:
    """The newest epoch of a run that was begun, told by its versions and fences; -1 for a run that is not there."""
    paths = [entry.path for entry in storage.list(FOLDER) or []]
    refs = [ref for path in paths if (ref := parse_manifest_path(path)) and ref.run_id == run_id]
    return max([-1, *(ref.epoch for ref in refs), _fences(paths).get(run_id, -1)])


def check_ours(storage: Storage, run_id: str, epoch: int, owner: str = "") -> None:
    """A job that goes on with a run begins an epoch of its own, and whoever was at it before must write no more.

    Raises:
        ForeignRunError: an epoch after ``epoch``, which is this job's, was begun, and not by ``owner``.
    """
    begun = newest_epoch(storage, run_id)
    if begun > epoch and (not owner or _owner(storage, run_id, begun) != owner):
        raise ForeignRunError(
            f"{storage.root}: another job goes on with run {run_id} (epoch {begun}; this job is in {epoch}): this one"
            " saves and restores no more. Give each job a root of its own"
        )


def _owner(storage: Storage, run_id: str, epoch: int) -> str:
    """Whose fence an epoch has; "" where it has none that can be read."""
    path = _fence_path(run_id, epoch)
    try:
        return str(unseal(storage.get(path), path).get("owner", ""))
    except (StorageError, ManifestError, CorruptShardError) as error:
        log.warning("%s: whose epoch it is cannot be told: %s", path, error)
        return ""


def remove(storage: Storage, path: str) -> None:
    """Remove a self-contained version by the path of its manifest: first the manifest, then its files.

    Versions under ``manifests/`` may be needed by others and are refused: gc removes those. Files stay where another
    object in the folder is a copy of the manifest.
    """
    if path.startswith(f"{FOLDER}/"):
        raise ManifestError(f"{path}: versions of a root are removed by gc, which keeps what others need")
    version = replaced_version(storage, path)
    storage.delete([path])
    if version is not None:
        remove_files(storage, version)


def replaced_version(storage: Storage, path: str) -> str | None:
    """The version whose files become useless when the manifest at ``path`` goes, None if there is none."""
    size = storage.size(path)
    if size is None:
        return None
    try:
        version = load_manifest(storage, path).version
    except (ManifestError, CorruptShardError) as error:
        log.warning("%s is replaced or removed; what files it had is unknown: %s", path, error)
        return None
    folder = path.rpartition("/")[0]
    beside = [entry.path for entry in storage.list(folder) or [] if not entry.is_dir and entry.bytes == size]
    for other in beside:
        if other != path and _same_version(storage, other, version):
            log.info("%s: its files stay, %s is a copy of it", path, other)
            return None
    return version


def remove_files(storage: Storage, version: str) -> None:
    """Remove the chunks and blobs of a version with a manifest at a path of its own, which must be gone."""
    storage.delete_folder(f"{SIBLING}/{version}")


def _age(version: Manifest | VersionRef) -> tuple[int, int]:
    return version.epoch, version.step


def _torn_since(storage: Storage, manifest: Manifest) -> list[Problem]:
    text = "holds files of a save that was not committed"
    torn = [ref for ref in torn_versions(storage, manifest.run_id) if _age(ref) > _age(manifest)]
    for ref in torn:
        log.warning("%s/%s %s; it is ignored", CHUNKS, ref.version, text)
    return [Problem(f"{CHUNKS}/{ref.version}", None, text) for ref in torn]


def _same_version(storage: Storage, path: str, version: str) -> bool:
    try:
        return load_manifest(storage, path).version == version
    except (ManifestError, CorruptShardError):
        return False


def _versions(storage: Storage, paths: list[str], run_id: str | None) -> list[VersionRef]:
    refs = [ref for path in paths if (ref := parse_manifest_path(path)) and run_id in (None, ref.run_id)]
    begun = _fences(paths)
    runs = {ref.run_id for ref in refs} & set(begun)
    # The newest fence of a run carries on what earlier ones let through.
    known = {run: _read_fence(storage, run, begun[run], refs) for run in runs}
    kept = []
    for ref in refs:
        if ref.run_id not in runs or ref.epoch >= begun[ref.run_id] or ref.version in known[ref.run_id]:
            kept.append(ref)
        else:
            log.warning("version %s is ignored: it came after epoch %d had begun", ref.version, begun[ref.run_id])
    return sorted(kept, key=lambda ref: (*_age(ref), ref.version), reverse=True)


def _fences(paths: list[str]) -> dict[str, int]:
    """By run, the newest epoch that has a fence."""
    begun: dict[str, int] = {}
    for path in paths:
        if match := re.fullmatch(rf"{FOLDER}/([0-9]{{6}})-([A-Za-z0-9_-]+)\.fence", path):
            begun[match[2]] = max(int(match[1]), begun.get(match[2], 0))
    return begun


def _read_fence(storage: Storage, run_id: str, epoch: int, refs: list[VersionRef]) -> set[str]:
    path = _fence_path(run_id, epoch)
    try:
        return set(unseal(storage.get(path), path)["versions"])
    except (ManifestError, CorruptShardError) as error:
        log.warning("%s: the fence is unreadable, all versions before epoch %d count: %s", path, epoch, error)
        return {ref.version for ref in refs}


def _fence_path(run_id: str, epoch: int) -> str:
    return f"{FOLDER}/{epoch:06d}-{run_id}.fence"


def _why_none(
    storage: Storage,
    top: list[str],
    refs: list[VersionRef],
    skipped: list[Problem],
    consistency: Consistency | None,
    run_id: str | None,
) -> str:
    if not top:
        return f"{storage.root}: the folder is empty, nothing was saved there yet"
    if skipped:
        return f"{storage.root}: no usable version; {len(skipped)} damaged: " + "; ".join(p.message for p in skipped)
    if refs:
        return f"{storage.root}: {len(refs)} versions, none {consistency or 'usable'} and not excluded"
    if run_id is not None and list_versions(storage):
        return f"{storage.root}: no version of run {run_id!r}, only of other runs; choose another root, or that run"
    if CHUNKS in top:
        return f"{storage.root}: holds files of an unfinished first save, but no committed version; start anew"
    return f"{storage.root}: holds no version of lightning_cpr, but other files; check the path"
