"""CPRCallback: saves a job's state behind its training and brings back what a failure took.

The hooks are here. What to save or restore is decided in `policy` and `recovery.plan`, done in `cycle`, `saver` and
`restorer`; the arguments are checked in `settings`, and `root` finds the run to go on with.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from lightning_cpr._lightning import Callback, check_trainer, pl
from lightning_cpr.chain import Chain
from lightning_cpr.controller import Bits, Controller, RecoveryChoice
from lightning_cpr.cycle import SaveCycle
from lightning_cpr.errors import ConfigError, ForeignRunError, RecoveryError, UnsupportedError
from lightning_cpr.faults import FaultInjector
from lightning_cpr.job import Job
from lightning_cpr.loader import restart_warning
from lightning_cpr.policy.baseline import BaselinePolicy
from lightning_cpr.policy.due import Moment
from lightning_cpr.policy.ledger import Ledger, event_to_json
from lightning_cpr.policy.priority import Variant
from lightning_cpr.recovery.live import Recovery
from lightning_cpr.recovery.plan import Mode
from lightning_cpr.report.events import EventLog, metrics_of
from lightning_cpr.restorer import Recovered, Restorer
from lightning_cpr.root import Found, find_run, has_newer, is_version_of, rename_state, resume_from
from lightning_cpr.samples import SampleCounter, batches_trained, expected_samples, planned_samples
from lightning_cpr.saver import BackgroundSaves, Progress, RunId, SavePlan
from lightning_cpr.settings import Resume, Settings
from lightning_cpr.spec import Shard, ShardSpec
from lightning_cpr.store.save import SaveIO
from lightning_cpr.store.storage import Storage
from lightning_cpr.store.versions import fence, list_versions
from lightning_cpr.strategy import TorchRecStrategy
from lightning_cpr.tables.tracker import RowTracker

log = logging.getLogger(__name__)


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
            the target, for ``"partial"`` no limit.
        recovery: ``"partial"``: only the failed ranks' shards are restored, everybody else keeps what it has;
            ``"full"``: everybody goes back to the newest exact version; ``"auto"``: the planner's choice.
        incremental: which saves are bases and which hold only the rows that changed (Check-N-Run). ``"intermittent"``:
            since the base, and a new base when that is cheaper; ``"one_shot"``: always since the first base;
            ``"consecutive"``: since the last version; ``"full"``: every save is a base.
        bits: per saved weight. None: saved bit for bit. 8, 4, 3, 2: quantized, so that what a restore brings back has
            an error (`store.codec`; optimizer states have none); ``"auto"``: chosen from the restores to be expected,
            and 8 once there were more.
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
            is given a ``ckpt_path``; ``"never"``: ``root`` must not hold a run, unless ``ckpt_path`` points there.
        storage_options: for fsspec, e.g. credentials. Never logged, never stored.
        timeout_s: how long any wait of a save or a recovery may take.
        max_failed_saves: after this many failed saves in a row the run ends with the first cause; training goes on
            until then, and every failure is logged and counted.

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
        timeout_s: float = 600.0,
        max_failed_saves: int = 3,
    ) -> None:
        super().__init__()
        self.settings = Settings(
            Settings.root_of(root), save_every_n_steps, save_interval, target_pls, mtbf, max_pls, recovery, incremental,
            bits, priority, ratio, priority_tables, exact_close, keep_last, resume, storage_options, timeout_s,
            max_failed_saves,
        )  # fmt: skip
        self.counts = {"commits": 0, "skipped": 0, "failed": 0, "recoveries": 0, "hooks_lost": 0}
        self.ledger = Ledger(0)
        self._counter = SampleCounter()
        self._injector: FaultInjector | None = None
        self._found = Found()
        self._planner_state: Any = None

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

    # Set-up and resume

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        check_trainer(trainer)
        if not isinstance(trainer.strategy, TorchRecStrategy):
            raise UnsupportedError(
                f"CPRCallback needs every rank to save, and {type(trainer.strategy).__name__} saves on rank 0 only, so"
                ' that the other ranks\' tables would be missing. Use Trainer(strategy="torchrec").'
            )
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        others = [c for c in callbacks if c is not self and c is not self._counter]
        if any(isinstance(c, CPRCallback) and c.settings.place == self.settings.place for c in others):
            raise ConfigError(f"two CPRCallbacks save to {self.root}: give each its own root")
        # After the other callbacks, so that what they keep of a batch is in the version of that batch; samples are
        # counted before them, so that whoever saves at a batch's end has those of that batch.
        trainer.callbacks = [self._counter, *others, self]  # type: ignore[attr-defined]
        self._injector = next((c for c in others if isinstance(c, FaultInjector)), None)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The model is sharded; Lightning restores a ``ckpt_path`` after this."""
        strategy = trainer.strategy
        assert isinstance(strategy, TorchRecStrategy)
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
        if self._found.path is not None:
            resume_from(trainer, self.job, self.storage, self._found.path, self.state_key)

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
        at = Progress(batches_trained(trainer), self.samples)
        self._controller.trained(at.samples, 0.0, None)
        for path in from_root.refused or () if from_root is not None else ():
            self._emit("version_refused", version=path, error="damaged")
        self._emit(
            "run_started", run_id=self._run.run_id, epoch=self.epoch, step=at.step, world_size=job.world_size,
            samples=at.samples, total_elements=self.ledger.total_elements,
            resumed_from=loaded.name if loaded is not None else None,
        )  # fmt: skip
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

    def _make_tracker(self) -> RowTracker:
        return self.settings.tracker(self.job, count=self._injector is not None)

    def _make_controller(self) -> Controller:
        setting = self.settings.setting(self.job)
        controller = Controller(self.settings.fixed, setting, self._emit, self.counts["recoveries"])
        controller.restore(self._planner_state)
        return controller

    def _make_workers(self, tracker: RowTracker, chain: Chain, controller: Controller, started: float) -> None:
        job, kv, timeout_s = self.job, self.job.kv, self.settings.timeout_s
        io = SaveIO(self.storage, kv, epoch=lambda: int(kv.get("epoch")), points=self._point, timeout_s=timeout_s)
        saves = BackgroundSaves(job, self._run, io, tracker, chain, self.settings.keep)
        self._controller, self._started = controller, started
        self._cycle = SaveCycle(self.settings, job, saves, controller, self._emit, self.counts, started)
        self._restorer = Restorer(job, self.storage, self._run.run_id, saves, timeout_s, self._emit, self._cycle.take)

    def _point(self, point: str, step: int) -> None:
        if self._injector is not None:
            self._injector.at_point(point, step)

    # Training

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        lost = self._injector.take_wiped() if self._injector is not None else []
        if lost:
            self._recover(trainer, lost, Progress(batches_trained(trainer), self.samples))
        step = batches_trained(trainer)
        self._cycle.do_announced(trainer, Progress(step, self.samples), self.epoch, self.ledger)
        if self.job.rank == 0:
            self._report_progress(step + 1)
            self._cycle.announce_next(step + 1, self.epoch)

    def _report_progress(self, step: int) -> None:
        now = self._cycle.now(step)
        self._controller.report(self.samples, now.seconds, planned_samples(self.job.trainer, self.samples))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Flush: the last state is saved, and committed, before fit returns."""
        at = Progress(batches_trained(trainer), self.samples)
        if trainer.interrupted:
            self._cycle.wait()
        else:
            self._cycle.flush(trainer, at, self.ledger)
        self._emit("run_ended", step=at.step, samples=at.samples, pls=self.pls)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if hasattr(self, "_cycle"):
            self._cycle.saves.io.cancel.set()
            self._cycle.saves.close(timeout=0.0)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if hasattr(self, "_cycle"):
            self._cycle.saves.close(self.settings.timeout_s)
            self._cycle.saves.tracker.close()

    # Recovery

    def _recover(self, trainer: pl.Trainer, failed: list[int], at: Progress) -> None:
        self.epoch += 1
        recovered = self._restorer.recover(trainer, failed, at, self.epoch, self._choose, self.ledger)
        self._recovered(recovered, failed, at, {})

    def restore_shards(self, recovery: Recovery, lost: Sequence[ShardSpec], shards: Sequence[Shard]) -> None:
        """A process died and was replaced (`live.RecoveryHook`): its shards come back from the newest version."""
        trainer, decision = self.job.trainer, recovery.decision
        if self.settings.recovery == "full":
            raise RecoveryError("CPRCallback(recovery='full'): everybody goes back, by a restart of the job")
        if not recovery.lost:
            self._cycle.saves.abandon(self.settings.timeout_s)
        # What the donor knows of the run; a replacement knows nothing, be it rank 0.
        told: list[Any] = [None]
        if self.job.rank == decision.donor:
            told = [(self._run.run_id, self.epoch, self.job.incarnation, self.state_dict(), self._cycle.closed)]
        dist.broadcast_object_list(told, src=decision.donor)
        run_id, epoch, incarnation, state, closed = told[0]
        self._run = RunId(run_id, self._run.config_fingerprint, self._run.plan_fingerprint)
        self.load_state_dict(state)
        self.epoch = epoch + 1
        self.job.rejoin(incarnation, recovery.epoch)
        if recovery.lost:
            self._make_workers(self._make_tracker(), Chain(), self._make_controller(), time.monotonic())
        else:
            self._make_workers(self._cycle.saves.tracker, Chain(), self._controller, self._started)
        self._cycle.closed = closed
        failed = sorted({spec.owner for spec in lost} | set(decision.lost))
        at = Progress(decision.step, self.samples)
        recovered = self._restorer.recover_lost(trainer, failed, at, self.epoch, self.ledger)
        phases = {f"{phase}_s": round(seconds, 6) for phase, seconds in recovery.seconds.items()}
        self._recovered(recovered, failed, at, {"replaced": True, "error": recovery.error, **phases})

    def on_recovered(self, recovery: Recovery, lost: Sequence[ShardSpec]) -> None:
        """All stand together again (`live.RecoveryHook`)."""
        if self.job.rank == 0:
            seconds = {f"{phase}_s": round(value, 6) for phase, value in recovery.seconds.items()}
            self._emit("rejoined", epoch=self.epoch, step=recovery.decision.step, **seconds)

    def _recovered(self, recovered: Recovered, failed: list[int], at: Progress, more: dict[str, Any]) -> None:
        self.ledger = recovered.ledger
        if recovered.rewound is not None:
            self._counter.samples = recovered.rewound.samples
        self.counts["recoveries"] += 1
        self._cycle.reset(at.step if recovered.rewound is None else recovered.rewound.step, bool(recovered.rewound))
        self._controller.recovered(recovered.plan.mode, recovered.seconds, self.samples, self.pls)
        if self.job.rank == 0:
            source = next(iter(recovered.plan.sources.values()))
            log.warning(
                "%s recovery of rank %s after batch %d (%s): %d rows from %s in %.2f s, PLS %.4f",
                recovered.plan.mode, ", ".join(map(str, failed)), at.step, recovered.plan.reason, recovered.rows,
                source.name, recovered.seconds, self.pls,
            )  # fmt: skip
        self._emit(
            "recovery", mode=recovered.plan.mode, reason=recovered.plan.reason, failed=failed, step=at.step,
            epoch=self.epoch, version=next(iter(recovered.plan.sources.values())).name, bytes_read=recovered.bytes_read,
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
