"""The vocabulary that all layers share: what a table, a shard of it, and a block of its rows are.

Keys are canonical: the table's fully qualified name, global row numbers and a column range. Nothing here depends on
the sharding plan or on a rank, so that a version written under one plan can be read under another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class StateSpec:
    """One optimizer state of a table, e.g. ``sum`` of Adagrad.

    ``kind`` is ``"row"`` for one value a row (row-wise Adagrad) and ``"element"`` for one value a weight.
    """

    name: str
    kind: Literal["row", "element"]
    dtype: torch.dtype


@dataclass(frozen=True)
class TableSpec:
    """One embedding table as a whole. ``row_sparse``: a step changes no row that no batch looked up."""

    fqn: str
    rows: int
    cols: int
    dtype: torch.dtype
    optimizer: str
    states: tuple[StateSpec, ...] = ()
    row_sparse: bool = False


@dataclass(frozen=True)
class ShardSpec:
    """A rectangle of a table: rows ``[row_start, row_start + rows)`` x columns ``[col_start, col_start + cols)``.

    ``replicated`` shards (data-parallel tables) are held by every rank; ``owner`` is then the rank that saves them.
    A shard may have 0 rows.
    """

    table: str
    row_start: int
    rows: int
    col_start: int
    cols: int
    owner: int
    replicated: bool = False

    @property
    def row_end(self) -> int:
        return self.row_start + self.rows

    @property
    def col_end(self) -> int:
        return self.col_start + self.cols

    @property
    def elements(self) -> int:
        return self.rows * self.cols


def sharded_elements(plan: Iterable[ShardSpec], owner: int) -> int:
    """Elements of the owner's shards; replicated tables do not count, since no single failure loses them."""
    return sum(shard.elements for shard in plan if shard.owner == owner and not shard.replicated)


@dataclass
class Shard:
    """A shard in live memory. The tensors are views of what the optimizer updates: writing to them restores.

    weight: ``[rows, cols]``. states: by name, ``[rows]`` for kind ``row``, ``[rows, cols]`` for kind ``element``.
    """

    spec: ShardSpec
    weight: Tensor
    states: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class RowBlock:
    """Rows of one table and one column range in host memory: what a save stages and a chunk holds.

    rows: int64 ``[n]``, global row numbers, strictly increasing. weight: ``[n, cols]``. states as in `Shard`.
    A row's weight and all its optimizer states are one record of one step.
    """

    table: str
    rows: Tensor
    col_start: int
    weight: Tensor
    states: dict[str, Tensor] = field(default_factory=dict)

    @property
    def cols(self) -> int:
        return int(self.weight.shape[1])
