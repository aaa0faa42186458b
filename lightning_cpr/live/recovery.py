"""Live recovery inside ``trainer.fit``: what `TorchRecStrategy` does when a peer dies in a training step.

Survivors: the collective of the step fails inside `Strategy.optimizer_step` (automatic optimization) or
`Strategy.training_step` (manual); there they meet the replacement, put their model on the new group and run the step
again from its start (`live.batch`). No loop counter has moved, so Lightning notices nothing.

Replacement: runs the user's script from its start, with a stand-in process group in which every collective returns at
once, so that it runs none that the survivors do not run. When Lightning would resume from a checkpoint it meets the
others and takes their place in the loops; in its first training step it forms the group with them, takes over the dense
part, and gets its rows back from the `RecoveryHook`.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import torch.distributed as dist
from torch import nn

from lightning_cpr._lightning import TrainerFn, pl
from lightning_cpr.errors import RecoveryError
from lightning_cpr.job.start_checks import check_waits
from lightning_cpr.job.state import rng_state
from lightning_cpr.live.batch import BatchStart, ManualStart
from lightning_cpr.live.loader import stand_at_batch
from lightning_cpr.live.state import (
    adopt_all,
    adopt_dense,
    capture,
    manual_progress,
    stepped_state,
    take_position,
    tell_position,
    why_not,
)
from lightning_cpr.live.step_back import DenseCopy, Step, StepGuard, set_groups, step_of
from lightning_cpr.pipeline import PipelinedModule
from lightning_cpr.recovery.child import heartbeat
from lightning_cpr.recovery.election import Decision, Holding, Standing, elect, is_lost_peer
from lightning_cpr.recovery.guardian import HEARTBEAT_FD_ENV, JOB_DIR_ENV, note_modules
from lightning_cpr.recovery.live import Recovery, recover
from lightning_cpr.recovery.membership import REPLACES_ENV, Epoch, Membership, Timeouts
from lightning_cpr.spec import Shard, ShardSpec
from lightning_cpr.tables.rebind import drop_traces, rebind, stand_in_group
from lightning_cpr.tables.shards import global_shards, local_shards, plan_fingerprint

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
    """One strategy's part in live recovery. ``apart``: this replacement has not joined the others yet.

    ``guard``: what lets survivors go back over a step; set by the callback that restores rows.
    """

    def __init__(self, strategy: TorchRecStrategy) -> None:
        self._strategy = strategy
        self._trainer: Any = None
        self._hooks: list[RecoveryHook] = []
        self._met: Epoch | None = None
        self._reached: dict[str, float] = {}
        self._start: BatchStart | None = None
        self._stepped: dict[str, Any] = {}
        self._carries = False
        self._noted = False
        self._guard: StepGuard | None = None
        self._before: Step | None = None  # the step that the loop left last
        self._now: Step | None = None
        self._done = 0  # batches whose dense step this rank has finished; the loop may still be in the last of them
        self._stood: int | None = None  # the step that a recovery under way went back to
        self._groups: list[list[dict[str, Any]]] | None = None  # of the donor's step, on a replacement
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

    @property
    def broken(self) -> bool:
        """`Membership.broken`: for waits that are no collectives."""
        return _membership is not None and _membership.broken

    @property
    def guard(self) -> StepGuard | None:
        return self._guard

    @guard.setter
    def guard(self, guard: StepGuard | None) -> None:
        self._guard = guard
        if guard is None:
            self._before = None
        if _membership is not None:
            _membership.on_release = None if guard is None else guard.abort

    def setup_group(self, backend: str, timeout: float) -> None:
        """Make the process group: the job's, or a replacement's stand-in. In place of ``init_process_group``."""
        global _membership
        if _membership is not None:
            self.apart = self.apart and _membership.epoch < 0  # of a later Trainer: it has joined by then
            return
        waits = check_waits(timeout)
        timeouts = Timeouts(waits.collective, waits.announce, waits.join, waits.free)
        _membership = Membership.from_env(backend=backend, timeouts=timeouts, on_beat=heartbeat())
        atexit.register(_membership.close)
        if self.apart:
            self._reached["start"] = time.time()
            stand_in_group(_membership.rank, _membership.world_size)
        else:
            holding = Holding(_membership.rank, os.getpid(), 0)
            met = _membership.meet(holding, after=-1)
            if met.number or not _membership.form(met):
                raise RecoveryError("a peer died while the job started; it restarts in full")

    def setup(self, trainer: pl.Trainer) -> None:
        """At the end of the strategy's set-up."""
        global _fits
        self._trainer = trainer
        self._start, self._stepped, self._carries, self._before = None, {}, False, None
        fitting = trainer.state.fn == TrainerFn.FITTING
        _fits += fitting
        self._hooks = [cb for cb in trainer.callbacks if isinstance(cb, RecoveryHook)]  # type: ignore[attr-defined]
        reason = why_not(trainer, self._model, self._hooks) if fitting else f"it runs trainer.{trainer.state.fn}"
        self.enabled = not reason
        if not self.apart:
            if fitting and reason:
                log.warning("a process that dies will not be replaced in place (%s): the job restarts in full", reason)
            return
        if not self.enabled:
            raise RecoveryError(f"this replacement cannot join in place: {reason}")
        trainer._checkpoint_connector.resume_start = self._resume  # type: ignore[method-assign]

    # The replacement's way in.

    def _resume(self, *args: Any, **kwargs: Any) -> None:
        """In place of loading a checkpoint: take the survivors' place in the loops."""
        assert _membership is not None
        del self._trainer._checkpoint_connector.resume_start  # Lightning's own again: this is for the first fit only
        after = int(os.environ[REPLACES_ENV]) - 1
        self._reached["build"] = time.time()
        self._met = _membership.meet(self._holding(None), after)
        take_position(self._trainer, _membership.position_of(self._met, elect(self._met.holdings).donor), _fits)

    def on_train_start(self) -> None:
        """Bring the replacement's loader and counters to the batch that the others are at."""
        if not self.apart:
            return
        assert self._met is not None
        decision = elect(self._met.holdings)
        standing = self._met.holdings[decision.donor].standing
        again = decision.exchange is not None and standing is not None and decision.step < standing.loop
        fetched = stand_at_batch(self._trainer.fit_loop, again)
        self._before = None if fetched is None else step_of(self._trainer, *fetched)

    def _enter(self) -> Recovery:
        """The first training step of a replacement."""
        met, self._met = self._met, None
        return self._recover(self._holding(None), after=-1, met=met)

    # The step.

    def optimizer_step(self, run: Callable[[], T], closure: Any) -> T | None:
        """Run an optimizer step, with the forward and backward in its closure; if a peer is lost, recover and repeat.

        In manual optimization it only runs: the whole training step is repeated there.
        """
        if not self.enabled or not self._automatic:
            return run()

        def skip() -> None:
            loop = self._trainer.fit_loop.epoch_loop.automatic_optimization
            closure._result = loop.output_result_cls(closure_loss=None)

        return self._attempt(run, skip, BatchStart)

    def training_step(self, run: Callable[[], T], *args: Any) -> T | None:
        """`optimizer_step` of manual optimization. ``args``: of the step."""
        if not self.enabled or self._automatic:
            return run()
        module, before = self._trainer.lightning_module, manual_progress(self._trainer).state_dict()

        def skip() -> None:
            if isinstance(module, PipelinedModule):
                module.skip_step(*args)

        result = self._attempt(run, skip, ManualStart)
        self._stepped = stepped_state(self._strategy, self._trainer)
        self._carries = self._stepped["progress"] == before
        return result

    def _attempt(self, run: Callable[[], T], skip: Callable[[], None], at_start: type[BatchStart]) -> T | None:
        assert _membership is not None
        recovery = self._enter() if self.apart else None
        start = self._start = at_start(self._trainer)
        loop = self._done = self._finished
        module = self._trainer.lightning_module
        self._now = Step(run, self._copy())
        ran = False
        result: T | None = None
        while True:
            try:
                if recovery is not None:
                    recovered, recovery = recovery, None
                    self._recovered(recovered)
                    self._catch_up(recovered, start)
                if self._done == loop:
                    result, ran = run(), True
                    if not self._noted:  # after a whole step, so that the spare imports what only a step does
                        self._noted = True
                        note_modules(os.environ.get(JOB_DIR_ENV), _membership.rank)
                    self._end_step()
                break
            except RuntimeError as error:
                if not is_lost_peer(error):
                    raise
                log.warning("rank %d lost a peer in step %d: %s", _membership.rank, loop + 1, error)
                drop_traces(error)
                if isinstance(module, PipelinedModule):
                    module.rebuild()
                if self._done == loop:
                    start.put_back_dense()
                if self._carries:
                    why = f"batch {loop} stepped no optimizer: its gradients were for this one, and they are lost"
                    raise RecoveryError(why) from error
                recovery = self._recover(self._holding(self._done), after=_membership.epoch, error=str(error))
        if not ran:  # the others have finished this batch, and this rank has their state
            skip()
        self._before, self._now, self._groups = (self._now if self._guard is not None else None), None, None
        return result

    def _copy(self) -> DenseCopy | None:
        """Manual optimization keeps its own (`ManualStart`), and goes back over no batch that the loop has left."""
        return DenseCopy(self._trainer) if self._guard is not None and self._automatic else None

    def _end_step(self) -> None:
        self._done += 1
        if self._guard is not None:
            self._guard.end_step(self._done)

    def _catch_up(self, recovery: Recovery, start: BatchStart) -> None:
        """To the start of the loop's batch, or to its end: where the recovery stands."""
        loop, decision = self._finished, recovery.decision
        self._done = decision.step
        if self._done <= loop:
            self._run_before(loop)
            start.put_back()
        if self._done < loop:
            assert self._now is not None
            self._now.start = self._copy()
            self._end_step()
        standings = [h.standing for h in recovery.holdings if h.standing is not None]
        if decision.exchange is not None and any(standing.loop < loop for standing in standings):
            self._stay_with_those_behind()

    def _run_before(self, loop: int) -> None:
        """Run the batch that the loop has left, if all went back to before it, at the rates that it had."""
        if self._done == loop:
            return
        before, now = self._before, self._now
        assert before is not None
        before.start = before.start or self._copy()
        before.again()
        groups = self._groups or (now.start.groups if now is not None and now.start is not None else None)
        if groups is not None:
            set_groups(self._trainer, groups)

    @property
    def _automatic(self) -> bool:
        return bool(self._trainer.lightning_module.automatic_optimization)

    @property
    def _finished(self) -> int:
        """Batches that the loop has left."""
        return int(self._trainer.fit_loop.epoch_loop.batch_progress.total.processed)

    def _holding(self, step: int | None) -> Holding:
        assert _membership is not None
        return self.held(Holding(_membership.rank, os.getpid(), step, plan_fingerprint(self._model)))

    def _recover(self, holding: Holding, after: int, met: Epoch | None = None, error: str = "") -> Recovery:
        assert _membership is not None
        position = "" if holding.step is None else tell_position(self._trainer, _fits)
        device, reached = self._strategy.root_device, self._reached if met is not None else None
        try:
            return recover(_membership, self, holding, after, position, met, error, device, reached)
        finally:
            self._stood = None

    def _recovered(self, recovery: Recovery) -> None:
        for hook in self._hooks:
            hook.on_recovered(recovery, self._lost(recovery))
        behind = recovery.decision.behind
        if behind and recovery.rank not in behind:
            self._stay_with_those_behind()

    def _stay_with_those_behind(self) -> None:
        """Lightning broadcasts at the start of each batch. Ranks that are behind come to the start of this one yet."""
        epoch_loop = self._trainer.fit_loop.epoch_loop
        if hasattr(epoch_loop, "_broadcast_sigterm_tensor"):
            epoch_loop._broadcast_sigterm_tensor()

    def _lost(self, recovery: Recovery) -> list[ShardSpec]:
        return [s for s in global_shards(self._model) if not s.replicated and s.owner in recovery.decision.lost]

    @property
    def _model(self) -> nn.Module:
        assert self._strategy.model is not None
        return self._strategy.model

    # `LiveState`, called by `recover`.

    def rebind(self, group: dist.ProcessGroup) -> None:
        rebind(self._model, group)

    def go_back(self, decision: Decision) -> None:
        assert _membership is not None
        if decision.exchange is None or self._guard is None or _membership.rank in decision.lost:
            return
        self._guard.go_back(decision.exchange)
        self._stood = decision.step
        batches = decision.step - self._finished
        if batches == 0 and self._start is not None:
            self._start.put_back_dense()
        step = {-1: self._before, 0: self._now}.get(batches)
        if step is not None and step.start is not None:
            step.start.put_back()

    def held(self, holding: Holding) -> Holding:
        if holding.step is None or self._guard is None:
            return holding
        if self._stood is not None:
            holding = replace(holding, step=self._stood)
        held = self._guard.hold()
        if held is None or isinstance(self._trainer.lightning_module, PipelinedModule):  # its batch is not kept
            return replace(holding, standing=None)
        again = self._before is not None and self._before.start is not None
        return replace(holding, standing=Standing(self._finished, again, *held))

    def capture(self) -> bytes:
        rng = rng_state() if self._start is None else self._start.rng
        groups = None if self._now is None or self._now.start is None else self._now.start.groups
        return capture(self._strategy, self._trainer, rng, self._stepped, groups)

    def adopt(self, data: bytes, lost: bool) -> None:
        if lost:
            self._groups = adopt_all(self._strategy, self._trainer, data)
        else:
            adopt_dense(self._strategy, self._trainer, data)

    def restore(self, recovery: Recovery) -> None:
        self.apart = False  # the new group is up, and this rank stands in it: hooks run collectives
        self._strategy.rejoin(recovery.decision.donor, recovery.epoch)
        lost = self._lost(recovery)
        shards = local_shards(self._model)
        for hook in self._hooks:
            hook.restore_shards(recovery, lost, shards)
