"""CPRCallback: saves a job's state behind its training and brings back what a failure took.

The hooks are here; what to save or restore is decided in `policy` and `recovery.plan`, done in `saver` and
`restorer`.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch import Tensor

from lightning_cpr._lightning import Callback, check_trainer, pl, rank_zero_info
from lightning_cpr.chain import Chain, next_content
from lightning_cpr.checkpoint_io import VERSION_KEY, Version, load_sound
from lightning_cpr.controller import Bits, Controller, Fixed, RecoveryChoice
from lightning_cpr.errors import (
    CommitError,
    ConfigError,
    CPRError,
    ForeignRunError,
    RecoveryError,
    UnsupportedError,
)
from lightning_cpr.faults import FaultInjector
from lightning_cpr.job import Job
from lightning_cpr.loader import restart_warning
from lightning_cpr.policy import check
from lightning_cpr.policy.baseline import POLICIES, BaselinePolicy
from lightning_cpr.policy.due import Due, Moment, Schedule, due
from lightning_cpr.policy.ledger import Ledger, event_to_json
from lightning_cpr.policy.priority import VARIANTS, PriorityConfig, Variant, choose_variant, select_tables
from lightning_cpr.policy.setting import Mtbf, Setting
from lightning_cpr.recovery.live import Recovery
from lightning_cpr.recovery.plan import Mode
from lightning_cpr.report.events import EventLog, metrics_of
from lightning_cpr.restorer import Recovered, Restorer
from lightning_cpr.saver import BITS, BackgroundSaves, Committed, Progress, RunId, SavePlan
from lightning_cpr.spec import Shard, ShardSpec
from lightning_cpr.store.manifest import FOLDER
from lightning_cpr.store.retention import Rules
from lightning_cpr.store.save import SaveIO
from lightning_cpr.store.storage import Storage
from lightning_cpr.store.versions import fence, list_versions, load_manifest, newest
from lightning_cpr.strategy import TorchRecStrategy
from lightning_cpr.tables.tracker import RowTracker
from lightning_cpr.units import seconds as to_seconds

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
        resume: Literal["auto", "never"] = "auto",
        storage_options: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
        max_failed_saves: int = 3,
    ) -> None:
        super().__init__()
        check.one_of("recovery", recovery, get_args(RecoveryChoice))
        check.one_of("incremental", incremental, POLICIES)
        check.one_of("priority", priority, (*VARIANTS, "auto"))
        check.one_of("resume", resume, ("auto", "never"))
        if not isinstance(root, str | os.PathLike) or not os.fspath(root):
            raise ConfigError(f"root={root!r}: a folder or an fsspec URL is needed")
        if save_every_n_steps is not None and save_interval is not None:
            raise ConfigError(f"{save_every_n_steps=}, {save_interval=}: set one of them, or none for the planner's")
        if save_every_n_steps is not None:
            check.count("save_every_n_steps", save_every_n_steps)
        check.share("target_pls", target_pls)
        check.share("ratio", ratio)
        if bits not in (*BITS, "auto"):
            raise ConfigError(f"bits={bits!r}: must be one of {', '.join(map(repr, BITS))}, 'auto'")
        if max_pls is not None:
            check.share("max_pls", max_pls)
            if max_pls < target_pls:
                raise ConfigError(f"max_pls={max_pls}: must be at least target_pls={target_pls}")
        if not (timeout_s > 0 and math.isfinite(timeout_s)) or max_failed_saves < 1:
            raise ConfigError(f"timeout_s={timeout_s}, max_failed_saves={max_failed_saves}: above 0, and 1 or more")
        planned = save_every_n_steps is None and save_interval is None
        if priority == "auto" and not planned:
            priority = "vanilla"
        schedule = None
        if not planned:
            seconds = None if save_interval is None else to_seconds(save_interval)
            if seconds is not None:
                check.positive("save_interval", seconds)
            schedule = Schedule(save_every_n_steps, seconds, 1.0 if priority == "vanilla" else ratio)
        self._fixed = Fixed(schedule, recovery, bits, max_pls)
        self.root = os.fspath(root).rstrip("/") or "/"
        self.target_pls = target_pls
        self.mtbf = Mtbf() if mtbf is None else Mtbf(to_seconds(mtbf), None)
        self.incremental = incremental
        self.priority = priority
        self.ratio = ratio
        self.priority_tables = priority_tables
        self.exact_close = exact_close
        self.resume = resume
        self.storage_options = storage_options
        self._keep = None if keep_last is None else Rules(last=keep_last)
        self.timeout_s = timeout_s
        self.max_failed_saves = max_failed_saves
        self.samples = 0
        self.counts = {"commits": 0, "skipped": 0, "failed": 0, "recoveries": 0, "hooks_lost": 0}
        self.ledger = Ledger(0)
        self._injector: FaultInjector | None = None
        self._foreign = ""
        self._own_run: str | None = None
        self._closed: Moment | None = None
        self._prioritised: Moment | None = None
        self._saved_step = -1
        self._started = time.monotonic()
        self._cycle_stall = 0.0
        self._planner_state: Any = None

    @property
    def state_key(self) -> str:
        return f"CPRCallback[{self.root}]"

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
        if hasattr(self, "_saves"):
            self._saves.tracker.mark(table, rows)

    # Set-up and resume

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        check_trainer(trainer)
        if not isinstance(trainer.strategy, TorchRecStrategy):
            raise UnsupportedError(
                f"CPRCallback needs every rank to save, and {type(trainer.strategy).__name__} saves on rank 0 only, so"
                ' that the other ranks\' tables would be missing. Use Trainer(strategy="torchrec").'
            )
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        others = [c for c in callbacks if c is not self]
        if any(isinstance(c, CPRCallback) and c.root == self.root for c in others):
            raise ConfigError(f"two CPRCallbacks save to {self.root}: give each its own root")
        # After the other callbacks, so that what they keep of a batch is in the version of that batch; samples are
        # counted before them, so that whoever saves at a batch's end has those of that batch.
        others = [c for c in others if not (isinstance(c, _Count) and c.owner is self)]
        trainer.callbacks = [_Count(self), *others, self]  # type: ignore[attr-defined]
        self._injector = next((c for c in others if isinstance(c, FaultInjector)), None)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The model is sharded; Lightning restores a ``ckpt_path`` after this."""
        strategy = trainer.strategy
        assert isinstance(strategy, TorchRecStrategy)
        self.job: Job = strategy.job.scoped(self.root)
        self.storage = self.job.together(lambda: Storage(self.root, self.storage_options))
        self._events = EventLog(self.storage, self.job.rank)
        if self._injector is not None:
            self._injector.connect(self._events.emit, lambda: self.job.shards)
            self.storage.intercept = self._injector.intercept
        self._run = self.job.together(lambda: RunId.of(self.job, self.job.incarnation))
        if self.job.alone:
            return
        path, self._own_run, self._foreign = self.job.from_rank_0(self._find_run)
        if path is not None:
            self._resume(trainer, path)

    def _find_run(self) -> tuple[str | None, str | None, str]:
        """(manifest to resume from, the run to go on with, why the root may not be used)."""
        found = newest(self.storage)
        manifest = found.manifest
        if manifest is None:
            return None, None, "" if not found.skipped else found.why
        if self.resume == "never":
            return None, None, f"it holds run {manifest.run_id} at step {manifest.step}, and resume='never'"
        for what in ("config", "plan"):
            if getattr(manifest, f"{what}_fingerprint") != getattr(self._run, f"{what}_fingerprint"):
                model = "other tables or another model" if what == "config" else "another sharding plan or world size"
                return None, None, f"its run {manifest.run_id} has {model} than this job"
        return manifest.path, manifest.run_id, ""

    def _resume(self, trainer: pl.Trainer, path: str) -> None:
        version = self.job.together(lambda: Version(self.storage, load_manifest(self.storage, path), refused=()))
        checkpoint = load_sound(self.job, version)
        version = checkpoint[VERSION_KEY]
        rank_zero_info(f"CPRCallback resumes from {version.name}, step {version.manifest.step}")
        self._rename_state(trainer, checkpoint)
        connector = trainer._checkpoint_connector
        other = connector._loaded_checkpoint.get(VERSION_KEY)
        if other is None or other.manifest.step < checkpoint[VERSION_KEY].manifest.step:
            # Lightning restores from this, as it does for a ckpt_path; one that the user gave replaces it.
            connector._loaded_checkpoint = checkpoint

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Everything is restored; take up the run that it came from, or begin one."""
        if self.job.alone:
            return
        strategy = trainer.strategy
        assert isinstance(strategy, TorchRecStrategy)
        job, loaded = self.job, strategy.loaded_version
        # A checkpoint of Lightning's that lies there is none of the root's versions.
        same_root = (
            loaded is not None
            and loaded.storage.root == self.storage.root
            and loaded.manifest.path.startswith(f"{FOLDER}/")
        )
        # Where a ckpt_path from elsewhere was loaded, the root's own run goes on with that: a root holds one run.
        run_id = loaded.manifest.run_id if same_root and loaded is not None else self._own_run
        if run_id is not None:
            self._run = RunId(run_id, self._run.config_fingerprint, self._run.plan_fingerprint)
            self.epoch = job.from_rank_0(lambda: list_versions(self.storage, run_id)[0].epoch) + 1
        elif self._foreign:
            raise ForeignRunError(
                f"{self.root} cannot be used: {self._foreign}. Resume that run with"
                f" trainer.fit(..., ckpt_path={self.root!r}), which reshards where it must, or choose an empty root."
            )
        else:
            self.epoch = 0
        if not self.ledger.total_elements:
            self.ledger = Ledger(sum(s.elements for s in job.plan if not s.replicated))
        if job.rank == 0:
            job.kv.set("epoch", str(self.epoch))
            if self.epoch:
                fence(self.storage, self._run.run_id, self.epoch)
        trainer.strategy.barrier("CPRCallback.on_train_start")
        self._controller = Controller(self._fixed, self._setting(), self._emit, self.counts["recoveries"])
        self._controller.restore(self._planner_state)
        self._make_workers(self._make_tracker(), Chain())
        step = _step(trainer)
        self._started = time.monotonic()
        self._controller.trained(self.samples, 0.0, None)
        for path in (loaded.refused or ()) if loaded is not None and same_root else ():
            self._emit("version_refused", version=path, error="damaged")
        self._emit(
            "run_started", run_id=self._run.run_id, epoch=self.epoch, step=step, world_size=job.world_size,
            samples=self.samples, total_elements=self.ledger.total_elements,
            resumed_from=loaded.name if loaded is not None else None,
        )  # fmt: skip
        if same_root:
            assert loaded is not None
            job.together(lambda: self._restorer.holds(loaded.manifest))
            self._saved_step, self._closed = loaded.manifest.step, Moment(step, 0.0)
        if not same_root or self._left_behind(loaded):
            # At once, so that there is a version to recover from before the first interval is over.
            self._start_save(trainer, SavePlan(step, f"{job.incarnation}-{step}", bits=job.broadcast(self._bits(True))))
        if same_root and self._saves.busy:
            # Until it stands, the newest version is one of the future that this run has turned away from.
            self._take_outcome(self._saves.poll(self.timeout_s))

    def _left_behind(self, loaded: Version | None) -> bool:
        """Whether the root has newer exact versions than the one that was loaded: the user went back by name."""

        def newer() -> bool:
            found = newest(self.storage, run_id=self._run.run_id).manifest
            return found is None or loaded is None or found.version != loaded.manifest.version

        return self.job.from_rank_0(newer)

    def _setting(self) -> Setting:
        """What the planner is told of this job."""
        job = self.job
        nodes = job.trainer.num_nodes
        each = job.world_size // nodes
        hosts = tuple(tuple(range(n * each, (n + 1) * each)) for n in range(nodes)) if nodes > 1 else ()
        return Setting(
            owners=tuple(float(job.sharded_elements(rank)) for rank in range(job.world_size)),
            target_pls=self.target_pls,
            hosts=hosts,
            mtbf=self.mtbf,
            max_pls=self._fixed.max_pls,
            ratio=1.0 if self.priority == "vanilla" else self.ratio,
            row_bytes=tuple(
                (spec.rows, spec.cols * spec.dtype.itemsize) for spec in job.specs.values() if spec.row_sparse
            ),
        )

    def _make_tracker(self) -> RowTracker:
        job, config = self.job, None
        tables = select_tables([spec for spec in job.specs.values() if spec.row_sparse])
        if self.priority_tables is not None:
            names = {fqn.rpartition(".")[2]: fqn for fqn in job.specs}
            tables = select_tables(list(job.specs.values()), names=[names.get(n, n) for n in self.priority_tables])
        if self.priority != "vanilla":
            variant = self.priority
            if variant == "auto":
                variant = choose_variant(self._setting().row_bytes)
            config = PriorityConfig(variant, self.ratio)
        return RowTracker(
            job.module, job.owned, job.specs, priority=config, tables=tables, count=self._injector is not None
        )

    def _make_workers(self, tracker: RowTracker, chain: Chain) -> None:
        kv = self.job.kv
        io = SaveIO(self.storage, kv, epoch=lambda: int(kv.get("epoch")), points=self._point, timeout_s=self.timeout_s)
        self._saves = BackgroundSaves(self.job, self._run, io, tracker, chain, self._keep)
        self._restorer = Restorer(
            self.job, self.storage, self._run.run_id, self._saves, self.timeout_s, self._emit, self._take_outcome
        )

    def _point(self, point: str, step: int) -> None:
        if self._injector is not None:
            self._injector.at_point(point, step)

    # Training

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = _step(trainer)
        lost = self._injector.take_wiped() if self._injector is not None else []
        if lost:
            self._recover(trainer, lost, Progress(step, self.samples))
            step = _step(trainer)
        self._take_outcome(self._saves.poll())
        plan = self._saves.announced(step, self.epoch)
        if plan is not None and plan.stop:
            raise CommitError(plan.stop)
        if plan is not None:
            if self._saves.busy:
                # Rank 0 saw its save committed before it announced this one; this rank's thread needs an instant more.
                self._take_outcome(self._saves.poll(self.timeout_s))
            self._start_save(trainer, plan)
        if self.job.rank == 0:
            self._announce_next(step + 1)

    def _announce_next(self, step: int) -> None:
        """Rank 0: what all do at the end of the next batch."""
        if self._saves.failed_in_a_row >= self.max_failed_saves:
            cause = f"{self._saves.failed_in_a_row} saves in a row failed, the first with: {self._saves.first_failure}"
            self._saves.announce(SavePlan(step, "", stop=cause), self.epoch)
            return
        now = Moment(step, time.monotonic() - self._started)
        self._controller.report(self.samples, now.seconds, self._planned_samples())
        what = due(self._controller.schedule, now, self._closed, self._prioritised)
        if what is None:
            return
        if self._saves.busy:
            self._note(what, now)
            self.counts["skipped"] += 1
            self._emit("save_skipped", step=step, due=what, skipped=self.counts["skipped"])
        else:
            nonce = f"{self.job.incarnation}-{step}-{self.counts['commits']}"
            self._saves.announce(self._plan(step, nonce, what), self.epoch)

    def _plan(self, step: int, nonce: str, what: Due) -> SavePlan:
        """Rank 0: what a save of this step holds. After two failures in a row it builds on nothing that may be gone."""
        chain = self._saves.chain
        content = next_content(chain, what, self.incremental, self.exact_close, self._saves.failed_in_a_row >= 2)
        return SavePlan(step, nonce, content, chain.version, self._bits(content.kind == "base"))

    def _bits(self, base: bool) -> int | None:
        return self._controller.bits(base) if self.job.rank == 0 else None

    def _note(self, what: Due, at: Moment) -> None:
        if what == "priority":
            self._prioritised = at
        else:
            self._closed = at

    def _start_save(self, trainer: pl.Trainer, plan: SavePlan) -> None:
        step, tracker = _step(trainer), self._saves.tracker
        at = Progress(step, self.samples)
        lost = tracker.hooks_lost()
        if lost:
            self.job.refresh()
            tracker.settle(plan.committed)
            tracker.adopt(self.job.owned)
            self.counts["hooks_lost"] += 1
            log.warning("the lookups of %s were replaced: all rows count as changed", ", ".join(lost))
            self._emit("hooks_lost", step=step, tables=lost, hooks_lost=self.counts["hooks_lost"])
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        planner = self._controller.state.to_json() if self.job.rank == 0 else None
        stall = self._saves.start(plan, at, checkpoint, planner, self.ledger.to_json())
        content = plan.content
        if content.consistency == "exact" or not self.exact_close:
            self._saved_step = step
        self._note("priority" if content.rows == "priority" and self.exact_close else "close", self._now(step))
        self._cycle_stall += stall
        self._controller.stood_still(stall)
        self._emit(
            "save_started", step=step, kind=content.kind, consistency=content.consistency, rows=content.rows,
            bits=plan.bits, stall_s=round(stall, 6),
        )  # fmt: skip

    def _now(self, step: int) -> Moment:
        return Moment(step, time.monotonic() - self._started)

    def _take_outcome(self, outcome: Committed | CPRError | None) -> None:
        if isinstance(outcome, Committed):
            self.counts["commits"] += 1
            manifest = outcome.manifest
            if manifest is not None:
                self._emit(
                    "save_committed", step=manifest.step, epoch=manifest.epoch, version=manifest.version,
                    kind=manifest.kind, consistency=manifest.consistency, samples=manifest.samples,
                    bytes=sum(f.bytes for f in manifest.stored if f"/{manifest.version}/" in f.path),
                    rows=sum(f.rows for f in manifest.files if f"/{manifest.version}/" in f.path),
                    raw_rows=outcome.report.part.raw_rows, seconds=round(outcome.report.seconds, 6),
                )  # fmt: skip
                if manifest.consistency == "exact":
                    self._controller.saved(self._cycle_stall)
                    self._cycle_stall = 0.0
        elif outcome is not None:
            self.counts["failed"] += 1
            self._saved_step = -1
            log.error("a save failed, training goes on: %s", outcome)
            self._emit("save_failed", error=str(outcome).partition("\n")[0], failed=self.counts["failed"])

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Flush: the last state is saved, and committed, before fit returns."""
        self._take_outcome(self._saves.poll(self.timeout_s) if self._saves.busy else None)
        step = _step(trainer)
        # By rank 0's word: of a failed commit the others may know or not.
        if not trainer.interrupted and self.job.broadcast(step != self._saved_step):
            nonce = f"{self.job.incarnation}-{secrets.token_hex(4)}"
            self._start_save(trainer, self.job.from_rank_0(lambda: self._plan(step, nonce, "close")))
            # The save gives up by itself after as long; a moment more, so that its own error is seen.
            outcome = self._saves.poll(self.timeout_s + 1)
            self._take_outcome(outcome)
            if outcome is None:
                raise CommitError(f"the last save, of step {step}, has not ended after {self.timeout_s:g} s")
            if isinstance(outcome, CPRError):
                raise outcome
        self._emit("run_ended", step=step, samples=self.samples, pls=self.pls)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if hasattr(self, "_saves"):
            self._saves.io.cancel.set()
            self._saves.close(timeout=0.0)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if hasattr(self, "_saves"):
            self._saves.close(self.timeout_s)
            self._saves.tracker.close()

    # Recovery

    def _recover(self, trainer: pl.Trainer, failed: list[int], at: Progress) -> None:
        self.epoch += 1
        recovered = self._restorer.recover(trainer, failed, at, self.epoch, self._choose, self.ledger)
        self._recovered(recovered, failed, at, {})

    def restore_shards(self, recovery: Recovery, lost: Sequence[ShardSpec], shards: Sequence[Shard]) -> None:
        """A process died and was replaced (`live.RecoveryHook`): its shards come back from the newest version."""
        trainer, decision = self.job.trainer, recovery.decision
        if self._fixed.recovery == "full":
            raise RecoveryError("CPRCallback(recovery='full'): everybody goes back, by a restart of the job")
        if not recovery.lost:
            self._saves.abandon(self.timeout_s)
        # What the donor knows of the run; a replacement knows nothing, be it rank 0.
        told: list[Any] = [None]
        if self.job.rank == decision.donor:
            told = [(self._run.run_id, self.epoch, self.job.incarnation, self.state_dict(), self._closed)]
        dist.broadcast_object_list(told, src=decision.donor)
        run_id, epoch, incarnation, state, closed = told[0]
        self._run = RunId(run_id, self._run.config_fingerprint, self._run.plan_fingerprint)
        self.load_state_dict(state)
        self._closed, self.epoch = closed, epoch + 1
        self.job.rejoin(incarnation, recovery.epoch)
        if recovery.lost:
            self._controller = Controller(self._fixed, self._setting(), self._emit, self.counts["recoveries"])
            self._controller.restore(self._planner_state)
        self._make_workers(self._make_tracker() if recovery.lost else self._saves.tracker, Chain())
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
            self.samples = recovered.rewound.samples
            self._closed = self._prioritised = self._now(recovered.rewound.step)
        self.counts["recoveries"] += 1
        self._saved_step = -1
        self._cycle_stall = 0.0
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
        self._controller.trained(self.samples, self._now(0).seconds, self._planned_samples())
        loader = self.job.trainer.fit_loop._combined_loader
        assert loader is not None
        replays = restart_warning(loader.flattened, batches=1) is None
        return self._controller.choose(failed, after.pls(self._total_samples()), lost_samples, replays)

    def _planned_samples(self) -> int | None:
        """Samples of the whole run; None where the Trainer does not know when it ends."""
        trainer = self.job.trainer
        epochs_end = trainer.max_epochs not in (None, -1) and not math.isinf(trainer.fit_loop.max_batches)
        return self._total_samples() or None if trainer.max_steps != -1 or epochs_end else None

    def _total_samples(self) -> int:
        """Samples of the whole run, from what the Trainer expects; a stream without an end: those so far."""
        trainer = getattr(self, "job", None) and self.job.trainer
        step = 0 if trainer is None else _step(trainer)
        if trainer is None or step == 0:
            return self.samples
        loop = trainer.fit_loop
        batches = math.inf
        if trainer.max_steps != -1:
            batches = trainer.max_steps * trainer.accumulate_grad_batches
        if trainer.max_epochs not in (None, -1):
            batches = min(batches, trainer.max_epochs * loop.max_batches)
        return self.samples if math.isinf(batches) else max(self.samples, round(batches * self.samples / step))

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
        self.samples = state_dict["samples"]
        self.ledger = Ledger.from_json(state_dict["ledger"])
        # A rewind brings back the state of an earlier step, which does not undo what has happened since.
        self.counts |= {name: max(count, self.counts.get(name, 0)) for name, count in state_dict["counts"].items()}
        self._planner_state = state_dict.get("planner")

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if hasattr(self, "storage"):
            self._rename_state(trainer, checkpoint)

    def _rename_state(self, trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
        """Find this callback's state in a version of its root that was saved when the root had another name."""
        version, states = checkpoint.get(VERSION_KEY), checkpoint.get("callbacks") or {}
        if version is None or version.storage.root != self.storage.root or self.state_key in states:
            return
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        known = {callback.state_key for callback in callbacks}
        other = [key for key in states if key.startswith("CPRCallback[") and key not in known]
        if len(other) == 1:
            states[self.state_key] = states.pop(other[0])

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


class _Count(Callback):
    """Counts the samples of its owner."""

    def __init__(self, owner: CPRCallback) -> None:
        self.owner = owner

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.owner.samples += _batch_size(batch) * trainer.world_size


def _step(trainer: pl.Trainer) -> int:
    """Batches trained so far, over all epochs."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.processed  # type: ignore[attr-defined]


def _batch_size(batch: Any) -> int:
    """Samples in a rank's batch: the length of the first tensor in it."""
    if isinstance(batch, Tensor):
        return int(batch.shape[0]) if batch.dim() else 1
    if hasattr(batch, "stride") and callable(batch.stride):
        return int(batch.stride())  # a KeyedJaggedTensor
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else None
    if parts is None:
        parts = vars(batch).values() if hasattr(batch, "__dict__") else ()
    sized = (p for p in parts if isinstance(p, Tensor | Mapping | list | tuple) or hasattr(p, "stride"))
    first = next(iter(sized), None)
    return 1 if first is None else _batch_size(first)
