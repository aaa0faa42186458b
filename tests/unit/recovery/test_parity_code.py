"""The field, the code and the checksum of parity."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cpr.recovery.parity import code


def words(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=generator)


def slow_times(word: int, exponent: int) -> int:
    """Shift-and-reduce, one lane at a time."""
    result = 0
    for lane in range(4):
        value = (word >> (16 * lane)) & 0xFFFF
        for _ in range(exponent):
            value <<= 1
            if value >> 16:
                value ^= 0x1100B
        result |= value << (16 * lane)
    return result - (1 << 64) if result >> 63 else result


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 7, 16, 40])
def test_times_is_the_field_product(exponent: int) -> None:
    w = words(50, seed=exponent)
    assert code.times(w, exponent).tolist() == [slow_times(v & (2**64 - 1), exponent) for v in w.tolist()]
    assert torch.equal(code.times_each(w, torch.full((50,), exponent)), code.times(w, exponent))


def test_g_is_a_generator_and_has_inverses() -> None:
    w = words(100)
    assert torch.equal(code.times(code.times(w, 12345), -12345), w)
    log, exp = code._tables()
    assert exp[: code.ORDER].unique().numel() == code.ORDER
    assert torch.equal(exp[log[1:].long()], torch.arange(1, 65536, dtype=torch.int32))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 300), st.integers(1, 40), st.integers(0, 1000))
def test_checksums_of_rows_blocks_and_flat_words_agree(n: int, r: int, seed: int) -> None:
    w = words(n, r, seed=seed)
    block_rows = 1 + seed % 7
    placed = code.times_each(code.row_sums(w), torch.arange(n) * r)
    assert code.xor_all(placed) == code.flat_sum(w.reshape(-1))
    blocks = code.block_sums(w, block_rows)
    assert code.xor_all(code.times_each(blocks, torch.arange(len(blocks)) * block_rows * r)) == code.flat_sum(
        w.view(-1)
    )


def test_flat_sum_of_many_chunks_is_linear_and_commutes_with_the_code() -> None:
    a, b = words(300_001, seed=1), words(300_001, seed=2)
    assert code.flat_sum(a) ^ code.flat_sum(b) == code.flat_sum(a ^ b)
    total = torch.tensor([code.flat_sum(a)])
    assert int(code.times(total, 5)) == code.flat_sum(code.times(a, 5))


@given(st.integers(0, 999), st.integers(0, 63))
def test_every_flipped_bit_is_found(word: int, bit: int) -> None:
    w = words(1000)
    before = code.flat_sum(w)
    w[word] ^= 1 << bit if bit < 63 else -(1 << 63)
    assert code.flat_sum(w) != before


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.data())
def test_any_one_or_two_lost_members_decode_exactly(k: int, data: st.DataObject) -> None:
    members = [words(37, seed=c) for c in range(k)]
    members[0][:5] = torch.full((5,), float("nan"), dtype=torch.float64).view(torch.int64)
    p, q = torch.zeros(37, dtype=torch.int64), torch.zeros(37, dtype=torch.int64)
    for c, d in enumerate(members):
        p ^= d
        q ^= code.times(d, c)
    lost = data.draw(st.lists(st.integers(0, k - 1), min_size=1, max_size=min(2, k), unique=True))
    for c, d in enumerate(members):
        if c not in lost:
            p, q = p ^ d, q ^ code.times(d, c)
    for pair in [(p, q)] if len(lost) == 2 else [(p, None), (None, q), (p, q)]:
        for c, found in zip(lost, code.decode(*pair, lost), strict=True):
            assert torch.equal(found, members[c])
