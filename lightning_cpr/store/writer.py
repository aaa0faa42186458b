"""One rank's part of a save: rows encoded and written as chunks, then a part-manifest, then its hash to the others."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightning_cpr.errors import ConfigError
from lightning_cpr.spec import RowBlock, TableSpec
from lightning_cpr.store.agree import abort, check_alive, publish_part
from lightning_cpr.store.chunk import chunk_rows, encode_chunk
from lightning_cpr.store.codec import Codec, get_codec, tune
from lightning_cpr.store.manifest import BlobEntry, FileEntry, PartManifest, digest, dump_part
from lightning_cpr.store.pool import DaemonPool
from lightning_cpr.store.save import PartReport, RankPart, SaveIO, SaveSpec

SAMPLE_ROWS = 512


@dataclass(frozen=True)
class _Piece:
    """Rows of one chunk, encoded but not yet laid out. ``parts``: ``[n, ...]`` tensors by full name."""

    block: RowBlock
    rows: Tensor
    codec: str
    state_codecs: Mapping[str, str]
    parts: Mapping[str, Tensor]


def write_part(io: SaveIO, spec: SaveSpec, part: RankPart) -> PartReport:
    """Write what one rank saves and make it count. Runs on every rank, before `commit`, in any thread.

    The next chunk is encoded while earlier ones are hashed and written. Nothing of the version is visible to readers.

    Raises:
        CommitError: this rank failed, or another did first; every rank gets the same cause, and the version is void.
    """
    started = time.monotonic()
    written: list[str] = []
    published = False
    try:
        check_alive(io, spec)
        io.points("pre_write", spec.step)
        files, raw_rows = _write_chunks(io, spec, part, written)
        blobs = tuple(_write_blob(io, spec, part.rank, name, data, written) for name, data in part.blobs.items())
        raw = dump_part(PartManifest(part.rank, tuple(part.shards), files, blobs))
        written.append(spec.part_path(part.rank))
        size = io.storage.put(written[-1], raw)
        if part.rank:
            io.points("pre_commit", spec.step)
        check_alive(io, spec)
        # From here on rank 0 may commit: this rank must not remove its files any more.
        published = True
        publish_part(io, spec, part.rank, raw)
    except BaseException as error:
        raise abort(io, spec, part.rank, "writing", error, [] if published else written) from error
    total = size + sum(entry.bytes for entry in files) + sum(blob.bytes for blob in blobs)
    rows = sum(entry.rows for entry in files)
    return PartReport(total, len(files), rows, raw_rows, time.monotonic() - started)


def _write_chunks(io: SaveIO, spec: SaveSpec, part: RankPart, written: list[str]) -> tuple[tuple[FileEntry, ...], int]:
    tables = {table.fqn: table for table in spec.tables}
    entries: list[FileEntry] = []
    pending: deque[Future[FileEntry]] = deque()
    raw_rows = 0
    first = threading.Lock()

    def write(piece: _Piece, path: str) -> FileEntry:
        chunk = encode_chunk(
            piece.block.table, piece.rows, piece.block.col_start, piece.block.cols,
            piece.codec, piece.state_codecs, piece.parts,
        )  # fmt: skip
        io.storage.put(path, chunk.buffers)
        if first.acquire(blocking=False):
            io.points("mid_write", spec.step)
        return FileEntry(
            path, chunk.bytes, piece.block.table, chunk.code.count, chunk.code.start, chunk.code.end,
            piece.block.col_start, piece.block.cols, piece.codec, piece.state_codecs,
            chunk.index_bytes, chunk.index_hash, spec.step,
        )  # fmt: skip

    with DaemonPool(io.writers, "cpr-put") as pool:
        for block in part.blocks:
            table = _table_of(tables, block)
            codec = _tuned(part.codecs.get(table.fqn, "raw"), block.weight)
            for piece in _encode(block, table, codec, part.state_codecs, io.chunk_bytes):
                check_alive(io, spec)
                raw_rows += len(piece.rows) if piece.codec != codec.name else 0
                written.append(spec.chunk_path(part.rank, len(written)))
                pending.append(pool.submit(partial(write, piece, written[-1])))
                # Not held here: at most writers + 1 encoded chunks are in memory.
                del piece
                if len(pending) > io.writers:
                    entries.append(pending.popleft().result())
        while pending:
            entries.append(pending.popleft().result())
    if not entries:
        io.points("mid_write", spec.step)
    return tuple(entries), raw_rows


def _tuned(name: str, rows: Tensor) -> Codec:
    """A codec whose range search suits these rows, tried on a sample of them."""
    return tune(get_codec(name), rows[:: max(1, len(rows) // SAMPLE_ROWS)][:SAMPLE_ROWS])


def _encode(
    block: RowBlock, table: TableSpec, codec: Codec, state_codecs: Mapping[str, str], chunk_bytes: int
) -> Iterator[_Piece]:
    """Cut a block into chunks and encode each. Rows that a codec cannot hold go raw into a chunk of their own."""
    raw_codec = get_codec("raw")
    names = {state.name: state_codecs.get(state.name, "raw") for state in table.states}
    raw = dict.fromkeys(names, "raw")
    columns = {f"state.{name}.": (get_codec(names[name]), _two_d(block.states[name])) for name in names}
    columns = {"weight.": (codec, block.weight), **columns}
    count = len(block.rows)
    if not count:
        return
    step = chunk_rows(sum(values.nbytes for _, values in columns.values()) // count, chunk_bytes)
    for start in range(0, count, step):
        cut = {prefix: (chosen, values[start : start + step]) for prefix, (chosen, values) in columns.items()}
        rows = block.rows[start : start + step]
        fits = torch.ones(len(rows), dtype=torch.bool)
        for chosen, values in cut.values():
            fits &= chosen.fits(values)
        if fits.all():
            yield _Piece(block, rows, codec.name, names, _encode_parts(cut))
            continue
        for keep, as_raw in ((fits, False), (~fits, True)):
            if keep.any():
                picked = {key: (raw_codec if as_raw else chosen, values[keep]) for key, (chosen, values) in cut.items()}
                used = ("raw", raw) if as_raw else (codec.name, names)
                yield _Piece(block, rows[keep], *used, _encode_parts(picked))


def _encode_parts(columns: Mapping[str, tuple[Codec, Tensor]]) -> dict[str, Tensor]:
    return {
        f"{prefix}{part}": tensor
        for prefix, (codec, values) in columns.items()
        for part, tensor in codec.encode(values).items()
    }


def _two_d(state: Tensor) -> Tensor:
    return state.unsqueeze(1) if state.dim() == 1 else state


def _table_of(tables: Mapping[str, TableSpec], block: RowBlock) -> TableSpec:
    """The table of a block; ConfigError unless the block fits it in every respect."""
    table = tables.get(block.table)
    if table is None:
        raise ConfigError(f"a block of table {block.table!r}, which the save does not list")
    count, cols = len(block.rows), block.cols
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"weight": ((count, cols), table.dtype)}
    for state in table.states:
        wanted[state.name] = ((count, cols) if state.kind == "element" else (count,), state.dtype)
    found = {name: (tuple(t.shape), t.dtype) for name, t in {"weight": block.weight, **block.states}.items()}
    if found != wanted or not 0 <= block.col_start <= block.col_start + cols <= table.cols:
        raise ConfigError(f"table {table.fqn}: a block from column {block.col_start} on holds {found}, wanted {wanted}")
    if count and int(block.rows[-1]) >= table.rows:
        raise ConfigError(f"table {table.fqn}: row {int(block.rows[-1])} of {table.rows}")
    return table


def _write_blob(
    io: SaveIO, spec: SaveSpec, rank: int, name: str, data: bytes | Callable[[], bytes], written: list[str]
) -> BlobEntry:
    check_alive(io, spec)
    data = data if isinstance(data, bytes) else data()
    written.append(spec.blob_path(rank, name))
    return BlobEntry(name, written[-1], io.storage.put(written[-1], data), digest(data))
