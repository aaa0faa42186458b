"""What a save is made of: the part all ranks agree on, one rank's part, and what they are written through."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import quote

from lightning_cpr.errors import ConfigError
from lightning_cpr.spec import RowBlock, TableSpec
from lightning_cpr.store.chunk import CHUNK_BYTES
from lightning_cpr.store.kv import KeyValue
from lightning_cpr.store.manifest import (
    CHUNKS,
    FOLDER,
    SIBLING,
    Consistency,
    FileEntry,
    Kind,
    ShardRecord,
    manifest_path,
    split_version,
)
from lightning_cpr.store.storage import Storage

Inherit = Literal["all", "base"]
POINTS = ("pre_write", "mid_write", "pre_commit", "post_commit")


def _no_point(point: str, step: int) -> None:
    return


@dataclass(frozen=True)
class SaveSpec:
    """What every rank passes alike. ``version``: from `new_version_id`; it carries run id, epoch and step.

    A base holds every row of every table in ``tables``. A delta holds some rows and inherits the files of the manifest
    at ``parent``, or of these (``inherit="base"``) only its base's: it then holds every row that differs from the base.
    ``path``: where the manifest of a base goes, relative to the root; by default under ``manifests/``.
    """

    version: str
    samples: int
    kind: Kind
    consistency: Consistency
    world_size: int
    tables: tuple[TableSpec, ...]
    config_fingerprint: str = ""
    plan_fingerprint: str = ""
    parent: str | None = None
    path: str | None = None
    inherit: Inherit = "all"

    def __post_init__(self) -> None:
        if (self.kind == "delta") != (self.parent is not None):
            raise ConfigError(f"version {self.version}: a delta names its parent, a base has none")
        if self.path is not None and self.parent is not None:
            raise ConfigError(f"version {self.version}: only a base has a manifest at a path of its own")
        if self.parent is not None and not self.parent.startswith(f"{FOLDER}/"):
            raise ConfigError(f"version {self.version}: {self.parent} can be removed at any time, so it has no deltas")

    @property
    def run_id(self) -> str:
        return split_version(self.version).run_id

    @property
    def epoch(self) -> int:
        return split_version(self.version).epoch

    @property
    def step(self) -> int:
        return split_version(self.version).step

    @property
    def folder(self) -> str:
        return f"{CHUNKS if self.path is None else SIBLING}/{self.version}"

    @property
    def manifest(self) -> str:
        return self.path or manifest_path(self.version)

    def part_path(self, rank: int) -> str:
        return f"{self.folder}/part-{rank}.json"

    def chunk_path(self, rank: int, number: int) -> str:
        return f"{self.folder}/r{rank}-{number:05d}.safetensors"

    def blob_path(self, rank: int, name: str) -> str:
        return f"{self.folder}/r{rank}-{quote(name, safe='')}.blob"

    def key(self, name: str) -> str:
        """The key-value key of this save."""
        return f"cpr/save/{self.version}/{name}"


@dataclass(frozen=True)
class RankPart:
    """What one rank saves.

    blocks: the rows; consumed once and in order, so a generator may gather them while earlier ones are written, and
    must not reuse a block's memory before the save ends. Blocks of one version overlap nowhere, on no rank.
    shards: this rank's shards of the plan, with the step that each is complete to. blobs: bytes by name, or what
    makes them when they are written; names are unique over all ranks. codecs: by table. state_codecs: by state name.
    Both are raw where nothing is said.
    """

    rank: int
    blocks: Iterable[RowBlock]
    shards: tuple[ShardRecord, ...] = ()
    blobs: Mapping[str, bytes | Callable[[], bytes]] = field(default_factory=dict)
    codecs: Mapping[str, str] = field(default_factory=dict)
    state_codecs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Compacted:
    """Files that hold the rows of others: a chain that begins with ``old`` may begin with ``new`` instead."""

    old: tuple[FileEntry, ...]
    new: tuple[FileEntry, ...]

    def apply(self, files: tuple[FileEntry, ...]) -> tuple[FileEntry, ...]:
        """``files``, in apply order, with the new beginning; as they are if they do not begin with the old one."""
        count = len(self.old)
        return self.new + files[count:] if files[:count] == self.old else files


@dataclass(frozen=True)
class SaveIO:
    """What saves go through. ``epoch`` gives the job's epoch now: a save of another epoch aborts.

    points: called as ``points(point, step)`` at each of `POINTS`, for the fault injector; a raise there fails the save.
    On rank 0 ``pre_commit`` comes right before the manifest is written, elsewhere right before the rank's part counts.
    timeout_s: how long a rank waits for the others. writers: threads that hash and write chunks, at most one more chunk
    than threads is in memory beside the blocks. cancel: set, it makes the save abort at the next chunk.
    """

    storage: Storage
    kv: KeyValue
    epoch: Callable[[], int]
    points: Callable[[str, int], None] = _no_point
    timeout_s: float = 600.0
    writers: int = 2
    chunk_bytes: int = CHUNK_BYTES
    cancel: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class PartReport:
    """What one rank wrote. ``raw_rows``: rows that their codec could not hold and that were stored raw."""

    bytes: int
    files: int
    rows: int
    raw_rows: int
    seconds: float


@dataclass(frozen=True)
class SaveReport:
    """A committed version: its manifest, relative to the root, and what this rank wrote of it."""

    path: str
    version: str
    step: int
    part: PartReport
    seconds: float
