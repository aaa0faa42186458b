"""How the ranks of a save agree, through the key-value store: whose part counts, who failed first, is it committed.

Keys of a save, under ``cpr/save/<version>/``: ``part/<rank>`` (digest and size of a part-manifest), ``failed`` (the
first failure, set once), ``done`` (the manifest's path).
"""

from __future__ import annotations

import json
import logging
import threading
import time
import traceback
from collections.abc import Sequence

from lightning_cpr.errors import CommitError, CPRError, ManifestError
from lightning_cpr.store.manifest import digest
from lightning_cpr.store.save import SaveIO, SaveSpec

log = logging.getLogger(__name__)

_POLL_S = (0.002, 0.05)


class CoverageError(CommitError, ManifestError):
    """A version was not committed: rows of a table are missing from it, or in it twice."""


def publish_part(io: SaveIO, spec: SaveSpec, rank: int, raw: bytes) -> None:
    """Make a rank's part count: its part-manifest is in storage."""
    io.kv.set(spec.key(f"part/{rank}"), json.dumps({"blake2b": digest(raw), "bytes": len(raw)}))


def check_alive(io: SaveIO, spec: SaveSpec) -> None:
    """CommitError if the save is void: another rank failed, the epoch moved on, or it was cancelled."""
    _raise_failure(io, spec)
    now = io.epoch()
    if now != spec.epoch:
        raise CommitError(f"version {spec.version} is of epoch {spec.epoch} and the job is in {now}; it was given up")
    if io.cancel.is_set():
        raise CommitError(f"version {spec.version} was cancelled")


def wait_for(io: SaveIO, spec: SaveSpec, keys: Sequence[str], what: str) -> None:
    """Wait until all keys of the save are set; CommitError when it is void or ``io.timeout_s`` have passed."""
    deadline = time.monotonic() + io.timeout_s
    pause = _POLL_S[0]
    full = [spec.key(key) for key in keys]
    while not io.kv.check(full):
        check_alive(io, spec)
        if time.monotonic() > deadline:
            missing = [key for key, name in zip(keys, full, strict=True) if not io.kv.check([name])]
            late = f"{what} not there after {io.timeout_s:g} s: {', '.join(missing)}"
            raise CommitError(f"version {spec.version}: {late}")
        threading.Event().wait(pause)
        pause = min(2 * pause, _POLL_S[1])


def abort(io: SaveIO, spec: SaveSpec, rank: int, doing: str, error: BaseException, remove: Sequence[str]) -> CPRError:
    """Void the save on all ranks and remove ``remove``. Returns what to raise: the first failure of any rank."""
    record = {
        "rank": rank,
        "doing": doing,
        "coverage": isinstance(error, ManifestError),
        "error": f"{type(error).__name__}: {error}",
        "trace": "".join(traceback.format_exception(error)),
    }
    first = json.dumps(record)
    try:
        first = io.kv.compare_set(spec.key("failed"), "", first).decode()
    except Exception as lost:
        log.warning("version %s: the key-value store does not take the failure: %s", spec.version, lost)
    try:
        io.storage.delete(remove)
        io.storage.drop_empty(spec.folder)
    except CPRError as kept:
        log.warning("version %s: parts of the aborted save stay for gc: %s", spec.version, kept)
    return _failure(spec, first)


def _raise_failure(io: SaveIO, spec: SaveSpec) -> None:
    key = spec.key("failed")
    if io.kv.check([key]):
        raise _failure(spec, io.kv.get(key).decode())


def _failure(spec: SaveSpec, raw: str) -> CPRError:
    first = json.loads(raw)
    kind = CoverageError if first["coverage"] else CommitError
    return kind(
        f"version {spec.version} was not committed, the one before it stands: rank {first['rank']} failed while "
        f"{first['doing']}: {first['error']}\nFirst failure, on rank {first['rank']}:\n{first['trace']}"
    )
