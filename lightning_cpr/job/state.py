"""Everything of a run that is not a table row: captured as plain values, restored into a Trainer.

Two blobs a version. ``job.pt``, written by rank 0: what is the same on every rank (dense weights, dense optimizers,
schedulers, loops, callbacks, hyper-parameters). ``rank<r>.pt``, one a rank: RNG streams, loader states and loop
progress. Both hold tensors and plain Python values only, so that ``torch.load(..., weights_only=True)`` reads them.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import os
import random
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_cpr._lightning import pl
from lightning_cpr.errors import UnsupportedError
from lightning_cpr.job.loader import restart_warning

log = logging.getLogger(__name__)

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def cloned(value: Any) -> Any:
    """A copy with tensors of its own, where they are; other values are shared."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: cloned(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(cloned(item) for item in value)
    return value


def to_plain(value: Any, where: str = "checkpoint") -> Any:
    """A copy of ``value`` in host memory, made of tensors and plain Python values only.

    Raises:
        UnsupportedError: an object has no plain form; the message names the path to it.
    """
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True).contiguous()
    if isinstance(value, enum.Enum):
        return to_plain(value.value, where)
    if type(value) in _ATOMS:
        return value
    if isinstance(value, Mapping):
        plain = {to_plain(k, where): to_plain(v, f"{where}.{k}") for k, v in value.items()}
        return OrderedDict(plain) if isinstance(value, OrderedDict) else plain
    if isinstance(value, list | tuple):
        items = [to_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, set | frozenset):
        return {to_plain(v, where) for v in value}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, str):  # a subclass of it, as of the next three
        return str(value)
    if isinstance(value, bytes):
        return bytes(value)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_plain(dataclasses.asdict(value), where)
    raise UnsupportedError(
        f"{where} holds a {type(value).__module__}.{type(value).__qualname__}, which has no plain form. A version holds"
        " tensors and plain Python values only, so that loading it can run no code. Return such values from your"
        " state_dict / on_save_checkpoint."
    )


def rng_state() -> dict[str, Any]:
    """The state of this process's random streams: Python, numpy, torch, and the current CUDA device."""
    kind, keys, pos, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), pos, has_gauss, cached),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put the random streams back to where `rng_state` saw them."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, pos, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), pos, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def drop_unplain_hparams(checkpoint: dict[str, Any], keys: tuple[str, ...]) -> None:
    """Leave out, with a warning, the hyper-parameters that have no plain form: they only document a run."""
    for key in keys:
        plain = {}
        for name, value in dict(checkpoint.get(key) or {}).items():
            try:
                plain[name] = to_plain(value, f"{key}.{name}")
            except UnsupportedError as e:
                log.warning("left out of the saved hyper-parameters: %s", e)
        if key in checkpoint:
            checkpoint[key] = plain


def rewind(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
    """Put a Trainer that is at the end of a training batch back to where ``checkpoint`` was taken, inside its fit.

    ``checkpoint`` was taken at the end of a training batch too (or before the first). Everything is restored as by a
    resume; the loops then go on with the batch after it, also where that lies in an earlier epoch.
    """
    connector, fit_loop = trainer._checkpoint_connector, trainer.fit_loop
    connector._loaded_checkpoint = checkpoint
    try:
        connector.restore_datamodule()
        connector.restore_model()
        connector.restore_callbacks()
        connector.restore_training_state()
    finally:
        connector._loaded_checkpoint = {}
    for loop in (fit_loop, fit_loop.epoch_loop, fit_loop.epoch_loop.val_loop):
        loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    progress, epochs = fit_loop.epoch_loop.batch_progress, fit_loop.epoch_progress
    if epochs.current.ready == epochs.current.processed:  # type: ignore[attr-defined]
        # Taken between two epochs, while this loop is inside one.
        epochs.increment_ready()
        epochs.increment_started()
        progress.reset_on_run()
        fit_loop.epoch_loop.scheduler_progress.reset_on_run()
        fit_loop.epoch_loop.automatic_optimization.optim_progress.reset_on_run()
    if progress.current.completed == progress.current.ready:
        # Taken between two batches, while this loop is about to complete one.
        progress.current.completed -= 1
        progress.total.completed -= 1
        fit_loop.epoch_loop._batches_that_stepped -= 1
    loader, fetcher = fit_loop._combined_loader, fit_loop._data_fetcher
    assert loader is not None
    assert fetcher is not None
    for one in loader.flattened:
        sampler: Any = getattr(one, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(fit_loop.epoch_progress.current.processed)  # type: ignore[attr-defined]
    loader._load_state_dicts(fit_loop._combined_loader_states_to_load)
    fit_loop._combined_loader_states_to_load = []
    done = fit_loop.epoch_loop.batch_progress.current.ready
    if (warning := restart_warning(loader.flattened, done)) and trainer.is_global_zero:
        log.warning(warning)
    iter(fetcher)
    fetcher.fetched += done
    set_rng_state(checkpoint["rng"])


def end_of_batch(loops: dict[str, Any]) -> None:
    """Make the state of a Trainer's loops, taken inside a batch or between two, that of the end of the last one that
    was trained: what a save there holds. One taken at an epoch's end stays as it is. In place.
    """
    fit = loops["fit_loop"]
    progress, optimizer = fit["epoch_loop.batch_progress"], fit["epoch_loop.automatic_optimization.optim_progress"]
    current, total = progress["current"], progress["total"]
    inside = current["ready"] > current["processed"]
    if progress["is_last_batch"] and not inside:
        return
    progress["is_last_batch"] = False
    ended = 0 < current["processed"] == current["completed"]
    for counts in (current, total):
        counts["completed"] -= ended  # Lightning counts that batch as completed when it goes on
        counts["ready"] = counts["started"] = counts["processed"]
    fit["epoch_loop.state_dict"]["_batches_that_stepped"] -= ended
    for counts in (*optimizer["optimizer"]["step"].values(), *optimizer["optimizer"]["zero_grad"].values()):
        counts |= dict.fromkeys(counts.keys() & {"ready", "started"}, counts["completed"])
