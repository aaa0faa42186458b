"""Refuses `CPRCheckpointIO` under a stock strategy when a Trainer sets up, not at its first save hours later.

A CheckpointIO is not told of the Trainer's set-up; Lightning asks installed packages for callbacks of every Trainer by
the entry point ``callbacks_factory``, and these are the callbacks. None are given where CPRCheckpointIO is not in use.
"""

from __future__ import annotations

import sys

from lightning_cpr._lightning import PACKAGE, Callback, pl
from lightning_cpr.errors import UnsupportedError

STOCK_STRATEGY = (
    "CPRCheckpointIO needs every rank, and {strategy} saves on rank 0 only: tables of the other ranks would be missing."
    ' Use Trainer(strategy="torchrec").'
)


class CheckpointGuard(Callback):
    """Raises `UnsupportedError` at set-up if a stock strategy was given a `CPRCheckpointIO`."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        from lightning_cpr.checkpoint_io import CPRCheckpointIO
        from lightning_cpr.strategy import TorchRecStrategy

        strategy = trainer.strategy
        if isinstance(strategy._checkpoint_io, CPRCheckpointIO) and not isinstance(strategy, TorchRecStrategy):
            raise UnsupportedError(STOCK_STRATEGY.format(strategy=type(strategy).__name__))


def _guards(package: str) -> list[Callback]:
    return [CheckpointGuard()] if package == PACKAGE and "lightning_cpr.checkpoint_io" in sys.modules else []


def of_pytorch_lightning() -> list[Callback]:
    """For every ``pytorch_lightning.Trainer``."""
    return _guards("pytorch_lightning")


def of_lightning() -> list[Callback]:
    """For every ``lightning.pytorch.Trainer``."""
    return _guards("lightning.pytorch")
