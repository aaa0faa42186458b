"""Brings back what a failure took from a job whose processes all live: the doing of a `RecoveryPlan`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

import torch.distributed as dist

from lightning_cpr._lightning import pl
from lightning_cpr.checkpoint_io import Version, load_sound
from lightning_cpr.errors import CorruptShardError, CPRError, ManifestError, RecoveryError, StorageError
from lightning_cpr.job.job import Job
from lightning_cpr.job.state import rewind
from lightning_cpr.live.early_read import EarlyRead
from lightning_cpr.policy.ledger import Event, Ledger, charge
from lightning_cpr.policy.ledger import rewind as rewind_ledger
from lightning_cpr.recovery.election import LostPeerError
from lightning_cpr.recovery.plan import Mode, RecoveryPlan, RewindError, Source, plan_recovery
from lightning_cpr.saving.chain import Chain, samples_at
from lightning_cpr.saving.saver import BackgroundSaves, Committed, Progress
from lightning_cpr.saving.update_counts import Lost
from lightning_cpr.store.blob import rank_blob
from lightning_cpr.store.manifest import FOLDER, Consistency, Manifest, same_rows
from lightning_cpr.store.reader import read_into
from lightning_cpr.store.since import rows_since_base
from lightning_cpr.store.storage import Storage
from lightning_cpr.store.versions import fence, load_manifest, newest
from lightning_cpr.tables.scalars import fused_scalars, load_fused_scalars

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recovered:
    """What a recovery did. ``event`` is the ledger's; ``rewound``: where a full recovery went back to. lost_updates:
    row updates that are gone, None if unknown; an estimate unless ``lost_exact``. bytes_read: None: not counted.
    """

    plan: RecoveryPlan
    ledger: Ledger
    event: Event
    rewound: Progress | None
    bytes_read: int | None
    rows: int
    seconds: float
    lost_updates: int | None
    lost_exact: bool


class ParitySource(Protocol):
    """Parity in memory, as a source of lost shards. Both calls are collective."""

    def offer(self, failed: Sequence[int]) -> Source | None:
        """What the failed ranks' shards could come back to."""

    def bring_back(self, failed: Sequence[int]) -> tuple[int, int]:
        """Bring them back: (rows, bytes) of this rank. Raises RecoveryError, on all ranks, if that cannot be."""


Choose = Callable[[Sequence[int], Ledger, int], tuple[Mode, str]]
"""``choose(failed, ledger if partial, samples since the newest exact version)``: how to recover, and why. On rank 0."""


class Restorer:
    """Recovers on the training thread of every rank together.

    Nobody but the failed ranks reads a table file in a partial recovery.
    """

    def __init__(
        self,
        job: Job,
        storage: Storage,
        run_id: str,
        owner: str,
        saves: BackgroundSaves,
        timeout_s: float,
        emit: Callable[..., Any],
        committed: Callable[[Committed], None],
        parity: ParitySource | None = None,
    ) -> None:
        self._job = job
        self._storage = storage
        self._run_id, self._owner = run_id, owner
        self._saves = saves
        self._timeout_s = timeout_s
        self._emit = emit
        self._committed = committed
        self._parity = parity
        self._early: EarlyRead | None = None

    def recover(
        self, trainer: pl.Trainer, failed: list[int], at: Progress, epoch: int, choose: Choose, ledger: Ledger
    ) -> Recovered:
        """Restore the shards of ``failed``; a version that turns out damaged is refused and the one before it tried.

        Raises:
            RecoveryError: no version serves. Nothing more was changed.
        """
        started = time.monotonic()
        self._end_save_in_flight(epoch)
        before = self._job.broadcast(self._saves.chain)
        lost, exact = self._lost_updates(failed, before.version)
        recovered = self._from_parity(failed, at, ledger, started)
        if recovered is not None:
            return recovered
        mode, reason = self._job.from_rank_0(lambda: self._mode(failed, at, choose, ledger))
        counted = (lost, exact)
        return self._bring_back(trainer, failed, at, before, (mode, reason), ledger, started, lambda manifest: counted)

    def recover_lost(
        self,
        trainer: pl.Trainer,
        failed: list[int],
        at: Progress,
        epoch: int,
        ledger: Ledger,
        reason: str,
        left_out: Mapping[int, int] = MappingProxyType({}),
        early: EarlyRead | None = None,
        goes_back: Callable[[Ledger], str] | None = None,
    ) -> Recovered:
        """`recover` for ranks whose processes were replaced: the old group and its saves are gone already.

        What the dead processes counted of their rows' updates is gone too: it is estimated from what they told last.
        left_out: by survivor that leaves the broken batch out, the samples up to which its shards are whole. early: on
        a replacement, what it has begun to read. goes_back: by the ledger as it would be, why everybody has to go back
        where parity cannot help, or ""; on rank 0.

        Raises:
            RecoveryError: no version serves.
            RewindError: on all ranks: everybody goes back. Nothing more was changed.
        """
        started = time.monotonic()
        self._early = early
        if self._job.rank == 0:
            self._job.kv.set("epoch", str(epoch))
        self._job.from_rank_0(lambda: self._begin_epoch(epoch))

        def newest_chain() -> tuple[Chain, str]:
            manifest = newest(self._storage, None, self._run_id).manifest
            return (Chain(), "") if manifest is None else (Chain.of(manifest), manifest.path)

        before, path = self._job.from_rank_0(newest_chain)
        self._saves.chain = before
        self._saves.tracker.settle(before.version)
        counted_from: list[Any] = [None] * self._job.world_size
        dist.all_gather_object(counted_from, self._saves.tracker.since)
        if set(counted_from) - {"", before.version}:
            # A newer version was damaged since: survivors' rows are tracked against that one, so build on nothing.
            before = self._saves.chain = Chain()
        self._take_scalars(failed, at, path)
        from_parity = self._from_parity(failed, at, ledger, started, left_out)
        if from_parity is not None:
            return from_parity
        if goes_back is not None:
            self._check_goes_back(failed, at, ledger, goes_back, left_out)
        why: tuple[Mode, str] = ("partial", reason)
        lost = [Lost(owner, ledger.last_recovery(owner)) for owner in failed]

        def estimate(manifest: Manifest) -> tuple[int | None, bool]:
            return self._job.counts.estimate(lost, manifest, at.step, at.samples), False

        return self._bring_back(trainer, failed, at, before, why, ledger, started, estimate, left_out)

    def _from_parity(
        self,
        failed: list[int],
        at: Progress,
        ledger: Ledger,
        started: float,
        left_out: Mapping[int, int] = MappingProxyType({}),
    ) -> Recovered | None:
        """The shards out of parity, if that is the freshest source and holds what it should; else nothing is settled.

        The survivors' rows, and what is known of them, stay as they are; a replacement's are all dirty.
        """
        source = None if self._parity is None else self._parity.offer(failed)
        if self._parity is None or source is None:
            return None
        whole = source.step >= at.step  # everybody stands at the exchange, which is all there is

        def decide() -> RecoveryPlan:
            manifest = None if whole else newest(self._storage, None, self._run_id).manifest
            sources = [source] if manifest is None else [source, source_of(manifest)]
            return plan_recovery(dict.fromkeys(failed, sources), "partial")

        plan = self._job.from_rank_0(decide)
        if any(chosen.kind != "parity" for chosen in plan.sources.values()):
            return None
        try:
            rows, nbytes = self._parity.bring_back(failed)
        except LostPeerError:
            raise
        except RecoveryError:  # logged and counted; the store is next
            return None
        everybody: list[Any] = [None] * self._job.world_size
        dist.all_gather_object(everybody, (rows, nbytes))
        samples = source.samples if whole else at.samples
        held = min(source.samples, samples)
        losses = {owner: (self._job.sharded_elements(owner), [held]) for owner in failed}
        behind = {owner: (self._job.sharded_elements(owner), done) for owner, done in left_out.items()}
        ledger, event = charge(ledger, samples, losses, behind)
        reason = "nothing is lost" if whole else f"the rows of step {source.step} are the newest"
        seconds = time.monotonic() - started
        read, rows = sum(b for _, b in everybody), sum(r for r, _ in everybody)
        lost = 0 if whole else None
        return Recovered(replace(plan, reason=reason), ledger, event, None, read, rows, seconds, lost, whole)

    def _bring_back(
        self,
        trainer: pl.Trainer,
        failed: list[int],
        at: Progress,
        before: Chain,
        why: tuple[Mode, str],
        ledger: Ledger,
        started: float,
        count_lost: Callable[[Manifest], tuple[int | None, bool]],
        left_out: Mapping[int, int] = MappingProxyType({}),
    ) -> Recovered:
        """``before``: the newest version that stands, which the survivors' dirty rows are counted from. count_lost: row
        updates that are gone where the failed ranks take that version, and whether that is exact.
        """
        mode, reason = why
        exact = True
        refused: list[str] = []
        while True:
            plan, manifest = self._decide(failed, mode, reason, refused)
            problem, bytes_read, rows = self._restore(trainer, failed, plan, manifest)
            if problem is None:
                break
            log.error("version %s is refused: %s", manifest.version, problem)
            self._emit("version_refused", version=manifest.version, error=problem)
            refused.append(manifest.path)
        if plan.mode == "partial" and same_rows(manifest.version) != before.version:
            # Survivors' rows are tracked against a version that this one is not: build on nothing.
            self._saves.chain, exact = Chain(), False
        rewound: Progress | None = None
        event: Event
        updates: tuple[int | None, bool] = (0, True)
        if plan.mode == "full":
            rewound = Progress(manifest.step, manifest.samples)
            ledger, event = rewind_ledger(ledger, manifest.samples)
        else:
            behind = {owner: (self._job.sharded_elements(owner), held) for owner, held in left_out.items()}
            ledger, event = charge(ledger, at.samples, self._losses(failed, manifest), behind)
            updates = count_lost(manifest)
        seconds = time.monotonic() - started
        return Recovered(plan, ledger, event, rewound, bytes_read, rows, seconds, updates[0], updates[1] and exact)

    def _take_scalars(self, failed: Sequence[int], at: Progress, path: str) -> None:
        """The optimizers' scalars of tables that no survivor holds: as the newest version has them, their step counters
        brought to ``at``, for every kernel steps once a batch. Collective.
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
        steps = at.step - manifest.step
        saved = {t: v | ({"iter": v["iter"] + steps} if "iter" in v else {}) for t, v in saved.items()}
        known = {table: values for theirs in everybody for table, values in theirs.items()}
        for scalars in (saved, known):  # a kernel of which a survivor holds a table goes by that
            load_fused_scalars(self._job.module, scalars, self._job.trainer.optimizers)

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

    def _lost_updates(self, failed: list[int], committed: str) -> tuple[int, bool]:
        """Of all failed ranks together. Ends the save in flight: its rows are as dirty as before unless it stands."""
        self._saves.tracker.settle(committed)
        everybody: list[Any] = [None] * self._job.world_size
        dist.all_gather_object(everybody, self._saves.tracker.lost_updates())
        return sum(everybody[rank][0] for rank in failed), all(everybody[rank][1] for rank in failed)

    def _end_save_in_flight(self, epoch: int) -> None:
        """A new epoch: a save whose rows may be a failed rank's does not commit, but where there is no version yet: the
        first base was staged before the failure, and there is nothing else to go back to.
        """
        first = not self._job.broadcast(self._saves.chain.version)
        outcome = self._saves.poll(self._timeout_s) if first and self._saves.busy else None
        dist.barrier()
        if self._job.rank == 0:
            self._job.kv.set("epoch", str(epoch))
        dist.barrier()
        if self._saves.busy:
            outcome = self._saves.poll(self._timeout_s)
        if isinstance(outcome, CPRError):
            # Aborted by this recovery, which is no failure of storage.
            self._saves.failed_in_a_row = 0
            self._emit("save_aborted", error=str(outcome).partition("\n")[0])
        elif outcome is not None:
            self._committed(outcome)
        self._job.from_rank_0(lambda: self._begin_epoch(epoch))

    def _begin_epoch(self, epoch: int) -> None:
        """Rank 0: fence the earlier ones off. Without room for that the recovery goes on: none of them can commit any
        more in this job's own store, and a fence is for a rank of theirs that hangs in the middle of its commit.
        """
        try:
            fence(self._storage, self._run_id, epoch, self._owner)
        except StorageError as error:
            log.error("epoch %d begins without a fence: %s", epoch, error)
            self._emit("fence_failed", epoch=epoch, error=str(error).partition("\n")[0])

    def _mode(self, failed: list[int], at: Progress, choose: Choose, ledger: Ledger) -> tuple[Mode, str]:
        found = newest(self._storage, None, self._run_id).manifest
        if found is None:
            return "partial", "there is no version"
        exact = newest(self._storage, "exact", self._run_id).manifest
        after, _ = charge(ledger, at.samples, self._losses(failed, found))
        return choose(failed, after, at.samples - (exact.samples if exact is not None else 0))

    def _check_goes_back(
        self,
        failed: list[int],
        at: Progress,
        ledger: Ledger,
        goes_back: Callable[[Ledger], str],
        left_out: Mapping[int, int],
    ) -> None:
        def why() -> str:
            found = newest(self._storage, None, self._run_id).manifest
            behind = {owner: (self._job.sharded_elements(owner), held) for owner, held in left_out.items()}
            return goes_back(
                ledger if found is None else charge(ledger, at.samples, self._losses(failed, found), behind)[0]
            )

        if reason := self._job.from_rank_0(why):
            raise RewindError(reason)

    def _decide(self, failed: list[int], mode: Mode, reason: str, refused: list[str]) -> tuple[RecoveryPlan, Manifest]:
        """Rank 0 looks for versions and decides; all take its plan."""

        def decide() -> tuple[RecoveryPlan, str]:
            consistency: Consistency | None = "exact" if mode == "full" else None
            manifest = newest(self._storage, consistency, self._run_id, exclude=refused).manifest
            sources = [] if manifest is None else [source_of(manifest)]
            plan = replace(plan_recovery(dict.fromkeys(failed, sources), mode), reason=reason)
            return plan, manifest.path if manifest else ""

        plan, path = self._job.from_rank_0(decide)
        return plan, self._job.together(lambda: load_manifest(self._storage, path))

    def _restore(
        self, trainer: pl.Trainer, failed: list[int], plan: RecoveryPlan, manifest: Manifest
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
                report = self._early.take(manifest.path) if self._early is not None else None
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

    def _losses(self, failed: list[int], manifest: Manifest) -> dict[int, tuple[int, list[int]]]:
        """By failed owner: its sharded elements, and the samples that each of its shards is complete to."""
        complete = {record.spec: record.complete_step for record in manifest.shards}
        return {
            owner: (
                self._job.sharded_elements(owner),
                [
                    samples_at(manifest, complete.get(spec, manifest.step))
                    for spec in self._job.plan
                    if spec.owner == owner and not spec.replicated
                ],
            )
            for owner in failed
        }


def source_of(manifest: Manifest) -> Source:
    """A version as a source of shards."""
    oldest = min((record.complete_step for record in manifest.shards), default=manifest.step)
    samples = samples_at(manifest, oldest)
    return Source("store", manifest.version, oldest, samples, manifest.consistency == "exact")
