"""What a live recovery cost, told honestly: who noticed when, what each phase took, which updates are lost or doubled.

Fused tables are updated in backward. When a batch breaks, some shards have its update and others do not. The batch is
run again, so a shard that had it gets it twice; a rank that is a step behind leaves it out, so a shard that had not got
it never does. Nothing undoes this: it is counted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lightning_cpr.recovery.live import Recovery
from lightning_cpr.recovery.plan import Source
from lightning_cpr.spec import ShardSpec
from lightning_cpr.store.kv import KeyValue

_RENDEZVOUS, _REBUILD = ("meet", "form"), ("rebind", "dense")


@dataclass(frozen=True)
class Cut:
    """Where each survivor stood when the batch broke, by rank.

    updates: row updates of the broken batch that its shards had got. samples: trained by all ranks when it began.
    """

    updates: Mapping[int, int]
    samples: Mapping[int, int]


def gather_cut(recovery: Recovery, updates: int, samples: int) -> Cut:
    """A collective of all ranks; what a replacement passes does not count."""
    told = _gather((updates, samples))
    alive = [rank for rank in range(len(told)) if rank not in recovery.decision.lost]
    return Cut({rank: told[rank][0] for rank in alive}, {rank: told[rank][1] for rank in alive})


def cut_fields(recovery: Recovery, cut: Cut) -> dict[str, Any]:
    """For the event of a recovery. ``double_row_updates``: at most so many updates are applied twice, the batch being
    run again. ``left_out_by``: ranks that are behind and leave the batch out; ``missing_row_updates_by``: those of them
    whose shards had got none of it.
    """
    behind = recovery.decision.behind
    if recovery.decision.exchange is not None:  # all went back: no batch is half applied
        return {"double_row_updates": 0, "left_out_by": [], "missing_row_updates_by": []}
    return {
        "double_row_updates": sum(count for rank, count in cut.updates.items() if rank not in behind),
        "left_out_by": list(behind),
        "missing_row_updates_by": [rank for rank in behind if not cut.updates[rank]],
    }


def skipped_samples(recovery: Recovery, cut: Cut) -> dict[int, int]:
    """By rank that leaves the batch out: the samples up to which its shards are whole."""
    return {rank: cut.samples[rank] for rank in recovery.decision.behind}


def source_fields(lost: Iterable[ShardSpec], sources: Mapping[int, Source]) -> list[dict[str, Any]]:
    """Where each lost shard came back from."""
    return [
        {
            "table": spec.table,
            "rows": [spec.row_start, spec.row_end],
            "columns": [spec.col_start, spec.col_end],
            "rank": spec.owner,
            "source": sources[spec.owner].kind,
            "name": sources[spec.owner].name,
            "step": sources[spec.owner].step,
        }
        for spec in lost
        if spec.owner in sources
    ]


class Rejoined:
    """The times of one recovery, from the end of the lost process to the first step after it."""

    def __init__(self, recovery: Recovery, kv: KeyValue) -> None:
        """Once all stand together; no collective, for a peer may die here too. kv: shared by the ranks."""
        self._recovery, self._kv = recovery, kv
        self._stood = time.time()
        kv.set(self._key(recovery.rank), json.dumps(recovery.seconds))

    def _key(self, rank: int) -> str:
        return f"seconds/{self._recovery.epoch}/{rank}"

    def stepped(self, step: int) -> bool:
        """Whether a rank that has finished ``step`` batches has run one since."""
        return step > self._recovery.decision.step

    def fields(self) -> dict[str, Any]:
        """Seconds; each phase as the rank saw it that took longest, the replacement's start and build by themselves:
        they pass while survivors wait in the rendezvous. ``first_step_s`` and ``total_s`` end now.
        """
        lost, now = self._recovery.decision.lost, time.time()
        # All ranks have written theirs before the step that all have just made together.
        keys = [self._key(holding.rank) for holding in self._recovery.holdings]
        everybody = [json.loads(self._kv.get(key)) if self._kv.check([key]) else {} for key in keys]
        alive = [seconds for rank, seconds in enumerate(everybody) if rank not in lost]
        fresh = [seconds for rank, seconds in enumerate(everybody) if rank in lost]
        told = {
            "detect_s": _longest(alive, "detect"),
            "rendezvous_s": _longest(alive, *_RENDEZVOUS),
            "replacement_start_s": _longest(fresh, "start"),
            "replacement_build_s": _longest(fresh, "build"),
            "rebuild_s": _longest(everybody, *_REBUILD),
            "restore_s": _longest(everybody, "restore"),
            "first_step_s": now - self._stood,
            "total_s": now - self._recovery.died_at,
        }
        return {name: round(seconds, 6) for name, seconds in told.items()}


def where_lost(trainer: Any) -> str:
    """Where in the fit this rank is, for the log of a step down."""
    if trainer.sanity_checking:
        return "in the sanity check"
    return "in validation" if trainer.validating else "in training"


def _longest(ranks: Iterable[Mapping[str, float]], *phases: str) -> float:
    return max((sum(seconds.get(phase, 0.0) for phase in phases) for seconds in ranks), default=0.0)


def _gather(value: Any) -> list[Any]:
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, value)
    return everybody
