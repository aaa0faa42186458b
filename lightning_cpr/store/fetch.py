"""Fetching heads and blocks of chunk files, each checked before it is handed on."""

from __future__ import annotations

import errno
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_cpr.errors import CorruptShardError, StorageError
from lightning_cpr.spec import TableSpec
from lightning_cpr.store.chunk import ChunkIndex, Part, bytes_of, decode_rows_of, read_index
from lightning_cpr.store.manifest import FileEntry
from lightning_cpr.store.resolve import Need
from lightning_cpr.store.storage import Storage

PIECE_BYTES = 16 << 20
LOCAL_PIECE_BYTES = 4 << 20
"""Stays in the processor's cache while it is read, hashed and written. Each piece is a request to a remote store."""


@dataclass(frozen=True)
class Piece:
    """Blocks ``[first, last)`` of a file, and what they are for."""

    index: ChunkIndex
    first: int
    last: int
    needs: tuple[Need, ...]

    @property
    def row_span(self) -> tuple[int, int]:
        """The rows in it, counted in the file."""
        rows = self.index.block_rows
        return self.first * rows, min(self.last * rows, self.index.entry.rows)


class Fetcher:
    """Fetches and checks, and counts: bytes_read, and the paths opened. Thread-safe."""

    def __init__(self, storage: Storage, tables: Mapping[str, TableSpec], with_states: bool = True) -> None:
        self.bytes_read = 0
        self.opened: set[str] = set()
        self._storage = storage
        self._tables = tables
        self._with_states = with_states
        self._indexes: dict[str, ChunkIndex] = {}
        self._lock = threading.Lock()

    def index(self, entry: FileEntry) -> ChunkIndex:
        """The checked head of a file, fetched once."""
        if entry.path not in self._indexes:
            head = self._get(entry, 0, entry.index_bytes)
            self._indexes[entry.path] = read_index(head, entry, self._tables[entry.table])
        return self._indexes[entry.path]

    def bytes_of(self, piece: Piece) -> int:
        spans = [piece.index.span(part, piece.first, piece.last) for part in self.parts(piece.index)]
        return sum(end - start for start, end in spans)

    def checked(self, piece: Piece) -> dict[str, Tensor]:
        """The parts of a piece ``[m, ...]``, every block checked, and its first row decoded to see that it can be."""
        tensors = {}
        for part in self.parts(piece.index):
            data = self._get(piece.index.entry, *piece.index.span(part, piece.first, piece.last))
            piece.index.check(part, piece.first, piece.last, data)
            tensors[part.name] = piece.index.tensor(part, data)
        self.decode(piece.index, {name: tensor[:1] for name, tensor in tensors.items()})
        return tensors

    def land(self, piece: Piece, targets: Mapping[str, Tensor]) -> None:
        """Read the raw parts of a piece into ``targets``, contiguous in host memory, and check every block there.

        For targets that hold nothing yet: what is found damaged is in them already.
        """
        for part in self.parts(piece.index):
            view = bytes_of(targets[part.name])
            start, _ = piece.index.span(part, piece.first, piece.last)
            entry = piece.index.entry
            with _missing_is_damage(entry.path, f"table {entry.table}"):
                read = self._storage.get_into(entry.path, start, view)
            self._count(entry, read)
            piece.index.check(part, piece.first, piece.last, view[:read])

    def block(self, index: ChunkIndex, number: int) -> dict[str, Tensor]:
        """The parts of one block ``[m, ...]``, checked."""
        return self.checked(Piece(index, number, number + 1, ()))

    def decode(self, index: ChunkIndex, tensors: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return decode_rows_of(index, self._tables[index.entry.table], tensors, self._with_states)

    def pieces(self, entry: FileEntry, needs: Sequence[Need]) -> Iterator[Piece]:
        """Runs of the blocks of a file that hold a needed row, cut to pieces of a bounded size."""
        index = self.index(entry)
        wanted = torch.zeros(index.blocks, dtype=torch.bool)
        for need in needs:
            if isinstance(need.positions, range):
                wanted[need.positions.start // index.block_rows : -(-need.positions.stop // index.block_rows)] = True
            else:
                wanted[need.positions // index.block_rows] = True
        row_bytes = sum(part.row_bytes for part in self.parts(index))
        size = LOCAL_PIECE_BYTES if self._storage.local else PIECE_BYTES
        most = max(1, size // max(1, row_bytes * index.block_rows))
        blocks = torch.nonzero(wanted)[:, 0].tolist()
        first = last = blocks[0]
        for block in [*blocks[1:], math.inf]:
            if block != last + 1 or block - first >= most:
                yield Piece(index, first, last + 1, tuple(needs))
                first = block
            last = block

    def check_file(self, entry: FileEntry) -> None:
        """Fetch, check and decode a whole file, a piece at a time. Raises CorruptShardError."""
        size = self._storage.size(entry.path)
        if size is not None and size != entry.bytes:
            raise CorruptShardError(f"{entry.path} (table {entry.table}) has {size} bytes, {entry.bytes} were written")
        everything = Need(0, entry.col_start, entry.col_end, range(entry.rows), range(entry.rows), whole=True)
        self.index(entry).rows()
        for piece in self.pieces(entry, [everything]) if entry.rows else ():
            self.decode(piece.index, self.checked(piece))

    def parts(self, index: ChunkIndex) -> list[Part]:
        """The parts of a file that are read at all."""
        return [part for part in index.parts if self._with_states or part.name.startswith("weight.")]

    def _get(self, entry: FileEntry, start: int, end: int) -> bytearray:
        data = fetch(self._storage, entry.path, start, end, f"table {entry.table}")
        self._count(entry, len(data))
        return data

    def _count(self, entry: FileEntry, read: int) -> None:
        with self._lock:
            self.bytes_read += read
            self.opened.add(entry.path)


def fetch(storage: Storage, path: str, start: int, end: int | None, of: str) -> bytearray:
    """`Storage.get`, with a CorruptShardError for an object that a manifest names and that is not there."""
    with _missing_is_damage(path, of):
        return storage.get(path, start, end)


@contextmanager
def _missing_is_damage(path: str, of: str) -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        if error.errno == errno.ENOENT:
            raise CorruptShardError(f"{path} ({of}) is missing; use an older version") from error
        raise


def ahead(
    pool: ThreadPoolExecutor, tasks: Sequence[Callable[[], dict[str, Tensor]]], depth: int
) -> Iterator[dict[str, Tensor]]:
    """Results in order, with at most ``depth`` tasks running or waiting to be taken."""
    running: deque[Future[dict[str, Tensor]]] = deque()
    try:
        for task in tasks:
            running.append(pool.submit(task))
            if len(running) == depth:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        for future in running:
            future.cancel()
