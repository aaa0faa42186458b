"""SIGTERM on any rank of a fit: all ranks save the same step and leave with exit code 143.

Lightning's own handler runs a collective inside the handler, which the other ranks do not run: it is replaced while
training runs. What saves (`Flushes`) is asked at the end of the agreed batch, after every other callback.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist

from lightning_cpr._lightning import Callback, pl
from lightning_cpr.errors import CPRError, RecoveryError
from lightning_cpr.job.samples import batches_trained
from lightning_cpr.recovery.preempt import EXIT_PREEMPTED, Preemption
from lightning_cpr.recovery.stuck import StuckWatch, end_group

log = logging.getLogger(__name__)


@runtime_checkable
class Flushes(Protocol):
    """A callback that can save the step that all ranks stand at."""

    def flush(self, trainer: pl.Trainer) -> None:
        """Save and wait until it is committed. Called on all ranks after the same batch; may run collectives.

        Raises:
            CPRError: it was not saved; the version before stands.
        """


class StopOnSigterm(Callback):
    """One for each Trainer, put there by `attach`."""

    def __init__(self) -> None:
        self._preemption: Preemption | None = None
        self._watch: StuckWatch | None = None
        self._stopping = False

    def _install(self, trainer: pl.Trainer) -> None:
        if self._preemption is not None:
            return
        self._preemption = Preemption(_store(trainer), "fit")
        if threading.current_thread() is not threading.main_thread():
            return  # handlers belong to the main thread; this rank follows the others
        self._preemption.install()
        ports = trainer.strategy.group_ports  # type: ignore[attr-defined]
        if ports is not None:
            self._watch = StuckWatch(partial(end_group, *ports))
            self._watch.install()

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._install(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._install(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._preemption is not None
        step = batches_trained(trainer)
        if self._watch is not None:
            self._watch.step()
        try:
            self._stopping = self._stopping or self._preemption.due(step)
        except RecoveryError as error:
            log.error("preempted, nothing more is saved: %s", error)
            raise SystemExit(EXIT_PREEMPTED) from error
        if self._stopping and not trainer.fit_loop.epoch_loop._should_accumulate():
            # Inside a window of accumulated gradients all go on to its end: no version holds those.
            _save(trainer, step)
            raise SystemExit(EXIT_PREEMPTED)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._preemption is not None:
            self._preemption.remove()
            self._preemption = None
        self._stop_watching()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """The handler stays until Lightning puts back the one before `fit`: its own runs collectives."""
        self._stop_watching()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.remove()
            self._watch = None


def attach(trainer: pl.Trainer) -> None:
    """Put a `StopOnSigterm` behind all callbacks of the Trainer; one that is there already is moved."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    own = next((c for c in callbacks if isinstance(c, StopOnSigterm)), None) or StopOnSigterm()
    trainer.callbacks = [*(c for c in callbacks if c is not own), own]  # type: ignore[attr-defined]


def _store(trainer: pl.Trainer) -> dist.Store:
    """Keys that all ranks share, a process that replaces one of them too."""
    live = trainer.strategy.live  # type: ignore[attr-defined]
    return trainer.strategy.job.kv if live is None else live.store  # type: ignore[attr-defined]


def _save(trainer: pl.Trainer, step: int) -> None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, Flushes):
            try:
                callback.flush(trainer)
            except CPRError as error:
                log.error("preempted, step %d is not saved and the version before stands: %s", step, error)
            else:
                log.warning("preempted: step %d is saved, rank %d leaves", step, trainer.global_rank)
    try:
        trainer.strategy.barrier("preempted")  # rank 0's process may hold the store that the others still read
    except RuntimeError as error:
        log.warning("a rank left before the others: %s", error)
