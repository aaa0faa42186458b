"""Brings a replacement's loops and loader to the batch that the survivors are at."""

from __future__ import annotations

from typing import Any


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
    for loader in combined.flattened:
        batch_sampler = getattr(loader, "batch_sampler", None)
        for sampler in (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)):
            if (set_epoch := getattr(sampler, "set_epoch", None)) is not None:
                set_epoch(fit_loop.epoch_progress.current.processed)
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
