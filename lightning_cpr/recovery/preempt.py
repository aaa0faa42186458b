"""Preemption: a SIGTERM on any rank makes all ranks stop after the same step, so that they can save one exact version.

No collective is used, for a rank cannot know when the others look. The rank that was asked to end names a step far
enough ahead that every rank has read it by then (ranks in lockstep are at most one step apart), through the store.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch.distributed as dist

from lightning_cpr.errors import RecoveryError

log = logging.getLogger(__name__)

EXIT_PREEMPTED = 128 + signal.SIGTERM
LOOK_EVERY_S = 0.05
AHEAD_S = 0.5
_KEY = "preempt"


def steps_ahead(step_seconds: float) -> int:
    """How many steps ahead to stop: two, and at least as many as take `AHEAD_S`, in which each rank looks once."""
    return 2 + math.ceil(AHEAD_S / max(step_seconds, 1e-4))


class Preemption:
    """One rank's part. `install` in the main thread, call `due` after every step, `remove` at the end.

    Args:
        store: the job's key-value store, the same keys on all ranks (`Membership`'s, or the default group's).
        run: names this use of the store: a key is not read by a later attempt of the job.
    """

    def __init__(self, store: dist.Store, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._key = f"{_KEY}/{run}"
        self._clock = clock
        self._asked = False
        self._stop_after: int | None = None
        self._looked = self._last = clock()
        self._step_s = 0.0
        self._previous: Any = None

    def install(self) -> None:
        """Take SIGTERM over. Lightning's own handler runs a collective inside the handler: ours only notes it."""
        self._previous = signal.signal(signal.SIGTERM, self._on_signal)

    def remove(self) -> None:
        """Give SIGTERM back to the handler before."""
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, self._previous)

    def due(self, step: int) -> bool:
        """Whether all ranks stop now, after ``step``: save, and leave with `EXIT_PREEMPTED`.

        Raises:
            RecoveryError: the others have stopped at an earlier step; no common version can be saved.
        """
        now = self._clock()
        taken, self._last = now - self._last, now
        self._step_s = taken if self._step_s == 0 else min(taken, 2 * self._step_s)
        if self._stop_after is None and (self._asked or now - self._looked >= LOOK_EVERY_S):
            self._looked = now
            self._look(step)
        if self._stop_after is not None and step > self._stop_after:
            raise RecoveryError(f"told at step {step} to stop after step {self._stop_after}; the last version stands")
        return step == self._stop_after

    def _look(self, step: int) -> None:
        if self._asked:
            wanted = str(step + steps_ahead(self._step_s))
            self._stop_after = int(self._store.compare_set(self._key, "", wanted))
        elif self._store.check([self._key]):
            self._stop_after = int(self._store.get(self._key))
        if self._stop_after is not None:
            log.warning("preemption: all ranks save and stop after step %d (now at %d)", self._stop_after, step)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
