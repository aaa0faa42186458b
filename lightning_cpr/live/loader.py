"""Brings a replacement's loops and loader to the batch that the survivors are at."""

from __future__ import annotations

import logging
from typing import Any

from torch.utils.data import DataLoader

log = logging.getLogger(__name__)


def stand_at_batch(fit_loop: Any, again: bool = False) -> tuple[Any, int] | None:
    """Called when training starts, with the loops' state as a survivor told it in the middle of a batch.

    again: the batch before that one is run again first; returns (that batch, its number in the epoch).
    """
    epoch_loop = fit_loop.epoch_loop
    total, current = epoch_loop.batch_progress.total, epoch_loop.batch_progress.current
    # Lightning resets the current counters on a restart only.
    total.ready = total.started = total.processed = total.completed
    steps = epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
    steps.ready = steps.completed
    epoch_loop._batches_that_stepped -= 1  # Lightning adds one on a restart: its saves come after the step
    skip_batches(fit_loop, current.completed - again)
    if not again:
        return None
    fetcher = fit_loop._data_fetcher
    batch, _, _ = next(fetcher)
    fetcher.fetched -= 1
    return batch, current.completed - 1


def skip_batches(fit_loop: Any, batches: int) -> None:
    """Bring a fresh loader to batch ``batches`` of the epoch, by ``seek`` where all loaders have it, or by reading."""
    fetcher, combined = fit_loop._data_fetcher, fit_loop._combined_loader
    epoch = fit_loop.epoch_progress.current.processed
    for loader in combined.flattened:
        for sampler in _samplers(loader):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        if not _knows_order(loader, epoch):
            log.warning(
                "%s has no seek(batches), and no sampler with set_epoch fixes its order: this process may train on "
                "other batches of epoch %d than the one before it would have",
                type(loader).__name__, epoch,
            )  # fmt: skip
    if all(hasattr(loader, "seek") for loader in combined.flattened):
        for loader in combined.flattened:
            loader.seek(batches)
        iter(fetcher)
        combined._iterator._idx += batches
        return
    iter(fetcher)
    batch_iterator = getattr(fetcher, "iterator_wrapper", fetcher)  # of a step that takes the iterator itself
    for _ in range(batches):
        next(batch_iterator)
    fetcher.fetched -= batches  # the epoch loop adds them


def _samplers(loader: Any) -> list[Any]:
    return [getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)]


def _knows_order(loader: Any, epoch: int) -> bool:
    """Whether a fresh loader gives the batches of an epoch as one that ran the epochs before would.

    One that is no DataLoader may count its epochs by itself.
    """
    if hasattr(loader, "seek") or any(hasattr(sampler, "set_epoch") for sampler in _samplers(loader)):
        return True
    if isinstance(loader, DataLoader):
        return all(type(sampler).__name__ != "RandomSampler" for sampler in _samplers(loader))  # torchdata has its own
    return epoch == 0
