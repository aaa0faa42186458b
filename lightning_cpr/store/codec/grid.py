"""Codecs that store a row as codes on an even grid between two 16 bit floats: 8 bit and the adaptive 4, 3, 2 bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_cpr.errors import CorruptShardError
from lightning_cpr.store.codec.base import Scratch, row_chunks, shifted, take
from lightning_cpr.store.codec.lanes import pack, packed_width, unpack
from lightning_cpr.store.codec.plain import UNIT_ROUNDOFF
from lightning_cpr.store.codec.search import MAGIC, Search, narrow


class _Grid(NamedTuple):
    """Stored ends (16 bit floats), and in float32 the lower end, the step, and its inverse (0 for a constant row)."""

    low16: Tensor
    high16: Tensor
    low: Tensor
    step: Tensor
    inverse: Tensor


def _ends_dtype(rows: Tensor) -> torch.dtype:
    return torch.bfloat16 if rows.dtype == torch.bfloat16 else torch.float16


def _extremes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """float32 ``[n]`` each: least and largest value of each row; 0 for rows without columns, NaN if it holds one."""
    if rows.dtype == torch.float32 and rows.shape[1]:
        return rows.amin(dim=1), rows.amax(dim=1)
    low, high = (rows.new_zeros(rows.shape[0], dtype=torch.float32) for _ in range(2))
    for a, b in row_chunks(rows.shape, rows.device):
        block = rows[a:b].float()
        low[a:b], high[a:b] = block.amin(dim=1), block.amax(dim=1)
    return low, high


@dataclass(frozen=True)
class GridCodec:
    """``value = code * step + low`` with ``step = (high - low) / (2**bits - 1)``, in float32, each operation rounded.

    ``low`` and ``high`` are stored as float16, for bfloat16 rows as bfloat16, and rounded *before* the codes, which
    makes decoded rows fixed points: their extremes are the stored ends again. A row fits if it is finite, and either
    constant and exact in 16 bits, or rounding moves neither end by over a quarter step (narrow ranges far from zero,
    and magnitudes over 65504 or of the order of float16's smallest, do not fit) and the ends survive a decode. Rows of
    16 bit floats must also survive a second round trip as a whole.

    Bound per value: half a step; with a ``search`` (`narrow`) values beyond the chosen range are clipped to it, which
    adds at most the share ``search.ratio`` of the row's range, where that lessens the squared error of the row.
    Parts: ``codes`` uint8 ``[n, bytes]``, ``low`` and ``high`` ``[n]``; 3 bit codes lie in two planes, the lower two
    bits in ``codes`` and the third in ``codes_high``.
    """

    bits: int
    search: Search | None = None

    @property
    def name(self) -> str:
        return f"aint{self.bits}" if self.search else f"int{self.bits}"

    @property
    def _planes(self) -> tuple[tuple[str, int, int], ...]:
        """(part, bits, lowest bit) of each plane of codes."""
        return (("codes", 2, 0), ("codes_high", 1, 2)) if self.bits == 3 else (("codes", self.bits, 0),)

    def fits(self, rows: Tensor) -> Tensor:
        cols = rows.shape[1]
        low, high = _extremes(rows)
        grid = self._grid(low, high, _ends_dtype(rows))
        ok = self._holds(grid, low, high) | ((low == high) & (low == grid.low) & low.isfinite())
        if rows.dtype != torch.float32:
            for a, b in row_chunks(rows.shape, rows.device):
                once = self.decode(self.encode(rows[a:b]), cols, rows.dtype)
                ok[a:b] &= (self.decode(self.encode(once), cols, rows.dtype) == once).all(dim=1)
        return ok

    def encode(self, rows: Tensor) -> dict[str, Tensor]:
        n, cols = rows.shape
        grid = self._choose(rows)
        parts = {name: rows.new_empty(n, packed_width(cols, bits), dtype=torch.uint8) for name, bits, _ in self._planes}
        scratch = Scratch(rows.device)
        for a, b in row_chunks(rows.shape, rows.device):
            scaled = shifted(rows[a:b], grid.low[a:b], scratch).mul_(grid.inverse[a:b, None])
            if self.search is not None:
                scaled.clamp_(0, 2**self.bits - 1)
            whole = scaled.add_(MAGIC).view(torch.int32)  # the low byte is the code
            if self.bits == 8:
                parts["codes"][a:b] = whole
                continue
            codes = scratch.get("codes", torch.uint8, b - a, -(-cols // 8) * 8)
            codes[:, cols:] = 0
            codes[:, :cols] = whole
            for name, bits, lowest in self._planes:
                pack(codes, bits, lowest, scratch, parts[name][a:b])
        return {**parts, "low": grid.low16, "high": grid.high16}

    def decode(self, parts: Mapping[str, Tensor], cols: int, dtype: torch.dtype) -> Tensor:
        planes = [
            take(self.name, parts, name, (packed_width(cols, bits),), torch.uint8) for name, bits, _ in self._planes
        ]
        low, high = (
            take(self.name, parts, name, (), torch.float16, torch.bfloat16).float() for name in ("low", "high")
        )
        if any(len(part) != len(low) for part in (high, *planes)):
            raise CorruptShardError(
                f"codec {self.name}: parts of {[len(p) for p in (low, high, *planes)]} rows in one chunk"
            )
        step = self._step(low, high)
        out = torch.empty(low.shape[0], cols, dtype=dtype, device=low.device)
        scratch = Scratch(out.device)
        for a, b in row_chunks(out.shape, out.device):
            codes = planes[0][a:b] if self.bits == 8 else unpack(planes[0][a:b], self._planes[0][1], scratch)
            codes = codes[:, :cols]
            if self.bits == 3:
                codes.bitwise_or_(unpack(planes[1][a:b], 1, scratch)[:, :cols].bitwise_left_shift_(2))
            values = out[a:b] if dtype == torch.float32 else scratch.get("values", torch.float32, b - a, cols)
            # Multiply, then add, as two operations: fused into one they would round differently on another device.
            values.copy_(codes).mul_(step[a:b, None]).add_(low[a:b, None])
            if dtype != torch.float32:
                out[a:b] = values
        return out

    def bound(self, rows: Tensor) -> Tensor:
        low, high = _extremes(rows)
        cut = self.search.cuts / self.search.num_bins if self.search else 0.0
        rounding = 2.0**-22 + (UNIT_ROUNDOFF[rows.dtype] if rows.dtype != torch.float32 else 0)
        step = self._grid(low, high, _ends_dtype(rows)).step
        top = torch.maximum(low.abs(), high.abs()).clamp_(min=torch.finfo(rows.dtype).smallest_normal)
        bound = step * (0.5 + 2.0**-10) + (high - low) * cut + top * rounding
        return torch.where(low == high, 0, bound)

    def _choose(self, rows: Tensor) -> _Grid:
        low, high = _extremes(rows)
        whole = self._grid(low, high, _ends_dtype(rows))
        if self.search is None:
            return whole
        narrowed = narrow(rows, low, high, self.bits, self.search)
        found = self._grid(*narrowed, _ends_dtype(rows))
        keep = self._holds(found, *narrowed)
        return _Grid(*(torch.where(keep, new, old) for new, old in zip(found, whole, strict=True)))

    def _step(self, low: Tensor, high: Tensor) -> Tensor:
        # A tensor divisor: CUDA replaces a division by a Python number with a product by its inverse.
        return (high - low).div_(torch.full_like(low, 2**self.bits - 1))

    def _grid(self, low: Tensor, high: Tensor, stored: torch.dtype) -> _Grid:
        low16, high16 = low.to(stored), high.to(stored)
        start = low16.float()
        step = self._step(start, high16.float())
        inverse = torch.where(step > 0, torch.ones_like(step).div_(step), 0)
        return _Grid(low16, high16, start, step, inverse)

    def _holds(self, grid: _Grid, low: Tensor, high: Tensor) -> Tensor:
        """Bool ``[n]``: the stored ends are near the wanted ones, and are the extremes of what will be decoded."""
        quarter = grid.step * 0.25
        top = grid.step * (2**self.bits - 1) + grid.low
        return (
            (grid.step > 2.0**-100)  # the inverse is finite, and nothing below is subnormal
            & ((low - grid.low).abs_() <= quarter)
            & ((high - grid.high16.float()).abs_() <= quarter)
            & (top.to(grid.high16.dtype) == grid.high16)
            & grid.high16.isfinite()
        )
