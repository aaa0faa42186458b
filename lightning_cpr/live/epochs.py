"""A recovery begins an epoch of its run: saves of earlier ones do not commit any more."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from lightning_cpr.errors import CPRError, StorageError
from lightning_cpr.job.job import Job
from lightning_cpr.saving.saver import BackgroundSaves, Committed
from lightning_cpr.store.storage import Storage
from lightning_cpr.store.versions import fence

log = logging.getLogger(__name__)


class Epochs:
    """One rank's, for one group of processes. Both calls are collective.

    owner: names this job among those that went on with the run. emit: writes an event. committed: takes a save that
    stood before the epoch began.
    """

    def __init__(
        self,
        job: Job,
        storage: Storage,
        run_id: str,
        owner: str,
        saves: BackgroundSaves,
        timeout_s: float,
        emit: Callable[..., Any],
        committed: Callable[[Committed], None],
    ) -> None:
        self._job, self._storage, self._run_id, self._owner = job, storage, run_id, owner
        self._saves, self._timeout_s, self._emit, self._committed = saves, timeout_s, emit, committed

    def begin(self, epoch: int) -> None:
        """End the save in flight, whose rows may be a failed rank's: it does not commit, but where there is no version
        yet: the first base was staged before the failure, and there is nothing else to go back to.
        """
        first = not self._job.broadcast(self._saves.chain.version)
        outcome = self._saves.poll(self._timeout_s) if first and self._saves.busy else None
        dist.barrier()
        if self._job.rank == 0:
            self._job.kv.set("epoch", str(epoch))
        dist.barrier()
        if self._saves.busy:
            outcome = self._saves.poll(self._timeout_s)
        if isinstance(outcome, CPRError):
            # Aborted by this recovery, which is no failure of storage.
            self._saves.failed_in_a_row = 0
            self._emit("save_aborted", error=str(outcome).partition("\n")[0])
        elif outcome is not None:
            self._committed(outcome)
        self._job.from_rank_0(lambda: self._fence(epoch))

    def begin_in_new_group(self, epoch: int) -> None:
        """The old group of processes is gone, and its saves with it."""
        if self._job.rank == 0:
            self._job.kv.set("epoch", str(epoch))
        self._job.from_rank_0(lambda: self._fence(epoch))

    def _fence(self, epoch: int) -> None:
        """Rank 0: fence the earlier ones off. Without room for that the recovery goes on: none of them can commit any
        more in this job's own store, and a fence is for a rank of theirs that hangs in the middle of its commit.
        """
        try:
            fence(self._storage, self._run_id, epoch, self._owner)
        except StorageError as error:
            log.error("epoch %d begins without a fence: %s", epoch, error)
            self._emit("fence_failed", epoch=epoch, error=str(error).partition("\n")[0])
