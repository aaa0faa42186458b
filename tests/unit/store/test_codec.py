"""The contract of every row codec, by property, and the numbers that it promises."""

from __future__ import annotations

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_cpr.errors import ConfigError, CorruptShardError
from lightning_cpr.store.codec import CODECS, error_bound, get_codec, tune
from lightning_cpr.store.codec.base import Scratch
from lightning_cpr.store.codec.grid import GridCodec
from lightning_cpr.store.codec.lanes import pack, packed_width, unpack
from lightning_cpr.store.codec.plain import RawCodec
from lightning_cpr.store.codec.search import Search

NAMES = ["raw", "fp16", "bf16", "int8", "aint4", "aint3", "aint2", "up16"]
ADAPTIVE = {"aint4": 4, "aint3": 3, "aint2": 2}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NASTY = [0.0, -0.0, 1.0, 3.25, 1e-45, 1e-38, 6e-8, 65504.0, 65520.0, 1e5, 3e38, np.inf, -np.inf, np.nan, 1000.003]


@st.composite
def nasty_rows(draw: st.DrawFn) -> Tensor:
    """A few rows: any bit patterns, handpicked values, or numbers spread about a centre at any scale."""
    shape = (draw(st.integers(1, 5)), draw(st.integers(1, 70)))
    kind = draw(st.sampled_from(["any", "picked", "spread", "levels"]))
    if kind == "any":
        rows = torch.from_numpy(draw(hnp.arrays(np.float32, shape, elements=st.floats(width=32))))
    elif kind == "picked":
        rows = torch.from_numpy(draw(hnp.arrays(np.float32, shape, elements=st.sampled_from(NASTY))))
    else:
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
        values = torch.randn(shape, generator=generator)
        if kind == "levels":  # many equal values, among them the extremes
            values = values.mul(draw(st.sampled_from([0.5, 1.0, 4.0]))).round()
        centre = draw(st.sampled_from([0.0, 0.0, 1.0, -3.0, 1000.0, 1e-6, -4e4]))
        rows = centre + values * 10.0 ** draw(st.integers(-9, 5))
    return rows.to(draw(st.sampled_from(DTYPES)))


def bits(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.int32 if rows.dtype == torch.float32 else torch.int16)


def round_trip(name: str, rows: Tensor) -> Tensor:
    codec = get_codec(name)
    return codec.decode(codec.encode(rows), rows.shape[1], rows.dtype)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(rows=nasty_rows())
@example(rows=torch.tensor([[2.7418e-06, -1.2755e-05, 5.0068e-06]], dtype=torch.float16))  # decodes to subnormals
def test_rows_that_fit_are_within_bound_and_fixed_points(name: str, rows: Tensor) -> None:
    codec, before = get_codec(name), bits(rows).clone()
    fits = codec.fits(rows)
    parts = codec.encode(rows)
    assert all(part.shape[0] == len(rows) for part in parts.values())
    once = codec.decode(parts, rows.shape[1], rows.dtype)
    assert (once.shape, once.dtype, fits.shape, fits.dtype) == (rows.shape, rows.dtype, (len(rows),), torch.bool)
    held, back = rows[fits], once[fits]
    if name != "raw" and name != {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(rows.dtype):
        error = (back.double() - held.double()).abs().amax(dim=1)
        assert (error <= error_bound(codec, held).double()).all()
    assert codec.fits(back).all()
    again = codec.encode(back)
    first = codec.encode(held)
    assert torch.equal(
        bits(codec.decode(again, rows.shape[1], rows.dtype)), bits(codec.decode(first, rows.shape[1], rows.dtype))
    )
    assert torch.equal(bits(rows), before)


@pytest.mark.parametrize("name", ["raw", "fp16", "bf16", "int8", "up16"])
@settings(max_examples=60, deadline=None)
@given(rows=nasty_rows(), cut=st.integers(0, 5))
def test_bytes_of_a_row_depend_on_that_row_alone(name: str, rows: Tensor, cut: int) -> None:
    codec = get_codec(name)
    fits = codec.fits(rows)
    whole, part = codec.encode(rows), codec.encode(rows[cut:])
    for key in whole:
        assert torch.equal(whole[key][cut:][fits[cut:]].view(torch.uint8), part[key][fits[cut:]].view(torch.uint8))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(rows=nasty_rows(), start=st.integers(0, 4), length=st.integers(0, 4))
def test_a_row_range_slices_every_part(name: str, rows: Tensor, start: int, length: int) -> None:
    codec, cols = get_codec(name), rows.shape[1]
    parts = codec.encode(rows)
    whole = codec.decode(parts, cols, rows.dtype)
    some = codec.decode({k: v[start : start + length] for k, v in parts.items()}, cols, rows.dtype)
    assert torch.equal(bits(some), bits(whole[start : start + length]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_raw_keeps_every_bit_pattern(dtype: torch.dtype) -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    words = patterns.mul(65537) if dtype == torch.float32 else patterns.to(torch.int16)
    rows = words.view(dtype).reshape(1024, 64)
    assert get_codec("raw").fits(rows).all()
    assert torch.equal(bits(round_trip("raw", rows)), bits(rows))


@pytest.mark.parametrize("name", ["int8", *ADAPTIVE])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_ordinary_row_fits_and_is_a_fixed_point(name: str, dtype: torch.dtype) -> None:
    """Not by refusing rows: of 4,000 at four scales, all fit."""
    scale = torch.tensor([1.0, 0.05, 1e-3, 1e-4]).repeat_interleave(1000)[:, None]
    rows = (torch.randn(4000, 32, generator=torch.Generator().manual_seed(1)) * scale).to(dtype)
    assert get_codec(name).fits(rows).all()
    once = round_trip(name, rows)
    assert torch.equal(round_trip(name, once), once)


@pytest.mark.parametrize("cols", [1, 2, 3, 4, 5, 7, 8, 9, 31, 33, 64, 65, 70])
@pytest.mark.parametrize("name", NAMES)
def test_bytes_a_row(name: str, cols: int) -> None:
    rows = torch.rand(3, cols)
    bytes_of = {"raw": 4 * cols, "fp16": 2 * cols, "bf16": 2 * cols, "up16": 2 * cols, "int8": cols + 4}
    bytes_of |= {"aint4": -(-cols // 2) + 4, "aint3": -(-cols // 4) + -(-cols // 8) + 4, "aint2": -(-cols // 4) + 4}
    assert sum(part.nbytes for part in get_codec(name).encode(rows).values()) == 3 * bytes_of[name]


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("cols", [8, 16, 64, 72])
def test_lanes_lay_code_k_in_bits_k(width: int, cols: int) -> None:
    codes = torch.randint(0, 2**width, (5, cols), dtype=torch.uint8, generator=torch.Generator().manual_seed(cols))
    packed = torch.empty(5, packed_width(cols, width), dtype=torch.uint8)
    pack(codes.bitwise_left_shift(8 - width), width, 8 - width, Scratch(codes.device), packed)
    per_byte = codes.reshape(5, -1, 8 // width).int()
    expected = (per_byte << torch.arange(0, 8, width)).sum(dim=2).to(torch.uint8)
    assert torch.equal(packed, expected)
    assert torch.equal(unpack(packed, width, Scratch(codes.device)), codes)


@pytest.mark.parametrize("codec", [GridCodec(8), GridCodec(4), GridCodec(3), GridCodec(2)])
def test_decode_is_two_rounded_float32_operations(codec: GridCodec) -> None:
    """The same arithmetic in numpy, which fuses nothing: what any device must give."""
    rows = torch.randn(500, 24, generator=torch.Generator().manual_seed(3))
    parts = codec.encode(rows)
    low, high = (parts[k].numpy().astype(np.float32)[:, None] for k in ("low", "high"))
    step = (high - low) / np.float32(2**codec.bits - 1)
    codes = np.rint((rows.numpy() - low) * np.where(step > 0, np.float32(1) / step, np.float32(0)))
    codes = codes.clip(0, 2**codec.bits - 1).astype(np.float32)
    assert np.array_equal(codec.decode(parts, 24, torch.float32).numpy(), codes * step + low)


def squared_error(codec: GridCodec, rows: Tensor) -> float:
    return float((codec.decode(codec.encode(rows), rows.shape[1], rows.dtype) - rows).square().sum())


def greedy_squared_error(rows: Tensor, width: int, num_bins: int, ratio: float) -> float:
    """The paper's walk, one bin at a time, as a reference."""
    levels = 2**width - 1

    def error(low: Tensor, high: Tensor) -> Tensor:
        step = ((high - low) / levels)[:, None]
        codes = ((rows - low[:, None]) / step).round().clamp(0, levels)
        return (codes * step + low[:, None] - rows).square().sum(dim=1)

    low, high = rows.amin(dim=1), rows.amax(dim=1)
    step, best = (high - low) / num_bins, error(low, high)
    for _ in range(int(num_bins * ratio)):
        raised, lowered = error(low + step, high), error(low, high - step)
        up = raised <= lowered
        low, high = torch.where(up, low + step, low), torch.where(up, high, high - step)
        best = torch.minimum(best, torch.minimum(raised, lowered))
    return float(best.sum())


@pytest.mark.parametrize(("name", "share"), [("aint2", 0.53), ("aint3", 0.76), ("aint4", 0.85)])
def test_adaptive_beats_plain_and_matches_the_greedy_walk(name: str, share: float) -> None:
    rows = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0)) * 0.05
    width = ADAPTIVE[name]
    adaptive, plain = squared_error(get_codec(name), rows), squared_error(GridCodec(width), rows)
    assert adaptive < share * plain
    assert adaptive < 1.005 * greedy_squared_error(rows, width, 45 if width == 4 else 25, 0.6)


def test_two_bits_of_gaussian_rows_by_value() -> None:
    """The best fixed 4-level uniform quantizer of a normal distribution leaves 0.1188 of the variance (Max, 1960)."""
    rows = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
    assert squared_error(get_codec("aint2"), rows) / rows.numel() == pytest.approx(0.1038, abs=0.001)
    assert squared_error(GridCodec(2), rows) / rows.numel() == pytest.approx(0.2035, abs=0.003)


def test_tune_lessens_the_error_of_wide_rows() -> None:
    rows = torch.randn(512, 512, generator=torch.Generator().manual_seed(5))
    default = get_codec("aint2")
    tuned = tune(default, rows[:256])
    assert isinstance(tuned, GridCodec)
    assert isinstance(default, GridCodec)
    assert tuned.name == "aint2"
    assert squared_error(tuned, rows[256:]) < 0.97 * squared_error(default, rows[256:])
    parts = tuned.encode(rows)
    assert torch.equal(default.decode(parts, 512, rows.dtype), tuned.decode(parts, 512, rows.dtype))


def test_tune_gives_back_what_it_cannot_tune() -> None:
    assert tune(get_codec("int8"), torch.randn(4, 4)) is get_codec("int8")
    assert tune(get_codec("aint2"), torch.full((4, 4), torch.nan)) is get_codec("aint2")
    assert tune(get_codec("aint2"), torch.empty(0, 4)) is get_codec("aint2")


def test_what_does_not_fit() -> None:
    inf, nan = float("inf"), float("nan")
    rows = torch.tensor([[1, 2, inf], [-inf, 0, 1], [1, nan, 2], [0, 0.1, 7e4], [0, 1e-7, 1e-7], [0.1, 0.1, 0.1]])
    assert get_codec("raw").fits(rows).tolist() == [True] * 6
    assert get_codec("fp16").fits(rows).tolist() == [False, False, False, False, False, True]
    assert get_codec("bf16").fits(rows).tolist() == [False, False, False, True, True, True]
    for name in ("int8", *ADAPTIVE):
        assert get_codec(name).fits(rows).tolist() == [False, False, False, False, False, False]
    sums = torch.tensor([[0.0], [1.0], [-1.0], [-0.0], [1e-40], [nan], [inf], [3.4028e38]])
    assert get_codec("up16").fits(sums).tolist() == [True, True, False, False, False, False, False, False]


def test_sums_round_up_by_at_most_a_256th_and_never_to_zero() -> None:
    generator = torch.Generator().manual_seed(7)
    sums = torch.rand(2000, 3, generator=generator) * 10 ** (torch.rand(2000, 1, generator=generator) * 60 - 37)
    sums.clamp_(min=1.2e-38)[::7, 0] = 0
    assert get_codec("up16").fits(sums).all()
    back = round_trip("up16", sums)
    assert ((back >= sums) & (back.double() <= sums.double() * (1 + 2.0**-8))).all()
    assert torch.equal(back == 0, sums == 0)
    assert torch.equal(
        round_trip("up16", torch.tensor([[1.0, 2.0, 1.0 + 2**-8]])), torch.tensor([[1.0, 2.0, 1.0 + 2**-8]])
    )


@pytest.mark.parametrize("name", NAMES)
def test_strided_rows(name: str) -> None:
    table = torch.rand(40, 30)
    view = table[::2, 3:20]
    assert torch.equal(round_trip(name, view), round_trip(name, view.contiguous()))


def test_rows_beside_one_that_does_not_fit_are_undisturbed() -> None:
    rows = torch.randn(5, 13, generator=torch.Generator().manual_seed(2))
    spoiled = rows.clone()
    spoiled[2] = torch.tensor([float("nan"), float("inf"), 1e38] * 4 + [0.0])
    others = torch.tensor([0, 1, 3, 4])
    for name in NAMES:
        assert torch.equal(round_trip(name, rows)[others], round_trip(name, spoiled)[others])


def test_unknown_codec_is_refused_with_the_names() -> None:
    assert list(CODECS) == NAMES
    assert all(get_codec(name).name == name for name in NAMES)
    with pytest.raises(ConfigError, match=r"'int7'.*raw, fp16, bf16, int8, aint4, aint3, aint2, up16"):
        get_codec("int7")


@pytest.mark.parametrize("name", NAMES)
def test_parts_that_cannot_be_are_refused(name: str) -> None:
    codec = get_codec(name)
    parts = codec.encode(torch.rand(4, 16))
    first = next(iter(parts))
    with pytest.raises(CorruptShardError, match=f"{name}.*'{first}' is missing"):
        codec.decode({k: v for k, v in parts.items() if k != first}, 16, torch.float32)
    with pytest.raises(CorruptShardError, match=f"{name}.*expected"):
        codec.decode(parts, 32, torch.float32)
    with pytest.raises(CorruptShardError, match=f"{name}.*int64"):
        codec.decode(parts | {first: parts[first].long()}, 16, torch.float32)
    if len(parts) > 1:
        with pytest.raises(CorruptShardError, match=f"{name}.*rows in one chunk"):
            codec.decode(parts | {first: parts[first][:3]}, 16, torch.float32)


@pytest.mark.parametrize(("num_bins", "ratio"), [(0, 0.5), (20, 1.0), (20, -0.1), (100, 0.5)])
def test_impossible_searches_are_refused(num_bins: int, ratio: float) -> None:
    with pytest.raises(ConfigError, match="num_bins"):
        Search(num_bins, ratio)


def test_raw_is_the_same_bytes_not_a_copy() -> None:
    rows = torch.rand(4, 4)
    assert RawCodec().encode(rows)["values"].data_ptr() == rows.data_ptr()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_devices_agree(name: str) -> None:
    codec, rows = get_codec(name), torch.rand(3000, 37)
    here, there = codec.encode(rows), codec.encode(rows.cuda())
    if name not in ADAPTIVE:
        assert all(torch.equal(here[key].view(torch.uint8), there[key].cpu().view(torch.uint8)) for key in here)
    on_gpu = codec.decode(there, 37, torch.float32).cpu()
    assert torch.equal(codec.decode({k: v.cpu() for k, v in there.items()}, 37, torch.float32), on_gpu)
    assert ((on_gpu - rows).abs().amax(dim=1) <= error_bound(codec, rows)).all()
