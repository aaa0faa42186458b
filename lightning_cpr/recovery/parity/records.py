"""A row of a shard as one record of raw bits: its weight and all its optimizer states, in int64 words.

Fields start at multiples of 4 bytes and records are padded with zero bits to whole words, so that records of any dtype
and width can be XORed, and parity of shards of different widths shares one flat buffer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_cpr.spec import Shard, ShardSpec, TableSpec

WORD = 8  # bytes


@dataclass(frozen=True)
class Record:
    """Where the fields of a record lie: (state name or None for the weight, first byte, bytes)."""

    fields: tuple[tuple[str | None, int, int], ...]
    words: int


def record_of(table: TableSpec, spec: ShardSpec) -> Record:
    """The record of one row of a shard. Depends on table and width alone: every rank computes the same."""
    sizes: list[tuple[str | None, int]] = [(None, table.dtype.itemsize * spec.cols)]
    sizes += [(s.name, s.dtype.itemsize * (spec.cols if s.kind == "element" else 1)) for s in table.states]
    fields, offset = [], 0
    for name, size in sizes:
        fields.append((name, offset, size))
        offset += math.ceil(size / 4) * 4
    return Record(tuple(fields), math.ceil(offset / WORD))


class ShardRows:
    """Reads and writes rows of a live shard as records, int64 ``[n, words]`` in host memory."""

    def __init__(self, shard: Shard, record: Record) -> None:
        self.spec = shard.spec
        self.record = record
        self._fields = [
            (_bits(shard.weight if name is None else shard.states[name], offset, size), offset, size)
            for name, offset, size in record.fields
        ]

    def read(self, rows: Tensor | slice) -> Tensor:
        """Rows by shard-local number (int64, on the CPU) or as a range."""
        count = rows.numel() if isinstance(rows, Tensor) else rows.stop - rows.start
        words = torch.zeros((count, self.record.words), dtype=torch.int64)
        for bits, offset, size in self._fields:
            source = bits.index_select(0, rows.to(bits.device)) if isinstance(rows, Tensor) else bits[rows]
            _place(words, bits.dtype, offset, size).copy_(source)
        return words

    def write(self, rows: Tensor | slice, words: Tensor) -> None:
        """The opposite of `read`. Row numbers are distinct."""
        for bits, offset, size in self._fields:
            source = _place(words, bits.dtype, offset, size).to(bits.device)
            if isinstance(rows, Tensor):
                bits.index_copy_(0, rows.to(bits.device), source)
            else:
                bits[rows] = source


def _place(words: Tensor, unit: torch.dtype, offset: int, size: int) -> Tensor:
    return words.view(unit)[:, offset // unit.itemsize : (offset + size) // unit.itemsize]


def _bits(tensor: Tensor, offset: int, size: int) -> Tensor:
    """The tensor's own memory as ``[rows, units]`` of the widest unit that its alignment allows."""
    tensor = tensor.detach()
    matrix = tensor.unsqueeze(1) if tensor.dim() == 1 else tensor
    if matrix.shape[1] == 1:  # the stride of a single column is anything, and view wants it to be 1
        matrix = matrix.as_strided(matrix.shape, (matrix.stride(0), 1))
    aligned = size % 4 == 0 and matrix.data_ptr() % 4 == 0 and matrix.stride(0) * matrix.itemsize % 4 == 0
    return matrix.view(torch.int32 if aligned and offset % 4 == 0 else torch.uint8)
