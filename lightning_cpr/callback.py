"""CPRCallback: saves a job's state behind its training and brings back what a failure took.

The hooks are here. What to save or restore is decided in `policy` and `recovery.plan`; `saving.cycle` saves,
`live.coordinator` recovers; the arguments are checked in `saving.settings`, and `job.start` brings a fit to its start.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from lightning_cpr._lightning import Callback, check_trainer, pl
from lightning_cpr.errors import ConfigError, RecoveryError, UnsupportedError
from lightning_cpr.faults import FaultInjector
from lightning_cpr.job import handover, preemption
from lightning_cpr.job.job import Job
from lightning_cpr.job.run import Run
from lightning_cpr.job.samples import batches_trained, planned_samples
from lightning_cpr.job.start import Start
from lightning_cpr.job.start_checks import check_memory, check_waits
from lightning_cpr.live.account import where_lost
from lightning_cpr.live.coordinator import RecoveryCoordinator
from lightning_cpr.live.parity import ParityGuard
from lightning_cpr.policy.baseline import BaselinePolicy
from lightning_cpr.policy.ledger import Ledger
from lightning_cpr.policy.priority import Variant
from lightning_cpr.recovery.election import is_lost_peer
from lightning_cpr.recovery.live import Recovery
from lightning_cpr.recovery.parity.config import ParityConfig
from lightning_cpr.report.events import EventLog, metrics_of
from lightning_cpr.saving.controller import Bits, RecoveryChoice
from lightning_cpr.saving.cycle import SaveCycle
from lightning_cpr.saving.saver import Progress, RunId
from lightning_cpr.saving.settings import Resume, Settings
from lightning_cpr.spec import Shard, ShardSpec
from lightning_cpr.store.storage import Storage
from lightning_cpr.strategy import TorchRecStrategy

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
            the target, for ``"partial"`` no limit. Where a process died, a limit that is given restarts the job.
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
            jobs, and with the rows that survivors hand over; ``"never"``: ``root`` must not hold a run, unless
            ``ckpt_path`` points there.
        storage_options: for fsspec, e.g. credentials. Never logged, never stored.
        timeout_s: how long any wait of a save or a recovery may take; below the strategy's ``timeout``, after which the
            other ranks give up.
        max_failed_saves: after this many failed saves in a row the run ends with the first cause; training goes on
            until then, and every failure is logged and counted. The save at the end of the fit has no next one: if it
            fails, so does the fit.
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
        self._run = Run()
        self._recovery: RecoveryCoordinator | None = None
        self._parity: ParityGuard | None = None
        self._injector: FaultInjector | None = None
        self._start: Start | None = None

    @property
    def root(self) -> str:
        return self.settings.root

    @property
    def state_key(self) -> str:
        return f"CPRCallback[{self.root}]"

    @property
    def counts(self) -> dict[str, int]:
        """What is counted over the whole run (`job.run.COUNTS`)."""
        return self._run.counts

    @property
    def samples(self) -> int:
        """Samples trained so far, over all ranks."""
        return self._run.samples

    @property
    def ledger(self) -> Ledger:
        """What failures have cost."""
        return self._run.ledger

    @property
    def pls(self) -> float:
        """The portion of lost samples so far (CPR, section 4)."""
        return self._run.pls(self.job.trainer if hasattr(self, "job") else None)

    def mark_dirty(self, table: str, rows: Tensor | None = None) -> None:
        """Say that rows of a table (global numbers; None: all) were written by other means than training steps, so that
        the next delta holds them. Call it on every rank; before training starts there is no need to.

        Raises:
            ConfigError: no such table, or no such rows.
        """
        if self._at_work:
            self._cycle.saves.tracker.mark(table, rows)
            if self._parity is not None:
                self._parity.restart_after_step(f"table {table} was written by other means than steps")

    def wait_for_rows(self) -> None:
        """Return once all rows of all ranks are here: after a process was replaced, those of a large shard may come
        back from parity behind the training. Call it on every rank before you read, write or reshard tables in a hook.

        Raises:
            RecoveryError: rows will not come.
        """
        if self._parity is not None:
            self._parity.wait_for_rows()

    @property
    def _required(self) -> RecoveryCoordinator:
        assert self._recovery is not None, "before on_fit_start"
        return self._recovery

    @property
    def _at_work(self) -> bool:
        return self._recovery is not None and self._recovery.started

    @property
    def _cycle(self) -> SaveCycle:
        return self._required.cycle

    # Set-up and start

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
        first = [c for c in (self._run.counter, self._parity) if c is not None]
        others = [c for c in callbacks if c is not self and c not in first]
        if any(isinstance(c, CPRCallback) and c.settings.place == self.settings.place for c in others):
            raise ConfigError(f"two CPRCallbacks save to {self.root}: give each its own root")
        # After the other callbacks, so that what they keep of a batch is in the version of that batch; samples are
        # counted before them, so that whoever saves at a batch's end has those of that batch, and parity has it too.
        trainer.callbacks = [*first, *others, self]  # type: ignore[attr-defined]
        preemption.attach(trainer)
        # With several, each would restore versions of its own, and their runs would go on from different steps.
        self._only = not any(isinstance(c, CPRCallback) for c in others)
        self._hands_over = self.settings.recovery != "full" and self._only
        self._injector = next((c for c in others if isinstance(c, FaultInjector)), None)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The model is sharded; Lightning restores a ``ckpt_path`` after this."""
        strategy = _strategy(trainer)
        check_waits(strategy.collective_timeout, self.settings.timeout_s)
        self.job: Job = strategy.job.scoped(self.root)
        self.storage = self.job.together(lambda: Storage(self.root, self.settings.storage_options))
        self._events = EventLog(self.storage, self.job.rank)
        if self._injector is not None:
            self._injector.connect(self._events.emit, (lambda: self.job.shards) if self._only else None)
            self.storage.intercept = self._injector.intercept
        name = self._run.id.run_id or self.job.incarnation  # an earlier fit of this callback has named it
        self._run.id = self.job.together(lambda: RunId.of(self.job, name))
        self._recovery = RecoveryCoordinator(
            self.settings, self.job, self.storage, self._run, self._emit, self._injector, self._parity
        )
        self._start = Start(
            self.settings, self.job, self.storage, self._run, self._recovery, self._emit, self.state_key,
            self._hands_over,
        )  # fmt: skip
        if not self.job.alone:
            self._start.look(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Everything is restored; take up the run that it came from, or begin one."""
        if self.job.alone:
            return
        assert self._start is not None, "before on_fit_start"
        self._start.begin(trainer, _strategy(trainer).loaded_version)
        parity = 0 if self._parity is None else self._parity.memory_bytes
        check_memory(self.job, self._cycle.saves.tracker.memory_bytes, parity)

    # Training

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, idx: int) -> None:
        self._required.batch_begins()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        lost = self._injector.take_wiped() if self._injector is not None else []
        if lost:
            self._required.recover(trainer, lost, Progress(batches_trained(trainer), self.samples))
        step = batches_trained(trainer)
        self._required.batch_ended(step)
        self._cycle.do_announced(trainer, Progress(step, self.samples), self._run.epoch, self.ledger)
        if self.job.rank == 0:
            self._report_progress(step + 1)
            self._cycle.announce_next(step + 1, self._run.epoch)

    def _report_progress(self, step: int) -> None:
        now = self._cycle.now(step)
        planned = planned_samples(self.job.trainer, self.samples)
        self._required.controller.report(self.samples, now.seconds, planned)

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
            live = _strategy(trainer).live
            how = "" if live is not None and live.enabled else "; under 'lightning-cpr run' a process is replaced"
            log.error("no recovery in place %s: %s%s", *told.values(), how)
            log.error("started again, the job goes on from the newest version in %s", self.root)
            self._events.emit("stepped_down", step=batches_trained(trainer), **told)
        if self._at_work:
            self._cycle.saves.io.cancel.set()
            self._cycle.saves.close(timeout=0.0)
            if self._required.holds_all_rows and self._hands_over:
                handover.leave(trainer, self.job, self._run.id, self._run.epoch, exception)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._at_work:
            self._cycle.saves.close(self.settings.timeout_s)
            self._cycle.saves.tracker.close()

    # `live.recovery.RecoveryHook`

    def restore_shards(self, recovery: Recovery, lost: Sequence[ShardSpec], shards: Sequence[Shard]) -> None:
        """A process died and was replaced: its shards come back."""
        self._required.restore_shards(recovery, lost, _strategy(self.job.trainer).job.incarnation)

    def on_recovered(self, recovery: Recovery, lost: Sequence[ShardSpec]) -> None:
        """All stand together again."""
        self._required.on_recovered(recovery)

    # State and reporting

    def state_dict(self) -> dict[str, Any]:
        return self._run.state_dict(None) if self._recovery is None else self._recovery.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._run.load_state_dict(state_dict)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._start is not None:
            self._start.loads(trainer, checkpoint)

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


def _strategy(trainer: pl.Trainer) -> TorchRecStrategy:
    strategy = trainer.strategy
    assert isinstance(strategy, TorchRecStrategy)  # `CPRCallback.setup` has refused all others
    return strategy
