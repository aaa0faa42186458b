"""A row of a shard as one record of raw bits: its weight and all its optimizer states, in int64 words.

Fields start at multiples of 4 bytes and records are padded with zero bits to whole words, so that records of any dtype
and width can be XORed, and parity of shards of different widths shares one flat buffer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_cpr.spec import Shard, ShardSpec, TableSpec

WORD = 8  # bytes


@dataclass(frozen=True)
class Record:
    """Where the fields of a record lie: (state name or None for the weight, first byte, bytes)."""

    fields: tuple[tuple[str | None, int, int], ...]
    words: int

    @property
    def whole_words(self) -> int:
        """How many words, from the first on, are of fields alone: the others hold bytes of none."""
        end = 0
        for _, offset, size in self.fields:
            if offset > end:
                break
            end = offset + size
        return end // WORD


def record_of(table: TableSpec, spec: ShardSpec) -> Record:
    """The record of one row of a shard. Depends on table and width alone: every rank computes the same."""
    sizes: list[tuple[str | None, int]] = [(None, table.dtype.itemsize * spec.cols)]
    sizes += [(s.name, s.dtype.itemsize * (spec.cols if s.kind == "element" else 1)) for s in table.states]
    fields, offset = [], 0
    for name, size in sizes:
        fields.append((name, offset, size))
        offset += math.ceil(size / 4) * 4
    return Record(tuple(fields), math.ceil(offset / WORD))


def runs(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """``starts[i], starts[i] + 1, ...``, ``counts[i]`` numbers, for each i in turn: int64."""
    ends = counts.cumsum()
    return (starts - (ends - counts)).repeat(counts) + np.arange(ends[-1] if len(ends) else 0)


class ShardRows:
    """Reads and writes rows of a live shard as records, int64 ``[n, words]`` in host memory, or field by field."""

    def __init__(self, shard: Shard, record: Record) -> None:
        self.spec = shard.spec
        self.record = record
        self._fields = [
            (_bits(shard.weight if name is None else shard.states[name], offset, size), offset, size)
            for name, offset, size in record.fields
        ]

    def read(self, rows: Tensor | slice, out: Tensor | None = None) -> Tensor:
        """Rows by shard-local number (int64, on the CPU) or as a range; into ``out`` if it is given."""
        if isinstance(rows, Tensor):
            fields = self.room(rows.numel())
            self.take(rows, fields)
        else:
            fields = [bits[rows] for bits, _, _ in self._fields]
        words = torch.empty((fields[0].shape[0], self.record.words), dtype=torch.int64) if out is None else out
        self.join(fields, words)
        return words

    def write(self, rows: Tensor | slice, words: Tensor) -> None:
        """The opposite of `read`. Row numbers are distinct."""
        fields = [_place(words, bits.dtype, offset, size) for bits, offset, size in self._fields]
        if isinstance(rows, Tensor):
            self.put(rows, fields)
            return
        for (bits, _, _), source in zip(self._fields, fields, strict=True):
            bits[rows] = source.to(bits.device)

    def room(self, count: int) -> list[Tensor]:
        """Memory for ``count`` rows, by field."""
        return [torch.empty((count, bits.shape[1]), dtype=bits.dtype) for bits, _, _ in self._fields]

    def take(self, rows: Tensor, fields: Sequence[Tensor]) -> None:
        """Copy rows by number (int64, on the CPU, all of the shard) into ``fields``, of as many rows."""
        for (bits, _, _), target in zip(self._fields, fields, strict=True):
            if bits.is_cpu and bits.is_contiguous():
                np.take(bits.numpy(), rows.numpy(), axis=0, out=target.numpy(), mode="clip")
            else:
                target.copy_(bits.index_select(0, rows.to(bits.device)))

    def put(self, rows: Tensor, fields: Sequence[Tensor]) -> None:
        """The opposite of `take`. Row numbers are distinct."""
        for (bits, _, _), source in zip(self._fields, fields, strict=True):
            bits.index_copy_(0, rows.to(bits.device), source.to(bits.device))

    def join(self, fields: Sequence[Tensor], words: Tensor) -> None:
        """Write rows given by field as records: int64 ``[n, words]``."""
        words[:, self.record.whole_words :] = 0
        for (bits, offset, size), source in zip(self._fields, fields, strict=True):
            _place(words, bits.dtype, offset, size).copy_(source)


def _place(words: Tensor, unit: torch.dtype, offset: int, size: int) -> Tensor:
    return words.view(unit)[:, offset // unit.itemsize : (offset + size) // unit.itemsize]


def _bits(tensor: Tensor, offset: int, size: int) -> Tensor:
    """The tensor's own memory as ``[rows, units]`` of the widest unit that its alignment allows."""
    # Without the version that autograd keeps: rows that no graph has read may come back between forward and backward.
    tensor = tensor.data
    matrix = tensor.unsqueeze(1) if tensor.dim() == 1 else tensor
    if matrix.shape[1] == 1:  # the stride of a single column is anything, and view wants it to be 1
        matrix = matrix.as_strided(matrix.shape, (matrix.stride(0), 1))
    aligned = size % 4 == 0 and matrix.data_ptr() % 4 == 0 and matrix.stride(0) * matrix.itemsize % 4 == 0
    return matrix.view(torch.int32 if aligned and offset % 4 == 0 else torch.uint8)
