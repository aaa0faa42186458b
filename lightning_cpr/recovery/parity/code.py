"""The erasure code and the checksum of parity, over raw bits: one finite field serves both.

Memory is seen as int64 words, each four lanes of GF(2^16) with the primitive polynomial x^16 + x^12 + x^3 + x + 1 and
generator g = 2. Addition is XOR, so every function here is linear over XOR and exact for any dtype and optimizer.

- Code: P = XOR of d_c and Q = XOR of g^c * d_c over the members c of a group: the P + Q form of Reed-Solomon (H. P.
  Anvin, "The mathematics of RAID-6"), in a field wide enough for the checksum.
- Checksum of words w_0..w_n: XOR of g^i * w_i, n below 65535. One wrong word is always found; chance damage to several
  is missed with probability 2^-16 for each lane that it reaches, 2^-64 for whole words. It commutes with the code, so
  that parity is checked against the checksums of its members without their bytes; and the checksum of a change is the
  change of the checksum.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

ORDER = 65535  # g ** ORDER == 1
_REDUCE = 0x100B
_CARRY = 0x0001_0001_0001_0001
_KEEP = 0xFFFE_FFFE_FFFE_FFFE - (1 << 64)
_SUM_CHUNK = 1 << 18
_SUM_WIDTH = 64
_LAST_BIT, _REDUCE_LANE = np.int16(15), np.int16(_REDUCE)


@cache
def _tables() -> tuple[Tensor, Tensor]:
    """Logarithms (of 0: 0) and powers of g, int32; powers are listed twice so that sums of two logs need no modulo."""
    powers = [1]
    for _ in range(ORDER - 1):
        doubled = powers[-1] << 1
        powers.append((doubled ^ (0x10000 | _REDUCE)) if doubled >> 16 else doubled)
    exp = torch.tensor(powers + powers, dtype=torch.int32)
    log = torch.zeros(ORDER + 1, dtype=torch.int32)
    log[exp[:ORDER].long()] = torch.arange(ORDER, dtype=torch.int32)
    return log, exp


@cache
def _wide_tables() -> tuple[np.ndarray, np.ndarray]:
    """Logarithms (of 0: ``2 * ORDER``) and powers of g, zeros from ``2 * ORDER`` on, so that 0 is no special case."""
    log, exp = _tables()
    logs = log.numpy().copy()
    logs[0] = 2 * ORDER
    return logs, np.concatenate([exp.numpy(), np.zeros(ORDER, np.int32)]).astype(np.uint16)


@cache
def _product_table(exponent: int) -> Tensor:
    """``g**exponent * v`` for each lane value v, int16 ``[65536]``."""
    log, exp = _tables()
    products = exp[(log + exponent).long()]
    products[0] = 0
    return products.to(torch.int16)


def _lanes(words: Tensor) -> Tensor:
    # a single element counts as contiguous whatever its stride, and still cannot be viewed
    words = words if words.stride(-1) == 1 else words.clone(memory_format=torch.contiguous_format)
    return words.contiguous().view(torch.int16).int().bitwise_and_(0xFFFF)


def _double_(words: Tensor, carry: Tensor) -> None:
    """``words *= g`` in place; ``carry`` is scratch of the same shape."""
    torch.bitwise_right_shift(words, 15, out=carry)
    carry.bitwise_and_(_CARRY).mul_(_REDUCE)
    words.bitwise_left_shift_(1).bitwise_and_(_KEEP).bitwise_xor_(carry)


def times(words: Tensor, exponent: int) -> Tensor:
    """``g**exponent * words`` for int64 words of any shape. Exponent 0 gives ``words`` itself, else a new tensor."""
    exponent %= ORDER
    if exponent == 0 or words.numel() == 0:
        return words
    if exponent == 1:
        product = words.clone()
        _double_(product, torch.empty_like(product))
        return product
    flat = _lanes(words.reshape(-1))
    return _product_table(exponent).index_select(0, flat).view(torch.int64).view(words.shape)


def times_each(words: Tensor, exponents: Tensor) -> Tensor:
    """``g**exponents[i] * words[i]``, both int64 ``[n]``."""
    logs, powers = _wide_tables()
    lanes = words.contiguous().numpy().view(np.uint16).reshape(-1, 4)
    sums = logs.take(lanes)
    sums += (exponents.numpy() % ORDER).astype(np.int32)[:, None]
    return torch.from_numpy(powers.take(sums).reshape(-1).view(np.int64))


def row_sums(words: Tensor) -> Tensor:
    """Checksum of each row: int64 ``[n, r]`` -> int64 ``[n]``."""
    count, width = words.shape
    sums = torch.zeros(count, dtype=torch.int64)
    step = max(1, _SUM_CHUNK // max(1, width))
    for start in range(0, count if width else 0, step):
        columns = np.ascontiguousarray(words[start : start + step].numpy().T)
        total = sums[start : start + step].numpy()
        lanes = total.view(np.int16)
        carry = np.empty_like(lanes)
        total[:] = columns[-1]
        for column in columns[-2::-1]:
            np.right_shift(lanes, _LAST_BIT, out=carry)  # all ones where the lane overflows
            np.bitwise_and(carry, _REDUCE_LANE, out=carry)
            np.add(lanes, lanes, out=lanes)
            np.bitwise_xor(lanes, carry, out=lanes)
            np.bitwise_xor(total, column, out=total)
    return sums


def xor_by_block(values: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """XOR the values of equal blocks: int64 ``[n]`` each, blocks not decreasing -> (distinct blocks, their XOR)."""
    if values.numel() == 0:
        return blocks, values
    starts = np.flatnonzero(np.diff(blocks.numpy(), prepend=-1))
    return blocks[torch.from_numpy(starts)], torch.from_numpy(np.bitwise_xor.reduceat(values.numpy(), starts))


def xor_all(values: Tensor) -> int:
    """XOR of an int64 tensor of any size, 0 if empty."""
    return int(np.bitwise_xor.reduce(values.numpy(), axis=None)) if values.numel() else 0


def flat_sum(words: Tensor) -> int:
    """Checksum of int64 ``[n]`` words."""
    total = 0
    for start in range(0, words.numel(), _SUM_CHUNK):
        chunk = words[start : start + _SUM_CHUNK]
        whole = chunk.numel() // _SUM_WIDTH * _SUM_WIDTH
        sums = torch.cat([row_sums(chunk[:whole].view(-1, _SUM_WIDTH)), row_sums(chunk[whole:].view(1, -1))])
        total ^= xor_all(times_each(sums, torch.arange(sums.numel()) * _SUM_WIDTH + start))
    return total


def block_sums(words: Tensor, block_rows: int) -> Tensor:
    """Checksum of each block of ``block_rows`` rows (the last one may be shorter): int64 ``[n, r]`` -> ``[blocks]``."""
    index = torch.arange(words.shape[0])
    placed = times_each(row_sums(words), index % block_rows * words.shape[1])
    return xor_by_block(placed, index // block_rows)[1]


def decode(p: Tensor | None, q: Tensor | None, lost: Sequence[int]) -> list[Tensor]:
    """The data of lost members from syndromes: parity XORed with the (weighted) data of all members that are not lost.

    Args:
        p, q: the syndromes of P and Q, int64 ``[n]``; None where that parity is lost as well.
        lost: columns of the lost members, one, or two where both syndromes are given.
    """
    if len(lost) == 1:
        if p is not None:
            return [p]
        assert q is not None
        return [times(q, -lost[0])]
    assert p is not None
    assert q is not None
    a, b = lost
    log, exp = _tables()
    divisor = int(log[int(exp[a] ^ exp[b])])
    second = times(q ^ times(p, a), -divisor)
    return [p ^ second, second]
