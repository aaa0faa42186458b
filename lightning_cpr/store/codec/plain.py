"""Codecs without a search: bytes as they are, half-width floats, and one for optimizer sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_cpr.store.codec.base import row_chunks, take

# Half a unit in the last place of a 16 bit float, relative to a normal value.
UNIT_ROUNDOFF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}


def abs_max(rows: Tensor) -> Tensor:
    """float32 ``[n]``: the largest magnitude of each row (NaN if it holds one), 0 for rows without columns."""
    if rows.shape[1] == 0:
        return rows.new_zeros(rows.shape[0], dtype=torch.float32)
    return torch.maximum(rows.amax(dim=1).abs_(), rows.amin(dim=1).abs_()).float()


@dataclass(frozen=True)
class RawCodec:
    """The rows themselves, bit for bit, NaN payloads included. Holds every row; the bound is 0."""

    name: str = "raw"

    def fits(self, rows: Tensor) -> Tensor:
        return torch.ones(rows.shape[0], dtype=torch.bool, device=rows.device)

    def encode(self, rows: Tensor) -> dict[str, Tensor]:
        return {"values": rows.contiguous()}

    def decode(self, parts: Mapping[str, Tensor], cols: int, dtype: torch.dtype) -> Tensor:
        return take(self.name, parts, "values", (cols,), dtype)

    def bound(self, rows: Tensor) -> Tensor:
        return rows.new_zeros(rows.shape[0], dtype=torch.float32)


@dataclass(frozen=True)
class FloatCodec:
    """Rounding to a 16 bit float, to nearest, ties to even. Bound: unit roundoff x largest magnitude of the row.

    A row fits if it is finite, does not overflow, and is zero or reaches the format's smallest normal value, below
    which the relative bound would not hold. Rows that are of this dtype already are kept bit for bit, and all fit.
    """

    name: str
    stored: torch.dtype

    def fits(self, rows: Tensor) -> Tensor:
        top = abs_max(rows)
        if rows.dtype == self.stored:
            return torch.ones_like(top, dtype=torch.bool)
        limits = torch.finfo(self.stored)
        survives = top.to(self.stored).to(rows.dtype).isfinite()
        return (top == 0) | ((top >= limits.smallest_normal) & (top <= limits.max) & survives)

    def encode(self, rows: Tensor) -> dict[str, Tensor]:
        return {"values": rows.to(self.stored).contiguous()}

    def decode(self, parts: Mapping[str, Tensor], cols: int, dtype: torch.dtype) -> Tensor:
        return take(self.name, parts, "values", (cols,), self.stored).to(dtype)

    def bound(self, rows: Tensor) -> Tensor:
        if rows.dtype == self.stored:
            return rows.new_zeros(rows.shape[0], dtype=torch.float32)
        return abs_max(rows) * UNIT_ROUNDOFF[self.stored]


@dataclass(frozen=True)
class SumCodec:
    """Optimizer sums (Adagrad, second moments): non-negative values rounded *up* to 8 exponent and 8 mantissa bits.

    The sign bit is not stored, so 16 bits hold one bit more than bfloat16 over the whole float32 range. Per value:
    ``x <= decoded <= x * (1 + 2**-8)``, zero stays zero, non-zero never becomes zero, and no later step grows by the
    rounding. A row fits if each value is +0, or at least float32's smallest normal and not rounded up to infinity.
    """

    name: str = "up16"

    def fits(self, rows: Tensor) -> Tensor:
        ok = torch.ones(rows.shape[0], dtype=torch.bool, device=rows.device)
        top = int(torch.tensor(torch.finfo(rows.dtype).max).view(torch.int32)) & ~0x7FFF
        for a, b in row_chunks(rows.shape, rows.device):
            bits = rows[a:b].float().view(torch.int32)
            # As integers, values with the sign bit are below 0, infinities and NaNs above every finite one.
            ok[a:b] = (bits.amin(dim=1) >= 0) & (bits.amax(dim=1) <= top)
            # Less one, and without the sign bit, 0 is the largest integer and only subnormals are below 0x007FFFFF.
            ok[a:b] &= (bits - 1).bitwise_and_(0x7FFFFFFF).amin(dim=1) >= 0x007FFFFF
        return ok

    def encode(self, rows: Tensor) -> dict[str, Tensor]:
        words = torch.empty(rows.shape, dtype=torch.int16, device=rows.device)
        for a, b in row_chunks(rows.shape, rows.device):
            bits = rows[a:b].contiguous().to(torch.float32, copy=True).view(torch.int32)
            words[a:b] = bits.add_(0x7FFF).bitwise_right_shift_(15)
        return {"words": words}

    def decode(self, parts: Mapping[str, Tensor], cols: int, dtype: torch.dtype) -> Tensor:
        words = take(self.name, parts, "words", (cols,), torch.int16)
        return words.int().bitwise_and_(0xFFFF).bitwise_left_shift_(15).view(torch.float32).to(dtype)

    def bound(self, rows: Tensor) -> Tensor:
        return abs_max(rows) * 2.0**-8
