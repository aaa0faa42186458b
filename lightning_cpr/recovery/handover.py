"""Which rows the processes of a restarted job take from shared memory: decisions only.

Keyed by shard: a process takes the shards of its own rank in the plan, wherever they lie; on another host a process
there sends them. Rows of another plan are nobody's: each is read by a process of its host, for a version of the store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_cpr.errors import RecoveryError
from lightning_cpr.recovery.election import Decision, Holding, elect
from lightning_cpr.recovery.stash import Stash


@dataclass(frozen=True)
class Offer:
    """A stash that was found whole, by a process that can read it. ``host``: `recovery.host.host_id`."""

    host: str
    stash: Stash


@dataclass(frozen=True)
class Take:
    """What all do. decision: as of a live recovery, ``lost`` are owners without a stash. sources: the others', by
    owner. readers: by owner the rank that reads its stash: the owner itself, or another one of that host.

    resharded: owners are those of the job that broke, which had another plan or number of ranks.
    """

    decision: Decision
    sources: Mapping[int, Offer]
    readers: Mapping[int, int]
    resharded: bool


def choose(offers: Sequence[Offer], hosts: Sequence[str], newest: tuple[int, int], plan: str) -> Take:
    """Choose among what was found on all hosts.

    Args:
        hosts: by rank of the new processes, where it runs.
        newest: (epoch, step) of the newest version in the store.
        plan: of the new processes.

    Raises:
        RecoveryError: nothing serves; says why.
    """
    if not offers:
        raise RecoveryError("no process of the broken job left its rows")
    epoch = max(offer.stash.epoch for offer in offers)
    last = [offer for offer in offers if offer.stash.epoch == epoch]
    if len({offer.stash.incarnation for offer in last}) > 1:
        raise RecoveryError("rows of several starts of the job lie there, and nothing says which was the last")
    sources: dict[int, Offer] = {}
    for offer in last:
        held = sources.get(offer.stash.owner)
        if held is None or held.stash.step < offer.stash.step:
            sources[offer.stash.owner] = offer
    broke = last[0].stash
    resharded = broke.key.plan != plan or broke.world_size != len(hosts)
    owners = range(broke.world_size if resharded else len(hosts))
    if unknown := sources.keys() - set(owners):
        raise RecoveryError(f"rows of ranks {sorted(unknown)} lie there, and the job has {len(owners)} ranks")
    decision = elect(
        [
            Holding(owner, sources[owner].stash.pid, sources[owner].stash.step) if owner in sources
            else Holding(owner, 0, None)
            for owner in owners
        ]
    )  # fmt: skip
    if (epoch, decision.step) < newest:
        raise RecoveryError(
            f"the rows there are of epoch {epoch}, step {decision.step}: the store has epoch {newest[0]}, step"
            f" {newest[1]}"
        )
    readers = {}
    for owner, offer in sources.items():
        on_host = [rank for rank, host in enumerate(hosts) if host == offer.host]
        readers[owner] = owner if owner in on_host else on_host[owner % len(on_host)]
    return Take(decision, sources, readers, resharded)
