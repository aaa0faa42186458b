"""Recovery of one callback's run, from the failure that is told to the event that reports it.

What is restored from where is decided in `recovery.plan` and done by `live.restorer`; here the run is brought through
it: its epoch, its ledger and counts, and the saves and the parity that go on afterwards.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from lightning_cpr._lightning import pl
from lightning_cpr.faults import FaultInjector
from lightning_cpr.job.handover import restart_is_left
from lightning_cpr.job.job import Job
from lightning_cpr.job.loader import restart_warning
from lightning_cpr.job.reshard import Resharded
from lightning_cpr.job.run import Run
from lightning_cpr.job.samples import planned_samples
from lightning_cpr.live.account import Rejoined, cut_fields, gather_cut, skipped_samples, source_fields
from lightning_cpr.live.early_read import EarlyRead
from lightning_cpr.live.epochs import Epochs
from lightning_cpr.live.losses import Failure, source_of
from lightning_cpr.live.parity import ParityGuard
from lightning_cpr.live.restorer import Recovered, Restorer
from lightning_cpr.live.store_source import StoreSource
from lightning_cpr.policy.ledger import Ledger, event_to_json
from lightning_cpr.recovery.live import Recovery
from lightning_cpr.recovery.plan import Mode, RecoveryPlan, RewindError
from lightning_cpr.saving.chain import Chain
from lightning_cpr.saving.controller import Controller
from lightning_cpr.saving.cycle import SaveCycle
from lightning_cpr.saving.saver import BackgroundSaves, Progress
from lightning_cpr.saving.settings import Settings
from lightning_cpr.spec import ShardSpec
from lightning_cpr.store.save import SaveIO
from lightning_cpr.store.stage import Stager
from lightning_cpr.store.storage import Storage
from lightning_cpr.tables.tracker import RowTracker

log = logging.getLogger(__name__)


class RecoveryCoordinator:
    """One callback's recoveries on one rank, in one fit. All methods run on the training thread.

    It makes what works for the callback, at the start and anew for each group of processes: ``controller``, ``cycle``,
    ``store``. emit: writes an event. ``whole``: whether the rows are those of a step: not while they are restored.
    """

    controller: Controller
    cycle: SaveCycle
    store: StoreSource

    def __init__(
        self,
        settings: Settings,
        job: Job,
        storage: Storage,
        run: Run,
        emit: Callable[..., None],
        injector: FaultInjector | None = None,
        parity: ParityGuard | None = None,
    ) -> None:
        self._settings, self._job, self._storage, self._run, self._emit = settings, job, storage, run, emit
        self._injector, self._parity = injector, parity
        self._updates_before = 0  # row updates when the batch began
        self._early: EarlyRead | None = None
        self._rejoined: Rejoined | None = None
        self.whole = False

    @property
    def started(self) -> bool:
        """Whether there is anything at work: not before training, nor on a replacement that has not joined yet."""
        return hasattr(self, "cycle")

    def start(self) -> None:
        """Make what works for a run that begins, or that this process comes new to."""
        upkeep = None if self._parity is None else self._parity.unhidden_s
        settings, restores = self._settings, self._run.counts["recoveries"]
        controller = Controller(settings.fixed, settings.setting(self._job), self._emit, restores, upkeep)
        controller.restore(self._run.planner)
        self._equip(settings.tracker(self._job, count=self._injector is not None), controller, time.monotonic())

    def _equip(self, tracker: RowTracker, controller: Controller, started: float, stager: Stager | None = None) -> None:
        job, kv, settings, timeout_s = self._job, self._job.kv, self._settings, self._settings.timeout_s
        io = SaveIO(self._storage, kv, epoch=lambda: int(kv.get("epoch")), points=self._point, timeout_s=timeout_s)
        run_id = self._run.id
        saves = BackgroundSaves(job, run_id, io, tracker, Chain(), settings.incremental, settings.keep, stager)
        self.controller = controller
        self.cycle = SaveCycle(settings, job, saves, controller, self._emit, self._run.counts, started)
        self.store = StoreSource(job, self._storage, run_id.run_id, saves, self._emit)
        epochs = Epochs(
            job, self._storage, run_id.run_id, self._run.owner, saves, timeout_s, self._emit, self.cycle.take
        )
        self._restorer = Restorer(job, saves, self.store, epochs, self._parity)

    def _point(self, point: str, step: int) -> None:
        if self._injector is not None:
            self._injector.at_point(point, step)

    def protect(self, step: int) -> None:
        """Begin to keep parity of the rows as they are now, if the user wants any. A collective."""
        if self._parity is not None:
            self._parity.start(self._job, self._injector, self._parity_prefix, step)

    @property
    def _parity_prefix(self) -> str:
        return f"parity/{self._run.epoch}"

    # Batches

    def batch_begins(self) -> None:
        """A replacement begins to read its rows: it joins the others in this batch, who all wait for it."""
        if not self._job.alone:
            self._updates_before = self.cycle.saves.tracker.updates
        elif self._parity is None:  # which would write to the same rows
            self._early = EarlyRead(self._storage, [s for s in self._job.owned if not s.spec.replicated])

    def batch_ended(self, step: int) -> None:
        """The first batch after a process was replaced ends the account of that recovery."""
        if self._rejoined is not None and self._rejoined.stepped(step):
            rejoined, self._rejoined = self._rejoined, None
            self._emit("rejoined", epoch=self._run.epoch, step=step, **rejoined.fields())

    @property
    def holds_all_rows(self) -> bool:
        """Whether what this rank has can be handed over to a job that starts again."""
        return self.whole and (self._parity is None or self._parity.whole)

    # Recoveries. Each is a collective.

    def recover(self, trainer: pl.Trainer, failed: list[int], at: Progress) -> None:
        """Bring back the shards of ``failed``, whose processes live.

        Raises:
            RecoveryError: no version serves.
        """
        run = self._run
        run.epoch += 1
        if self._parity is not None:
            self._parity.new_epoch(self._parity_prefix)
        self.whole = False
        self.controller.failed(failed)
        recovered = self._restorer.recover(trainer, Failure(failed, at, run.ledger), run.epoch, self._choose)
        self.whole = True
        self._close(recovered, failed, at, {})

    def complete(self, trainer: pl.Trainer, failed: list[int], at: Progress, handed: list[int]) -> None:
        """Bring back what a restart was not handed over: the shards of ``failed``, those of ``handed`` being here.

        Raises:
            RecoveryError: no version serves, or (RewindError) all have to go back, which takes one more restart.
        """
        run = self._run
        if failed:
            self.controller.failed(failed)
        why = "the other ranks' rows were handed over"
        goes_back = self._why_back if failed and self._goes_back else None
        failure = Failure(failed, at, run.ledger)
        recovered = self._restorer.recover_lost(trainer, failure, run.epoch, why, goes_back=goes_back)
        if failed:
            self._close(recovered, failed, at, {"handed_over": handed})

    def resharded(self, trainer: pl.Trainer, done: Resharded, at: Progress) -> None:
        """The rows here are those of a version that was made of what a job of another plan left.

        Raises:
            RewindError: all have to go back, which takes one more restart.
        """
        if done.charge is None:
            return
        if self._goes_back and (why := self._job.from_rank_0(lambda: self._why_back(done.ledger))):
            raise RewindError(why)
        gone = sum(loss.elements for loss in done.charge.losses)
        self.controller.failed(done.lost, min(1.0, gone / max(1, done.ledger.total_elements)))
        reason = "the other ranks' rows were handed over, and resharded"
        plan = RecoveryPlan("partial", dict.fromkeys(done.lost, source_of(done.parent)), reason)
        recovered = Recovered(plan, done.ledger, done.charge, None, None, done.lost_rows, done.seconds, None, False)
        self._close(recovered, done.lost, at, {"handed_over": done.handed, "resharded": True})

    def restore_shards(self, recovery: Recovery, lost: Sequence[ShardSpec], incarnation: str) -> None:
        """Bring back the shards of processes that died and were replaced. incarnation: of the job, on the new group.

        Raises:
            RecoveryError: no version serves, or (RewindError) all have to go back, which takes a restart of the job.
        """
        run, decision, trainer = self._run, recovery.decision, self._job.trainer
        stager = None if recovery.lost else self.cycle.saves.abandon(self._settings.timeout_s)
        done = 0 if recovery.lost else self.cycle.saves.tracker.updates - self._updates_before
        cut, own_samples = gather_cut(recovery, done, run.samples), run.samples
        # What the donor knows of the run; a replacement knows nothing, be it rank 0.
        told: list[Any] = [None]
        if self._job.rank == decision.donor:
            told = [(run.id.run_id, run.epoch, run.owner, self.state_dict(), self.cycle.closed)]
        dist.broadcast_object_list(told, src=decision.donor)
        run_id, epoch, run.owner, state, closed = told[0]
        run.load_state_dict(state)
        if not recovery.lost:
            run.counter.samples = own_samples  # the donor's loop may be a batch ahead
        run.id, run.epoch = run.named(run_id), epoch + 1
        self._job.rejoin(incarnation, recovery.epoch)
        if recovery.lost:
            self.start()
        else:
            self._equip(self.cycle.saves.tracker, self.controller, self.cycle.started, stager)
        self.cycle.closed = closed
        if self._parity is not None:
            self._parity.rejoin(self._job, self._injector, self._parity_prefix, decision.donor, recovery.lost)
        failed = sorted({spec.owner for spec in lost} | set(decision.lost))
        self.controller.failed(failed)
        at = Progress(decision.step, state["samples"])
        failure = Failure(failed, at, run.ledger, skipped_samples(recovery, cut))
        why, goes_back = "a process died and was replaced", self._why_back if self._goes_back else None
        recovered = self._restorer.recover_lost(trainer, failure, run.epoch, why, self._early, goes_back)
        self.whole = True
        more = {"replaced": True, "error": recovery.error, "sources": source_fields(lost, recovered.plan.sources)}
        self._close(recovered, failed, at, more | cut_fields(recovery, cut))
        self._updates_before = self.cycle.saves.tracker.updates

    def on_recovered(self, recovery: Recovery) -> None:
        """All stand together again. No collective: a peer may die here too."""
        self._rejoined = Rejoined(recovery, self._job.kv)

    def state_dict(self) -> dict[str, Any]:
        """The run's, with what the planner has measured by now."""
        return self._run.state_dict(self.controller.state.to_json() if self.started else None)

    def _choose(self, failed: Sequence[int], after: Ledger, lost_samples: int) -> tuple[Mode, str]:
        """Rank 0: how to recover. after: the ledger if it is partial; lost_samples: since the newest exact version."""
        trainer, samples = self._job.trainer, self._run.samples
        self.controller.trained(samples, self.cycle.now(0).seconds, planned_samples(trainer, samples))
        loader = trainer.fit_loop._combined_loader
        assert loader is not None
        replays = restart_warning(loader.flattened, batches=1) is None
        return self.controller.choose(failed, after.pls(self._run.total_samples(trainer)), lost_samples, replays)

    @property
    def _goes_back(self) -> bool:
        """Whether a death may restart the job by the user's word."""
        return self._settings.recovery == "full" or self._settings.max_pls is not None

    def _why_back(self, after: Ledger) -> str:
        """Rank 0: why, by the user's word, a death restarts the job from the newest exact version; "": it does not."""
        pls, limit = after.pls(self._run.total_samples(self._job.trainer)), self._settings.max_pls
        if self._settings.recovery == "full":
            return "CPRCallback(recovery='full')"
        if limit is None or pls <= limit:
            return ""
        if not restart_is_left():
            log.warning("the PLS passes max_pls=%g, to %.3g: no restart is left to go back by", limit, pls)
            return ""
        return f"the PLS would be {pls:.3g}, above max_pls={limit:g}"

    def _close(self, recovered: Recovered, failed: list[int], at: Progress, more: dict[str, Any]) -> None:
        """Charge the run, let saves and parity go on, and report."""
        run, trainer, plan = self._run, self._job.trainer, recovered.plan
        run.ledger = recovered.ledger
        if recovered.rewound is not None:
            run.counter.samples = recovered.rewound.samples
        run.counts["recoveries"] += 1
        step = at.step if recovered.rewound is None else recovered.rewound.step
        self.cycle.reset(step, bool(recovered.rewound))
        source = next(iter(plan.sources.values()))
        if self._parity is not None and source.kind != "parity":
            self._parity.restart(step, f"rows came back from {source.name}")
        pls = run.pls(trainer)
        how = "parity" if source.kind == "parity" else plan.mode
        self.controller.recovered(how, recovered.seconds, run.samples, pls)
        if self._job.rank == 0:
            log.warning(
                "%s recovery of rank %s after batch %d (%s): %d rows from %s in %.2f s, PLS %.4f",
                plan.mode, ", ".join(map(str, failed)), at.step, plan.reason, recovered.rows, source.name,
                recovered.seconds, pls,
            )  # fmt: skip
        self._emit(
            "recovery", mode=plan.mode, reason=plan.reason, failed=failed, step=at.step, epoch=run.epoch,
            source=source.kind, version=source.name, bytes_read=recovered.bytes_read, rows=recovered.rows,
            seconds=round(recovered.seconds, 6), pls=pls, lost_row_updates=recovered.lost_updates,
            lost_row_updates_exact=recovered.lost_exact, total_samples=run.total_samples(trainer),
            ledger=event_to_json(recovered.event), **more,
        )  # fmt: skip
