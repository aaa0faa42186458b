"""Versions of a run as the source of lost shards, or of everybody's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from lightning_cpr._lightning import pl
from lightning_cpr.checkpoint_io import Version, load_sound
from lightning_cpr.errors import CorruptShardError, CPRError, ManifestError, RecoveryError
from lightning_cpr.job.job import Job
from lightning_cpr.job.state import rewind
from lightning_cpr.live.early_read import EarlyRead
from lightning_cpr.live.losses import source_of
from lightning_cpr.recovery.plan import Mode, RecoveryPlan, plan_recovery
from lightning_cpr.saving.chain import Chain
from lightning_cpr.saving.saver import BackgroundSaves
from lightning_cpr.store.blob import rank_blob
from lightning_cpr.store.manifest import FOLDER, Consistency, Manifest, same_rows
from lightning_cpr.store.reader import read_into
from lightning_cpr.store.since import rows_since_base
from lightning_cpr.store.storage import Storage
from lightning_cpr.store.versions import load_manifest, newest
from lightning_cpr.tables.scalars import fused_scalars, load_fused_scalars

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """manifest: of the version that was read. bytes_read, rows: over all ranks."""

    plan: RecoveryPlan
    manifest: Manifest
    bytes_read: int
    rows: int


class StoreSource:
    """One rank's view of its run in storage. emit: writes an event."""

    def __init__(
        self, job: Job, storage: Storage, run_id: str, saves: BackgroundSaves, emit: Callable[..., Any]
    ) -> None:
        self._job, self._storage, self._run_id, self._saves, self._emit = job, storage, run_id, saves, emit

    def newest(self, consistency: Consistency | None = None, exclude: Sequence[str] = ()) -> Manifest | None:
        """The newest version that is whole; exclude: paths of manifests. For rank 0."""
        return newest(self._storage, consistency, self._run_id, exclude=exclude).manifest

    def bring_back(
        self, trainer: pl.Trainer, failed: Sequence[int], mode: Mode, reason: str, early: EarlyRead | None = None
    ) -> Restored:
        """Restore the shards of ``failed``, or in mode full everybody's; a version that turns out damaged is refused
        and the one before it tried. A collective.

        Nobody but the failed ranks reads a table file in mode partial. early: on a replacement, what it has begun to
        read.

        Raises:
            RecoveryError: no version serves.
        """
        refused: list[str] = []
        while True:
            plan, manifest = self._decide(failed, mode, reason, refused)
            problem, bytes_read, rows = self._restore(trainer, failed, plan, manifest, early)
            if problem is None:
                return Restored(plan, manifest, bytes_read, rows)
            log.error("version %s is refused: %s", manifest.version, problem)
            self._emit("version_refused", version=manifest.version, error=problem)
            refused.append(manifest.path)

    def _decide(
        self, failed: Sequence[int], mode: Mode, reason: str, refused: Sequence[str]
    ) -> tuple[RecoveryPlan, Manifest]:
        """Rank 0 looks for versions and decides; all take its plan."""

        def decide() -> tuple[RecoveryPlan, str]:
            manifest = self.newest("exact" if mode == "full" else None, refused)
            sources = [] if manifest is None else [source_of(manifest)]
            plan = replace(plan_recovery(dict.fromkeys(failed, sources), mode), reason=reason)
            return plan, manifest.path if manifest else ""

        plan, path = self._job.from_rank_0(decide)
        return plan, self._job.together(lambda: load_manifest(self._storage, path))

    def _restore(
        self,
        trainer: pl.Trainer,
        failed: Sequence[int],
        plan: RecoveryPlan,
        manifest: Manifest,
        early: EarlyRead | None,
    ) -> tuple[str | None, int, int]:
        """(what is wrong with the version on some rank, bytes read, rows restored): the latter over all ranks."""
        problem, bytes_read, rows = None, 0, 0
        try:
            if plan.mode == "full":
                # Both fail on all ranks or on none: they are collectives.
                rewind(trainer, load_sound(self._job, Version(self._storage, manifest)))
                self.holds(manifest)
                rows = sum(shard.spec.rows for shard in self._job.owned)
                bytes_read = sum(f.bytes for f in manifest.files) if self._job.rank == 0 else 0
            elif self._job.rank in failed:
                own = [s for s in self._job.owned if not s.spec.replicated]
                report = early.take(manifest.path) if early is not None else None
                if report is None:
                    report = read_into(self._storage, manifest, own, undefined=True)
                bytes_read, rows = report.bytes_read, report.rows
                chain = self._saves.chain
                self.holds(manifest)
                self._saves.chain = chain
        except (CorruptShardError, ManifestError) as e:
            problem = f"rank {self._job.rank}: {e}"
        except CPRError as e:
            raise RecoveryError(f"rank {self._job.rank}: {e}") from e
        everybody: list[Any] = [None] * self._job.world_size
        dist.all_gather_object(everybody, (problem, bytes_read, rows))
        problems = [p for p, _, _ in everybody if p is not None]
        return (problems[0] if problems else None), sum(b for _, b, _ in everybody), sum(r for _, _, r in everybody)

    def holds(self, manifest: Manifest) -> None:
        """This rank's shards hold this version's rows, and the next saves build on it."""
        complete = {record.spec: record.complete_step for record in manifest.shards}
        oldest = min(complete.values(), default=manifest.step)
        self._saves.tracker.restored(
            same_rows(manifest.version),
            lambda spec: rows_since_base(self._storage, manifest, spec),
            lambda spec: complete.get(spec, oldest),
        )
        same = set(manifest.tables) == set(self._job.specs.values()) and manifest.run_id == self._run_id
        kept = manifest.path.startswith(f"{FOLDER}/")  # a checkpoint of Lightning's may be removed any time
        self._saves.chain = Chain.of(manifest) if same and kept else Chain()

    def take_scalars(self, failed: Sequence[int], step: int, path: str) -> None:
        """The optimizers' scalars of tables that no survivor holds: as the version with this manifest has them, their
        step counters brought to ``step``, for every kernel steps once a batch. path: "" if there is no version.
        A collective.
        """
        mine = {} if self._job.rank in failed else fused_scalars(self._job.module, self._job.trainer.optimizers)
        everybody: list[Any] = [None] * self._job.world_size
        dist.all_gather_object(everybody, mine)
        if self._job.rank not in failed or not path:
            return
        try:
            manifest = load_manifest(self._storage, path)
            version = Version(self._storage, manifest)
            same_plan = manifest.plan_fingerprint == self._saves.run.plan_fingerprint  # this rank's tables were its own
            saved = version.blob(rank_blob(self._job.rank))["scalars"] if same_plan else version.scalars()
        except CPRError as error:  # the rows may yet come from parity, or from an older version
            log.error("rates and step counters of lost tables start anew: %s", error)
            return
        steps = step - manifest.step
        saved = {t: v | ({"iter": v["iter"] + steps} if "iter" in v else {}) for t, v in saved.items()}
        known = {table: values for theirs in everybody for table, values in theirs.items()}
        for scalars in (saved, known):  # a kernel of which a survivor holds a table goes by that
            load_fused_scalars(self._job.module, scalars, self._job.trainer.optimizers)
