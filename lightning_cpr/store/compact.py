"""Compaction: the live rows of a chain copied into few files, under a new manifest of the same step.

Nothing is decoded or encoded again: a row's codes, scales and optimizer state are copied as they are, each block
checked against its hash first. Committed files are never touched, so it runs beside training, restores and saves; files
that are still mostly live are inherited instead of copied.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_cpr.errors import CPRError
from lightning_cpr.spec import ShardSpec
from lightning_cpr.store.chunk import CHUNK_BYTES, Part, chunk_rows, encode_chunk
from lightning_cpr.store.coverage import check_count
from lightning_cpr.store.fetch import Fetcher
from lightning_cpr.store.manifest import (
    CHUNKS,
    FileEntry,
    Manifest,
    compacted_version,
    dump_manifest,
    manifest_path,
)
from lightning_cpr.store.resolve import as_index, resolve
from lightning_cpr.store.storage import Storage
from lightning_cpr.store.versions import check_files

log = logging.getLogger(__name__)

MIN_LIVE = 0.9


@dataclass(frozen=True)
class Compaction:
    """What `compact` did. ``bytes_written`` counts chunks and manifest; ``files`` before and after."""

    manifest: Manifest
    bytes_read: int
    bytes_written: int
    rows_copied: int
    files: tuple[int, int]


def chain_length(manifest: Manifest) -> int:
    """How many saves a restore of the version reads from: 1 for a base."""
    return len({entry.path.rpartition("/")[0] for entry in manifest.files})


def read_factor(manifest: Manifest) -> float:
    """Values in the files of a version for each value of its tables: 1 for a base, more the longer its chain."""
    held = sum(entry.rows * entry.cols for entry in manifest.files)
    return held / max(1, sum(spec.rows * spec.cols for spec in manifest.tables))


def compact(
    storage: Storage,
    manifest: Manifest,
    *,
    min_live: float = MIN_LIVE,
    chunk_bytes: int = CHUNK_BYTES,
    check: Callable[[], None] = lambda: None,
) -> Compaction | None:
    """Commit a version with the same rows and blobs, of which a restore reads each live row about once.

    A file is copied if fewer than ``min_live`` of its rows are live, or if it is smaller than a quarter of
    ``chunk_bytes``; the rest is inherited. None where nothing would be gained. ``parent`` of the new version is the
    path of the old one. Memory: row numbers, two chunks, and one block of every file that is copied.

    Runs in any one thread of one process. ``check`` is called before each chunk and right before the commit: what it
    raises (the epoch has moved on, the job ends) ends the compaction, and nothing is left behind.

    Raises:
        CorruptShardError, ManifestError, StorageError: the old version is damaged, or has been removed meanwhile. The
            new one is not committed, the old one is as it was.
    """
    tables = {spec.fqn: spec for spec in manifest.tables}
    fetcher = Fetcher(storage, tables)
    check_files(storage, manifest)
    live = _live_positions(fetcher, manifest)
    plan = _plan(fetcher, manifest, live, min_live, chunk_bytes)
    inherited = [item for item in plan if isinstance(item, FileEntry)]
    dead = any(len(live[at]) < manifest.files[at].rows for item in plan if isinstance(item, list) for at in item)
    if not dead and len(plan) == len(manifest.files):
        return None
    version = compacted_version(manifest.version, secrets.token_hex(4))
    folder = f"{CHUNKS}/{version}"
    files: list[FileEntry] = []
    rows_copied = 0
    try:
        for item in plan:
            if isinstance(item, FileEntry):
                files.append(item)
                continue
            prefix = f"{folder}/c-{len(files):05d}"
            for entry in _merge(storage, fetcher, manifest, item, live, prefix, chunk_bytes, check):
                files.append(entry)
                rows_copied += entry.rows
        merged = dataclasses.replace(
            manifest,
            version=version,
            kind=manifest.kind if inherited else "base",
            files=tuple(files),
            parent=manifest.path,
            path=manifest_path(version),
        )
        raw = dump_manifest(merged)
        check()
        storage.put(merged.path, raw)  # This is the commit.
        # A gc that ran meanwhile may have removed what is inherited; whoever of the two looks last sees the other.
        check_files(storage, merged)
    except BaseException:
        _undo(storage, manifest_path(version), folder)
        raise
    size = len(raw) + sum(entry.bytes for entry in files if entry.path.startswith(f"{folder}/"))
    log.info("version %s is compacted as %s: %d files are %d", manifest.version, version, len(live), len(files))
    return Compaction(merged, fetcher.bytes_read, size, rows_copied, (len(manifest.files), len(files)))


def _undo(storage: Storage, manifest: str, folder: str) -> None:
    try:
        storage.delete([manifest])
        storage.delete_folder(folder)
    except CPRError as error:
        log.warning("files of an unfinished compaction stay for gc: %s", error)


def _live_positions(fetcher: Fetcher, manifest: Manifest) -> list[Tensor]:
    """For each file of the version, which of its rows a restore takes (in any column), counted in the file."""
    needs: dict[int, list[Tensor]] = {}
    for spec in manifest.tables:
        check_count(spec, manifest.files)
        target = ShardSpec(spec.fqn, 0, spec.rows, 0, spec.cols, owner=0)
        found = resolve(manifest.files, [target], lambda entry: fetcher.index(entry).rows())
        for at, mine in found.items():
            needs.setdefault(at, []).extend(torch.as_tensor(need.positions) for need in mine)
    empty = torch.empty(0, dtype=torch.int64)
    return [_union(needs[at]) if at in needs else empty for at in range(len(manifest.files))]


def _union(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.unique(torch.cat(list(parts)))


def _plan(
    fetcher: Fetcher, manifest: Manifest, live: Sequence[Tensor], min_live: float, chunk_bytes: int
) -> list[FileEntry | list[int]]:
    """The new version's files in apply order: files to inherit, and groups of files (by number) to make one of each.

    Each segment of files, whose column ranges are equal or disjoint, becomes what it keeps and then what it merges:
    the merged rows are newer than any of the same columns that are kept.
    """
    plan: list[FileEntry | list[int]] = []
    for spec in manifest.tables:
        mine = [at for at, entry in enumerate(manifest.files) if entry.table == spec.fqn and len(live[at])]
        for segment in _segments([manifest.files[at] for at in mine], mine):
            kept = [at for at in segment if _keep(manifest.files[at], len(live[at]), min_live, chunk_bytes)]
            plan.extend(manifest.files[at] for at in kept)
            plan.extend(_groups(fetcher, manifest, [at for at in segment if at not in kept]))
    return plan


def _segments(entries: Sequence[FileEntry], numbers: Sequence[int]) -> Iterator[list[int]]:
    """Cut files, in apply order, where a column range cuts across one before it in the segment."""
    segment: list[int] = []
    ranges: set[tuple[int, int]] = set()
    for entry, at in zip(entries, numbers, strict=True):
        low, high = entry.col_start, entry.col_end
        if any((low, high) != other and low < other[1] and other[0] < high for other in ranges):
            yield segment
            segment, ranges = [], set()
        segment.append(at)
        ranges.add((low, high))
    if segment:
        yield segment


def _keep(entry: FileEntry, live: int, min_live: float, chunk_bytes: int) -> bool:
    return live >= min_live * entry.rows and entry.bytes >= chunk_bytes // 4


def _groups(fetcher: Fetcher, manifest: Manifest, numbers: Sequence[int]) -> list[list[int]]:
    """Files of a table that can become one: of the same columns, codecs and parts."""
    groups: dict[object, list[int]] = {}
    for at in numbers:
        entry = manifest.files[at]
        parts = tuple((part.name, part.dtype, part.tail) for part in fetcher.index(entry).parts)
        codecs = (entry.codec, *sorted(entry.state_codecs.items()))
        groups.setdefault((entry.col_start, entry.cols, codecs, parts), []).append(at)
    return list(groups.values())


def _merge(
    storage: Storage,
    fetcher: Fetcher,
    manifest: Manifest,
    group: Sequence[int],
    live: Sequence[Tensor],
    prefix: str,
    chunk_bytes: int,
    check: Callable[[], None],
) -> Iterator[FileEntry]:
    """Write the live rows of a group of files, ordered by row, as new chunks."""
    cursors = [_Cursor(fetcher, manifest.files[at], live[at]) for at in group]
    first = cursors[0].entry
    step = chunk_rows(cursors[0].row_bytes, chunk_bytes)
    source = torch.cat([torch.full((len(c.rows),), number, dtype=torch.int32) for number, c in enumerate(cursors)])
    rows, order = torch.cat([cursor.rows for cursor in cursors]).sort()
    source = source[order]
    for start in range(0, len(rows), step):
        check()
        ids, owner = rows[start : start + step], source[start : start + step]
        parts = {p.name: torch.empty((len(ids), *p.tail), dtype=p.dtype) for p in cursors[0].parts}
        used = owner.unique().tolist()
        for number in used:
            cursors[number].copy(parts, torch.nonzero(owner == number)[:, 0])
        chunk = encode_chunk(
            first.table, ids, first.col_start, first.cols, first.codec, first.state_codecs, parts
        )  # fmt: skip
        path = f"{prefix}-{start // step:05d}.safetensors"
        storage.put(path, chunk.buffers)
        yield FileEntry(
            path, chunk.bytes, first.table, len(ids), chunk.code.start, chunk.code.end, first.col_start,
            first.cols, first.codec, first.state_codecs, chunk.index_bytes, chunk.index_hash,
            max(cursors[number].entry.step for number in used),
        )  # fmt: skip


class _Cursor:
    """The live rows of a file, copied out in order. Keeps the block that it stands in."""

    def __init__(self, fetcher: Fetcher, entry: FileEntry, positions: Tensor) -> None:
        self.entry = entry
        self._index = fetcher.index(entry)
        self.rows = self._index.rows()[positions]
        self._fetcher = fetcher
        self._positions = positions
        self._done = 0
        self._block = -1
        self._tensors: dict[str, Tensor] = {}

    @property
    def parts(self) -> tuple[Part, ...]:
        return self._index.parts

    @property
    def row_bytes(self) -> int:
        return sum(part.row_bytes for part in self.parts)

    def copy(self, parts: dict[str, Tensor], to: Tensor) -> None:
        """The next ``len(to)`` live rows into rows ``to`` of ``parts``."""
        taken = self._positions[self._done : self._done + len(to)]
        self._done += len(to)
        blocks = taken // self._index.block_rows
        edges = [0, *(torch.nonzero(blocks[1:] != blocks[:-1])[:, 0] + 1).tolist(), len(taken)]
        for start, end in itertools.pairwise(edges):
            block = int(blocks[start])
            if block != self._block:
                self._tensors = self._fetcher.block(self._index, block)
                self._block = block
            inside = taken[start:end] - block * self._index.block_rows
            for name, target in parts.items():
                target[to[start:end]] = self._tensors[name][as_index(inside)]
