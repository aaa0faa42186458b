"""Does a set of chunk files hold every row and column of every table?"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from lightning_cpr.errors import ManifestError
from lightning_cpr.spec import ShardSpec, TableSpec
from lightning_cpr.store.manifest import FileEntry


def column_bands(edges: Iterable[int]) -> list[tuple[int, int]]:
    """The column ranges between consecutive edges: no file begins or ends inside one."""
    cuts = sorted(set(edges))
    return list(itertools.pairwise(cuts))


def check_count(spec: TableSpec, files: Sequence[FileEntry]) -> None:
    """ManifestError if files cannot hold all rows of a table: asked before anything is allocated for that many."""
    held = sum(entry.rows for entry in files if entry.table == spec.fqn)
    if held < spec.rows:
        raise ManifestError(f"table {spec.fqn}: {spec.rows} rows, of which files hold {held} at most")


def check_coverage(
    version: str,
    tables: Sequence[TableSpec],
    files: Sequence[FileEntry],
    runs: Callable[[FileEntry], np.ndarray],
    *,
    complete: bool = True,
    disjoint: bool = True,
) -> None:
    """Raise ManifestError, naming tables, rows and columns, where files leave rows out or hold rows twice.

    ``runs`` gives the row runs ``[k, 2]`` of a file; it is asked only for files that are not dense.
    """
    problems = []
    for spec in tables:
        mine = [entry for entry in files if entry.table == spec.fqn and entry.rows]
        spans = [
            (entry, np.array([[entry.row_start, entry.row_end]], np.int64) if entry.dense else runs(entry))
            for entry in mine
        ]
        edges = [0, spec.cols, *(entry.col_start for entry in mine), *(entry.col_end for entry in mine)]
        for low, high in column_bands(edges):
            inside = [span for entry, span in spans if entry.col_start <= low and high <= entry.col_end]
            found = np.concatenate([np.empty((0, 2), np.int64), *inside])
            missing, twice = _gaps(found[np.argsort(found[:, 0], kind="stable")], spec.rows)
            if complete and missing:
                problems.append(f"table {spec.fqn} lacks rows {_text(missing)} of columns [{low}, {high})")
            if disjoint and twice:
                problems.append(f"table {spec.fqn} holds rows {_text(twice)} of columns [{low}, {high}) twice")
    if problems:
        raise ManifestError(f"version {version}: " + "; ".join(problems))


def check_shards(version: str, tables: Sequence[TableSpec], shards: Iterable[ShardSpec]) -> None:
    """Raise ManifestError, naming tables, where the shards that the ranks saved of make up no whole table.

    A delta that lacks a shard looks like one in which no row of that shard changed.
    """
    elements: dict[str, int] = {}
    for shard in shards:
        elements[shard.table] = elements.get(shard.table, 0) + shard.elements
    problems = [
        f"the ranks hold {elements.get(spec.fqn, 0)} of the {spec.rows * spec.cols} elements of table {spec.fqn}"
        for spec in tables
        if elements.get(spec.fqn, 0) != spec.rows * spec.cols
    ]
    if problems:
        raise ManifestError(f"version {version}: " + "; ".join(problems))


def _gaps(runs: np.ndarray, rows: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Row ranges below ``rows`` in no run, and those in more than one, of runs ``[k, 2]`` sorted by start."""
    ends = np.concatenate(([0], np.maximum.accumulate(runs[:, 1]))) if len(runs) else np.zeros(1, np.int64)
    starts = np.concatenate((runs[:, 0], [rows]))
    holes = np.flatnonzero(starts > ends)
    overlaps = np.flatnonzero(starts[:-1] < ends[:-1])
    return (
        [(int(ends[at]), int(starts[at])) for at in holes],
        [(int(starts[at]), int(min(ends[at], runs[at, 1]))) for at in overlaps],
    )


def _text(ranges: Sequence[tuple[int, int]]) -> str:
    shown = ", ".join(f"[{start}, {end})" for start, end in ranges[:3])
    return shown + (f" and {len(ranges) - 3} more ranges" if len(ranges) > 3 else "")
