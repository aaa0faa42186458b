"""Compaction beside a running job: rank 0 rewrites a chain that has grown long, the next save builds on the result.

The version that the result stands for is not replaced: both restore the same rows. Saves go on meanwhile, and chains
that grew from the old files are moved onto the new ones (`Compacted`) when their next version is committed.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from lightning_cpr.errors import CommitError, CPRError
from lightning_cpr.policy.baseline import compaction_due
from lightning_cpr.store.background import BackgroundWriter
from lightning_cpr.store.compact import Compaction, compact, read_factor
from lightning_cpr.store.manifest import FileEntry, Manifest
from lightning_cpr.store.save import Compacted, SaveIO

log = logging.getLogger(__name__)

GRACE_S = 5.0


class _GivenUp(CommitError):
    """No failure: the job has no use for it any more."""


@dataclass(frozen=True)
class Finished:
    """A compaction of this job. before, after: values that a restore reads for each value of the tables."""

    compaction: Compaction
    before: float
    after: float
    seconds: float


class BackgroundCompaction:
    """At most one compaction at a time, on a thread of its own. All methods are called by rank 0's training thread.

    ``ready``: what the next save should build on.
    """

    def __init__(self, io: SaveIO, policy: str) -> None:
        self._io, self._policy = io, policy
        self._cancel = threading.Event()
        self._writer: BackgroundWriter[Finished | None] = BackgroundWriter(self._cancel)
        self._running = False
        self._base: tuple[FileEntry, ...] = ()
        self.ready: Compacted | None = None

    def consider(self, manifest: Manifest) -> None:
        """Compact the version that was just committed, if its chain is long and nothing else will shorten it."""
        moves = self.ready is not None and self.ready.apply(manifest.files) != manifest.files
        if self._running or moves or manifest.consistency != "exact":
            return
        before = read_factor(manifest)
        if not compaction_due(self._policy, before):
            return

        def check() -> None:
            now = self._io.epoch()
            if now != manifest.epoch or self._cancel.is_set() or self._io.cancel.is_set():
                raise _GivenUp(f"the compaction of {manifest.version} was given up: the job ends or is in epoch {now}")

        def work() -> Finished | None:
            started = time.monotonic()
            done = compact(self._io.storage, manifest, check=check)
            if done is None:
                return None
            return Finished(done, before, read_factor(done.manifest), time.monotonic() - started)

        self._base = manifest.files
        self._writer.submit(work)
        self._running = True

    def poll(self, timeout: float = 0.0) -> Finished | CPRError | None:
        """What became of the compaction, once; None while there is none, it runs, had nothing to do or was given up."""
        future = self._writer.wait(timeout)
        if future is None:
            return None
        self._running = False
        error = future.exception()
        if error is not None:
            assert isinstance(error, CPRError)
            return None if isinstance(error, _GivenUp) else error
        finished = future.result()
        if finished is not None:
            self.ready = Compacted(self._base, finished.compaction.manifest.files)
        return finished

    def close(self) -> None:
        """End it; what it has written so far goes."""
        self._cancel.set()
        try:
            self._writer.close(0.0, GRACE_S)
        except CommitError as error:
            log.error("a compaction hangs: %s", error)
