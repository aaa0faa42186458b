"""How many batches and samples a Trainer has trained, and how many it will."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_cpr._lightning import Callback, pl


class SampleCounter(Callback):
    """Counts the samples that all ranks have trained. First among the callbacks, so that all others see the count."""

    def __init__(self) -> None:
        self.samples = 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.samples += batch_size(batch) * trainer.world_size


def batches_trained(trainer: pl.Trainer) -> int:
    """Batches trained so far, over all epochs."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.processed  # type: ignore[attr-defined]


def expected_samples(trainer: pl.Trainer, samples: int) -> int:
    """Samples of the whole run, from what the Trainer expects; of a stream without an end those so far.

    samples: trained so far.
    """
    step, loop = batches_trained(trainer), trainer.fit_loop
    if step == 0:
        return samples
    batches = math.inf
    if trainer.max_steps != -1:
        batches = trainer.max_steps * trainer.accumulate_grad_batches
    if trainer.max_epochs not in (None, -1):
        batches = min(batches, trainer.max_epochs * loop.max_batches)
    return samples if math.isinf(batches) else max(samples, round(batches * samples / step))


def planned_samples(trainer: pl.Trainer, samples: int) -> int | None:
    """`expected_samples`; None where the Trainer does not know when it ends, or nothing is trained yet."""
    epochs_end = trainer.max_epochs not in (None, -1) and not math.isinf(trainer.fit_loop.max_batches)
    return expected_samples(trainer, samples) or None if trainer.max_steps != -1 or epochs_end else None


def batch_size(batch: Any) -> int:
    """Samples in a rank's batch: the length of the first tensor in it."""
    if isinstance(batch, Tensor):
        return int(batch.shape[0]) if batch.dim() else 1
    if hasattr(batch, "stride") and callable(batch.stride):
        return int(batch.stride())  # a KeyedJaggedTensor
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else None
    if parts is None:
        parts = vars(batch).values() if hasattr(batch, "__dict__") else ()
    sized = (p for p in parts if isinstance(p, Tensor | Mapping | list | tuple) or hasattr(p, "stride"))
    first = next(iter(sized), None)
    return 1 if first is None else batch_size(first)
