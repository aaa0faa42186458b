"""Packing of 1, 2 and 4 bit codes into bytes, several codes at a time.

Codes lie one a byte; as many as fit one packed byte are seen as one little-endian integer lane, and shifts of whole
lanes bring them together. Code ``k`` of a byte is in its bits ``[k * bits, (k + 1) * bits)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_cpr.store.codec.base import Scratch

# bits: (lane dtype, mask of one code in each byte of a lane, shifts that move code k from byte k to bit k * bits)
_LANES = {
    1: (torch.int64, 0x0101010101010101, (7, 14, 28)),
    2: (torch.int32, 0x03030303, (6, 12)),
    4: (torch.int16, 0x0F0F, (4,)),
}


def packed_width(cols: int, bits: int) -> int:
    """Bytes that ``cols`` codes of ``bits`` bits take: the last byte of a row is padded with zero bits."""
    return -(-cols * bits // 8)


def pack(codes: Tensor, bits: int, low: int, scratch: Scratch, out: Tensor) -> None:
    """Bits ``[low, low + bits)`` of uint8 codes ``[n, w]`` into the leading ``out.shape[1]`` bytes of each row.

    w is a multiple of 8 / bits, and codes past the row's columns are 0.
    """
    dtype, mask, shifts = _LANES[bits]
    source = codes.view(dtype)
    lanes, moved = (scratch.get(name, dtype, *source.shape) for name in (f"lanes{bits}", f"moved{bits}"))
    torch.bitwise_right_shift(source, low, out=lanes)
    lanes.bitwise_and_(mask)
    for shift in shifts:
        lanes.bitwise_or_(torch.bitwise_right_shift(lanes, shift, out=moved))
    out.copy_(lanes[:, : out.shape[1]])


def unpack(packed: Tensor, bits: int, scratch: Scratch) -> Tensor:
    """The inverse of `pack`: uint8 ``[n, p]`` to codes ``[n, p * 8 / bits]``, which live in ``scratch``."""
    dtype, mask, shifts = _LANES[bits]
    lanes, moved = (scratch.get(name, dtype, *packed.shape) for name in (f"lanes{bits}", f"moved{bits}"))
    lanes.copy_(packed)
    for shift in shifts:
        lanes.bitwise_or_(torch.bitwise_left_shift(lanes, shift, out=moved))
    return lanes.bitwise_and_(mask).view(torch.uint8)
