"""Rows that come back from parity behind the training, in a running Trainer: lookups wait, events tell of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from lightning_cpr.job.job import Job
from lightning_cpr.pipeline import PipelinedModule
from lightning_cpr.recovery.parity.degraded import DegradedRebuild
from lightning_cpr.recovery.parity.keeper import ParityKeeper
from lightning_cpr.tables.lookup import before_lookups


def may_come_behind(job: Job, keeper: ParityKeeper, failed: Sequence[int]) -> bool:
    """Whether the failed ranks have many rows, and all that uses a row asks for it first. The same on every rank."""
    if not job.module.automatic_optimization or isinstance(job.module, PipelinedModule):
        return False  # each step waits for its exchange; a pipeline may look up before the group stands
    if not all(job.specs[s.table].row_sparse for s in job.plan if s.owner in failed and not s.replicated):
        return False
    return keeper.rows_bytes(failed) >= keeper.config.behind_mb << 20


class RowsBehind:
    """From a rebuild that goes on behind the training until its last row is back, on one rank.

    Args:
        emit: writes an event.
        step: that the job goes on from. failed: the ranks whose rows come back.
    """

    def __init__(
        self,
        job: Job,
        keeper: ParityKeeper,
        degraded: DegradedRebuild,
        emit: Callable[..., Any],
        step: int,
        failed: Sequence[int],
    ) -> None:
        self._degraded = degraded
        self._emit = emit
        self._began = time.monotonic()
        self._handles = [] if keeper.whole else before_lookups(job.module, keeper.wait_for)
        emit("rows_come_back", step=step, failed=list(failed))

    def ended(self, step: int) -> bool:
        """Whether the last row has come back; then it is told, and lookups wait no more."""
        if not self._degraded.finished:
            return False
        self.remove()
        self._emit(
            "rows_are_back", step=step, seconds=round(time.monotonic() - self._began, 6),
            blocks=self._degraded.demanded, waited_s=self._degraded.waited_s,
        )  # fmt: skip
        return True

    def remove(self) -> None:
        """Lookups wait no more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
