"""Which file provides each row of a target: decided from row numbers alone, before a single row is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_cpr.errors import ManifestError
from lightning_cpr.spec import ShardSpec
from lightning_cpr.store.coverage import column_bands
from lightning_cpr.store.manifest import FileEntry

Ids = Tensor | range


@dataclass(frozen=True)
class Need:
    """Rows that a target takes from a file.

    shard: number of the target. ``[low, high)``: columns of the table. positions: which rows of the file, counted in
    the file, increasing. rows: where each goes, counted in the target, increasing. whole: the columns are all that the
    target has, else its row-wise state is a mean over column blocks.
    """

    shard: int
    low: int
    high: int
    positions: Ids
    rows: Ids
    whole: bool


def resolve(
    files: Sequence[FileEntry],
    shards: Sequence[ShardSpec],
    rows_of: Callable[[FileEntry], Tensor],
) -> dict[int, list[Need]]:
    """For each file, by its number in ``files`` (apply order), what the targets take from it.

    The newest file that holds a row and column wins; a superseded row is in no need. ``rows_of`` gives the row numbers
    of a file and is asked only for files that are not dense.

    Raises:
        ManifestError: a row of a target is in no file.
    """
    needs: dict[int, list[Need]] = {}
    for number, shard in enumerate(shards):
        if not shard.rows or not shard.cols:
            continue
        near = [(at, entry) for at, entry in enumerate(files) if near_shard(entry, shard)]
        if (held := sum(entry.rows for _, entry in near)) < shard.rows:
            raise ManifestError(f"table {shard.table}: {shard.rows} rows, of which files hold {held} at most")
        local = {at: _local_rows(entry, shard, rows_of) for at, entry in near}
        for low, high, owner in _owners(shard, near, local):
            for at, (first, rows) in local.items():
                if need := _need(number, shard, low, high, owner, at, first, rows):
                    needs.setdefault(at, []).append(need)
    return needs


def near_shard(entry: FileEntry, shard: ShardSpec) -> bool:
    """Whether a file's hull and columns meet a target."""
    rows = entry.row_start < shard.row_end and shard.row_start < entry.row_end
    cols = entry.col_start < shard.col_end and shard.col_start < entry.col_end
    return entry.table == shard.table and rows and cols and shard.rows > 0 and shard.cols > 0


def select(need: Need, start: int, end: int) -> tuple[Ids, Ids]:
    """The part of a need at file positions ``[start, end)``: positions counted from ``start``, and target rows."""
    if isinstance(need.positions, range) and isinstance(need.rows, range):
        first = max(start, need.positions.start) - need.positions.start
        last = max(first, min(end, need.positions.stop) - need.positions.start)
        begin = need.positions.start - start
        return range(begin + first, begin + last), need.rows[first:last]
    positions, rows = torch.as_tensor(need.positions), torch.as_tensor(need.rows)
    first, last = torch.searchsorted(positions, torch.tensor([start, end])).tolist()
    return positions[first:last] - start, rows[first:last]


def as_index(ids: Ids) -> Tensor | slice:
    """What a tensor is indexed with to get these rows."""
    return slice(ids.start, ids.stop) if isinstance(ids, range) else ids


def _local_rows(entry: FileEntry, shard: ShardSpec, rows_of: Callable[[FileEntry], Tensor]) -> tuple[int, Ids]:
    """``(first position, rows)``: a file's rows within a target, counted in the target."""
    if entry.dense:
        start, end = max(entry.row_start, shard.row_start), min(entry.row_end, shard.row_end)
        return start - entry.row_start, range(start - shard.row_start, end - shard.row_start)
    rows = rows_of(entry)
    first, last = torch.searchsorted(rows, torch.tensor([shard.row_start, shard.row_end])).tolist()
    return first, rows[first:last] - shard.row_start


def _owners(
    shard: ShardSpec, near: Sequence[tuple[int, FileEntry]], local: dict[int, tuple[int, Ids]]
) -> list[tuple[int, int, Tensor]]:
    """``(low, high, owner)`` of column bands; owner int32 ``[rows]``: the number of the file that provides a row."""
    edges = [shard.col_start, shard.col_end]
    edges += [edge for _, entry in near for edge in (entry.col_start, entry.col_end)]
    bands: list[tuple[int, int, Tensor]] = []
    for low, high in column_bands(edge for edge in edges if shard.col_start <= edge <= shard.col_end):
        owner = torch.full((shard.rows,), -1, dtype=torch.int32)
        left = shard.rows
        for at, entry in reversed(near):
            if not left:
                break
            if entry.col_start <= low and high <= entry.col_end:
                rows = as_index(local[at][1])
                found = owner[rows]
                left -= int((found < 0).sum())
                owner[rows] = torch.where(found < 0, at, found)
        if left:
            missing = torch.nonzero(owner < 0)[:3, 0] + shard.row_start
            raise ManifestError(
                f"table {shard.table}: {left} rows of columns [{low}, {high}) are in no file, "
                f"the first are {missing.tolist()}; use another version"
            )
        if bands and torch.equal(bands[-1][2], owner):
            bands[-1] = (bands[-1][0], high, owner)
        else:
            bands.append((low, high, owner))
    return bands


def _need(
    number: int, shard: ShardSpec, low: int, high: int, owner: Tensor, at: int, first: int, rows: Ids
) -> Need | None:
    mine = torch.nonzero(owner[as_index(rows)] == at)[:, 0]
    if not len(mine):
        return None
    taken = mine + rows.start if isinstance(rows, range) else rows[mine]
    return Need(
        number, low, high, _compact(mine + first), _compact(taken), (low, high) == (shard.col_start, shard.col_end)
    )


def _compact(ids: Tensor) -> Ids:
    first, last = int(ids[0]), int(ids[-1])
    return range(first, last + 1) if last - first + 1 == len(ids) else ids
