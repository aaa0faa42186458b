"""CPRCallback: saves a job's state behind its training and brings back what a failure took.

The hooks are here; what to save or restore is decided in `policy` and `recovery.plan`, done in `saver` and
`restorer`.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from lightning_cpr._lightning import Callback, check_trainer, pl
from lightning_cpr.checkpoint_io import VERSION_KEY, Version, load_sound
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
from lightning_cpr.policy.due import Moment, Schedule, due
from lightning_cpr.policy.ledger import Ledger, event_to_json
from lightning_cpr.recovery.live import Recovery
from lightning_cpr.report.events import EventLog, metrics_of
from lightning_cpr.restorer import Recovered, Restorer
from lightning_cpr.saver import BackgroundSaves, Committed, Progress, RunId, SavePlan
from lightning_cpr.spec import Shard, ShardSpec
from lightning_cpr.store.save import SaveIO
from lightning_cpr.store.storage import Storage
from lightning_cpr.store.versions import fence, list_versions, load_manifest, newest
from lightning_cpr.strategy import TorchRecStrategy
from lightning_cpr.units import seconds as to_seconds

log = logging.getLogger(__name__)


class CPRCallback(Callback):
    """Add it to a Trainer with ``strategy="torchrec"``; nothing else changes.

    Args:
        root: where versions, events and parts lie: a folder or an fsspec URL (``s3://bucket/job42``).
        save_every_n_steps: save at each multiple of this many batches; or
        save_interval: save when this much time has passed since the last save: seconds, or "90s", "30min", "1h".
        recovery: ``"partial"``: only the failed ranks' shards are restored, everybody else keeps what it has;
            ``"full"``: everybody goes back to the newest exact version.
        resume: ``"auto"``: a run that is in ``root`` already goes on from its newest valid version, unless the Trainer
            is given a ``ckpt_path``; ``"never"``: ``root`` must not hold a run, unless ``ckpt_path`` points there.
        storage_options: for fsspec, e.g. credentials. Never logged, never stored.
        timeout_s: how long any wait of a save or a recovery may take.
        max_failed_saves: after this many failed saves in a row the run ends with the first cause; training goes on
            until then, and every failure is logged and counted.

    Metrics ``cpr/*`` go to the Trainer's loggers, events to ``events.jsonl`` under ``root``.

    Raises at set-up:
        UnsupportedError: the Trainer's strategy is not `TorchRecStrategy`.
        ConfigError: arguments out of range, or two callbacks with one root.
        ForeignRunError: ``root`` holds another run.
    """

    def __init__(
        self,
        root: str,
        *,
        save_every_n_steps: int | None = None,
        save_interval: float | str | None = None,
        recovery: Literal["partial", "full"] = "partial",
        resume: Literal["auto", "never"] = "auto",
        storage_options: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
        max_failed_saves: int = 3,
    ) -> None:
        super().__init__()
        if recovery not in ("partial", "full"):
            raise ConfigError(f"recovery={recovery!r}: use 'partial' or 'full'")
        if resume not in ("auto", "never"):
            raise ConfigError(f"resume={resume!r}: use 'auto' or 'never'")
        if not (timeout_s > 0 and math.isfinite(timeout_s)) or max_failed_saves < 1:
            raise ConfigError(f"timeout_s={timeout_s}, max_failed_saves={max_failed_saves}: above 0, and 1 or more")
        if save_every_n_steps is None and save_interval is None:
            save_interval = "30min"
        interval = None if save_interval is None else to_seconds(save_interval)
        self.schedule = Schedule(steps=save_every_n_steps, seconds=interval)
        self.root = root.rstrip("/")
        self.recovery = recovery
        self.resume = resume
        self.storage_options = storage_options
        self.timeout_s = timeout_s
        self.max_failed_saves = max_failed_saves
        self.samples = 0
        self.counts = {"commits": 0, "skipped": 0, "failed": 0, "recoveries": 0}
        self.ledger = Ledger(0)
        self._injector: FaultInjector | None = None
        self._foreign = ""
        self._own_run: str | None = None
        self._closed: Moment | None = None
        self._saved_step = -1
        self._started = time.monotonic()

    @property
    def state_key(self) -> str:
        return f"CPRCallback[{self.root}]"

    @property
    def pls(self) -> float:
        """The portion of lost samples so far (CPR, section 4)."""
        return self.ledger.pls(self._total_samples())

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
        # After the other callbacks, so that what they keep of a batch is in the version of that batch.
        trainer.callbacks = [*others, self]  # type: ignore[attr-defined]
        self._injector = next((c for c in others if isinstance(c, FaultInjector)), None)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The model is sharded; Lightning restores a ``ckpt_path`` after this."""
        strategy = trainer.strategy
        assert isinstance(strategy, TorchRecStrategy)
        self.job: Job = strategy.job
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
        log.info("resuming from %s, step %d", version.name, version.manifest.step)
        checkpoint = load_sound(self.job, version)
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
        same_root = loaded is not None and loaded.storage.root == self.storage.root
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
        self._make_workers()
        step = _step(trainer)
        self._started = time.monotonic()
        for path in (loaded.refused or ()) if loaded is not None and same_root else ():
            self._emit("version_refused", version=path, error="damaged")
        self._emit(
            "run_started", run_id=self._run.run_id, epoch=self.epoch, step=step, world_size=job.world_size,
            samples=self.samples, total_elements=self.ledger.total_elements,
            resumed_from=loaded.name if loaded is not None else None,
        )  # fmt: skip
        if same_root:
            assert loaded is not None
            self._saved_step, self._closed = loaded.manifest.step, Moment(step, 0.0)
        else:
            # At once, so that there is a version to recover from before the first interval is over.
            self._start_save(trainer, SavePlan(step, f"{job.incarnation}-{step}"))

    def _make_workers(self) -> None:
        kv = self.job.kv
        io = SaveIO(self.storage, kv, epoch=lambda: int(kv.get("epoch")), points=self._point, timeout_s=self.timeout_s)
        self._saves = BackgroundSaves(self.job, self._run, io)
        self._restorer = Restorer(self.job, self.storage, self._run.run_id, self._saves, self.timeout_s, self._emit)

    def _point(self, point: str, step: int) -> None:
        if self._injector is not None:
            self._injector.at_point(point, step)

    # Training

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = _step(trainer)
        self.samples += _batch_size(batch) * self.job.world_size
        lost = self._injector.take_wiped() if self._injector is not None else []
        if lost:
            self._recover(trainer, lost, Progress(step, self.samples))
            step = _step(trainer)
        self._take_outcome(self._saves.poll())
        plan = self._saves.announced(step)
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
            self._saves.announce(SavePlan(step, "", stop=cause))
            return
        now = Moment(step, time.monotonic() - self._started)
        if due(self.schedule, now, self._closed) is None:
            return
        if self._saves.busy:
            self._closed = now
            self.counts["skipped"] += 1
            self._emit("save_skipped", step=step, skipped=self.counts["skipped"])
        else:
            self._saves.announce(SavePlan(step, f"{self.job.incarnation}-{step}-{self.counts['commits']}"))

    def _start_save(self, trainer: pl.Trainer, plan: SavePlan) -> None:
        step = _step(trainer)
        at = Progress(step, self.samples)
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        stall = self._saves.start(plan, at, checkpoint, self.ledger.to_json())
        self._saved_step = step
        self._closed = Moment(step, time.monotonic() - self._started)
        self._emit("save_started", step=step, kind=plan.kind, consistency=plan.consistency, stall_s=round(stall, 6))

    def _take_outcome(self, outcome: Committed | CPRError | None) -> None:
        if isinstance(outcome, Committed):
            self.counts["commits"] += 1
            manifest = outcome.manifest
            if manifest is not None:
                self._emit(
                    "save_committed", step=manifest.step, epoch=manifest.epoch, version=manifest.version,
                    kind=manifest.kind, consistency=manifest.consistency, samples=manifest.samples,
                    bytes=sum(f.bytes for f in manifest.stored if f"/{manifest.version}/" in f.path),
                    seconds=round(outcome.report.seconds, 6), stall_s=round(outcome.stall_s, 6),
                )  # fmt: skip
        elif outcome is not None:
            self.counts["failed"] += 1
            log.error("a save failed, training goes on: %s", outcome)
            self._emit("save_failed", error=str(outcome).partition("\n")[0], failed=self.counts["failed"])

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Flush: the last state is saved, and committed, before fit returns."""
        self._take_outcome(self._saves.poll(self.timeout_s) if self._saves.busy else None)
        step = _step(trainer)
        if step != self._saved_step and not trainer.interrupted:
            nonce = self.job.broadcast(secrets.token_hex(4))
            self._start_save(trainer, SavePlan(step, f"{self.job.incarnation}-{nonce}"))
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

    # Recovery

    def _recover(self, trainer: pl.Trainer, failed: list[int], at: Progress) -> None:
        self.epoch += 1
        recovered = self._restorer.recover(trainer, failed, at, self.epoch, self.recovery, self.ledger)
        self._recovered(recovered, failed, at, {})

    def restore_shards(self, recovery: Recovery, lost: Sequence[ShardSpec], shards: Sequence[Shard]) -> None:
        """A process died and was replaced (`live.RecoveryHook`): its shards come back from the newest version."""
        trainer, decision = self.job.trainer, recovery.decision
        if self.recovery == "full":
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
        self._make_workers()
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
            self._closed = Moment(recovered.rewound.step, time.monotonic() - self._started)
        self.counts["recoveries"] += 1
        self._saved_step = -1
        self._emit(
            "recovery", mode=recovered.plan.mode, reason=recovered.plan.reason, failed=failed, step=at.step,
            epoch=self.epoch, version=next(iter(recovered.plan.sources.values())).name, bytes_read=recovered.bytes_read,
            rows=recovered.rows, seconds=round(recovered.seconds, 6), pls=self.pls,
            total_samples=self._total_samples(), ledger=event_to_json(recovered.event), **more,
        )  # fmt: skip

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
        return {"samples": self.samples, "ledger": self.ledger.to_json(), "counts": dict(self.counts)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.samples = state_dict["samples"]
        self.ledger = Ledger.from_json(state_dict["ledger"])
        self.counts = dict(state_dict["counts"])

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
