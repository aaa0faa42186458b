"""What a failure costs by the ledger, from what the lost shards come back to. All here is pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_cpr.policy.ledger import Charge, Ledger, LeftOut, charge
from lightning_cpr.recovery.plan import Source
from lightning_cpr.saving.chain import samples_at
from lightning_cpr.saving.saver import Progress
from lightning_cpr.spec import ShardSpec, sharded_elements
from lightning_cpr.store.manifest import Manifest


@dataclass(frozen=True)
class Failure:
    """The shards of some ranks are lost. at: where training stands. ledger: before this is charged. left_out: by
    survivor that leaves the broken batch out, the samples up to which its shards are whole.
    """

    ranks: Sequence[int]
    at: Progress
    ledger: Ledger
    left_out: Mapping[int, int] = field(default_factory=dict)


def charge_version(failure: Failure, plan: Sequence[ShardSpec], manifest: Manifest) -> tuple[Ledger, Charge]:
    """The lost shards come back as a version has them. plan: all shards of the job."""
    complete = {record.spec: record.complete_step for record in manifest.shards}
    losses = {
        owner: (
            sharded_elements(plan, owner),
            [
                samples_at(manifest, complete.get(spec, manifest.step))
                for spec in plan
                if spec.owner == owner and not spec.replicated
            ],
        )
        for owner in failure.ranks
    }
    return charge(failure.ledger, failure.at.samples, losses, _left_out(failure, plan))


def all_stand_at(exchange: Source, failure: Failure) -> bool:
    """Whether what parity offers is where everybody stands, so that nothing is lost."""
    return exchange.step >= failure.at.step


def charge_exchange(failure: Failure, plan: Sequence[ShardSpec], exchange: Source) -> tuple[Ledger, Charge]:
    """The lost shards come back as parity has them. plan: all shards of the job."""
    samples = exchange.samples if all_stand_at(exchange, failure) else failure.at.samples
    held = min(exchange.samples, samples)
    losses = {owner: (sharded_elements(plan, owner), [held]) for owner in failure.ranks}
    return charge(failure.ledger, samples, losses, _left_out(failure, plan))


def _left_out(failure: Failure, plan: Sequence[ShardSpec]) -> LeftOut:
    return {owner: (sharded_elements(plan, owner), held) for owner, held in failure.left_out.items()}


def source_of(manifest: Manifest) -> Source:
    """A version as a source of shards."""
    oldest = min((record.complete_step for record in manifest.shards), default=manifest.step)
    samples = samples_at(manifest, oldest)
    return Source("store", manifest.version, oldest, samples, manifest.consistency == "exact")
