"""Which rows of a table differ between two versions, value by value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_cpr.errors import IncompatiblePlanError
from lightning_cpr.spec import RowBlock
from lightning_cpr.store.coverage import column_bands
from lightning_cpr.store.resolve import as_index
from lightning_cpr.store.stream import SLAB_BYTES, TableReader


@dataclass(frozen=True)
class TableDiff:
    """How two versions of a table differ. ``norm``, ``largest``: L2 norm and largest absolute value of the change of
    the weights; NaN where a weight is. ``states``: rows of which only the optimizer state differs.
    """

    table: str
    rows: int
    changed: int
    states: int
    norm: float
    largest: float


def changed_rows(
    old: TableReader, new: TableReader, slab_bytes: int = SLAB_BYTES
) -> Iterator[tuple[RowBlock, RowBlock]]:
    """The rows of ``new`` whose weight or states have other bits than in ``old``: ``(before, after)`` piece by piece.

    Only rows are read that the two versions take from different files.

    Raises:
        IncompatiblePlanError: shape, dtype or states of the table differ.
    """
    here, there = (
        (t.spec.rows, t.spec.cols, t.spec.dtype, tuple((s.name, s.kind, s.dtype) for s in t.spec.states))
        for t in (old, new)
    )
    if here != there:
        raise IncompatiblePlanError(
            f"table {new.spec.fqn} is {here} in {old.manifest.version} and {there} in {new.manifest.version}"
        )
    candidates = torch.nonzero(_other_files(old, new))[:, 0]
    step = new.slab_rows(slab_bytes)
    for start in range(0, len(candidates), step):
        rows = candidates[start : start + step]
        before, after = old.read(rows), new.read(rows)
        differs = _differs(before.weight, after.weight)
        for name, state in after.states.items():
            differs |= _differs(before.states[name], state)
        if differs.any():
            yield _pick(before, differs), _pick(after, differs)


def diff_table(old: TableReader, new: TableReader, slab_bytes: int = SLAB_BYTES) -> TableDiff:
    """Count and measure. Raises as `changed_rows` does."""
    changed = states = 0
    square, largest = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for before, after in changed_rows(old, new, slab_bytes):
        weights = _differs(before.weight, after.weight)
        delta = after.weight[weights].double() - before.weight[weights].double()
        changed += int(weights.sum())
        states += int((~weights).sum())
        square += delta.square().sum()
        largest = torch.maximum(largest, delta.abs().max()) if delta.numel() else largest
    return TableDiff(new.spec.fqn, new.spec.rows, changed, states, float(square.sqrt()), float(largest))


def _other_files(old: TableReader, new: TableReader) -> Tensor:
    """Bool ``[rows]``: whether the versions take any column of the row from different files."""
    differs = torch.zeros(new.spec.rows, dtype=torch.bool)
    bands = [reader.providers() for reader in (old, new)]
    numbers: dict[str, int] = {}
    for low, _ in column_bands(edge for band in bands for pair in band for edge in pair):
        owners = []
        for band in bands:
            owner = torch.full((new.spec.rows,), -1, dtype=torch.int32)
            for path, rows in next(files for (start, end), files in band.items() if start <= low < end):
                owner[as_index(rows)] = numbers.setdefault(path, len(numbers))
            owners.append(owner)
        differs |= owners[0] != owners[1]
    return differs


def _differs(before: Tensor, after: Tensor) -> Tensor:
    """Bool ``[n]``: rows with any other bit. NaN equals the same NaN, 0.0 is not -0.0."""
    if not before.numel():
        return torch.zeros(len(before), dtype=torch.bool)
    one, two = (t.reshape(len(t), -1).contiguous().view(torch.uint8) for t in (before, after))
    return (one != two).any(dim=1)


def _pick(block: RowBlock, rows: Tensor) -> RowBlock:
    states = {name: state[rows] for name, state in block.states.items()}
    return RowBlock(block.table, block.rows[rows], block.col_start, block.weight[rows], states)
