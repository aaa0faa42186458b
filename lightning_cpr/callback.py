"""CPRCallback: saves a job's state behind its training and brings back what a failure took.

The hooks are here. What to save or restore is decided in `policy` and `recovery.plan`, done in `saving` and `live`;
the arguments are checked in `saving.settings`, and `job.root` finds the run to go on with.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from lightning_cpr._lightning import Callback, check_trainer, pl, rank_zero_info
from lightning_cpr.checkpoint_io import VERSION_KEY, Version
from lightning_cpr.errors import ConfigError, ForeignRunError, RecoveryError, UnsupportedError
from lightning_cpr.faults import FaultInjector
from lightning_cpr.job import handover, preemption
from lightning_cpr.job.job import Job
from lightning_cpr.job.loader import restart_warning
from lightning_cpr.job.root import Found, find_run, has_newer, is_version_of, rename_state, resume_from
from lightning_cpr.job.samples import SampleCounter, batches_trained, expected_samples, planned_samples
from lightning_cpr.job.start_checks import check_memory, check_waits
from lightning_cpr.live.account import Rejoined, cut_fields, gather_cut, skipped_samples, source_fields, where_lost
from lightning_cpr.live.early_read import EarlyRead
from lightning_cpr.live.parity import ParityGuard
from lightning_cpr.live.restorer import Recovered, Restorer
from lightning_cpr.policy.baseline import BaselinePolicy
from lightning_cpr.policy.due import Moment
from lightning_cpr.policy.ledger import Ledger, event_to_json
from lightning_cpr.policy.priority import Variant
from lightning_cpr.recovery.election import is_lost_peer
from lightning_cpr.recovery.live import Recovery
from lightning_cpr.recovery.parity.config import ParityConfig
from lightning_cpr.recovery.plan import Mode
from lightning_cpr.report.events import EventLog, metrics_of
from lightning_cpr.saving.chain import Chain
from lightning_cpr.saving.controller import Bits, Controller, RecoveryChoice
from lightning_cpr.saving.cycle import SaveCycle
from lightning_cpr.saving.saver import BackgroundSaves, Progress, RunId, SavePlan
from lightning_cpr.saving.settings import Resume, Settings
from lightning_cpr.spec import Shard, ShardSpec
from lightning_cpr.store.save import SaveIO
from lightning_cpr.store.stage import Stager
from lightning_cpr.store.storage import Storage
from lightning_cpr.store.versions import fence, list_versions
from lightning_cpr.strategy import TorchRecStrategy
from lightning_cpr.tables.tracker import RowTracker

log = logging.getLogger(__name__)

COUNTS = (
    "commits", "skipped", "failed", "recoveries", "hooks_lost", "compactions", "compactions_failed",
    "parity_mismatches", "parity_refused", "parity_broken",
)  # fmt: skip
"""What a callback counts over a whole run."""


class CPRCallback(Callback):
    """Add it to a Trainer with ``strategy="torchrec"``; nothing else changes.

    Args:
        root: where versions, events and parts lie: a folder or an fsspec URL (``s3://bucket/job42``).
        save_every_n_steps: save at each multiple of this many batches; or
        save_interval: save when this much time has passed since the last save: seconds, or "90s", "30min", "1h". With
            neither, the planner finds the interval that costs least and keeps to ``target_pls``, from what it measures
            of this job: its speed, its failures, what saves and recoveries take.
        target_pls: the portion of lost samples, in (0, 1], that all failures of the run together may cost on average.
        mtbf: mean time between failures of the whole job: seconds, or "28h". None: estimated from this job's failures,
            starting from 20 h.
        max_pls: a failure that would bring the PLS above it is recovered in full. None: for ``recovery="auto"`` twice
            the target, for ``"partial"`` no limit. A process that died is always recovered in part.
        recovery: ``"partial"``: only the failed ranks' shards are restored, everybody else keeps what it has;
            ``"full"``: everybody goes back to the newest exact version; ``"auto"``: the planner's choice.
        incremental: which saves are bases and which hold only the rows that changed (Check-N-Run). ``"intermittent"``:
            since the base, and a new base when that is cheaper; ``"one_shot"``: always since the first base;
            ``"consecutive"``: since the last version, and long chains are compacted behind the training; ``"full"``:
            every save is a base.
        bits: per saved weight. None: saved bit for bit. 8, 4, 3, 2: quantized, so that what a restore brings back has
            an error (`store.codec`); at 4 bits and fewer Adagrad's sums come back up to 0.4 % too high, all other
            optimizer states have none; ``"auto"``: chosen from the restores to be expected, and 8 once there were more.
        priority: which rows go first, in saves every ``ratio`` of an interval. ``"mfu"``: those looked up most since
            they were saved; ``"ssu"``: those seen in every second batch; ``"scar"``: those that moved farthest (keeps
            a copy of the tables); ``"vanilla"``: no such saves. ``"auto"``: mfu or ssu, as memory allows, where the
            planner sets the interval, else vanilla.
        ratio: share of the rows, and of the interval, of a priority save, in (0, 1].
        priority_tables: names of the tables that priorities choose rows of; None: the largest ones, with 99 % of the
            rows. Of the others each save holds every changed row.
        exact_close: each interval ends with a version that is exact: of one step. False: as in CPR's paper, only the
            bases are, and a restart goes back to one.
        keep_last: keep so many of the newest versions and what they need, and any younger than an hour; older ones are
            removed behind the training. None: all are kept (`lightning-cpr gc` removes by hand).
        resume: ``"auto"``: a run that is in ``root`` already goes on from its newest valid version, unless the Trainer
            is given a ``ckpt_path``; ``"reshard"``: under another sharding plan or number of ranks too, for elastic
            jobs; ``"never"``: ``root`` must not hold a run, unless ``ckpt_path`` points there.
        storage_options: for fsspec, e.g. credentials. Never logged, never stored.
        timeout_s: how long any wait of a save or a recovery may take; below the strategy's ``timeout``, after which the
            other ranks give up.
        max_failed_saves: after this many failed saves in a row the run ends with the first cause; training goes on
            until then, and every failure is logged and counted.
        parity: keep parity of all shards in the memory of other ranks, so that a lost shard comes back without the
            store, and at ``every_n_steps=1`` with nothing lost (`ParityConfig`). It is tried before what ``recovery``
            says. None: no parity.

    Metrics ``cpr/*`` go to the Trainer's loggers, events to ``events.jsonl`` under ``root``. Code that writes table
    weights itself calls `mark_dirty`.

    Raises at set-up:
        UnsupportedError: the Trainer's strategy is not `TorchRecStrategy`.
        ConfigError: arguments out of range, or two callbacks with one root.
        ForeignRunError: ``root`` holds another run.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        save_every_n_steps: int | None = None,
        save_interval: float | str | None = None,
        target_pls: float = 0.1,
        mtbf: float | str | None = None,
        max_pls: float | None = None,
        recovery: RecoveryChoice = "auto",
        incremental: BaselinePolicy = "intermittent",
        bits: Bits | None = None,
        priority: Variant | Literal["auto"] = "auto",
        ratio: float = 0.125,
        priority_tables: Sequence[str] | None = None,
        exact_close: bool = True,
        keep_last: int | None = None,
        resume: Resume = "auto",
        storage_options: Mapping[str, Any] | None = None,
        timeout_s: float = 240.0,
        max_failed_saves: int = 3,
        parity: ParityConfig | None = None,
    ) -> None:
        super().__init__()
        self.settings = Settings(
            Settings.root_of(root), save_every_n_steps, save_interval, target_pls, mtbf, max_pls, recovery, incremental,
            bits, priority, ratio, priority_tables, exact_close, keep_last, resume, storage_options, timeout_s,
            max_failed_saves, parity,
        )  # fmt: skip
        self.counts = dict.fromkeys(COUNTS, 0)
        self.ledger = Ledger(0)
        self._counter = SampleCounter()
        self._injector: FaultInjector | None = None
        self._updates_before = 0  # row updates when the batch began
        self._rejoined: Rejoined | None = None
        self._early: EarlyRead | None = None
        self._found = Found()
        self._taken: handover.Taken | None = None
        self._whole = False  # whether the rows are those of a step: not while they are being restored
        self._planner_state: Any = None
        self._parity: ParityGuard | None = None

    @property
    def root(self) -> str:
        return self.settings.root

    @property
    def state_key(self) -> str:
        return f"CPRCallback[{self.root}]"

    @property
    def samples(self) -> int:
        """Samples trained so far, over all ranks."""
        return self._counter.samples

    @property
    def pls(self) -> float:
        """The portion of lost samples so far (CPR, section 4)."""
        return self.ledger.pls(self._total_samples())

    def mark_dirty(self, table: str, rows: Tensor | None = None) -> None:
        """Say that rows of a table (global numbers; None: all) were written by other means than training steps, so that
        the next delta holds them. Call it on every rank; before training starts there is no need to.

        Raises:
            ConfigError: no such table, or no such rows.
        """
        if hasattr(self, "_cycle"):
            self._cycle.saves.tracker.mark(table, rows)
            if self._parity is not None:
                self._parity.restart_after_step(f"table {table} was written by other means than steps")

    # Set-up and resume

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        check_trainer(trainer)
        if not isinstance(trainer.strategy, TorchRecStrategy):
            raise UnsupportedError(
                f"CPRCallback needs every rank to save, and {type(trainer.strategy).__name__} saves on rank 0 only, so"
                ' that the other ranks\' tables would be missing. Use Trainer(strategy="torchrec").'
            )
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        parity = self.settings.parity
        if parity is not None and self._parity is None:
            self._parity = ParityGuard(parity, lambda: self.samples, self._emit, self.counts, self.settings.timeout_s)
        first = [c for c in (self._counter, self._parity) if c is not None]
        others = [c for c in callbacks if c is not self and c not in first]
        if any(isinstance(c, CPRCallback) and c.settings.place == self.settings.place for c in others):
            raise ConfigError(f"two CPRCallbacks save to {self.root}: give each its own root")
        # After the other callbacks, so that what they keep of a batch is in the version of that batch; samples are
        # counted before them, so that whoever saves at a batch's end has those of that batch, and parity has it too.
        trainer.callbacks = [*first, *others, self]  # type: ignore[attr-defined]
        preemption.attach(trainer)
        others_save = any(isinstance(c, CPRCallback) for c in others)  # their runs would go on from elsewhere
        self._hands_over = self.settings.recovery != "full" and not others_save
        self._injector = next((c for c in others if isinstance(c, FaultInjector)), None)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The model is sharded; Lightning restores a ``ckpt_path`` after this."""
        strategy = trainer.strategy
        assert isinstance(strategy, TorchRecStrategy)
        check_waits(strategy.collective_timeout, self.settings.timeout_s)
        self.job: Job = strategy.job.scoped(self.root)
        self.storage = self.job.together(lambda: Storage(self.root, self.settings.storage_options))
        self._events = EventLog(self.storage, self.job.rank)
        if self._injector is not None:
            self._injector.connect(self._events.emit, lambda: self.job.shards)
            self.storage.intercept = self._injector.intercept
        self._run = self.job.together(lambda: RunId.of(self.job, self.job.incarnation))
        if self.job.alone:
            return
        self._found = self.job.from_rank_0(lambda: find_run(self.storage, self._run, self.settings.resume))
        self._taken = self._take_over(trainer)
        if self._taken is not None:
            trainer._checkpoint_connector._loaded_checkpoint = self._taken.checkpoint()
        elif self._found.path is not None:
            resume_from(trainer, self.job, self.storage, self._found.path, self.state_key)

    def _take_over(self, trainer: pl.Trainer) -> handover.Taken | None:
        """What the processes before these left in shared memory, if it is newer than what the root holds."""
        run_id = self._found.run_id
        if run_id is None or not self._hands_over:
            if self._hands_over:
                handover.discard(self._run)  # there is no version yet, so that what was left cannot be completed
            return None
        run = RunId(run_id, self._run.config_fingerprint, self._run.plan_fingerprint)
        ref = self.job.from_rank_0(lambda: list_versions(self.storage, run_id)[0])
        return handover.take(trainer, self.job, run, (ref.epoch, ref.step))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Everything is restored; take up the run that it came from, or begin one."""
        if self.job.alone:
            return
        strategy = trainer.strategy
        assert isinstance(strategy, TorchRecStrategy)
        job, loaded = self.job, strategy.loaded_version
        from_root = loaded if is_version_of(self.storage, loaded) else None
        self._take_up(from_root.manifest.run_id if from_root is not None else self._found.run_id)
        if not self.ledger.total_elements:
            self.ledger = Ledger(sum(s.elements for s in job.plan if not s.replicated))
        if job.rank == 0:
            job.kv.set("epoch", str(self.epoch))
            if self.epoch:
                fence(self.storage, self._run.run_id, self.epoch)
        trainer.strategy.barrier("CPRCallback.on_train_start")
        self._make_workers(self._make_tracker(), Chain(), self._make_controller(), time.monotonic())
        if self._taken is not None:
            self._go_on(trainer, self._taken)
        else:
            self._begin(trainer, from_root)
        self._taken, self._whole = None, True
        parity = 0 if self._parity is None else self._parity.memory_bytes
        check_memory(job, self._cycle.saves.tracker.memory_bytes, parity)

    def _go_on(self, trainer: pl.Trainer, taken: handover.Taken) -> None:
        """The rows of those that survived are here; the others' come from the newest version."""
        taken.stand(trainer)
        at, failed = Progress(taken.step, self.samples), list(taken.take.decision.lost)
        self._controller.trained(at.samples, 0.0, None)
        handed = sorted(taken.take.sources)
        self._emit(
            "run_started", run_id=self._run.run_id, epoch=self.epoch, step=at.step, world_size=self.job.world_size,
            samples=at.samples, total_elements=self.ledger.total_elements, handed_over=handed,
        )  # fmt: skip
        if failed:
            self._controller.failed(failed)
        recovered = self._restorer.recover_lost(
            trainer, failed, at, self.epoch, self.ledger, "the other ranks' rows were handed over"
        )
        if failed:
            self._recovered(recovered, failed, at, {"handed_over": handed})
        if self._parity is not None:
            self._parity.start(self.job, self._injector, self._parity_prefix, at.step)

    def _begin(self, trainer: pl.Trainer, from_root: Version | None) -> None:
        job, strategy = self.job, trainer.strategy
        assert isinstance(strategy, TorchRecStrategy)
        loaded = strategy.loaded_version
        at = Progress(batches_trained(trainer), self.samples)
        self._controller.trained(at.samples, 0.0, None)
        for path in from_root.refused or () if from_root is not None else ():
            self._emit("version_refused", version=path, error="damaged")
        self._emit(
            "run_started", run_id=self._run.run_id, epoch=self.epoch, step=at.step, world_size=job.world_size,
            samples=at.samples, total_elements=self.ledger.total_elements,
            resumed_from=loaded.name if loaded is not None else None,
        )  # fmt: skip
        if self._parity is not None:
            self._parity.start(job, self._injector, self._parity_prefix, at.step)
        if from_root is not None:
            manifest = from_root.manifest
            job.together(lambda: self._restorer.holds(manifest))
            self._cycle.saved_step, self._cycle.closed = manifest.step, Moment(at.step, 0.0)
            if not job.from_rank_0(lambda: has_newer(self.storage, self._run.run_id, from_root)):
                return
        # At once, so that there is a version to recover from before the first interval is over.
        plan = SavePlan(at.step, f"{job.incarnation}-{at.step}", bits=job.broadcast(self._cycle.bits(True)))
        self._cycle.start(trainer, plan, at, self.ledger)
        if from_root is not None:
            # Until it stands, the newest version is one of the future that this run has turned away from.
            self._cycle.wait()

    def _take_up(self, run_id: str | None) -> None:
        """Go on with a run of this root, or begin one. Where a ``ckpt_path`` from elsewhere was loaded, the root's own
        run goes on with that: a root holds one run.
        """
        if run_id is not None:
            self._run = RunId(run_id, self._run.config_fingerprint, self._run.plan_fingerprint)
            self.epoch = self.job.from_rank_0(lambda: list_versions(self.storage, run_id)[0].epoch) + 1
        elif self._found.foreign:
            raise ForeignRunError(
                f"{self.root} cannot be used: {self._found.foreign}. Resume that run with"
                f" trainer.fit(..., ckpt_path={self.root!r}), which reshards where it must, or choose an empty root."
            )
        else:
            self.epoch = 0
            rank_zero_info(f"CPRCallback begins run {self._run.run_id} in {self.root}, which holds none yet")

    def _make_tracker(self) -> RowTracker:
        return self.settings.tracker(self.job, count=self._injector is not None)

    def _make_controller(self) -> Controller:
        setting = self.settings.setting(self.job)
        upkeep = None if self._parity is None else self._parity.unhidden_s
        controller = Controller(self.settings.fixed, setting, self._emit, self.counts["recoveries"], upkeep)
        controller.restore(self._planner_state)
        return controller

    def _make_workers(
        self, tracker: RowTracker, chain: Chain, controller: Controller, started: float, stager: Stager | None = None
    ) -> None:
        job, kv, timeout_s = self.job, self.job.kv, self.settings.timeout_s
        io = SaveIO(self.storage, kv, epoch=lambda: int(kv.get("epoch")), points=self._point, timeout_s=timeout_s)
        saves = BackgroundSaves(
            job, self._run, io, tracker, chain, self.settings.incremental, self.settings.keep, stager
        )
        self._controller, self._started = controller, started
        self._cycle = SaveCycle(self.settings, job, saves, controller, self._emit, self.counts, started)
        self._restorer = Restorer(
            job, self.storage, self._run.run_id, saves, timeout_s, self._emit, self._cycle.take, self._parity
        )

    @property
    def _parity_prefix(self) -> str:
        return f"parity/{self.epoch}"

    def _point(self, point: str, step: int) -> None:
        if self._injector is not None:
            self._injector.at_point(point, step)

    # Training

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, idx: int) -> None:
        if self.job.alone:
            if self._parity is None:  # which would write to the same rows
                self._early = EarlyRead(self.storage, [s for s in self.job.owned if not s.spec.replicated])
        else:
            self._updates_before = self._cycle.saves.tracker.updates

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        lost = self._injector.take_wiped() if self._injector is not None else []
        if lost:
            self._recover(trainer, lost, Progress(batches_trained(trainer), self.samples))
        step = batches_trained(trainer)
        if self._rejoined is not None and self._rejoined.stepped(step):
            self._tell_rejoined()
        self._cycle.do_announced(trainer, Progress(step, self.samples), self.epoch, self.ledger)
        if self.job.rank == 0:
            self._report_progress(step + 1)
            self._cycle.announce_next(step + 1, self.epoch)

    def _report_progress(self, step: int) -> None:
        now = self._cycle.now(step)
        self._controller.report(self.samples, now.seconds, planned_samples(self.job.trainer, self.samples))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Flush: the last state is saved, and committed, before fit returns."""
        if trainer.interrupted:
            self._cycle.wait()
        else:
            self.flush(trainer)
        self._emit("run_ended", step=batches_trained(trainer), samples=self.samples, pls=self.pls)

    def flush(self, trainer: pl.Trainer) -> None:
        """Save the step that all ranks have finished, and wait until it is committed (`job.preemption.Flushes`)."""
        self._cycle.flush(trainer, Progress(batches_trained(trainer), self.samples), self.ledger)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if hasattr(self, "_events") and (isinstance(exception, RecoveryError) or is_lost_peer(exception)):
            told = {"where": where_lost(trainer), "error": str(exception).partition("\n")[0]}
            log.error("no recovery in place %s: %s", *told.values())
            self._events.emit("stepped_down", step=batches_trained(trainer), **told)
        if hasattr(self, "_cycle"):
            self._cycle.saves.io.cancel.set()
            self._cycle.saves.close(timeout=0.0)
            if self._whole and self._hands_over:
                handover.leave(trainer, self.job, self._run, self.epoch, exception)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if hasattr(self, "_cycle"):
            self._cycle.saves.close(self.settings.timeout_s)
            self._cycle.saves.tracker.close()

    # Recovery

    def _recover(self, trainer: pl.Trainer, failed: list[int], at: Progress) -> None:
        self.epoch += 1
        if self._parity is not None:
            self._parity.new_epoch(self._parity_prefix)
        self._whole = False
        self._controller.failed(failed)
        recovered = self._restorer.recover(trainer, failed, at, self.epoch, self._choose, self.ledger)
        self._whole = True
        self._recovered(recovered, failed, at, {})

    def restore_shards(self, recovery: Recovery, lost: Sequence[ShardSpec], shards: Sequence[Shard]) -> None:
        """A process died and was replaced: its shards come back (`live.recovery.RecoveryHook`)."""
        trainer, decision = self.job.trainer, recovery.decision
        strategy = trainer.strategy
        assert isinstance(strategy, TorchRecStrategy)
        stager = None if recovery.lost else self._cycle.saves.abandon(self.settings.timeout_s)
        done = 0 if recovery.lost else self._cycle.saves.tracker.updates - self._updates_before
        cut, own_samples = gather_cut(recovery, done, self.samples), self.samples
        # What the donor knows of the run; a replacement knows nothing, be it rank 0.
        told: list[Any] = [None]
        if self.job.rank == decision.donor:
            told = [(self._run.run_id, self.epoch, self.state_dict(), self._cycle.closed)]
        dist.broadcast_object_list(told, src=decision.donor)
        run_id, epoch, state, closed = told[0]
        self._run = RunId(run_id, self._run.config_fingerprint, self._run.plan_fingerprint)
        self.load_state_dict(state)
        if not recovery.lost:
            self._counter.samples = own_samples  # the donor's loop may be a batch ahead
        self.epoch = epoch + 1
        self.job.rejoin(strategy.job.incarnation, recovery.epoch)
        if recovery.lost:
            self._make_workers(self._make_tracker(), Chain(), self._make_controller(), time.monotonic())
        else:
            self._make_workers(self._cycle.saves.tracker, Chain(), self._controller, self._started, stager)
        self._cycle.closed = closed
        if self._parity is not None:
            self._parity.rejoin(self.job, self._injector, self._parity_prefix, decision.donor, recovery.lost)
        failed = sorted({spec.owner for spec in lost} | set(decision.lost))
        self._controller.failed(failed)
        at = Progress(decision.step, state["samples"])
        recovered = self._restorer.recover_lost(
            trainer, failed, at, self.epoch, self.ledger, "a process died and was replaced",
            skipped_samples(recovery, cut), self._early, rewinds=self.settings.recovery == "full",
        )  # fmt: skip
        self._whole = True
        more = {"replaced": True, "error": recovery.error, "sources": source_fields(lost, recovered.plan.sources)}
        self._recovered(recovered, failed, at, more | cut_fields(recovery, cut))
        self._updates_before = self._cycle.saves.tracker.updates

    def on_recovered(self, recovery: Recovery, lost: Sequence[ShardSpec]) -> None:
        """All stand together again (`live.recovery.RecoveryHook`)."""
        self._rejoined = Rejoined(recovery, self.job.kv)

    def _tell_rejoined(self) -> None:
        assert self._rejoined is not None
        rejoined, self._rejoined = self._rejoined, None
        self._emit("rejoined", epoch=self.epoch, step=batches_trained(self.job.trainer), **rejoined.fields())

    def _recovered(self, recovered: Recovered, failed: list[int], at: Progress, more: dict[str, Any]) -> None:
        self.ledger = recovered.ledger
        if recovered.rewound is not None:
            self._counter.samples = recovered.rewound.samples
        self.counts["recoveries"] += 1
        step = at.step if recovered.rewound is None else recovered.rewound.step
        self._cycle.reset(step, bool(recovered.rewound))
        source = next(iter(recovered.plan.sources.values()))
        if self._parity is not None and source.kind != "parity":
            self._parity.restart(step, f"rows came back from {source.name}")
        self._controller.recovered(
            "parity" if source.kind == "parity" else recovered.plan.mode, recovered.seconds, self.samples, self.pls
        )
        if self.job.rank == 0:
            log.warning(
                "%s recovery of rank %s after batch %d (%s): %d rows from %s in %.2f s, PLS %.4f",
                recovered.plan.mode, ", ".join(map(str, failed)), at.step, recovered.plan.reason, recovered.rows,
                source.name, recovered.seconds, self.pls,
            )  # fmt: skip
        self._emit(
            "recovery", mode=recovered.plan.mode, reason=recovered.plan.reason, failed=failed, step=at.step,
            epoch=self.epoch, source=source.kind, version=source.name, bytes_read=recovered.bytes_read,
            rows=recovered.rows, seconds=round(recovered.seconds, 6), pls=self.pls,
            lost_row_updates=recovered.lost_updates, lost_row_updates_exact=recovered.lost_exact,
            total_samples=self._total_samples(), ledger=event_to_json(recovered.event), **more,
        )  # fmt: skip

    def _choose(self, failed: Sequence[int], after: Ledger, lost_samples: int) -> tuple[Mode, str]:
        """Rank 0: how to recover. after: the ledger if it is partial; lost_samples: since the newest exact version."""
        trainer = self.job.trainer
        seconds = self._cycle.now(0).seconds
        self._controller.trained(self.samples, seconds, planned_samples(trainer, self.samples))
        loader = trainer.fit_loop._combined_loader
        assert loader is not None
        replays = restart_warning(loader.flattened, batches=1) is None
        return self._controller.choose(failed, after.pls(self._total_samples()), lost_samples, replays)

    def _total_samples(self) -> int:
        return expected_samples(self.job.trainer, self.samples) if hasattr(self, "job") else self.samples

    # State and reporting

    def state_dict(self) -> dict[str, Any]:
        planner = self._controller.state.to_json() if hasattr(self, "_controller") else None
        return {
            "samples": self.samples,
            "ledger": self.ledger.to_json(),
            "counts": dict(self.counts),
            "planner": planner,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._counter.samples = state_dict["samples"]
        self.ledger = Ledger.from_json(state_dict["ledger"])
        # A rewind brings back the state of an earlier step, which does not undo what has happened since.
        self.counts |= {name: max(count, self.counts.get(name, 0)) for name, count in state_dict["counts"].items()}
        self._planner_state = state_dict.get("planner")

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if hasattr(self, "storage"):
            rename_state(trainer, self.storage, self.state_key, checkpoint)
        if self._taken is None:
            return
        if checkpoint[VERSION_KEY] is None:
            self._taken.adopt()
        else:
            log.warning("a ckpt_path is given: the job goes back to it, what was handed over is not used")
            self._taken.close()
            self._taken = None

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["lightning_cpr_samples"] = self.samples

    def _emit(self, event: str, **fields: Any) -> None:
        """Rank 0: to the event log and, its numbers, to the Trainer's loggers."""
        if self.job.rank:
            return
        record = self._events.emit(event, **fields)
        metrics = {k: v for k, v in metrics_of(record).items() if not k.endswith("_step")}
        metrics["cpr/pls"] = self.pls
        trainer = self.job.trainer
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
