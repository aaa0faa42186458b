from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_cpr.errors import ConfigError, CorruptShardError
from lightning_cpr.store.rows import code_from_meta, decode_rows, encode_rows, rows_of, runs_of


def rows_strategy() -> st.SearchStrategy[list[int]]:
    dense = st.tuples(st.integers(0, 1 << 40), st.integers(1, 300)).map(lambda p: list(range(p[0], p[0] + p[1])))
    scattered = st.lists(st.integers(0, 5000), unique=True).map(sorted)
    far = st.lists(st.integers(0, 1 << 50), unique=True, max_size=30).map(sorted)
    return st.one_of(dense, scattered, far)


@given(rows_strategy())
def test_round_trip(ids: list[int]) -> None:
    rows = torch.tensor(ids, dtype=torch.int64)
    code = encode_rows(rows)
    assert torch.equal(decode_rows(code_from_meta(code.meta(), code.data, "f"), "f"), rows)
    assert torch.equal(rows_of(runs_of(rows)), rows)
    assert (code.start, code.end, code.count) == ((ids[0], ids[-1] + 1, len(ids)) if ids else (0, 0, 0))


@pytest.mark.parametrize(
    ("rows", "most"),
    [
        (torch.arange(1_000_000), 8),
        (torch.randperm(1_000_000, generator=torch.Generator().manual_seed(0))[:260_000].sort().values, 125_000),
        (torch.randperm(2_000_000, generator=torch.Generator().manual_seed(0))[:100].sort().values, 500),
    ],
    ids=["all", "a quarter", "few"],
)
def test_bytes_are_far_below_eight_a_row(rows: torch.Tensor, most: int) -> None:
    assert len(encode_rows(rows).data) <= most


@pytest.mark.parametrize("ids", [[3, 3], [4, 2], [-1, 0]])
def test_unsorted_rows_are_refused(ids: list[int]) -> None:
    with pytest.raises(ConfigError, match="strictly increasing"):
        encode_rows(torch.tensor(ids))


def test_other_than_int64_is_refused() -> None:
    with pytest.raises(ConfigError, match="int64"):
        encode_rows(torch.tensor([1, 2], dtype=torch.int32))


@pytest.mark.parametrize("rows", [torch.tensor([1, 5, 9, 700]), torch.arange(40), torch.arange(0, 999, 3)])
@pytest.mark.parametrize(
    "change",
    [
        {"count": 1 << 61}, {"count": 0}, {"count": -1}, {"start": 1 << 61}, {"end": 2}, {"runs": 2}, {"runs": 1 << 40},
        {"widths": [3, 1]}, {"widths": None}, {"kind": "pickle"}, {"start": 1.5}, {"end": True},
    ],
)  # fmt: skip
def test_hostile_meta_is_refused_cheaply(rows: torch.Tensor, change: dict[str, Any]) -> None:
    code = encode_rows(rows)
    with pytest.raises(CorruptShardError, match="chunk-x"):
        decode_rows(code_from_meta({**code.meta(), **change}, code.data, "chunk-x"), "chunk-x")


@given(st.data())
def test_flipped_data_never_give_other_counts(data: st.DataObject) -> None:
    rows = torch.tensor([1, 2, 3, 90, 4000, 4001, 70000])
    code = encode_rows(rows)
    raw = bytearray(code.data)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = decode_rows(code_from_meta(code.meta(), bytes(raw), "f"), "f")
    except CorruptShardError:
        return
    assert len(found) == 7
    assert (int(found[0]), int(found[-1])) == (1, 70000)
