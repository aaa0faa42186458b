"""Row codecs: how the rows of a table, or of an optimizer state, become the bytes of a chunk (Check-N-Run).

=========  ===================================  =====================================================================
name       bytes a row of ``c`` values          error of a value, for rows that fit
=========  ===================================  =====================================================================
``raw``    ``4c`` (``2c`` for 16 bit rows)      none, NaN payloads included
``fp16``   ``2c``                               ``2**-11`` x largest magnitude of the row
``bf16``   ``2c``                               ``2**-8`` x largest magnitude of the row
``int8``   ``c + 4``                            half a step: range / 510
``aint4``  ``ceil(c / 2) + 4``                  half a step (range / 30), clipped values more: see `GridCodec`
``aint3``  ``ceil(c / 4) + ceil(c / 8) + 4``    half a step (range / 14), clipped values more
``aint2``  ``ceil(c / 4) + 4``                  half a step (range / 6), clipped values more
``up16``   ``2c``                               for non-negative sums: relative, in ``[0, 2**-8]``, zero only for zero
=========  ===================================  =====================================================================

Rows with NaN, infinity or a range that a codec cannot hold do not ``fit``; the writer stores them raw and counts them.
Encoding is byte-identical on every device for all but the adaptive widths, which meet their bound; decoding is for all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_cpr.errors import ConfigError
from lightning_cpr.store.codec.base import Codec
from lightning_cpr.store.codec.grid import GridCodec
from lightning_cpr.store.codec.plain import FloatCodec, RawCodec, SumCodec
from lightning_cpr.store.codec.search import Search

__all__ = ["CODECS", "Codec", "error_bound", "get_codec", "tune"]

# All of these cut up to 9 bins: 55 candidates, so that they cost the same. `tune` picks among the first of each pair.
_NUM_BINS = {2: (14, 16, 20, 24, 32), 3: (20, 26, 32, 40, 50), 4: (45, 60, 75, 90, 120)}
_DEFAULT_BINS = {2: 20, 3: 32, 4: 75}


def _search(num_bins: int) -> Search:
    return Search(num_bins, 9.5 / num_bins)


_ALL: tuple[Codec, ...] = (
    RawCodec(),
    FloatCodec("fp16", torch.float16),
    FloatCodec("bf16", torch.bfloat16),
    GridCodec(8),
    *(GridCodec(bits, _search(_DEFAULT_BINS[bits])) for bits in (4, 3, 2)),
    SumCodec(),
)
CODECS = {codec.name: codec for codec in _ALL}


def get_codec(name: str) -> Codec:
    """The codec that a manifest calls ``name``.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    if name not in CODECS:
        raise ConfigError(f"unknown codec {name!r}: use one of {', '.join(CODECS)}")
    return CODECS[name]


def error_bound(codec: Codec, rows: Tensor) -> Tensor:
    """float32 ``[n]``: the stated bound on ``|decode(encode(row)) - row|`` of each row of ``rows`` that fits."""
    return codec.bound(rows)


def tune(codec: Codec, sample: Tensor) -> Codec:
    """``codec`` with the search parameters that give the least squared error on ``sample`` ``[n, cols]``.

    A few hundred rows do. Parameters shape only the codes, so what was written before decodes as before. Codecs
    without a search, and samples of which no row fits, give ``codec`` back.
    """
    if not isinstance(codec, GridCodec) or codec.search is None:
        return codec
    rows = sample[codec.fits(sample)]
    if rows.numel() == 0:
        return codec
    candidates = [codec, *(GridCodec(codec.bits, _search(bins)) for bins in _NUM_BINS[codec.bits])]
    return min(candidates, key=lambda c: _squared_error(c, rows))


def _squared_error(codec: Codec, rows: Tensor) -> float:
    decoded = codec.decode(codec.encode(rows), rows.shape[1], rows.dtype)
    return float((decoded.float() - rows.float()).square().sum())
