"""Table rows that outlive their process: a survivor of a broken job leaves its shards in host shared memory, and the
processes that torchrun starts in its place take them from there. What is taken is decided in `recovery.handover`.

A stash is two files in /dev/shm: ``<name>.rows`` (the tensors, one after the other, then a blob of plain values) and
``<name>.json``, renamed into place when the rows are complete. It names the run, the incarnation and the plan,
each shard by its rectangle, and the hash of every part. The plan's owner of the shards is in the name so that names
differ; a process with another rank may take them.

A stash serves one restart of one run under one agent (torchrun): everything else is refused, and removed once nobody
can want it. Files of another user are never opened.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from lightning_cpr.errors import ConfigError, CorruptShardError, StorageError
from lightning_cpr.spec import Shard, ShardSpec

log = logging.getLogger(__name__)

PREFIX = "lightning-cpr-"
_NAME = re.compile(re.escape(PREFIX) + r"(?P<run>[A-Za-z0-9_-]{1,64})\.(?P<owner>[0-9]+)\.(?P<pid>[0-9]+)")
_PIECE = 32 << 20


@dataclass(frozen=True)
class Key:
    """What a stash must be of to be used: the run, its tables and model, its plan, and the agent that restarts it.

    config, plan: fingerprints. ``agent``: process id and start time of torchrun's agent on this host. Each start takes
    or removes what is there of its agent, so that what it finds is of the start before.
    """

    run_id: str
    config: str
    plan: str
    agent: str


@dataclass(frozen=True)
class Part:
    """One tensor of a shard: ``weight`` or an optimizer state, at ``offset`` of the rows' file."""

    shard: ShardSpec
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    xxh3: str = ""


@dataclass(frozen=True)
class Stash:
    """A stash as its metadata tells it.

    epoch, incarnation, world_size: of the job that broke. owner: of its shards, by the plan. step: batches whose dense
    step its rank had finished. blob: (offset, bytes, hash). ``path``: of the metadata; not stored.
    """

    key: Key
    epoch: int
    incarnation: str
    world_size: int
    owner: int
    pid: int
    step: int
    parts: tuple[Part, ...]
    blob: tuple[int, int, str]
    path: Path = field(default=Path(), compare=False)

    @property
    def rows(self) -> Path:
        return self.path.with_suffix(".rows")

    @property
    def nbytes(self) -> int:
        return self.blob[0] + self.blob[1]

    def to_json(self) -> str:
        data = asdict(self)
        del data["path"]
        return json.dumps(data)

    @staticmethod
    def from_json(text: str, path: Path) -> Stash:
        data = json.loads(text)
        parts = [{**p, "shard": ShardSpec(**p["shard"]), "shape": tuple(p["shape"])} for p in data["parts"]]
        told = {"key": Key(**data["key"]), "parts": tuple(Part(**p) for p in parts), "blob": tuple(data["blob"])}
        return Stash(**{**data, **told, "path": path})


def agent_of(pid: int) -> str:
    """A name for a process that no later process gets; "" if it is gone."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
    return f"{pid}-{started}"


def size_of(shards: Sequence[Shard]) -> int:
    """Bytes of the rows of a stash of these shards."""
    return sum(tensor.nbytes for shard in shards for _, tensor in _tensors(shard))


def leave(
    folder: Path,
    key: Key,
    epoch: int,
    incarnation: str,
    world_size: int,
    owner: int,
    step: int,
    shards: Sequence[Shard],
    blob: bytes,
) -> Stash:
    """Copy shards and a blob into ``folder``, for whoever takes this rank's place.

    Raises:
        StorageError: there is no room. Nothing is left behind.
        ConfigError: the run's id cannot be part of a file name.
    """
    path = folder / f"{PREFIX}{key.run_id}.{owner}.{os.getpid()}.json"
    if _NAME.fullmatch(path.stem) is None:
        raise ConfigError(f"run id {key.run_id!r}: must be letters, digits, '-' and '_'")
    parts, at = [], 0
    for shard in shards:
        for name, tensor in _tensors(shard):
            dtype = str(tensor.dtype).removeprefix("torch.")
            parts.append(Part(shard.spec, name, dtype, tuple(tensor.shape), at, tensor.nbytes))
            at += tensor.nbytes
    blob_entry = (at, len(blob), _digest([blob]))
    stash = Stash(key, epoch, incarnation, world_size, owner, os.getpid(), step, tuple(parts), blob_entry, path)
    try:
        _write(stash, [tensor for shard in shards for _, tensor in _tensors(shard)], blob)
    except OSError as error:
        _remove(path)
        raise StorageError(f"{folder} has no room for {stash.nbytes / 1e6:.0f} MB of rows: {error}") from error
    return stash


def _write(stash: Stash, tensors: Sequence[Tensor], blob: bytes) -> None:
    _remove(stash.path)
    file = os.open(stash.rows, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    hashed = []
    try:
        if stash.nbytes:
            os.posix_fallocate(file, 0, stash.nbytes)  # a page that cannot be had later would end the process
        for part, tensor in zip(stash.parts, tensors, strict=True):
            target, digest = _mapped(file, part.offset, part.nbytes), xxhash.xxh3_128()
            for start, piece in _pieces(tensor):
                target[start : start + len(piece)] = piece
                digest.update(piece)
            hashed.append(replace(part, xxh3=digest.hexdigest()))
        os.pwrite(file, blob, stash.blob[0])
    finally:
        os.close(file)
    torn = stash.path.with_suffix(".torn")
    torn.write_text(replace(stash, parts=tuple(hashed)).to_json())
    torn.chmod(0o600)
    torn.rename(stash.path)


def find(folder: Path, key: Key, any_plan: bool = False) -> list[Stash]:
    """The stashes that serve ``key``, complete by their sizes (`check` reads them). Removes what serves nobody: of this
    agent but of another plan (unless ``any_plan``) or run, of an agent that is gone, or torn.
    """
    found = []
    for path in sorted(folder.glob(f"{PREFIX}*")):
        name = _NAME.fullmatch(path.stem)
        with suppress(FileNotFoundError):  # another rank of this host removes too
            if name is None or path.stat().st_uid != os.geteuid():
                continue
            if path.suffix == ".json":
                if (stash := _serves(path, key, any_plan)) is not None:
                    found.append(stash)
            else:
                _remove_torn(path, int(name["pid"]))
    return found


def _remove_torn(path: Path, pid: int) -> None:
    """Rows whose process ``pid`` ended before they were complete."""
    if not path.with_suffix(".json").exists() and not agent_of(pid):
        log.warning("%s is torn: its process ended before it was complete; removed", path.name)
        path.unlink()


def _serves(path: Path, key: Key, any_plan: bool) -> Stash | None:
    """A stash if it serves ``key``; what serves nobody is removed."""
    why = ""
    try:
        stash = Stash.from_json(path.read_text(), path)
        if stash.rows.stat().st_size != stash.nbytes:
            why = "its rows are not all there"
        elif stash.key == key or (any_plan and replace(stash.key, plan=key.plan) == key):
            return stash
        elif stash.key.agent == key.agent:
            why = f"it is of {_told(stash.key)}, not of {_told(key)}"
        elif agent_of(int(stash.key.agent.partition("-")[0])) != stash.key.agent:
            why = "the launcher that could restart its job is gone"
    except FileNotFoundError:
        why = "its rows are gone"
    except (ValueError, TypeError, KeyError) as error:
        why = f"its metadata cannot be read: {error}"
    if why:  # else it is of another job that runs on this host
        log.warning("stash %s is refused and removed: %s", path.name, why)
        _remove(path)
    return None


def _told(key: Key) -> str:
    return f"run {key.run_id}, model {key.config} and plan {key.plan}"


def check(stash: Stash) -> bytes:
    """Read a whole stash against its hashes; returns its blob.

    Raises:
        CorruptShardError: it is not what was left, or it is gone.
    """
    try:
        with open(stash.rows, "rb") as file:
            for part in stash.parts:
                mapped = _mapped(file.fileno(), part.offset, part.nbytes, write=False)
                if _digest(mapped[i : i + _PIECE] for i in range(0, part.nbytes, _PIECE)) != part.xxh3:
                    raise CorruptShardError(
                        f"stash {stash.path.name}: {part.shard.table}.{part.name} does not match its hash"
                    )
            blob = os.pread(file.fileno(), stash.blob[1], stash.blob[0])
    except OSError as error:
        raise CorruptShardError(f"stash {stash.path.name}: {error}") from error
    if _digest([blob]) != stash.blob[2]:
        raise CorruptShardError(f"stash {stash.path.name}: its state does not match its hash")
    return blob


def read(stash: Stash, file: int) -> Iterator[tuple[Part, Tensor]]:
    """The tensors of a stash whose rows are open as ``file``, as their bytes: views of the shared memory, not to be
    written.
    """
    for part in stash.parts:
        yield part, torch.from_numpy(_mapped(file, part.offset, part.nbytes, write=False))


def remove(stashes: Iterable[Stash]) -> None:
    """Give the memory back."""
    for stash in stashes:
        _remove(stash.path)


def remove_of_agent(folder: Path, agent: str) -> None:
    """Remove what this agent's processes left: no restart comes any more."""
    for path in folder.glob(f"{PREFIX}*.json"):
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError, PermissionError):
            if path.stat().st_uid == os.geteuid() and json.loads(path.read_text())["key"]["agent"] == agent:
                _remove(path)
    for path in folder.glob(f"{PREFIX}*"):
        name = _NAME.fullmatch(path.stem)
        with suppress(FileNotFoundError):
            if name is not None and path.suffix != ".json" and path.stat().st_uid == os.geteuid():
                _remove_torn(path, int(name["pid"]))


def bytes_of(tensor: Tensor) -> Tensor:
    """A contiguous host tensor as the bytes ``[nbytes]`` that it is made of; a view."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _tensors(shard: Shard) -> list[tuple[str, Tensor]]:
    return [("weight", shard.weight), *sorted(shard.states.items())]


def _pieces(tensor: Tensor) -> Iterator[tuple[int, Any]]:
    """(offset, bytes) of a tensor, piece by piece, from whatever device."""
    if tensor.numel() == 0:
        return
    per_row = max(1, tensor[:1].nbytes)
    step = max(1, _PIECE // per_row)
    for row in range(0, tensor.shape[0], step):
        piece = tensor.detach()[row : row + step].cpu().contiguous()
        yield row * per_row, bytes_of(piece).numpy()


def _mapped(file: int, offset: int, nbytes: int, write: bool = True) -> Any:
    if nbytes == 0:
        return np.empty(0, dtype=np.uint8)
    with os.fdopen(os.dup(file), "r+b" if write else "rb") as handle:
        return np.memmap(handle, dtype=np.uint8, mode="r+" if write else "c", offset=offset, shape=(nbytes,))


def _digest(pieces: Iterable[Any]) -> str:
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _remove(path: Path) -> None:
    for suffix in (".json", ".torn", ".rows"):  # the metadata first: rows alone are never used
        with suppress(FileNotFoundError):
            path.with_suffix(suffix).unlink()
