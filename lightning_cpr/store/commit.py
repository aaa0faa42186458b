"""The commit of a save: rank 0 collects the parts, checks that no row is missing, and writes the manifest last."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from lightning_cpr.errors import CorruptShardError, CPRError, ManifestError
from lightning_cpr.spec import TableSpec
from lightning_cpr.store.agree import abort, check_alive, wait_for
from lightning_cpr.store.chunk import read_index
from lightning_cpr.store.coverage import check_coverage, check_shards
from lightning_cpr.store.manifest import (
    BlobEntry,
    FileEntry,
    Manifest,
    PartManifest,
    digest,
    dump_manifest,
    parse_part,
    split_version,
)
from lightning_cpr.store.rows import runs_of
from lightning_cpr.store.save import Compacted, RankPart, SaveIO, SaveReport, SaveSpec
from lightning_cpr.store.since import base_of, folder_of
from lightning_cpr.store.storage import Storage
from lightning_cpr.store.versions import check_files, check_ours, load_manifest, remove_files, replaced_version
from lightning_cpr.store.writer import write_part

log = logging.getLogger(__name__)


def save(
    io: SaveIO,
    spec: SaveSpec,
    part: RankPart,
    planner: Any = None,
    ledger: Any = None,
    compacted: Compacted | None = None,
) -> SaveReport:
    """`write_part` and then `commit`: a whole save, as every rank runs it. Raises as they do."""
    started = time.monotonic()
    report = write_part(io, spec, part)
    path = commit(io, spec, part.rank, planner, ledger, compacted)
    return SaveReport(path, spec.version, spec.step, report, time.monotonic() - started)


def commit(
    io: SaveIO,
    spec: SaveSpec,
    rank: int,
    planner: Any = None,
    ledger: Any = None,
    compacted: Compacted | None = None,
) -> str:
    """Commit a version whose parts all ranks have written, or learn that rank 0 did. Returns the manifest's path.

    Runs on every rank after `write_part`. planner, ledger: JSON values for the manifest; compacted: where what is
    inherited now lies. Those of rank 0 count.

    Raises:
        CommitError: a rank failed, did not report in time, or the epoch moved on; every rank gets the first cause.
        CoverageError: (a CommitError and ManifestError) rows are missing or there twice.
    """
    if rank == 0:
        _lead(io, spec, planner, ledger, compacted)
    else:
        try:
            wait_for(io, spec, ["done"], "the commit of rank 0 is")
        except BaseException as error:
            # Rank 0 may be past its last check: the files stay.
            raise abort(io, spec, rank, "waiting for the commit", error, []) from error
    io.points("post_commit", spec.step)
    return spec.manifest


def _lead(io: SaveIO, spec: SaveSpec, planner: Any, ledger: Any, compacted: Compacted | None) -> None:
    storage = io.storage
    attempted = False
    try:
        ranks = range(spec.world_size)
        wait_for(io, spec, [f"part/{rank}" for rank in ranks], "parts of ranks are")
        parts = [_load_part(io, spec, rank) for rank in ranks]
        inherited = _inherited(storage, spec, compacted)
        manifest = _assemble(storage, spec, parts, inherited, planner, ledger)
        raw = dump_manifest(manifest)
        replaced = replaced_version(storage, spec.path) if spec.path else None
        io.points("pre_commit", spec.step)
        # Read the epoch again: whoever moved it on has given this save up.
        check_alive(io, spec)
        if not spec.path:
            ref = split_version(spec.version)
            check_ours(storage, ref.run_id, ref.epoch)
        attempted = True
        storage.put(spec.manifest, raw)  # This is the commit.
    except BaseException as error:
        raise abort(io, spec, 0, "committing", error, _leftovers(storage, spec, attempted)) from error
    io.kv.set(spec.key("done"), spec.manifest)
    for rank in ranks:
        io.kv.delete_key(spec.key(f"part/{rank}"))
    try:
        storage.delete(spec.part_path(rank) for rank in ranks)
        if replaced and replaced != spec.version:
            remove_files(storage, replaced)
    except CPRError as error:
        log.warning("version %s is committed; superseded files stay for gc: %s", spec.version, error)


def _leftovers(storage: Storage, spec: SaveSpec, attempted: bool) -> list[str]:
    """The files to remove of a version that was not committed: none unless its manifest is surely not there."""
    try:
        if attempted:
            storage.delete([spec.manifest])
        return [entry.path for entry in storage.list(spec.folder) or [] if not entry.is_dir]
    except CPRError as error:
        log.warning("version %s: parts of the aborted save stay for gc: %s", spec.version, error)
        return []


def _load_part(io: SaveIO, spec: SaveSpec, rank: int) -> PartManifest:
    path = spec.part_path(rank)
    said = json.loads(io.kv.get(spec.key(f"part/{rank}")))
    raw = io.storage.get(path)
    if {"blake2b": digest(raw), "bytes": len(raw)} != said:
        raise CorruptShardError(f"{path}: {len(raw)} bytes that are not the {said['bytes']} that rank {rank} wrote")
    return parse_part(raw, path)


def _assemble(
    storage: Storage,
    spec: SaveSpec,
    parts: Sequence[PartManifest],
    inherited: tuple[FileEntry, ...],
    planner: Any,
    ledger: Any,
) -> Manifest:
    """The manifest of all parts, after the parent's files. Raises unless all is there that a restore needs."""
    files = tuple(entry for part in parts for entry in part.files)
    blobs = tuple(blob for part in parts for blob in part.blobs)
    names = [blob.name for blob in blobs]
    if len(set(names)) != len(names):
        raise ManifestError(f"version {spec.version}: two ranks saved a blob of one name: {sorted(names)}")
    sizes = {listed.path: listed.bytes for listed in storage.list(spec.folder) or []}
    stored: list[FileEntry | BlobEntry] = [*files, *blobs]
    for entry in stored:
        if sizes.get(entry.path) != entry.bytes:
            have = sizes.get(entry.path, "no")
            raise CorruptShardError(f"{entry.path}: {have} bytes in storage, {entry.bytes} were written")
    shards = tuple(shard for part in parts for shard in part.shards)
    if shards:
        check_shards(spec.version, spec.tables, (shard.spec for shard in shards))
    tables = {table.fqn: table for table in spec.tables}
    check_coverage(spec.version, spec.tables, files, partial(row_runs, storage, tables), complete=spec.kind == "base")
    return Manifest(
        run_id=spec.run_id,
        version=spec.version,
        epoch=spec.epoch,
        step=spec.step,
        samples=spec.samples,
        kind=spec.kind,
        consistency=spec.consistency,
        world_size=spec.world_size,
        wall_time=time.time(),
        config_fingerprint=spec.config_fingerprint,
        plan_fingerprint=spec.plan_fingerprint,
        tables=spec.tables,
        shards=shards,
        files=inherited + files,
        blobs=blobs,
        planner=planner,
        ledger=ledger,
        parent=spec.parent,
        path=spec.manifest,
    )


def _inherited(storage: Storage, spec: SaveSpec, compacted: Compacted | None) -> tuple[FileEntry, ...]:
    if spec.parent is None:
        return ()
    parent = load_manifest(storage, spec.parent)
    if set(parent.tables) != set(spec.tables) or parent.run_id != spec.run_id:
        raise ManifestError(
            f"version {spec.version}: {spec.parent} is of run {parent.run_id!r} or of other tables; save a base"
        )
    if spec.inherit == "all":
        moved = parent.files if compacted is None else compacted.apply(parent.files)
        if moved != parent.files:
            try:
                check_files(storage, replace(parent, files=moved))
            except CorruptShardError as error:
                log.warning("version %s builds on files that were not compacted: %s", spec.version, error)
                return parent.files
        return moved
    base = base_of(parent)
    return tuple(entry for entry in parent.files if folder_of(entry) == base)


def row_runs(storage: Storage, tables: dict[str, TableSpec], entry: FileEntry) -> np.ndarray:
    """The row runs ``[k, 2]`` of a chunk file, from its verified head."""
    head = storage.get(entry.path, 0, entry.index_bytes)
    return runs_of(read_index(head, entry, tables[entry.table]).rows())
