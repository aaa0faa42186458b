"""Sets of row numbers, coded compactly: runs of rows with narrow integers, or a bitmap, whichever is smaller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_cpr.errors import ConfigError, CorruptShardError

_WIDTHS: dict[int, Any] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<i8")}


@dataclass(frozen=True)
class RowCode:
    """Coded rows. ``start``/``end``: the hull. ``runs``: number of runs; ``widths``: bytes of a gap and of a length
    (all 0 for a bitmap).

    ``data`` is, for ``runs``, all gaps (to the end of the run before, the first to ``start``) and then all lengths; for
    ``bitmap``, one bit a row from ``start`` on, lowest bit first.
    """

    kind: Literal["runs", "bitmap"]
    start: int
    end: int
    count: int
    runs: int
    widths: tuple[int, int]
    data: bytes

    def meta(self) -> dict[str, Any]:
        """Everything but ``data``, as JSON values."""
        return {
            "kind": self.kind,
            "start": self.start,
            "end": self.end,
            "count": self.count,
            "runs": self.runs,
            "widths": list(self.widths),
        }


def runs_of(rows: Tensor) -> np.ndarray:
    """int64 ``[k, 2]``: the half-open runs of strictly increasing int64 rows ``[n]``; ConfigError if they are not."""
    ids = rows.numpy()
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise ConfigError(f"row numbers must be int64 [n], not {ids.dtype} {list(ids.shape)}")
    if ids.size == 0:
        return np.empty((0, 2), np.int64)
    steps = np.diff(ids)
    if ids[0] < 0 or (steps.size and int(steps.min()) <= 0):
        raise ConfigError("row numbers must be non-negative and strictly increasing")
    breaks = np.flatnonzero(steps != 1)
    starts = ids[np.concatenate(([0], breaks + 1))]
    ends = ids[np.concatenate((breaks, [ids.size - 1]))] + 1
    return np.stack((starts, ends), axis=1)


def rows_of(runs: np.ndarray) -> Tensor:
    """int64 ``[n]``: the rows of half-open runs ``[k, 2]``."""
    if len(runs) == 1:
        return torch.arange(int(runs[0, 0]), int(runs[0, 1]), dtype=torch.int64)
    lengths = runs[:, 1] - runs[:, 0]
    first = np.cumsum(lengths) - lengths
    return torch.from_numpy(np.repeat(runs[:, 0] - first, lengths) + np.arange(int(lengths.sum()), dtype=np.int64))


def _width(values: np.ndarray) -> int:
    top = int(values.max(initial=0))
    return next(width for width, limit in ((1, 1 << 8), (2, 1 << 16), (4, 1 << 32), (8, 1 << 63)) if top < limit)


def encode_rows(rows: Tensor) -> RowCode:
    """Code strictly increasing int64 rows ``[n]``."""
    runs = runs_of(rows)
    if not len(runs):
        return RowCode("runs", 0, 0, 0, 0, (1, 1), b"")
    start, end = int(runs[0, 0]), int(runs[-1, 1])
    gaps = np.concatenate(([0], runs[1:, 0] - runs[:-1, 1]))
    lengths = runs[:, 1] - runs[:, 0]
    widths = (_width(gaps), _width(lengths))
    if len(runs) * sum(widths) <= (end - start + 7) // 8:
        data = gaps.astype(_WIDTHS[widths[0]]).tobytes() + lengths.astype(_WIDTHS[widths[1]]).tobytes()
        return RowCode("runs", start, end, len(rows), len(runs), widths, data)
    bits = np.zeros(end - start, np.uint8)
    bits[rows.numpy() - start] = 1
    return RowCode("bitmap", start, end, len(rows), 0, (0, 0), np.packbits(bits, bitorder="little").tobytes())


def code_from_meta(meta: Any, data: bytes, name: str) -> RowCode:
    """The `RowCode` of `RowCode.meta` and its data; CorruptShardError naming ``name`` unless every field is sound."""
    try:
        kind, (gap, length) = meta["kind"], meta["widths"]
        numbers = [meta[key] for key in ("start", "end", "count", "runs")]
        if any(type(number) is not int or number < 0 for number in (*numbers, gap, length)):
            raise ValueError("negative or not an integer")
        code = RowCode(kind, numbers[0], numbers[1], numbers[2], numbers[3], (gap, length), data)
        span = code.end - code.start
        if not (code.runs <= code.count <= span < 1 << 62 and (code.count == 0) == (span == 0)):
            raise ValueError("counts contradict each other")
        if kind == "runs":
            wanted = code.runs * (_WIDTHS[gap].itemsize + _WIDTHS[length].itemsize)
        else:
            wanted = {"bitmap": (span + 7) // 8}[kind] if code.runs == gap == length == 0 else -1
        if len(data) != wanted:
            raise ValueError(f"{len(data)} bytes of row numbers, wanted {wanted}")
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptShardError(f"{name}: unreadable row numbers ({error})") from error
    return code


def decode_rows(code: RowCode, name: str) -> Tensor:
    """int64 ``[n]``, strictly increasing, within the hull; CorruptShardError naming ``name`` if the data are not."""
    if code.kind == "bitmap":
        bits = np.unpackbits(np.frombuffer(code.data, np.uint8), count=code.end - code.start, bitorder="little")
        rows = torch.from_numpy(np.flatnonzero(bits).astype(np.int64) + code.start)
    else:
        split = code.runs * code.widths[0]
        gaps = np.frombuffer(code.data[:split], _WIDTHS[code.widths[0]]).astype(np.int64)
        lengths = np.frombuffer(code.data[split:], _WIDTHS[code.widths[1]]).astype(np.int64)
        # Checked before the rows are built: a hostile length must not decide how much memory is taken.
        sound = (lengths > 0).all() and (lengths <= code.count).all() and int(lengths.sum()) == code.count
        if not sound or (gaps[1:] <= 0).any() or gaps[:1].any():
            raise CorruptShardError(f"{name}: row runs do not add up to {code.count} rows")
        ends = code.start + np.cumsum(gaps + lengths)
        rows = rows_of(np.stack((ends - lengths, ends), axis=1))
    if len(rows) != code.count or (len(rows) and (int(rows[0]), int(rows[-1]) + 1) != (code.start, code.end)):
        raise CorruptShardError(f"{name}: row numbers do not match their hull [{code.start}, {code.end})")
    return rows
