"""Manifests: what a version is made of. Writing the manifest is the commit.

The object is one JSON document, ``{"blake2b":"<digest>","manifest":<body>}``, whose digest covers the bytes of the
body, so that any flipped bit is seen before the body is parsed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from lightning_cpr.errors import ConfigError, CorruptShardError, ManifestError
from lightning_cpr.spec import ShardSpec, TableSpec

SCHEMA = 1
FOLDER = "manifests"
CHUNKS = "chunks"
SIBLING = "cpr-chunks"
"""Where the chunks of a version lie whose manifest is at a path of its own."""
_COMPACTED = "-c"
HEAD = b'{"blake2b":"'
_MIDDLE = b'","manifest":'
_TAIL = b"}\n"
_DIGEST = 64
_OPENSSL = "blake2b512" in hashlib.algorithms_available
_RUN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_VERSION = re.compile(
    r"(?P<run>[A-Za-z0-9_-]{1,64})\.(?P<epoch>[0-9]{6})\.(?P<step>[0-9]{12})\.(?P<nonce>[A-Za-z0-9_-]{1,64})"
)
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)}  # fmt: skip

Kind = Literal["base", "delta"]
Consistency = Literal["exact", "mixed"]


@dataclass(frozen=True)
class FileEntry:
    """One chunk file: rows of one table and column range.

    path: relative to the root. bytes: the whole file. rows: how many, within the hull ``[row_start, row_end)``; all
    rows of the hull if equal, else the row numbers are in the chunk's index. index_bytes: the file's head that holds
    the block index, index_hash: blake2b of that head. step: the training step that the rows are of.
    """

    path: str
    bytes: int
    table: str
    rows: int
    row_start: int
    row_end: int
    col_start: int
    cols: int
    codec: str
    state_codecs: Mapping[str, str]
    index_bytes: int
    index_hash: str
    step: int

    @property
    def dense(self) -> bool:
        """Whether every row of the hull is there."""
        return self.rows == self.row_end - self.row_start

    @property
    def col_end(self) -> int:
        return self.col_start + self.cols


@dataclass(frozen=True)
class BlobEntry:
    """Plain bytes of a version: the dense part, or one rank's RNG and loader state."""

    name: str
    path: str
    bytes: int
    blake2b: str


@dataclass(frozen=True)
class ShardRecord:
    """A shard of the plan that wrote the version. Every row of it is at least as new as ``complete_step``."""

    spec: ShardSpec
    complete_step: int


@dataclass(frozen=True)
class Manifest:
    """A version. ``files`` are all that restore it, inherited ones included, in apply order: the newest row wins.

    ``path`` is where it was read from or written to, relative to the root; it is not stored. ``planner`` and ``ledger``
    are JSON values that the store does not look into. ``parent`` is provenance only. ``wall_time``: seconds, Unix.
    """

    run_id: str
    version: str
    epoch: int
    step: int
    samples: int
    kind: Kind
    consistency: Consistency
    world_size: int
    wall_time: float
    config_fingerprint: str
    plan_fingerprint: str
    tables: tuple[TableSpec, ...]
    shards: tuple[ShardRecord, ...]
    files: tuple[FileEntry, ...]
    blobs: tuple[BlobEntry, ...]
    planner: Any = None
    ledger: Any = None
    parent: str | None = None
    schema: int = SCHEMA
    path: str = field(default="", compare=False)

    @property
    def stored(self) -> list[FileEntry | BlobEntry]:
        """Every object that the version needs."""
        return [*self.files, *self.blobs]

    def table(self, fqn: str) -> TableSpec:
        for spec in self.tables:
            if spec.fqn == fqn:
                return spec
        raise ManifestError(
            f"{self.path}: holds no table {fqn!r}; it holds {', '.join(t.fqn for t in self.tables) or 'none'}"
        )


@dataclass(frozen=True)
class PartManifest:
    """What one rank wrote of a version, before it is committed."""

    rank: int
    shards: tuple[ShardRecord, ...]
    files: tuple[FileEntry, ...]
    blobs: tuple[BlobEntry, ...]


@dataclass(frozen=True)
class VersionRef:
    """A manifest as a listing shows it, unread."""

    path: str
    run_id: str
    version: str
    epoch: int
    step: int


def new_version_id(run_id: str, epoch: int, step: int, nonce: str) -> str:
    """``<run>.<epoch>.<step>.<nonce>``. All ranks of one save pass the same nonce, and no two saves share one.

    A job that restarts must not meet files of a save that its predecessor left unfinished: let the nonce start with a
    random word that the ranks agree on at start-up. "-c" in a nonce is for compactions.
    """
    version = f"{run_id}.{epoch:06d}.{step:012d}.{nonce}"
    if not _VERSION.fullmatch(version):
        raise ConfigError(f"no version id can be made of run {run_id!r}, epoch {epoch}, step {step}, nonce {nonce!r}")
    return version


def compacted_version(version: str, word: str) -> str:
    """The id of a compaction of a version, told apart by a random word: it sorts right after the version itself."""
    ref = split_version(version)
    nonce = version.rpartition(".")[2]
    return new_version_id(ref.run_id, ref.epoch, ref.step, f"{nonce[: 62 - len(word)]}{_COMPACTED}{word}")


def is_compaction(version: str) -> bool:
    """Whether a version id is one of `compacted_version`."""
    return _COMPACTED in version.rpartition(".")[2]


def same_rows(version: str) -> str:
    """The version that a compaction stands for, any other itself: two that give the same hold the same rows."""
    return version[: version.rfind(_COMPACTED)] if is_compaction(version) else version


def split_version(version: str) -> VersionRef:
    """The run, epoch and step in a version id; ManifestError if it is none."""
    match = _VERSION.fullmatch(version)
    if not match:
        raise ManifestError(f"{version!r} is no version id")
    path = f"{FOLDER}/{match['step']}-{match['epoch']}-{version}.json"
    return VersionRef(path, match["run"], version, int(match["epoch"]), int(match["step"]))


def manifest_path(version: str) -> str:
    """``manifests/<step>-<epoch>-<id>.json``, zero padded, so that listings sort by step."""
    return split_version(version).path


def parse_manifest_path(path: str) -> VersionRef | None:
    """The version that a listed path names, None for anything else that lies there."""
    match = re.fullmatch(rf"{FOLDER}/[0-9]{{12}}-[0-9]{{6}}-({_VERSION.pattern})\.json", path)
    ref = split_version(match[1]) if match else None
    return ref if ref and ref.path == path else None


def digest(data: bytes | bytearray | memoryview) -> str:
    """The hash that manifests record: the first 32 bytes of the BLAKE2b-512 digest, hex. OpenSSL's, where it has it, is
    half as fast again.
    """
    if _OPENSSL:
        return hashlib.new("blake2b512", data, usedforsecurity=False).hexdigest()[:_DIGEST]
    return hashlib.blake2b(data).hexdigest()[:_DIGEST]


def seal(body: Any) -> bytes:
    """JSON ``body`` under its own digest."""
    raw = json.dumps(body, separators=(",", ":"), sort_keys=True, allow_nan=False).encode()
    return HEAD + digest(raw).encode() + _MIDDLE + raw + _TAIL


def unseal(raw: bytes | bytearray, name: str) -> Any:
    """The body that `seal` took; `CorruptShardError` naming ``name`` unless every byte is as written."""
    start = len(HEAD) + _DIGEST
    if not raw:
        raise CorruptShardError(f"{name}: is empty (a torn write); use an older version")
    if raw[: len(HEAD)] != HEAD or raw[start : start + len(_MIDDLE)] != _MIDDLE:
        raise ManifestError(f"{name}: is no manifest of lightning_cpr, or its first bytes are damaged")
    body = raw[start + len(_MIDDLE) : -len(_TAIL)]
    if raw[-len(_TAIL) :] != _TAIL or digest(body).encode() != raw[len(HEAD) : start]:
        raise CorruptShardError(f"{name}: {len(raw)} bytes do not match the digest in them; use an older version")
    return json.loads(body)


def dump_manifest(manifest: Manifest) -> bytes:
    body = _plain(manifest)
    del body["path"]
    return seal(body)


def parse_manifest(raw: bytes | bytearray, path: str) -> Manifest:
    """The manifest in the bytes of the object at ``path``.

    Raises:
        CorruptShardError: the bytes are not those that were written.
        ManifestError: it is no manifest, malformed, or of a newer schema.
    """
    body = unseal(raw, path)
    schema = body.get("schema") if isinstance(body, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        raise ManifestError(f"{path}: schema {schema} is newer than {SCHEMA}, the newest known: upgrade lightning_cpr")
    try:
        manifest: Manifest = _typed({**body, "path": path}, Manifest)
        _check(manifest)
    except (KeyError, TypeError, ValueError) as error:
        raise ManifestError(f"{path}: malformed ({error!r})") from error
    return manifest


def dump_part(part: PartManifest) -> bytes:
    return seal(_plain(part))


def parse_part(raw: bytes | bytearray, path: str) -> PartManifest:
    """As `parse_manifest`, for the part of one rank."""
    try:
        part: PartManifest = _typed(unseal(raw, path), PartManifest)
    except (KeyError, TypeError, ValueError) as error:
        raise ManifestError(f"{path}: malformed ({error!r})") from error
    return part


def _check(manifest: Manifest) -> None:
    """What types do not say. ValueError names the entry."""
    if split_version(manifest.version).run_id != manifest.run_id:
        raise ValueError(f"version {manifest.version!r} is not of run {manifest.run_id!r}")
    tables = {spec.fqn: spec for spec in manifest.tables}
    for spec in manifest.tables:
        if spec.rows < 0 or spec.cols < 0:
            raise ValueError(f"table {spec.fqn} is {spec.rows} x {spec.cols}")
    for entry in manifest.files:
        spec = tables[entry.table]
        inside = (
            0 <= entry.row_start <= entry.row_end <= spec.rows and 0 <= entry.col_start <= entry.col_end <= spec.cols
        )
        counted = 0 <= entry.rows <= entry.row_end - entry.row_start and 8 < entry.index_bytes <= entry.bytes
        # Every row has a byte at least: what is allocated for rows is bounded by what is stored.
        counted = counted and (entry.rows <= entry.bytes or not entry.cols)
        if not inside or not counted or set(entry.state_codecs) != {state.name for state in spec.states}:
            raise ValueError(f"file {entry.path} does not fit table {entry.table}")
    for named in manifest.stored:
        match = re.fullmatch(rf"(?:{CHUNKS}|{SIBLING})/{_VERSION.pattern}/(?!\.)[^/\\]+", named.path)
        if not match:
            raise ValueError(f"{named.path!r} is no path of a chunk or blob")
        if match["run"] != manifest.run_id or named.bytes < 0:
            raise ValueError(f"{named.path!r} is not of run {manifest.run_id!r}")


def _plain(value: Any) -> Any:
    """JSON values of a dataclass tree."""
    if dataclasses.is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {key: _plain(below) for key, below in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(below) for below in value]
    return value


def _typed(value: Any, kind: Any) -> Any:
    """The dataclass tree of JSON values, every type checked: nothing in a manifest is taken on trust."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if kind is torch.dtype:
        return _DTYPES[value]
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        names = {item.name for item in dataclasses.fields(kind)}
        if not isinstance(value, dict) or set(value) != names:
            raise ValueError(f"{getattr(kind, '__name__', kind)} has fields {sorted(value)}, wanted {sorted(names)}")
        return kind(**{name: _typed(value[name], hints[name]) for name in names})  # type: ignore[operator]
    if origin is tuple and isinstance(value, list):
        return tuple(_typed(below, args[0]) for below in value)
    if origin is Literal and value in args:
        return value
    if origin is not None and isinstance(value, dict):
        return {key: _typed(below, args[1]) for key, below in value.items()}
    if type(None) in args:
        return None if value is None else _typed(value, args[0])
    if kind is float and type(value) in (int, float):
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{value!r} is no {kind}")
    return value
