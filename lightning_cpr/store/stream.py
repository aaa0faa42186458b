"""One table of a version, read in pieces: for tools that need all rows, but not all at once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import TracebackType

import torch
from torch import Tensor

from lightning_cpr.spec import RowBlock, Shard, ShardSpec
from lightning_cpr.store.coverage import check_count
from lightning_cpr.store.fetch import Fetcher, Piece, ahead
from lightning_cpr.store.manifest import Manifest
from lightning_cpr.store.reader import THREADS, write_piece
from lightning_cpr.store.resolve import Ids, Need, resolve
from lightning_cpr.store.storage import Storage
from lightning_cpr.store.versions import check_files

SLAB_BYTES = 64 << 20


class TableReader:
    """Rows of one table of a version. Which file provides each row is decided once, from row numbers alone.

    Use it as a context manager; it holds threads. Memory beside the answers: row numbers, and ``2 * threads`` pieces.
    A block that the rows of two answers share is fetched for both: ask for many rows at once.

    Raises:
        ManifestError: the version has no such table, or lacks rows of it.
        CorruptShardError: bytes are not those that were written; they are in no answer.
    """

    def __init__(
        self, storage: Storage, manifest: Manifest, fqn: str, *, with_states: bool = True, threads: int = THREADS
    ) -> None:
        self.spec = manifest.table(fqn)
        self.manifest = manifest
        self._fetcher = Fetcher(storage, {fqn: self.spec}, with_states)
        self._with_states = with_states
        self._threads = threads
        # A forged manifest must not decide how much memory is taken: files of the sizes that it claims are there.
        check_files(storage, manifest)
        check_count(self.spec, manifest.files)
        mine = [entry for entry in manifest.files if entry.table == fqn]
        with ThreadPoolExecutor(threads, thread_name_prefix="cpr-get") as pool:
            list(pool.map(self._fetcher.index, [entry for entry in mine if not entry.dense]))
        target = ShardSpec(fqn, 0, self.spec.rows, 0, self.spec.cols, owner=0)
        needs = resolve(manifest.files, [target], lambda entry: self._fetcher.index(entry).rows())
        self._needs = {at: needs[at] for at in sorted(needs)}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="cpr-get")

    def __enter__(self) -> TableReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    @property
    def bytes_read(self) -> int:
        return self._fetcher.bytes_read

    def slabs(self, slab_bytes: int = SLAB_BYTES) -> Iterator[RowBlock]:
        """All rows in order, in blocks of about ``slab_bytes``."""
        step = self.slab_rows(slab_bytes)
        for start in range(0, self.spec.rows, step):
            yield self.read(range(start, min(start + step, self.spec.rows)))

    def slab_rows(self, slab_bytes: int = SLAB_BYTES) -> int:
        """How many rows with their optimizer states take ``slab_bytes``."""
        row = self.spec.cols * self.spec.dtype.itemsize
        for state in self.spec.states:
            row += state.dtype.itemsize * (self.spec.cols if state.kind == "element" else 1)
        return max(1, slab_bytes // max(1, row))

    def read(self, rows: Ids) -> RowBlock:
        """These rows, whole. ``rows``: a range, or int64 ``[n]``, strictly increasing."""
        count, cols = len(rows), self.spec.cols
        states = {
            s.name: torch.empty((count, cols) if s.kind == "element" else (count,), dtype=s.dtype)
            for s in (self.spec.states if self._with_states else ())
        }
        target = Shard(
            ShardSpec(self.spec.fqn, 0, count, 0, cols, owner=0),
            torch.empty(count, cols, dtype=self.spec.dtype),
            states,
        )
        pieces: list[Piece] = []
        for at, needs in self._needs.items():
            if mine := [cut for need in needs if (cut := _cut(need, rows))]:
                pieces.extend(self._fetcher.pieces(self.manifest.files[at], mine))
        means: dict[tuple[int, str], Tensor] = {
            (0, name): torch.zeros(count, dtype=torch.float64)
            for name, state in states.items()
            if state.dim() == 1 and any(not need.whole for piece in pieces for need in piece.needs)
        }
        tasks = [partial(self._fetcher.checked, piece) for piece in pieces]
        with torch.no_grad():
            for piece, tensors in zip(pieces, ahead(self._pool, tasks, 2 * self._threads), strict=True):
                write_piece(self._fetcher, piece, tensors, [target], means)
            for (_, name), mean in means.items():
                states[name].copy_(mean / cols)
        return RowBlock(self.spec.fqn, torch.as_tensor(rows), 0, target.weight, states)

    def providers(self) -> dict[tuple[int, int], list[tuple[str, Ids]]]:
        """By column range, which cut the table into bands: ``(path of a file, the rows that it provides)``."""
        bands: dict[tuple[int, int], list[tuple[str, Ids]]] = {}
        for at, needs in self._needs.items():
            for need in needs:
                bands.setdefault((need.low, need.high), []).append((self.manifest.files[at].path, need.rows))
        return bands


def _cut(need: Need, rows: Ids) -> Need | None:
    """The part of a need that goes to ``rows``, its targets renumbered to their places among them."""
    if not len(rows):
        return None
    first, last = int(rows[0]), int(rows[-1]) + 1
    if isinstance(need.rows, range):
        start = min(max(first, need.rows.start), need.rows.stop) - need.rows.start
        end = max(start, min(last, need.rows.stop) - need.rows.start)
    else:
        start, end = torch.searchsorted(need.rows, torch.tensor([first, last])).tolist()
    if start == end:
        return None
    positions, targets = need.positions[start:end], need.rows[start:end]
    if isinstance(rows, range):
        moved = range(targets.start - first, targets.stop - first) if isinstance(targets, range) else targets - first
        return replace(need, positions=positions, rows=moved)
    wanted = torch.as_tensor(targets)
    places = torch.searchsorted(rows, wanted)
    hit = rows[places] == wanted
    if not hit.any():
        return None
    return replace(need, positions=torch.as_tensor(positions)[hit], rows=places[hit])
