"""Public failures of row quantizers (pytorch, FBGEMM, TorchEasyRec): what a codec of ours does with the same rows."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from lightning_cpr.store.codec import CODECS, Codec, error_bound, get_codec
from lightning_cpr.store.codec.base import row_chunks

QUANTIZED = [get_codec(name) for name in ("int8", "aint4", "aint3", "aint2")]
INF = float("inf")
quantized = pytest.mark.parametrize("codec", QUANTIZED, ids=lambda codec: codec.name)


def as_written(codec: Codec, rows: Tensor) -> tuple[Tensor, int]:
    """The rows after a save and a restore as a writer does them, and how many were stored raw."""
    fits, raw = codec.fits(rows), get_codec("raw")
    back = torch.empty_like(rows)
    for used, mask in ((codec, fits), (raw, ~fits)):
        back[mask] = used.decode(used.encode(rows[mask]), rows.shape[1], rows.dtype)
    return back, int((~fits).sum())


@quantized
def test_q01_rows_with_inf_or_nan_are_kept_raw(codec: Codec) -> None:
    rows = torch.tensor([[1, 2, INF, 4], [-INF, 1, 2, 3], [1, 2, float("nan"), 4], [-1, 0.5, 0.25, 1]])
    back, raw = as_written(codec, rows)
    assert raw == 3
    assert torch.equal(back[:3].view(torch.int32), rows[:3].view(torch.int32))
    assert (back[3] - rows[3]).abs().max() <= error_bound(codec, rows)[3]


@quantized
@pytest.mark.parametrize("value", [0.0, 3.25, -7.5, 0.1, 1e-30, 1e30])
@pytest.mark.parametrize("cols", [1, 5, 64])
def test_q03_constant_rows_are_exact(codec: Codec, value: float, cols: int) -> None:
    rows = torch.full((3, cols), value)
    back, raw = as_written(codec, rows)
    assert torch.equal(back, rows)
    assert raw == (0 if value in (0.0, 3.25, -7.5) else 3)  # those are exact in 16 bits


@quantized
def test_q04_a_narrow_range_far_from_zero_keeps_its_precision(codec: Codec) -> None:
    row = torch.linspace(1000.0, 1000.003, 64)[None]
    back, _ = as_written(codec, row)
    ulp = 2.0**-14
    assert (back - row).abs().max() <= (row.max() - row.min()) / 255 + ulp


def test_q04_the_range_is_not_forced_through_zero() -> None:
    row = torch.linspace(10.0, 11.0, 256)[None]
    codec = get_codec("int8")
    assert codec.fits(row).all()
    back, raw = as_written(codec, row)
    assert raw == 0
    assert (back - row).abs().max() <= 1 / 255


@quantized
def test_q06_a_row_beyond_fp16_is_not_turned_into_nan(codec: Codec) -> None:
    rows = torch.stack([torch.linspace(-1e5, 1e5, 64), torch.linspace(-6e4, 6e4, 64)])
    back, raw = as_written(codec, rows)
    assert raw == 1
    assert torch.equal(back[0], rows[0])
    assert back.isfinite().all()
    assert (back[1] - rows[1]).abs().max() <= error_bound(codec, rows)[1]


def test_q08_offsets_of_70_million_rows() -> None:
    """Python integers, so that no product of rows and columns can wrap; chunks stay far below 2**31 elements."""
    rows, cols = 70_000_000, 32
    for device in ("cpu", "cuda"):
        chunks = list(row_chunks((rows, cols), torch.device(device)))
        assert (chunks[0][0], chunks[-1][1]) == (0, rows)
        assert all(end == start for (_, end), (start, _) in pairwise(chunks))
        assert all(0 < (end - start) * cols < 2**31 for start, end in chunks)
        assert chunks[-1][0] * cols > 2**31


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("shape", [(0, 8), (5, 0), (0, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_q10_empty_in_empty_out(codec: Codec, shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows = torch.empty(shape, dtype=dtype)
    assert torch.equal(codec.fits(rows), torch.ones(shape[0], dtype=torch.bool))
    parts = codec.encode(rows)
    assert all(part.shape[0] == shape[0] for part in parts.values())
    back = codec.decode(parts, shape[1], dtype)
    assert (back.shape, back.dtype) == (shape, dtype)
    assert torch.equal(error_bound(codec, rows), torch.zeros(shape[0]))
