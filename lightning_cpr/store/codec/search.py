"""The range search of the adaptive widths, for all candidate ranges of many rows at once.

Check-N-Run (arXiv 2010.08679, section 5.2) narrows a row's range greedily, one of ``num_bins`` bins at a time from
either end, until a share ``ratio`` of it is cut, and keeps the range with the least squared error. Seen on rows that
are scaled to [0, 1], the error of one value under one candidate is the same function for every row. So a row's
histogram times a fixed table gives its error under each candidate, and *all* pairs of cuts, of which the greedy walk
visits some, are compared by one matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lightning_cpr.errors import ConfigError
from lightning_cpr.store.codec.base import Scratch, row_chunks, shifted

MAGIC = 12582912.0  # 1.5 * 2**23: adding it rounds a small float to an integer that lies in the low mantissa bits
_POINTS = 32  # a bin's error is the mean over this many points of it
# bits: (used bins - 1, bins). The first is a multiple of 2**bits - 1: decoded rows fall on bin centres. The second is
# a power of two: a mask keeps any index, of a NaN too, inside.
_BINS = {2: (60, 64), 3: (63, 64), 4: (120, 128)}


@dataclass(frozen=True)
class Search:
    """Cut up to ``ratio`` of the range, in steps of 1 / ``num_bins`` of it, from both ends together."""

    num_bins: int
    ratio: float

    def __post_init__(self) -> None:
        if not (self.num_bins >= 1 and 0 <= self.ratio < 1 and self.cuts <= 20):
            raise ConfigError(f"{self}: needs num_bins >= 1, 0 <= ratio < 1 and at most 20 bins cut")

    @property
    def cuts(self) -> int:
        return int(self.num_bins * self.ratio)


@lru_cache(maxsize=64)
def _table(bits: int, search: Search, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Squared error ``[bins, candidates]`` above the least possible, and the lower and upper cut of each candidate.

    The whole range is candidate 0. Its error is exactly 0 where a level lies, and every other candidate's error is
    positive in the first or last bin: a row that was decoded keeps its range.
    """
    last, bins = _BINS[bits]
    levels = 2**bits - 1
    pairs = [(k - j, j) for k in range(search.cuts + 1) for j in range(k + 1)]
    cut = torch.tensor(pairs, dtype=torch.float32).t().div(search.num_bins)
    offsets = (torch.arange(_POINTS) + 0.5) / _POINTS - 0.5
    points = ((torch.arange(bins)[:, None] + offsets) / last)[:, :, None]
    step = (1 - cut[0] - cut[1]) / levels
    codes = ((points - cut[0]) / step).round().clamp(0, levels)
    error = (points - (codes * step + cut[0])).square().mean(dim=1) - 1 / (12 * last * last)
    error = error.clamp(min=0)
    error[0, 0] = error[last, 0] = 0
    return error.to(device), cut[0].to(device), cut[1].to(device)


def narrow(rows: Tensor, low: Tensor, high: Tensor, bits: int, search: Search) -> tuple[Tensor, Tensor]:
    """float32 ``[n]`` each: the best range of ``[n, cols]`` rows whose extremes are ``low`` and ``high``."""
    last, bins = _BINS[bits]
    table, low_cut, high_cut = _table(bits, search, rows.device)
    numbers = torch.arange(table.shape[1], dtype=torch.int32, device=rows.device)
    span = high - low
    scale = torch.where(span > 0, last / span, 0)
    best = torch.zeros(rows.shape[0], dtype=torch.int32, device=rows.device)
    scratch = Scratch(rows.device)
    for a, b in row_chunks(rows.shape, rows.device):
        scaled = shifted(rows[a:b], low[a:b], scratch)
        whole = scaled.mul_(scale[a:b, None]).add_(MAGIC).view(torch.int32).bitwise_and_(bins - 1)
        index = scratch.get("index", torch.int64, *scaled.shape).copy_(whole)
        counts = scratch.get("counts", torch.float32, b - a, bins).zero_()
        counts.scatter_add_(1, index, scaled.fill_(1))
        errors = torch.mm(counts, table, out=scratch.get("errors", torch.float32, b - a, len(numbers)))
        # Non-negative floats order like their bits: the low ones carry the candidate's number through the minimum.
        torch.amin(errors.view(torch.int32).bitwise_and_(~255).bitwise_or_(numbers), dim=1, out=best[a:b])
    best.bitwise_and_(255)
    return low + low_cut[best] * span, high - high_cut[best] * span
