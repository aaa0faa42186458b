"""What a row codec is, and the two helpers that all of them share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_cpr.errors import CorruptShardError

# Elements worked on at a time: on a CPU the temporaries stay in the L2 cache, on a GPU launches are amortised.
CHUNK_ELEMENTS = {"cpu": 1 << 18}


class Codec(Protocol):
    """Rows to bytes and back. A writer calls ``fits``, then ``encode`` on the rows that fit; a reader calls ``decode``.

    Codecs are stateless and safe to use from any thread. Rows are ``[n, cols]`` of float32, float16 or bfloat16; an
    optimizer state of kind ``row`` is passed as ``[n, 1]``. ``n`` and ``cols`` may be 0. Inputs are never written to.
    For rows that fit, ``decode(encode(decode(x))) == decode(x)`` bit for bit, and ``decode`` uses only operations that
    round alike on every device.
    """

    @property
    def name(self) -> str:
        """What a manifest stores, and `get_codec` takes."""
        ...

    def fits(self, rows: Tensor) -> Tensor:
        """Bool ``[n]``: rows held within `bound`. The writer stores the others raw and counts them."""
        ...

    def encode(self, rows: Tensor) -> dict[str, Tensor]:
        """Named parts, each with leading dim ``n``, so that a row range slices every part. May alias ``rows``.

        Rows that do not fit give meaningless bytes and disturb no other row.
        """
        ...

    def decode(self, parts: Mapping[str, Tensor], cols: int, dtype: torch.dtype) -> Tensor:
        """``[n, cols]`` of ``dtype``, the dtype of the rows that were encoded. May alias ``parts``.

        Raises:
            CorruptShardError: a part is missing, or its shape or dtype cannot belong to rows of ``cols`` columns.
        """
        ...

    def bound(self, rows: Tensor) -> Tensor:
        """float32 ``[n]``: for each row that fits, the largest ``|decode(encode(row)) - row|`` that may occur."""
        ...


class Scratch:
    """Buffers that the chunks of one call share: fresh pages for each temporary would cost more than the arithmetic."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    def get(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """Uninitialised, contiguous; valid until the next call with this name."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=dtype, device=self._device)
        return buffer[:size].view(shape)


def shifted(rows: Tensor, low: Tensor, scratch: Scratch) -> Tensor:
    """``rows - low`` in float32, in ``scratch``; a mixed-dtype subtraction would be several times slower."""
    out = scratch.get("shifted", torch.float32, rows.shape[0], rows.shape[1])
    if rows.dtype == torch.float32:
        return torch.sub(rows, low[:, None], out=out)
    return out.copy_(rows).sub_(low[:, None])


def row_chunks(shape: Sequence[int], device: torch.device) -> Iterator[tuple[int, int]]:
    """``[start, end)`` that cover the rows of ``[n, cols]`` in order; none if there are no columns.

    No chunk reaches 2**31 elements unless one row does.
    """
    rows, cols = shape
    step = max(1, CHUNK_ELEMENTS.get(device.type, 1 << 24) // max(1, cols))
    for start in range(0, rows if cols else 0, step):
        yield start, min(rows, start + step)


def take(codec: str, parts: Mapping[str, Tensor], name: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> Tensor:
    """Part ``name`` of ``parts``. ``shape`` is checked from the second dimension on, the dtype if any are given."""
    part = parts.get(name)
    if part is None:
        raise CorruptShardError(f"codec {codec}: part {name!r} is missing (there are {sorted(parts)})")
    if part.dim() != 1 + len(shape) or part.shape[1:] != shape or (dtypes and part.dtype not in dtypes):
        raise CorruptShardError(
            f"codec {codec}: part {name!r} is {part.dtype} {list(part.shape)}, "
            f"expected {' or '.join(map(str, dtypes)) or 'any dtype'} {['n', *shape]}"
        )
    return part
