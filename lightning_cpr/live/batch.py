"""What one training step changes before it is over, kept at its start, so that a step that broke can be run again.

Automatic optimization steps its optimizer last, after every collective: random streams, metrics and buffers are kept.
Manual optimization may step at any point of ``training_step``: the dense part and its optimizers are kept too, which
costs a copy of them a batch. Fused table rows are not kept: a batch that is run again may update them twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_cpr.job.state import cloned, rng_state, set_rng_state
from lightning_cpr.tables.dense import (
    dense_buffers,
    dense_optimizer_state,
    dense_state,
    load_dense_optimizer_state,
    load_dense_state,
)
from lightning_cpr.tables.replicas import load_replicated_state, replicated_state
from lightning_cpr.tables.scalars import fused_scalars, load_fused_scalars

_METRIC_FLAGS = (
    "_update_count", "_computed", "_forward_cache", "_cache", "_is_synced", "_to_sync", "_should_unsync", "_enable_grad"
)  # fmt: skip


class BatchStart:
    """The start of a step. ``rng``: this process's random streams there."""

    def __init__(self, trainer: Any) -> None:
        self._results = trainer.fit_loop.epoch_loop._results
        self._logged = set(self._results)
        modules = [m for m in trainer.lightning_module.modules() if _is_metric(m)]
        self._metrics = [(m, _metric_state(m)) for m in (*modules, *self._results.values())]
        self._buffers = [(m, name, b.clone()) for m, name, b in dense_buffers(trainer.lightning_module)]
        self.rng = rng_state()

    def put_back_dense(self) -> None:
        """The dense part as it was. Before a recovery, so that what a survivor hands over is of the step's start."""
        with torch.no_grad():
            for module, name, value in self._buffers:
                buffer = module._buffers[name]
                assert buffer is not None
                buffer.copy_(value)

    def put_back(self) -> None:
        """The rest, before the step is run again."""
        for metric, state in self._metrics:
            for name, value in state.items():
                setattr(metric, name, value)
        for name in set(self._results) - self._logged:
            del self._results[name]
        set_rng_state(self.rng)


class ManualStart(BatchStart):
    """The start of a manual ``training_step``."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._trainer, self._module = trainer, trainer.lightning_module
        optimizers = trainer.strategy.optimizers
        self._dense = cloned(dense_state(self._module))
        self._optimizers = [(o, cloned(dense_optimizer_state(self._module, o))) for o in optimizers]
        self._replicas = cloned(replicated_state(self._module, optimizers))
        self._scalars = fused_scalars(self._module, optimizers)
        self._schedulers = schedulers_state(trainer)
        self._requires_grad = [(p, p.requires_grad) for p in self._module.parameters()]
        self._progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.state_dict()

    def put_back_dense(self) -> None:
        load_dense_state(self._module, self._dense)
        for optimizer, state in self._optimizers:
            load_dense_optimizer_state(self._module, optimizer, cloned(state))
        optimizers = [optimizer for optimizer, _ in self._optimizers]
        load_replicated_state(self._module, self._replicas, optimizers)
        load_fused_scalars(self._module, self._scalars, optimizers)
        load_schedulers_state(self._trainer, self._schedulers)
        for parameter, requires_grad in self._requires_grad:  # a toggled optimizer may have taken it away
            parameter.requires_grad_(requires_grad)
        manual = self._trainer.fit_loop.epoch_loop.manual_optimization
        manual.optim_step_progress.load_state_dict(self._progress)


def schedulers_state(trainer: Any) -> list[dict[str, Any]]:
    """Of the learning-rate schedulers, in order; copied."""
    return [cloned(dict(config.scheduler.state_dict())) for config in trainer.lr_scheduler_configs]


def load_schedulers_state(trainer: Any, states: list[dict[str, Any]]) -> None:
    """Loads what `schedulers_state` gave."""
    for config, state in zip(trainer.lr_scheduler_configs, states, strict=True):
        config.scheduler.load_state_dict(cloned(state))


def _is_metric(module: nn.Module) -> bool:
    return hasattr(module, "_defaults") and hasattr(module, "_update_count")


def _metric_state(metric: Any) -> dict[str, Any]:
    """Its sums, and where it stands in a synchronisation that may break half-way."""
    state = {name: getattr(metric, name) for name in metric._defaults}
    copied: dict[str, Any] = {n: v.clone() if isinstance(v, Tensor) else list(v) for n, v in state.items()}
    return copied | {name: metric.__dict__[name] for name in _METRIC_FLAGS if name in metric.__dict__}
