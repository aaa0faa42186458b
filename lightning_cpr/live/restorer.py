"""Brings back what a failure took: from parity where that is the freshest, else from the store, and charges for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch.distributed as dist

from lightning_cpr._lightning import pl
from lightning_cpr.errors import RecoveryError
from lightning_cpr.job.job import Job
from lightning_cpr.live.early_read import EarlyRead
from lightning_cpr.live.epochs import Epochs
from lightning_cpr.live.losses import Failure, all_stand_at, charge_exchange, charge_version, source_of
from lightning_cpr.live.store_source import StoreSource
from lightning_cpr.policy.ledger import Event, Ledger
from lightning_cpr.policy.ledger import rewind as rewind_ledger
from lightning_cpr.recovery.election import LostPeerError
from lightning_cpr.recovery.plan import Mode, RecoveryPlan, RewindError, Source, plan_recovery
from lightning_cpr.saving.chain import Chain
from lightning_cpr.saving.saver import BackgroundSaves, Progress
from lightning_cpr.saving.update_counts import Lost
from lightning_cpr.store.manifest import Manifest, same_rows


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
    """Recovers on the training thread of every rank together."""

    def __init__(
        self, job: Job, saves: BackgroundSaves, store: StoreSource, epochs: Epochs, parity: ParitySource | None = None
    ) -> None:
        self._job, self._saves, self._store, self._epochs, self._parity = job, saves, store, epochs, parity

    def recover(self, trainer: pl.Trainer, failure: Failure, epoch: int, choose: Choose) -> Recovered:
        """Bring the lost shards back to ranks whose processes live.

        Raises:
            RecoveryError: no version serves. Nothing more was changed.
        """
        started = time.monotonic()
        self._epochs.begin(epoch)
        before = self._job.broadcast(self._saves.chain)
        lost = self._lost_updates(failure.ranks, before.version)
        recovered = self._from_parity(failure, started)
        if recovered is not None:
            return recovered
        why = self._job.from_rank_0(lambda: self._mode(failure, choose))
        return self._from_store(trainer, failure, before, why, started, lambda manifest: lost)

    def recover_lost(
        self,
        trainer: pl.Trainer,
        failure: Failure,
        epoch: int,
        reason: str,
        early: EarlyRead | None = None,
        goes_back: Callable[[Ledger], str] | None = None,
    ) -> Recovered:
        """`recover` for ranks whose processes were replaced: the old group and its saves are gone already.

        What the dead processes counted of their rows' updates is gone too: it is estimated from what they told last.
        early: on a replacement, what it has begun to read. goes_back: by the ledger as it would be, why everybody has
        to go back where parity cannot help, or ""; on rank 0.

        Raises:
            RecoveryError: no version serves.
            RewindError: on all ranks: everybody goes back. Nothing more was changed.
        """
        started = time.monotonic()
        at, ledger = failure.at, failure.ledger
        self._epochs.begin_in_new_group(epoch)

        def newest_chain() -> tuple[Chain, str]:
            manifest = self._store.newest()
            return (Chain(), "") if manifest is None else (Chain.of(manifest), manifest.path)

        before, path = self._job.from_rank_0(newest_chain)
        self._saves.chain = before
        self._saves.tracker.settle(before.version)
        counted_from: list[Any] = [None] * self._job.world_size
        dist.all_gather_object(counted_from, self._saves.tracker.since)
        if set(counted_from) - {"", before.version}:
            # A newer version was damaged since: survivors' rows are tracked against that one, so build on nothing.
            before = self._saves.chain = Chain()
        self._store.take_scalars(failure.ranks, at.step, path)
        from_parity = self._from_parity(failure, started)
        if from_parity is not None:
            return from_parity
        if goes_back is not None:
            self._check_goes_back(failure, goes_back)
        lost = [Lost(owner, ledger.last_recovery(owner)) for owner in failure.ranks]

        def estimate(manifest: Manifest) -> tuple[int | None, bool]:
            return self._job.counts.estimate(lost, manifest, at.step, at.samples), False

        return self._from_store(trainer, failure, before, ("partial", reason), started, estimate, early)

    def _lost_updates(self, failed: Sequence[int], committed: str) -> tuple[int, bool]:
        """Of all failed ranks together, and whether that is exact. Ends the save in flight: its rows are as dirty as
        before unless it stands.
        """
        self._saves.tracker.settle(committed)
        everybody: list[Any] = [None] * self._job.world_size
        dist.all_gather_object(everybody, self._saves.tracker.lost_updates())
        return sum(everybody[rank][0] for rank in failed), all(everybody[rank][1] for rank in failed)

    def _mode(self, failure: Failure, choose: Choose) -> tuple[Mode, str]:
        found = self._store.newest()
        if found is None:
            return "partial", "there is no version"
        exact = self._store.newest("exact")
        after, _ = charge_version(failure, self._job.plan, found)
        return choose(failure.ranks, after, failure.at.samples - (exact.samples if exact is not None else 0))

    def _check_goes_back(self, failure: Failure, goes_back: Callable[[Ledger], str]) -> None:
        def why() -> str:
            found = self._store.newest()
            return goes_back(failure.ledger if found is None else charge_version(failure, self._job.plan, found)[0])

        if reason := self._job.from_rank_0(why):
            raise RewindError(reason)

    def _from_parity(self, failure: Failure, started: float) -> Recovered | None:
        """The shards out of parity, if that is the freshest source and holds what it should; else nothing is settled.

        The survivors' rows, and what is known of them, stay as they are; a replacement's are all dirty.
        """
        source = None if self._parity is None else self._parity.offer(failure.ranks)
        if self._parity is None or source is None:
            return None
        whole = all_stand_at(source, failure)

        def decide() -> RecoveryPlan:
            manifest = None if whole else self._store.newest()
            sources = [source] if manifest is None else [source, source_of(manifest)]
            return plan_recovery(dict.fromkeys(failure.ranks, sources), "partial")

        plan = self._job.from_rank_0(decide)
        if any(chosen.kind != "parity" for chosen in plan.sources.values()):
            return None
        try:
            rows, nbytes = self._parity.bring_back(failure.ranks)
        except LostPeerError:
            raise
        except RecoveryError:  # logged and counted; the store is next
            return None
        everybody: list[Any] = [None] * self._job.world_size
        dist.all_gather_object(everybody, (rows, nbytes))
        ledger, event = charge_exchange(failure, self._job.plan, source)
        reason = "nothing is lost" if whole else f"the rows of step {source.step} are the newest"
        seconds = time.monotonic() - started
        read, rows = sum(b for _, b in everybody), sum(r for r, _ in everybody)
        lost = 0 if whole else None
        return Recovered(replace(plan, reason=reason), ledger, event, None, read, rows, seconds, lost, whole)

    def _from_store(
        self,
        trainer: pl.Trainer,
        failure: Failure,
        before: Chain,
        why: tuple[Mode, str],
        started: float,
        count_lost: Callable[[Manifest], tuple[int | None, bool]],
        early: EarlyRead | None = None,
    ) -> Recovered:
        """``before``: the newest version that stands, which the survivors' dirty rows are counted from. count_lost: row
        updates that are gone where the failed ranks take that version, and whether that is exact.
        """
        done = self._store.bring_back(trainer, failure.ranks, *why, early)
        plan, manifest = done.plan, done.manifest
        rewound: Progress | None = None
        event: Event
        lost: int | None = 0
        exact = True
        if plan.mode == "full":
            rewound = Progress(manifest.step, manifest.samples)
            ledger, event = rewind_ledger(failure.ledger, manifest.samples)
        else:
            ledger, event = charge_version(failure, self._job.plan, manifest)
            lost, exact = count_lost(manifest)
            if same_rows(manifest.version) != before.version:
                # Survivors' rows are tracked against a version that this one is not: build on nothing.
                self._saves.chain, exact = Chain(), False
        seconds = time.monotonic() - started
        return Recovered(plan, ledger, event, rewound, done.bytes_read, done.rows, seconds, lost, exact)
