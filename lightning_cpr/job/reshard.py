"""A restart under another plan: what survivors left in shared memory becomes a version of the run, which the job then
resumes from as from any other, resharded by its reads.

That version is a delta upon the newest one: survivors' shards are of the batch that broke the job, the lost ranks'
shards are that newest version's. It has the plan of the job that broke, and is mixed, so that nobody takes it for the
state of one step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_cpr.errors import CPRError
from lightning_cpr.job.handover import Taken
from lightning_cpr.job.job import Job
from lightning_cpr.job.state import end_of_batch
from lightning_cpr.policy.ledger import Charge, Ledger, charge
from lightning_cpr.recovery import stash as stashes
from lightning_cpr.recovery.handover import Take
from lightning_cpr.saving.chain import Chain, samples_at
from lightning_cpr.spec import Shard, ShardSpec
from lightning_cpr.store.blob import JOB_BLOB, encode_blob, rank_blob
from lightning_cpr.store.commit import commit
from lightning_cpr.store.find import Version
from lightning_cpr.store.manifest import Manifest, ShardRecord, new_version_id
from lightning_cpr.store.save import RankPart, SaveIO, SaveSpec
from lightning_cpr.store.stage import live_blocks
from lightning_cpr.store.storage import Storage
from lightning_cpr.store.versions import load_manifest, newest, newest_epoch
from lightning_cpr.store.writer import write_part

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resharded:
    """A version that was made. path: of its manifest. parent: the version that the lost owners' rows are of.

    handed, lost: owners of the plan that broke. lost_rows: in the shards of the latter. ledger: of the version, with
    the charge for them; charge: None if nothing is lost. seconds: that making it took.
    """

    path: str
    parent: Manifest
    handed: list[int]
    lost: list[int]
    lost_rows: int
    ledger: Ledger
    charge: Charge | None
    seconds: float


def save_version(taken: Taken, job: Job, storage: Storage, state_key: str, timeout_s: float) -> Resharded:
    """Write what was taken as a version of its run, and commit it. A collective.

    state_key: of the callback in the donor's checkpoint. timeout_s: how long the commit waits for all ranks.

    Raises:
        CPRError: on every rank: it could not be written; the versions before stand.
    """
    started = time.monotonic()
    take, told = taken.take, taken.told
    handed, lost, donor = sorted(take.sources), list(take.decision.lost), take.decision.donor
    checkpoint, broke = told["checkpoint"], take.sources[donor].stash
    state, samples = checkpoint["callbacks"][state_key], checkpoint["lightning_cpr_samples"]
    path, epoch = job.from_rank_0(lambda: _parent(storage, broke.key.run_id))
    parent = job.together(lambda: load_manifest(storage, path))
    complete = complete_steps([ShardSpec(**spec) for spec in told["plan"]], take, parent)
    ranks = max(broke.world_size, job.world_size)
    ledger, event = charge_lost(Ledger.from_json(state["ledger"]), samples, parent, complete, lost, ranks)
    measured = state["planner"] if donor == 0 else (parent.planner or {}).get("planner")  # rank 0 alone measures
    state |= {"ledger": ledger.to_json(), "planner": measured}
    end_of_batch(checkpoint["loops"])
    scalars = job.from_rank_0(lambda: _scalars(taken, Version(storage, parent)))
    spec = SaveSpec(
        version=new_version_id(broke.key.run_id, epoch, taken.step, f"{job.incarnation}-handed"),
        samples=samples,
        kind="delta",
        consistency="mixed",
        world_size=broke.world_size,
        tables=parent.tables,
        config_fingerprint=broke.key.config,
        plan_fingerprint=broke.key.plan,
        parent=parent.path,
    )

    io = SaveIO(storage, job.kv, epoch=lambda: epoch, timeout_s=timeout_s)

    def write() -> None:
        for owner in range(spec.world_size):
            if take.readers.get(owner, 0) == job.rank:
                write_part(io, spec, _part(taken, complete, scalars, owner))

    job.together(write)  # ranks of a new host write nothing: their wait for the others is no part of the commit's
    chain = {"chain": Chain.of(parent).to_json(), "planner": measured}
    job.together(lambda: commit(io, spec, job.rank, chain, ledger.to_json()))
    if job.rank == 0:
        log.warning(
            "the rows of ranks %s of %d are handed over to a job of another plan, after batch %d, as version %s; of"
            " ranks %s they are those of step %d; loaders start their epoch over unless they can place themselves",
            handed, spec.world_size, taken.step, spec.version, lost, parent.step,
        )  # fmt: skip
    rows = sum(shard.rows for shard in complete if shard.owner in lost and not shard.replicated)
    return Resharded(spec.manifest, parent, handed, lost, rows, ledger, event, time.monotonic() - started)


def _part(taken: Taken, complete: Mapping[ShardSpec, int], scalars: Mapping[str, Any], owner: int) -> RankPart:
    """What an owner of the plan that broke would save; of a lost one no rows. complete: of all shards of that plan."""
    donor, checkpoint = taken.take.decision.donor, taken.told["checkpoint"]
    own = {"loops": checkpoint["loops"], "rng": taken.rngs.get(owner, taken.rngs[donor]), "scalars": scalars}
    blobs = {rank_blob(owner): encode_blob(own)}
    if owner == donor:
        blobs[JOB_BLOB] = encode_blob(checkpoint)
    records = tuple(ShardRecord(shard, step) for shard, step in complete.items() if shard.owner == owner)
    return RankPart(owner, live_blocks(list(_shards(taken, complete, owner))), records, blobs)


def _parent(storage: Storage, run_id: str) -> tuple[str, int]:
    """The newest version, whatever its consistency, and the epoch after all that were begun."""
    return newest(storage, None, run_id).require().path, newest_epoch(storage, run_id) + 1


def complete_steps(plan: Iterable[ShardSpec], take: Take, parent: Manifest) -> dict[ShardSpec, int]:
    """The step that each shard is complete to: a lost one as the least complete of those that ``parent`` has of it."""

    def of(shard: ShardSpec) -> int:
        if shard.replicated:
            return take.decision.step
        if shard.owner in take.sources:
            return take.sources[shard.owner].stash.step
        known = [record.complete_step for record in parent.shards if _overlap(record.spec, shard)]
        return min(known, default=parent.step)

    return {shard: of(shard) for shard in plan}


def _overlap(one: ShardSpec, other: ShardSpec) -> bool:
    rows = min(one.row_end, other.row_end) - max(one.row_start, other.row_start)
    cols = min(one.col_end, other.col_end) - max(one.col_start, other.col_start)
    return one.table == other.table and rows > 0 and cols > 0


def charge_lost(
    ledger: Ledger,
    samples: int,
    parent: Manifest,
    complete: Mapping[ShardSpec, int],
    lost: Collection[int],
    ranks: int,
) -> tuple[Ledger, Charge | None]:
    """The ledger with a charge for the lost owners; None if nothing is lost.

    complete: of all shards of the plan that broke. ranks: of the old or of the new job, whichever has more. Each is
    named: whatever shards it has from now on, all before ``samples`` is whole or charged here (but for the one batch
    that a survivor may be behind).
    """
    if not lost:
        return ledger, None
    losses: dict[int, tuple[int, list[int]]] = {rank: (0, [samples]) for rank in range(ranks)}
    for owner in lost:
        mine = {shard: step for shard, step in complete.items() if shard.owner == owner and not shard.replicated}
        elements = sum(shard.elements for shard in mine)
        losses[owner] = elements, [samples_at(parent, step) for step in mine.values()]
    return charge(ledger, samples, losses)


def _scalars(taken: Taken, parent: Version) -> dict[str, dict[str, Any]]:
    """Rank 0: of all tables."""
    leading = taken.told["scalars"].keys()
    if {table.fqn for table in parent.manifest.tables} <= leading:
        return taken.scalars
    try:
        saved = parent.scalars()
    except CPRError as error:  # the rows may yet be sound
        log.error("rates and step counters of lost tables start anew: %s", error)
        return taken.scalars
    return scalars_now(saved, taken.scalars, leading, taken.step - parent.manifest.step)


def scalars_now(
    saved: Mapping[str, Mapping[str, Any]],
    known: Mapping[str, Mapping[str, Any]],
    leading: Collection[str],
    steps: int,
) -> dict[str, dict[str, Any]]:
    """The scalars of all tables: of those that survivors hold as they are ``known``, of the others as they were saved
    ``steps`` before, the step counters brought forward.

    Tables that had equal rates when they were saved have equal ones now, those of the donor (``leading``): a schedule
    drives them, survivors may be a step of it apart, and under the new plan one kernel may hold them all.
    """

    def rates(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if name != "iter"}

    now = {}
    for fqn in sorted(saved.keys() | known.keys()):
        was, own = saved.get(fqn, {}), known.get(fqn)
        held = dict(was if own is None else own)
        if own is None and "iter" in held:
            held["iter"] += steps
        twins = [known[t] for t in sorted(leading) if t in saved and rates(saved[t]) == rates(was)]
        if fqn not in leading and twins and rates(held) not in map(rates, twins):
            held |= rates(twins[0])
        now[fqn] = held
    return now


def _shards(taken: Taken, plan: Iterable[ShardSpec], owner: int) -> Iterator[Shard]:
    """What an owner left: views of shared memory. The donor has the replicated tables."""
    if owner not in taken.take.sources:
        return
    found: dict[ShardSpec, dict[str, torch.Tensor]] = {}
    for part, data in stashes.read(taken.take.sources[owner].stash, taken.files[owner]):
        tensors = found.setdefault(part.shard, {})
        tensors[part.name] = data.view(getattr(torch, part.dtype)).reshape(part.shape)
    if owner == taken.take.decision.donor:
        replicas: Mapping[str, Mapping[str, torch.Tensor]] = taken.told["replicas"]
        found |= {shard: dict(replicas[shard.table]) for shard in plan if shard.replicated}
    for shard, tensors in found.items():
        weight = tensors.pop("weight")
        yield Shard(shard, weight, tensors)
