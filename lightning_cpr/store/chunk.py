"""Chunk files: rows of one table and column range, as safetensors, with a hash for every block of rows.

A file is ``header | index | rows | parts``: the safetensors header, a tensor of block hashes, the coded row numbers,
then one tensor a part (``weight.<part>``, ``state.<name>.<part>``), each with the rows as its leading dimension. The
head (everything before the parts) is one small read, checked against the hash in the manifest before it is parsed;
a ranged read of rows takes whole blocks and checks each against the index.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

from lightning_cpr.errors import ConfigError, CorruptShardError, CPRError
from lightning_cpr.spec import TableSpec
from lightning_cpr.store.codec import get_codec
from lightning_cpr.store.manifest import FileEntry, digest
from lightning_cpr.store.rows import RowCode, code_from_meta, decode_rows, encode_rows

CHUNK_BYTES = 64 << 20
BLOCK_BYTES = 1 << 20
_HASH_BYTES = 16
DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class EncodedChunk:
    """A chunk ready to be put. ``buffers`` are views of the parts given, in file order."""

    buffers: list[memoryview]
    bytes: int
    index_bytes: int
    index_hash: str
    code: RowCode


@dataclass(frozen=True)
class Part:
    """One tensor of a chunk: ``[rows, *tail]`` from byte ``start`` of the file on."""

    name: str
    dtype: torch.dtype
    tail: tuple[int, ...]
    start: int

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.tail)


@dataclass(frozen=True)
class ChunkIndex:
    """The checked head of a chunk file: where each block of each part lies, and its hash."""

    entry: FileEntry
    block_rows: int
    code: RowCode
    parts: tuple[Part, ...]
    hashes: bytes

    @property
    def blocks(self) -> int:
        return -(-self.entry.rows // self.block_rows)

    def rows(self) -> Tensor:
        """int64 ``[n]``: the global row numbers, increasing."""
        return decode_rows(self.code, f"{self.entry.path} (table {self.entry.table})")

    def span(self, part: Part, first: int, last: int) -> tuple[int, int]:
        """Bytes of the file that hold the blocks ``[first, last)`` of a part."""
        stop = min(last * self.block_rows, self.entry.rows)
        return part.start + first * self.block_rows * part.row_bytes, part.start + stop * part.row_bytes

    def check(self, part: Part, first: int, last: int, data: bytearray | memoryview) -> None:
        """CorruptShardError unless ``data`` are the bytes of the blocks ``[first, last)`` of a part, as written."""
        start, end = self.span(part, first, last)
        where = f"{self.entry.path} (table {self.entry.table}, {part.name})"
        if len(data) != end - start:
            raise CorruptShardError(f"{where}: cut off: {len(data)} of {end - start} bytes from byte {start} on")
        step = self.block_rows * part.row_bytes
        view, order = memoryview(data), self.parts.index(part)
        for block in range(first, last):
            at = _HASH_BYTES * (order * self.blocks + block)
            offset = (block - first) * step
            if _hash(view[offset : offset + step]) != self.hashes[at : at + _HASH_BYTES]:
                raise CorruptShardError(f"{where}: block {block} does not match its hash; use an older version")

    def tensor(self, part: Part, data: bytearray) -> Tensor:
        """``[m, *tail]``: the tensor in checked bytes of whole rows. Shares their memory."""
        if not data:
            return torch.empty((0 if part.row_bytes else self.entry.rows, *part.tail), dtype=part.dtype)
        return torch.frombuffer(data, dtype=part.dtype).view(-1, *part.tail)


def chunk_rows(row_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """How many rows of ``row_bytes`` a chunk takes, at least one."""
    return max(1, chunk_bytes // max(1, row_bytes))


def encode_chunk(
    table: str,
    rows: Tensor,
    col_start: int,
    cols: int,
    codec: str,
    state_codecs: Mapping[str, str],
    parts: Mapping[str, Tensor],
) -> EncodedChunk:
    """Lay out one chunk. ``rows``: int64 ``[n]``, strictly increasing. ``parts``: ``[n, ...]`` tensors by full name."""
    count = len(rows)
    tensors = {name: part.detach().contiguous() for name, part in parts.items()}
    for name, tensor in tensors.items():
        if tensor.shape[:1] != (count,) or tensor.dtype not in DTYPE_NAMES or tensor.device.type != "cpu":
            raise ConfigError(f"table {table}: part {name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}")
    widest = max((tensor.nbytes // count for tensor in tensors.values()), default=1) if count else 1
    block_rows = max(1, BLOCK_BYTES // max(1, widest))
    views = {name: bytes_of(tensor) for name, tensor in tensors.items()}
    hashes = b"".join(_block_hashes(view, count, block_rows) for view in views.values())
    code = encode_rows(rows)
    meta = {
        "table": table,
        "col_start": col_start,
        "cols": cols,
        "codec": codec,
        "state_codecs": dict(state_codecs),
        "block_rows": block_rows,
        "rows": code.meta(),
    }
    header: dict[str, Any] = {"__metadata__": {"lightning_cpr": json.dumps(meta)}}
    offset = 0
    for name, dtype, shape, size in [
        ("index", "U8", [len(hashes)], len(hashes)),
        ("rows", "U8", [len(code.data)], len(code.data)),
        *((name, DTYPE_NAMES[t.dtype], list(t.shape), t.nbytes) for name, t in tensors.items()),
    ]:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text + hashes + code.data
    size = len(head) + sum(len(view) for view in views.values())
    return EncodedChunk([memoryview(head), *views.values()], size, len(head), digest(head), code)


def read_index(head: bytearray, entry: FileEntry, spec: TableSpec) -> ChunkIndex:
    """The index in the first ``entry.index_bytes`` bytes of a chunk file.

    Raises:
        CorruptShardError: naming file and table; the bytes are not those written, or contradict the manifest.
    """
    name = f"{entry.path} (table {entry.table})"
    if len(head) != entry.index_bytes:
        raise CorruptShardError(f"{name}: {len(head)} bytes of an index of {entry.index_bytes}; it is cut off")
    if digest(head) != entry.index_hash:
        raise CorruptShardError(f"{name}: the block index does not match its hash; use an older version")
    try:
        return _parse_index(bytes(head), entry, spec, name)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CorruptShardError(f"{name}: malformed block index ({error!r})") from error


def _parse_index(head: bytes, entry: FileEntry, spec: TableSpec, name: str) -> ChunkIndex:
    data_start = 8 + int.from_bytes(head[:8], "little")
    if data_start > len(head):
        raise ValueError(f"a header of {data_start - 8} bytes in {len(head)}")
    header = json.loads(head[8:data_start])
    meta = json.loads(header.pop("__metadata__")["lightning_cpr"])
    described = [meta[key] for key in ("table", "col_start", "cols", "codec", "state_codecs")]
    if described != [entry.table, entry.col_start, entry.cols, entry.codec, dict(entry.state_codecs)]:
        raise ValueError(f"is of {described}, which is not what the manifest says")
    ends = [header[key]["data_offsets"][1] for key in ("index", "rows")]
    if not 0 <= ends[0] <= ends[1] == len(head) - data_start:
        raise ValueError(f"index and rows end at {ends} of {len(head) - data_start}")
    del header["index"], header["rows"]
    code = code_from_meta(meta["rows"], head[data_start + ends[0] :], name)
    if (code.start, code.end, code.count) != (entry.row_start, entry.row_end, entry.rows):
        raise ValueError("its rows are not those of the manifest")
    prefixes = ("weight.", *(f"state.{state.name}." for state in spec.states))
    parts, offset = [], len(head)
    for key, item in header.items():
        part = Part(key, _DTYPES[item["dtype"]], tuple(item["shape"][1:]), offset)
        if any(type(width) is not int or width < 0 for width in part.tail) or item["shape"][0] != entry.rows:
            raise ValueError(f"part {key} has shape {item['shape']}")
        offset += entry.rows * part.row_bytes
        if item["data_offsets"] != [part.start - data_start, offset - data_start] or not key.startswith(prefixes):
            raise ValueError(f"part {key} at {item['data_offsets']} is misplaced or of nothing known")
        parts.append(part)
    if offset != entry.bytes or not all(any(key.startswith(prefix) for key in header) for prefix in prefixes):
        raise ValueError(f"parts {sorted(header)} end at byte {offset} of {entry.bytes}")
    index = ChunkIndex(entry, meta["block_rows"], code, tuple(parts), head[data_start : data_start + ends[0]])
    if type(index.block_rows) is not int or index.block_rows < 1:
        raise ValueError(f"blocks of {index.block_rows} rows")
    if len(index.hashes) != index.blocks * len(parts) * _HASH_BYTES:
        raise ValueError(f"{len(index.hashes)} bytes of hashes")
    return index


def decode_rows_of(
    index: ChunkIndex, spec: TableSpec, tensors: Mapping[str, Tensor], with_states: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weight ``[m, cols]`` and states (``[m]`` or ``[m, cols]``) of the rows whose parts ``[m, ...]`` are given."""
    entry = index.entry

    def decode(prefix: str, codec: str, cols: int, dtype: torch.dtype) -> Tensor:
        mine = {name.removeprefix(prefix): part for name, part in tensors.items() if name.startswith(prefix)}
        try:
            return get_codec(codec).decode(mine, cols, dtype)
        except (CPRError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CorruptShardError(f"{entry.path} (table {entry.table}, {prefix}*): cannot decode: {error}") from error

    weight = decode("weight.", entry.codec, entry.cols, spec.dtype)
    states = {}
    for state in spec.states if with_states else ():
        wide = entry.cols if state.kind == "element" else 1
        values = decode(f"state.{state.name}.", entry.state_codecs[state.name], wide, state.dtype)
        states[state.name] = values if state.kind == "element" else values[:, 0]
    return weight, states


def _hash(data: memoryview) -> bytes:
    """XXH3, 128 bits: as fast as memory, so that checking costs a read nothing. It finds damage, not forgery."""
    return xxhash.xxh3_128_digest(data)


def _block_hashes(view: memoryview, count: int, block_rows: int) -> bytes:
    step = block_rows * (len(view) // count) if count else 0
    starts = [block * step for block in range(-(-count // block_rows))]
    return b"".join(_hash(view[start : start + step]) for start in starts)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
