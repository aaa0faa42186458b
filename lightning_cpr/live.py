"""Live recovery inside ``trainer.fit``: what `TorchRecStrategy` does when a peer dies in a training step.

Survivors: the collective of the step fails inside `Strategy.optimizer_step`; there they meet the replacement, put their
model on the new group and call the same closure again. No loop counter has moved, so Lightning notices nothing.

Replacement: runs the user's script from its start, with a stand-in process group in which every collective returns at
once, so that it runs none that the survivors do not run. When Lightning would resume from a checkpoint it meets the
others and takes their place in the loops; in its first training step it forms the group with them, takes over the dense
part, and gets its rows back from the `RecoveryHook`.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import torch.distributed as dist
from torch import Tensor, nn

from lightning_cpr._lightning import TrainerFn, pl
from lightning_cpr.checkpoint_io import VERSION_KEY
from lightning_cpr.errors import CPRError, RecoveryError
from lightning_cpr.recovery.child import heartbeat
from lightning_cpr.recovery.election import Holding, elect, is_lost_peer
from lightning_cpr.recovery.guardian import HEARTBEAT_FD_ENV
from lightning_cpr.recovery.live import Recovery, recover
from lightning_cpr.recovery.membership import REPLACES_ENV, Epoch, Membership, Timeouts
from lightning_cpr.spec import Shard, ShardSpec
from lightning_cpr.start_checks import check_waits
from lightning_cpr.state import rng_state, set_rng_state, to_plain
from lightning_cpr.store.blob import decode_blob, encode_blob
from lightning_cpr.tables.rebind import check_rebindable, drop_traces, rebind, stand_in_group
from lightning_cpr.tables.replicas import load_replicated_state, replicated_state
from lightning_cpr.tables.shards import (
    fused_scalars,
    global_shards,
    load_fused_scalars,
    local_shards,
    plan_fingerprint,
)

if TYPE_CHECKING:
    from lightning_cpr.strategy import TorchRecStrategy

log = logging.getLogger(__name__)

T = TypeVar("T")

_membership: Membership | None = None  # of this process: it outlives a Trainer, as the process group does
_fits = 0  # how many fits this process has begun


@runtime_checkable
class RecoveryHook(Protocol):
    """A callback that knows where lost rows come from. Without one in the Trainer, live recovery is off."""

    def restore_shards(self, recovery: Recovery, lost: Sequence[ShardSpec], shards: Sequence[Shard]) -> None:
        """Write the lost rows. Runs on all ranks with the new group up, so it may run collectives.

        lost: the shards that nobody holds. shards: this rank's own, as live views; on a replacement (``recovery.lost``)
        their content is not defined yet, on a survivor it must not change (unless parity says so). Replicated tables
        are restored already. Raise `RecoveryError` if it cannot be done: the job then restarts in full.
        """

    def on_recovered(self, recovery: Recovery, lost: Sequence[ShardSpec]) -> None:
        """Charge the ledger, write the event. Runs on all ranks, once all stand together."""


def under_guardian() -> bool:
    """Whether this process was started by ``lightning-cpr run``."""
    return HEARTBEAT_FD_ENV in os.environ


class LiveRecovery:
    """One strategy's part in live recovery. ``apart``: this replacement has not joined the others yet."""

    def __init__(self, strategy: TorchRecStrategy) -> None:
        self._strategy = strategy
        self._trainer: Any = None
        self._hooks: list[RecoveryHook] = []
        self._met: Epoch | None = None
        self.enabled = False
        self.apart = REPLACES_ENV in os.environ

    @property
    def store(self) -> dist.Store:
        """The job's key-value store, under the prefix of this attempt; the same through all epochs."""
        assert _membership is not None
        return _membership.store

    @property
    def epoch(self) -> int:
        """The epoch that this rank stands in: 0 from the start, one more for each replaced process."""
        assert _membership is not None
        return _membership.epoch

    def setup_group(self, backend: str, timeout: float) -> None:
        """Make the process group: the job's, or a replacement's stand-in. In place of ``init_process_group``."""
        global _membership
        if _membership is not None:
            return
        waits = check_waits(timeout)
        timeouts = Timeouts(waits.collective, waits.announce, waits.join, waits.free)
        _membership = Membership.from_env(backend=backend, timeouts=timeouts, on_beat=heartbeat())
        atexit.register(_membership.close)
        if self.apart:
            stand_in_group(_membership.rank, _membership.world_size)
        else:
            holding = Holding(_membership.rank, os.getpid(), 0)
            if not _membership.form(_membership.meet(holding, after=-1)):
                raise RecoveryError("a peer died while the job started; it restarts in full")

    def setup(self, trainer: pl.Trainer) -> None:
        """At the end of the strategy's set-up."""
        global _fits
        self._trainer = trainer
        fitting = trainer.state.fn == TrainerFn.FITTING
        _fits += fitting
        self._hooks = [cb for cb in trainer.callbacks if isinstance(cb, RecoveryHook)]  # type: ignore[attr-defined]
        reason = self._why_not(trainer) if fitting else f"it runs trainer.{trainer.state.fn}"
        self.enabled = not reason
        if not self.apart:
            if fitting and reason:
                log.warning("a process that dies will not be replaced in place (%s): the job restarts in full", reason)
            return
        if not self.enabled:
            raise RecoveryError(f"this replacement cannot join in place: {reason}")
        trainer._checkpoint_connector.resume_start = self._resume  # type: ignore[method-assign]

    def _why_not(self, trainer: pl.Trainer) -> str:
        if not self._hooks:
            return "no callback of the Trainer can restore rows"
        if not trainer.lightning_module.automatic_optimization:
            return "manual optimization"
        if trainer.accumulate_grad_batches != 1:
            return "accumulate_grad_batches"
        assert dist.group.WORLD is not None
        try:
            check_rebindable(self._model, dist.group.WORLD)
        except RecoveryError as e:
            return str(e)
        return ""

    # The replacement's way in.

    def _resume(self, *args: Any, **kwargs: Any) -> None:
        """In place of loading a checkpoint: take the survivors' place in the loops."""
        assert _membership is not None
        del self._trainer._checkpoint_connector.resume_start  # Lightning's own again: this is for the first fit only
        after = int(os.environ[REPLACES_ENV]) - 1
        self._met = _membership.meet(self._holding(None), after)
        position = json.loads(_membership.position_of(self._met, elect(self._met.holdings).donor))
        if position["fit"] != _fits:
            raise RecoveryError(f"the job is in its fit number {position['fit']}, this replacement in number {_fits}")
        self._trainer.fit_loop.load_state_dict(position["fit_loop"])
        self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = False  # not yet known of the batch to come
        for checkpoint, dirpath in zip(self._trainer.checkpoint_callbacks, position["dirpaths"], strict=True):
            if hasattr(checkpoint, "dirpath"):
                checkpoint.dirpath = dirpath

    def on_train_start(self) -> None:
        """Bring the replacement's loader and counters to the batch that the others are at."""
        if not self.apart:
            return
        fit_loop = self._trainer.fit_loop
        epoch_loop = fit_loop.epoch_loop
        total, current = epoch_loop.batch_progress.total, epoch_loop.batch_progress.current
        # The loops were read in the middle of a batch; Lightning resets the current counters on a restart only.
        total.ready = total.started = total.processed = total.completed
        steps = epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
        steps.ready = steps.completed
        epoch_loop._batches_that_stepped -= 1  # Lightning adds one on a restart: its saves come after the step
        _skip_batches(fit_loop, current.completed)

    def _enter(self) -> None:
        """The first training step of a replacement."""
        met, self._met = self._met, None
        self._recovered(self._recover(self._holding(None), after=-1, met=met))

    # The step.

    def step(self, run: Callable[[], T], closure: Any) -> T | None:
        """Run an optimizer step; if a peer is lost in it, recover and run it again."""
        if not self.enabled:
            return run()
        assert _membership is not None
        if self.apart:
            self._enter()
        start = _BatchStart(self._trainer)
        finished = self._trainer.global_step
        while True:
            try:
                return run()
            except RuntimeError as error:
                if not is_lost_peer(error):
                    raise
                log.warning("rank %d lost a peer in step %d: %s", _membership.rank, finished + 1, error)
                drop_traces(error)
                holding = self._holding(finished)
                recovery = self._recover(holding, after=_membership.epoch, error=str(error))
                self._recovered(recovery)
            if recovery.decision.step > finished:  # the others have finished this batch, and this rank has their state
                closure._result = type(self)._no_result(self._trainer)
                return None
            start.restore()

    @staticmethod
    def _no_result(trainer: Any) -> Any:
        return trainer.fit_loop.epoch_loop.automatic_optimization.output_result_cls(closure_loss=None)

    def _holding(self, step: int | None) -> Holding:
        assert _membership is not None
        return Holding(_membership.rank, os.getpid(), step, plan_fingerprint(self._model))

    def _recover(self, holding: Holding, after: int, met: Epoch | None = None, error: str = "") -> Recovery:
        assert _membership is not None
        position = "" if holding.step is None else self._position()
        return recover(_membership, self, holding, after, position, met, error, self._strategy.root_device)

    def _recovered(self, recovery: Recovery) -> None:
        for hook in self._hooks:
            hook.on_recovered(recovery, self._lost(recovery))
        behind = recovery.decision.behind
        epoch_loop = self._trainer.fit_loop.epoch_loop
        if behind and recovery.rank not in behind and hasattr(epoch_loop, "_broadcast_sigterm_tensor"):
            # Lightning broadcasts at the start of each batch. Ranks that are behind come to the start of this one yet.
            epoch_loop._broadcast_sigterm_tensor()

    def _position(self) -> str:
        state = self._trainer.fit_loop.state_dict()
        state["state_dict"] = {k: v for k, v in state["state_dict"].items() if k != "combined_loader"}  # of this rank
        dirpaths = [getattr(checkpoint, "dirpath", None) for checkpoint in self._trainer.checkpoint_callbacks]
        return json.dumps({"fit": _fits, "fit_loop": to_plain(state), "dirpaths": dirpaths})

    def _lost(self, recovery: Recovery) -> list[ShardSpec]:
        return [s for s in global_shards(self._model) if not s.replicated and s.owner in recovery.decision.lost]

    @property
    def _model(self) -> nn.Module:
        assert self._strategy.model is not None
        return self._strategy.model

    # `LiveState`, called by `recover`.

    def rebind(self, group: dist.ProcessGroup) -> None:
        rebind(self._model, group)

    def capture(self) -> bytes:
        connector = self._trainer._checkpoint_connector
        try:
            checkpoint = connector.dump_checkpoint(weights_only=False)
            module = self._trainer.lightning_module
            for key in ("loops", module.CHECKPOINT_HYPER_PARAMS_KEY, module.CHECKPOINT_HYPER_PARAMS_TYPE):
                checkpoint.pop(key, None)
            extra = {
                "replicas": replicated_state(self._model),
                "scalars": fused_scalars(self._model),
                "rng": rng_state(),
            }
            return encode_blob(to_plain({"checkpoint": checkpoint, **extra}))
        except CPRError as e:
            raise RecoveryError(f"the dense state cannot be handed over: {e}") from e

    def adopt(self, data: bytes, lost: bool) -> None:
        told = decode_blob(data, "the state of a survivor")
        checkpoint = told["checkpoint"] | {VERSION_KEY: None}
        load_replicated_state(self._model, told["replicas"])
        if lost:
            connector = self._trainer._checkpoint_connector
            connector._loaded_checkpoint = checkpoint
            connector.restore_datamodule()
            connector.restore_model()
            connector.restore_callbacks()
            connector.restore_precision_plugin_state()
            connector.restore_optimizers_and_schedulers()
            connector._loaded_checkpoint = {}
            load_fused_scalars(self._model, told["scalars"])
            set_rng_state(told["rng"])
        else:  # this rank's own schedulers, callbacks and loops step by themselves when it leaves the batch
            self._strategy.load_model_state_dict(checkpoint)
            states = zip(self._strategy.optimizers, checkpoint["optimizer_states"], strict=True)
            own = [dict(self._strategy.optimizer_state(o)) | {"state": told["state"]} for o, told in states]
            self._strategy.load_optimizer_state_dict({"optimizer_states": own})

    def restore(self, recovery: Recovery) -> None:
        self.apart = False  # the new group is up, and this rank stands in it: hooks run collectives
        lost = self._lost(recovery)
        shards = local_shards(self._model)
        for hook in self._hooks:
            hook.restore_shards(recovery, lost, shards)


def _skip_batches(fit_loop: Any, batches: int) -> None:
    """Bring a fresh loader to batch ``batches`` of the epoch, by ``seek`` where all loaders have it, or by reading."""
    fetcher, loaders = fit_loop._data_fetcher, fit_loop._combined_loader.flattened
    for loader in loaders:
        batch_sampler = getattr(loader, "batch_sampler", None)
        for sampler in (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)):
            if (set_epoch := getattr(sampler, "set_epoch", None)) is not None:
                set_epoch(fit_loop.epoch_progress.current.processed)
    if all(hasattr(loader, "seek") for loader in loaders):
        for loader in loaders:
            loader.seek(batches)
        iter(fetcher)
        return
    iter(fetcher)
    for _ in range(batches):
        next(fetcher)
    fetcher.fetched -= batches  # the epoch loop adds them


class _BatchStart:
    """What a training step changes before an optimizer steps: RNG and metrics. Put back before it is run again."""

    def __init__(self, trainer: Any) -> None:
        self._results = trainer.fit_loop.epoch_loop._results
        self._logged = set(self._results)
        modules = [m for m in trainer.lightning_module.modules() if _is_metric(m)]
        self._metrics = [(m, _metric_state(m)) for m in (*modules, *self._results.values())]
        self._rng = rng_state()

    def restore(self) -> None:
        for metric, state in self._metrics:
            for name, value in state.items():
                setattr(metric, name, value)
        for name in set(self._results) - self._logged:
            del self._results[name]
        set_rng_state(self._rng)


def _is_metric(module: nn.Module) -> bool:
    return hasattr(module, "_defaults") and hasattr(module, "_update_count")


def _metric_state(metric: Any) -> dict[str, Any]:
    state = {name: getattr(metric, name) for name in metric._defaults}
    copied: dict[str, Any] = {n: v.clone() if isinstance(v, Tensor) else list(v) for n, v in state.items()}
    return copied | {"_update_count": metric._update_count}
