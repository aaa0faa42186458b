from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_cpr.errors import ConfigError, CorruptShardError
from lightning_cpr.spec import StateSpec, TableSpec
from lightning_cpr.store import chunk
from lightning_cpr.store.chunk import ChunkIndex, EncodedChunk, decode_rows_of, encode_chunk, read_index
from lightning_cpr.store.manifest import FileEntry, digest

STATES = (StateSpec("sum", "row", torch.float32), StateSpec("m", "element", torch.float32))


def spec_of(cols: int, dtype: torch.dtype) -> TableSpec:
    return TableSpec("t", 10_000, cols, dtype, "adam", STATES)


def encode(rows: Tensor, cols: int, dtype: torch.dtype) -> tuple[EncodedChunk, dict[str, Tensor]]:
    g = torch.Generator().manual_seed(len(rows))
    parts = {
        "weight.values": torch.randn(len(rows), cols, generator=g).to(dtype),
        "state.sum.values": torch.rand(len(rows), 1, generator=g),
        "state.m.values": torch.randn(len(rows), cols, generator=g),
    }
    return encode_chunk("t", rows, 4, cols, "raw", {"sum": "raw", "m": "raw"}, parts), parts


def entry_of(made: EncodedChunk, cols: int) -> FileEntry:
    code = made.code
    return FileEntry(
        "chunks/v/f", made.bytes, "t", code.count, code.start, code.end, 4, cols, "raw", {"sum": "raw", "m": "raw"},
        made.index_bytes, made.index_hash, 7,
    )  # fmt: skip


def read_all(raw: bytes, entry: FileEntry, spec: TableSpec) -> tuple[ChunkIndex, dict[str, Tensor]]:
    index = read_index(bytearray(raw[: entry.index_bytes]), entry, spec)
    tensors = {}
    for part in index.parts:
        start, end = index.span(part, 0, index.blocks)
        data = bytearray(raw[start:end])
        index.check(part, 0, index.blocks, data)
        tensors[part.name] = index.tensor(part, data)
    return index, tensors


@given(
    st.lists(st.integers(0, 9_000), unique=True, max_size=60).map(sorted),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.sampled_from([1 << 20, 64, 1]),
)
def test_round_trip(ids: list[int], cols: int, dtype: torch.dtype, block_bytes: int) -> None:
    rows = torch.tensor(ids, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk, "BLOCK_BYTES", block_bytes)
        made, parts = encode(rows, cols, dtype)
    raw = b"".join(made.buffers)
    assert len(raw) == made.bytes
    index, tensors = read_all(raw, entry_of(made, cols), spec_of(cols, dtype))
    assert torch.equal(index.rows(), rows)
    weight, states = decode_rows_of(index, spec_of(cols, dtype), tensors, with_states=True)
    assert torch.equal(weight.view(torch.uint8), parts["weight.values"].view(torch.uint8))
    assert torch.equal(states["sum"], parts["state.sum.values"][:, 0])
    assert torch.equal(states["m"], parts["state.m.values"])
    # Any safetensors reader opens it.
    plain = safetensors.torch.load(raw)
    assert torch.equal(plain["weight.values"], parts["weight.values"])


def test_nan_payloads_survive() -> None:
    bits = torch.tensor([[0x7FC00123, -1, 0x7F800000, -0x80000000]], dtype=torch.int32)
    made = encode_chunk("t", torch.tensor([5]), 0, 4, "raw", {}, {"weight.values": bits.view(torch.float32)})
    assert torch.equal(safetensors.torch.load(b"".join(made.buffers))["weight.values"].view(torch.int32), bits)


def test_blocks_are_at_most_a_mebibyte_and_read_alone() -> None:
    rows = torch.arange(20_000)
    spec = dataclasses.replace(spec_of(64, torch.float32), rows=20_000)
    made, parts = encode(rows, 64, torch.float32)
    raw = b"".join(made.buffers)
    entry = entry_of(made, 64)
    index = read_index(bytearray(raw[: entry.index_bytes]), entry, spec)
    assert (index.block_rows, index.blocks) == (4096, 5)
    part = next(part for part in index.parts if part.name == "weight.values")
    start, end = index.span(part, 2, 4)
    assert end - start == 2 << 20
    data = bytearray(raw[start:end])
    index.check(part, 2, 4, data)
    assert torch.equal(index.tensor(part, data), parts["weight.values"][2 * 4096 : 4 * 4096])
    data[-1] ^= 1
    with pytest.raises(CorruptShardError, match=r"chunks/v/f \(table t, weight.values\): block 3 does not match"):
        index.check(part, 2, 4, data)
    with pytest.raises(CorruptShardError, match="cut off"):
        index.check(part, 2, 4, data[:-7])


def test_every_flipped_byte_of_a_file_is_seen() -> None:
    made, _ = encode(torch.tensor([3, 4, 9, 1000]), 2, torch.bfloat16)
    raw, entry, spec = b"".join(made.buffers), entry_of(made, 2), spec_of(2, torch.bfloat16)
    for at in range(len(raw)):
        broken = bytearray(raw)
        broken[at] ^= 16
        with pytest.raises(CorruptShardError, match=r"chunks/v/f \(table t"):
            read_all(bytes(broken), entry, spec)


def test_a_tensor_in_place_is_not_copied() -> None:
    weight = torch.randn(1000, 8)
    made = encode_chunk("t", torch.arange(1000), 0, 8, "raw", {}, {"weight.values": weight})
    weight[0, 0] = 42.0
    assert torch.frombuffer(made.buffers[1], dtype=torch.float32)[0] == 42.0


@pytest.mark.parametrize(
    "part", [torch.zeros(3, 2), torch.zeros(4, 2, dtype=torch.complex64), torch.zeros(4, 2, device="meta")]
)
def test_parts_that_cannot_be_stored_are_refused(part: Tensor) -> None:
    with pytest.raises(ConfigError, match=r"table t: part weight\.values"):
        encode_chunk("t", torch.arange(4), 0, 2, "raw", {}, {"weight.values": part})


def forge(change: Callable[[dict[str, Any], dict[str, Any]], None]) -> tuple[bytes, FileEntry]:
    """A chunk by a writer that means harm: its header is changed, its hashes are right."""
    made, _ = encode(torch.arange(4), 2, torch.float32)
    raw = b"".join(made.buffers)
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    meta = json.loads(header["__metadata__"]["lightning_cpr"])
    change(header, meta)
    if "__metadata__" in header:
        header["__metadata__"]["lightning_cpr"] = json.dumps(meta)
    text = json.dumps(header).encode()
    head = len(text).to_bytes(8, "little") + text + raw[8 + size : made.index_bytes]
    entry = dataclasses.replace(
        entry_of(made, 2),
        index_bytes=len(head),
        index_hash=digest(head),
        bytes=len(head) + made.bytes - made.index_bytes,
    )
    return head + raw[made.index_bytes :], entry


def _set(item: str, key: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda header, meta: header[item].update({key: value})


def _meta(key: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda header, meta: meta.update({key: value})


HOSTILE = {
    "wrong dtype": _set("weight.values", "dtype", "F64"),
    "unknown dtype": _set("weight.values", "dtype", "PICKLE"),
    "wrong shape": _set("weight.values", "shape", [4, 3]),
    "negative shape": _set("weight.values", "shape", [4, -2]),
    "other rows": _set("weight.values", "shape", [8, 1]),
    "huge shape": _set("weight.values", "shape", [4, 1 << 60]),
    "offset before the data": _set("weight.values", "data_offsets", [-64, -32]),
    "offset beyond the file": _set("weight.values", "data_offsets", [1 << 50, (1 << 50) + 32]),
    "index beyond the head": _set("index", "data_offsets", [0, 1 << 40]),
    "another table": _meta("table", "u"),
    "another codec": _meta("codec", "int8"),
    "no blocks": _meta("block_rows", 0),
    "odd blocks": _meta("block_rows", "4"),
    "small blocks": _meta("block_rows", 1),
    "no metadata": lambda header, meta: header.pop("__metadata__"),
    "no index": lambda header, meta: header.pop("index"),
    "no state": lambda header, meta: header.pop("state.sum.values"),
    "a path for a name": lambda header, meta: header.update({"../../x": header.pop("state.m.values")}),
    "more rows": lambda header, meta: meta["rows"].update(count=1 << 40, end=1 << 40),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_hostile_headers_are_refused(change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    raw, entry = forge(change)
    with pytest.raises(CorruptShardError, match=r"chunks/v/f \(table t"):
        read_index(bytearray(raw[: entry.index_bytes]), entry, spec_of(2, torch.float32))


def test_the_forger_itself_is_sound() -> None:
    raw, entry = forge(lambda header, meta: None)
    read_all(raw, entry, spec_of(2, torch.float32))


@pytest.mark.parametrize(
    "head", [b"", b"\xff" * 8, (1 << 60).to_bytes(8, "little") + b"{}", b"\x02" + bytes(7) + b"[]"]
)
def test_huge_or_empty_headers_are_refused(head: bytes) -> None:
    made, _ = encode(torch.arange(4), 2, torch.float32)
    entry = dataclasses.replace(entry_of(made, 2), index_bytes=max(len(head), 1), index_hash=digest(head))
    with pytest.raises(CorruptShardError, match="table t"):
        read_index(bytearray(head), entry, spec_of(2, torch.float32))


def test_decoding_errors_name_file_and_table(tmp_path: Path) -> None:
    made, _ = encode(torch.arange(4), 2, torch.float32)
    index, tensors = read_all(b"".join(made.buffers), entry_of(made, 2), spec_of(2, torch.float32))
    with pytest.raises(CorruptShardError, match=r"chunks/v/f \(table t, weight.\*\): cannot decode"):
        decode_rows_of(index, spec_of(2, torch.float16), tensors, with_states=False)
