"""A Trainer resumes from a version: rows and dense part when Lightning restores the model, random streams at the start
of training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_cpr._lightning import pl
from lightning_cpr.checkpoint_io import VERSION_KEY, Version, restore_soundest
from lightning_cpr.errors import ConfigError
from lightning_cpr.job.job import Job
from lightning_cpr.job.state import set_rng_state
from lightning_cpr.tables.dense import load_dense_state
from lightning_cpr.tables.table_optim import FusedRates


class Resumption:
    """What one run of a Trainer is resumed from. ``version``: that its rows are of; None: of none, they were made here
    or came from other processes.
    """

    def __init__(self, job: Job, rates: FusedRates) -> None:
        self._job, self._rates = job, rates
        self.version: Version | None = None
        self._rng: dict[str, Any] | None = None

    def load(
        self, checkpoint: Mapping[str, Any], model: pl.LightningModule, optimizers: Sequence[Optimizer], strict: bool
    ) -> None:
        """The dense state of a checkpoint, and the rows of the version that it came with. Where that was the newest and
        is damaged, ``checkpoint`` becomes that of the version before it.

        Raises:
            IncompatiblePlanError: on every rank, if they fit the model on none. No tensor was changed.
            CorruptShardError: on every rank, if the version was asked for by name.
        """
        if VERSION_KEY not in checkpoint:
            raise ConfigError("the checkpoint was not loaded by CPRCheckpointIO, so nothing says where its tables are")
        if checkpoint[VERSION_KEY] is None:  # of a survivor, in a live recovery or a hand-over: rows come otherwise
            load_dense_state(model, checkpoint["state_dict"], strict=strict)
            self._rates.restored()
        else:
            # Lightning goes on with this very dict, and has shown it to the module.
            assert isinstance(checkpoint, dict)
            if restore_soundest(self._job, checkpoint, model, optimizers, strict=strict):
                model.on_load_checkpoint(checkpoint)
            self._rates.restored()
            self._job.together(lambda: load_dense_state(model, checkpoint["state_dict"], strict=strict))
            self.version = checkpoint[VERSION_KEY]
        self._rng = checkpoint.get("rng")

    def restore_rng(self, fit_loop: Any) -> None:
        """As late as can be: making loaders and the sanity check draw from the random streams."""
        if self._rng is None:
            return
        set_rng_state(self._rng)
        self._rng = None
        progress = fit_loop.epoch_loop.batch_progress
        if progress.is_last_batch or not progress.current.ready:
            # At an epoch's start, where the uninterrupted run makes the loader's iterator.
            iter(fit_loop._data_fetcher)
