"""What parity tells of itself: events when protection goes on or off, numbers for the Trainer's loggers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lightning_cpr._lightning import pl


class ParityReport:
    """One rank's, of one fit. ``told``: what was said last of whether a lost shard would come back.

    Args:
        emit: writes an event.
        numbers: parity's metrics of now.
    """

    def __init__(self, emit: Callable[..., Any], numbers: Callable[[], dict[str, float]]) -> None:
        self.told = False
        self._emit = emit
        self._numbers = numbers
        self._since = time.monotonic()

    def begin(self) -> None:
        """Encoding begins."""
        if not self.told:
            self._since = time.monotonic()

    def protection(self, protected: bool, step: int, reason: str) -> None:
        """An event whenever protection goes on or off."""
        if protected == self.told:
            return
        self.told, now = protected, time.monotonic()
        if protected:
            self._emit("parity_on", step=step, encoded_s=round(now - self._since, 6), **self._numbers())
        else:
            self._since = now
            self._emit("parity_off", step=step, reason=reason or "parity is encoded anew")

    def log(self, trainer: pl.Trainer, step: int) -> None:
        """Rank 0's numbers, to the Trainer's loggers."""
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if trainer.global_rank or not every or step % every:
            return
        metrics = {f"cpr/parity_{name}": value for name, value in self._numbers().items()}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
