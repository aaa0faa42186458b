"""From a running job to a version: what all ranks agree on, what this rank puts into it, and saving behind training.

`CPRCheckpointIO` saves while training waits, `CPRCallback` through `BackgroundSaves`.

Rank 0 decides at the end of batch k what is saved at the end of batch k + 1 and announces it in the key-value store.
No collective is needed for the others to know in time: to finish batch k + 1 they need rank 0's share of its forward or
backward, which rank 0 sends after the announcement.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from lightning_cpr.errors import CommitError, CPRError
from lightning_cpr.job import state
from lightning_cpr.job.job import Job
from lightning_cpr.saving.chain import Chain, Content
from lightning_cpr.saving.compaction import BackgroundCompaction, Finished
from lightning_cpr.saving.update_counts import UpdateCounts
from lightning_cpr.spec import RowBlock, ShardSpec
from lightning_cpr.store import retention
from lightning_cpr.store.background import BackgroundWriter
from lightning_cpr.store.blob import JOB_BLOB, encode_blob, rank_blob
from lightning_cpr.store.commit import save
from lightning_cpr.store.manifest import Manifest, ShardRecord, new_version_id
from lightning_cpr.store.save import RankPart, SaveIO, SaveReport, SaveSpec
from lightning_cpr.store.stage import Stager
from lightning_cpr.store.versions import clean_torn, load_manifest
from lightning_cpr.tables.scalars import fused_scalars
from lightning_cpr.tables.shards import plan_fingerprint
from lightning_cpr.tables.tracker import RowTracker

log = logging.getLogger(__name__)

CODECS = {None: "raw", 8: "int8", 4: "aint4", 3: "aint3", 2: "aint2"}
"""The codec of weights, by bits."""
BITS = tuple(CODECS)


def state_codecs(bits: int | None) -> dict[str, str]:
    """The codec of optimizer states, by name, where they are not raw: sums of squares beside weights of 4 bits or
    fewer, which have larger errors than the 2**-8 by which a sum may come back too high.
    """
    return {"sum": "up16"} if bits is not None and bits <= 4 else {}


@dataclass(frozen=True)
class RunId:
    """Which run a version belongs to, and what it takes to resume it: the same tables and model, the same plan."""

    run_id: str
    config_fingerprint: str
    plan_fingerprint: str

    @staticmethod
    def of(job: Job, run_id: str) -> RunId:
        """The identity of this job under ``run_id``."""
        dense = job.trainer.strategy.lightning_module_state_dict()
        lines = [repr((s.fqn, s.rows, s.cols, s.dtype, s.optimizer, s.states)) for s in job.specs.values()]
        lines += [f"{name} {tuple(getattr(value, 'shape', ()))}" for name, value in sorted(dense.items())]
        config = hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
        return RunId(run_id, config, plan_fingerprint(job.module))


@dataclass(frozen=True)
class Progress:
    """Where training stands: batches and samples trained so far, over all ranks."""

    step: int
    samples: int


def save_spec(
    job: Job,
    run: RunId,
    epoch: int,
    at: Progress,
    nonce: str,
    content: Content = Content(),  # noqa: B008
    path: str | None = None,
) -> SaveSpec:
    """What every rank of one save passes alike."""
    return SaveSpec(
        version=new_version_id(run.run_id, epoch, at.step, nonce),
        samples=at.samples,
        kind=content.kind,
        consistency=content.consistency,
        world_size=job.world_size,
        tables=tuple(job.specs.values()),
        config_fingerprint=run.config_fingerprint,
        plan_fingerprint=run.plan_fingerprint,
        parent=content.parent,
        path=path,
        inherit=content.inherit,
    )


def rank_part(
    job: Job,
    checkpoint: dict[str, Any],
    blocks: Iterable[RowBlock],
    step: int,
    complete: Mapping[ShardSpec, int] | None = None,
    bits: int | None = None,
) -> RankPart:
    """This rank's rows and blobs. ``checkpoint`` is Lightning's, of this rank; it is copied before this returns.

    complete: by shard the step that it is complete to, ``step`` where nothing is said. bits: per weight, None: raw.

    Raises:
        UnsupportedError: the checkpoint holds an object that has no plain form.
    """
    state.drop_unplain_hparams(checkpoint, ("hyper_parameters", "datamodule_hyper_parameters"))
    plain = state.to_plain(checkpoint)
    own = {
        "loops": plain.get("loops"),
        "rng": state.to_plain(state.rng_state()),
        "scalars": state.to_plain(fused_scalars(job.module, job.trainer.optimizers)),
    }
    blobs = {rank_blob(job.rank): partial(encode_blob, own)}
    if job.rank == 0:
        blobs[JOB_BLOB] = partial(encode_blob, plain)
    return RankPart(
        rank=job.rank,
        blocks=blocks,
        shards=tuple(ShardRecord(shard.spec, (complete or {}).get(shard.spec, step)) for shard in job.owned),
        blobs=blobs,
        codecs=dict.fromkeys(job.specs, CODECS[bits]),
        state_codecs=state_codecs(bits),
    )


@dataclass(frozen=True)
class SavePlan:
    """Rank 0's decision for one step.

    committed: the newest version that stands, by rank 0's word: whatever a rank saw of the save before, it keeps its
    rows of it dirty unless this is it. bits: per weight, None: raw. stop: nothing is saved, the run ends with this
    cause.
    """

    step: int
    nonce: str
    content: Content = field(default_factory=Content)
    committed: str = ""
    bits: int | None = None
    stop: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> SavePlan:
        data = json.loads(text)
        return SavePlan(**{**data, "content": Content(**data["content"])})


@dataclass(frozen=True)
class Committed:
    """A save of this callback that is committed. ``manifest``: on rank 0."""

    report: SaveReport
    manifest: Manifest | None


class BackgroundSaves:
    """The saves of one callback on one rank: announced, staged on the training thread, written behind it.

    Extra memory: the stager's buffers, the tracker's, and ``SaveIO.writers + 1`` chunks while a save is written.

    ``chain``: what the next save builds on; rank 0's counts. policy: of Check-N-Run; long chains are compacted.
    """

    def __init__(
        self,
        job: Job,
        run: RunId,
        io: SaveIO,
        tracker: RowTracker,
        chain: Chain,
        policy: str,
        keep: retention.Rules | None = None,
        stager: Stager | None = None,
    ) -> None:
        self.job, self.run, self.io, self.tracker, self.chain, self.keep = job, run, io, tracker, chain, keep
        self.compaction = BackgroundCompaction(io, policy)
        self.stager = stager or Stager()
        self.failed_in_a_row = 0
        self.first_failure: CPRError | None = None
        self._writer: BackgroundWriter[Committed] = BackgroundWriter(io.cancel)
        self._busy = False
        self._announced: list[str] = []
        self._specs: list[SaveSpec] = []
        self._counts = job.counts.of(job.rank) or UpdateCounts(0.0)

    @property
    def busy(self) -> bool:
        """Whether a save is in flight on this rank (not taken by `poll` yet)."""
        return self._busy

    def announce(self, plan: SavePlan, epoch: int) -> None:
        """Tell all ranks. Rank 0 only, before it starts the batch that ``plan.step`` names.

        A plan holds for its epoch: after a recovery it could build on what was not restored.
        """
        for key in self._announced[:-1]:
            # Every rank has taken it: for the batch just ended they had to end the one before.
            self.job.kv.delete_key(key)
        self._announced = [*self._announced[-1:], f"plan/{epoch}/{plan.step}"]
        self.job.kv.set(self._announced[-1], plan.to_json())

    def announced(self, step: int, epoch: int) -> SavePlan | None:
        """What rank 0 decided for the end of this step."""
        key = f"plan/{epoch}/{step}"
        return SavePlan.from_json(self.job.kv.get(key)) if self.job.kv.check([key]) else None

    def start(self, plan: SavePlan, at: Progress, checkpoint: dict[str, Any], planner: Any, ledger: Any) -> None:
        """Stage this rank's rows and start writing.

        planner, ledger: JSON values for the manifest; rank 0's count.
        """
        if self._busy:
            raise CommitError(f"rank {self.job.rank}: the save before the one of step {at.step} has not ended")
        spec = save_spec(self.job, self.run, self.io.epoch(), at, plan.nonce, plan.content)
        self._forget_before(spec)
        self.tracker.settle(plan.committed)
        selection = self.tracker.take(spec.version, plan.content.rows, at.step)
        self._counts = self._counts.with_version(spec.version, selection.lacking)
        self._tell_counts()
        blocks = self.stager.stage(self.job.owned, selection.rows)
        part = rank_part(self.job, checkpoint, blocks, at.step, selection.complete, plan.bits)
        state = {"chain": self.chain.to_json(), "planner": planner}
        compacted = self.compaction.ready

        def work() -> Committed:
            report = save(self.io, spec, part, state, ledger, compacted)
            return Committed(report, self._clean(report.path) if self.job.rank == 0 else None)

        self._writer.submit(work)
        self._busy = True

    def _forget_before(self, spec: SaveSpec) -> None:
        """Rank 0: the keys of the save before the last go. For the last one to begin, every rank had ended it."""
        if self.job.rank == 0:
            for old in self._specs[:-1]:
                for name in ("done", "failed"):
                    self.job.kv.delete_key(old.key(name))
            self._specs = [*self._specs[-1:], spec]

    def count_batch(self) -> None:
        """A batch has been trained: after the first one it is known how many rows a batch updates."""
        if not self._counts.per_batch:
            self._tell_counts()

    def _tell_counts(self) -> None:
        per_batch = self.tracker.updates_per_batch or self._counts.per_batch
        self._counts = replace(self._counts, per_batch=per_batch)
        if self._counts.per_batch:
            self.job.counts.tell(self.job.rank, self._counts)

    def _clean(self, path: str) -> Manifest:
        """The manifest of a commit. Its run's torn saves from before it go, and versions that no rule keeps."""
        storage, manifest = self.io.storage, load_manifest(self.io.storage, path)
        try:
            clean_torn(storage, manifest)
            if self.keep is not None:
                removal = retention.plan_removal(storage, manifest.run_id, self.keep, retention.GRACE_S)
                retention.remove_planned(storage, removal)
        except CPRError as error:
            log.warning("version %s is committed; what should go before it stays: %s", manifest.version, error)
        return manifest

    def poll(self, timeout: float = 0.0) -> Committed | CPRError | None:
        """The outcome of the save in flight, once; None if there is none, or it has not ended within ``timeout``."""
        future = self._writer.wait(timeout)
        if future is None:
            return None
        self._busy = False
        error = future.exception()
        if error is None:
            self.failed_in_a_row, self.first_failure = 0, None
            outcome = future.result()
            if outcome.manifest is not None:
                self.chain = Chain.of(outcome.manifest)
                self.compaction.consider(outcome.manifest)
            return outcome
        assert isinstance(error, CPRError)
        self.failed_in_a_row += 1
        self.first_failure = self.first_failure or error
        return error

    def poll_compaction(self) -> Finished | CPRError | None:
        """What became of a compaction, once; the next save builds on it."""
        outcome = self.compaction.poll()
        if isinstance(outcome, Finished):
            chain = Chain.of(outcome.compaction.manifest)
            if chain.version == self.chain.version:
                self.chain = chain
        return outcome

    def abandon(self, timeout: float) -> Stager:
        """Give up the save in flight, whose other ranks may be gone. Returns a stager for the saves to come: this one,
        with its buffers, unless the save still reads them."""
        self.io.cancel.set()
        return self.stager if self.close(timeout) else Stager()

    def close(self, timeout: float) -> bool:
        """End the save in flight: wait for it, then cancel it; give a compaction up. For exceptions and teardown; no
        collectives. Returns whether the save has ended.
        """
        try:
            self._writer.close(timeout)
        except CommitError as error:
            log.error("%s", error)
            return False
        finally:
            self.compaction.close()
        return True
