"""Going back over training steps inside a fit: what a survivor keeps to stand at the end of an earlier step.

With parity of every step a failure may take everybody back to the end of the last batch, or of the one before it, whose
differences were still on their way. Table rows go back by parity's own windows; the dense part from here, and the
batch is run again by the closure that ran it. Lightning's loop has left that batch: to it nothing happens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_cpr.job.state import cloned, rng_state, set_rng_state
from lightning_cpr.recovery.parity.agree import RankState
from lightning_cpr.tables.dense import (
    dense_optimizer_state,
    dense_state,
    load_dense_optimizer_state,
    load_dense_state,
)
from lightning_cpr.tables.replicas import load_replicated_state, replicated_state
from lightning_cpr.tables.shards import fused_scalars, load_fused_scalars


class StepGuard(Protocol):
    """Protects the rows of a job step by step. All calls but `abort` come from the training thread."""

    def end_step(self, step: int) -> None:
        """Batch ``step`` is done on this rank.

        Raises:
            LostPeerError: a peer is gone.
        """

    def hold(self) -> tuple[RankState, dict[int, int]] | None:
        """A peer is gone: which steps this rank's rows can go back to, see `ParityKeeper.hold`; None: to none."""

    def go_back(self, exchange: int) -> None:
        """Give this rank's rows the bits of that exchange."""

    def wait_for_rows(self) -> None:
        """Return once this rank holds all its rows, and all ranks theirs if all call this: some may come back behind
        the training.

        Raises:
            RecoveryError: they will not come.
        """

    def abort(self) -> None:
        """Break off what waits for peers. From any thread."""


class DenseCopy:
    """The dense part at a step's start, its optimizers, replicated tables and fused scalars included; a copy."""

    def __init__(self, trainer: Any) -> None:
        self._module, self._optimizers = trainer.lightning_module, trainer.strategy.optimizers
        self._dense = cloned(dense_state(self._module))
        self._states = [cloned(dense_optimizer_state(self._module, optimizer)) for optimizer in self._optimizers]
        self._replicas = cloned(replicated_state(self._module, self._optimizers))
        self._scalars = fused_scalars(self._module, self._optimizers)
        self.rng = rng_state()

    def put_back(self) -> None:
        """Give the model these values."""
        load_dense_state(self._module, self._dense)
        for optimizer, state in zip(self._optimizers, self._states, strict=True):
            load_dense_optimizer_state(self._module, optimizer, cloned(state))
        load_replicated_state(self._module, self._replicas, self._optimizers)
        load_fused_scalars(self._module, self._scalars, self._optimizers)

    @property
    def groups(self) -> list[list[dict[str, Any]]]:
        """The param groups of each optimizer, without parameters: what a scheduler sets."""
        return [[{k: v for k, v in g.items() if k != "params"} for g in s["param_groups"]] for s in self._states]


def set_groups(trainer: Any, groups: list[list[dict[str, Any]]]) -> None:
    """Give the optimizers what `DenseCopy.groups` gave."""
    for optimizer, told in zip(trainer.strategy.optimizers, groups, strict=True):
        for group, values in zip(optimizer.param_groups, told, strict=True):
            group.update(values)


@dataclass
class Step:
    """A training step that can be run again. ``start``: None on a replacement, which has not run it."""

    run: Callable[[], Any]
    start: DenseCopy | None = None

    def again(self) -> None:
        """Run it from where the model stands, with the random streams of its start."""
        if self.start is not None:
            set_rng_state(self.start.rng)
        self.run()


def step_of(trainer: Any, batch: Any, batch_idx: int) -> Step:
    """The step that Lightning's automatic optimization makes of a batch as the loader gave it."""
    module, strategy, epoch_loop = trainer.lightning_module, trainer.strategy, trainer.fit_loop.epoch_loop
    batch = trainer.precision_plugin.convert_input(batch)
    batch = strategy.batch_to_device(module._on_before_batch_transfer(batch, dataloader_idx=0), dataloader_idx=0)
    kwargs = epoch_loop._build_kwargs(OrderedDict(), batch, batch_idx)
    closure = epoch_loop.automatic_optimization._make_closure(kwargs, trainer.optimizers[0], batch_idx)
    return Step(lambda: strategy._optimizer_step(trainer.optimizers[0], closure, module))
