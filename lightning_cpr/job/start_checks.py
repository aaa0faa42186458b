"""What is checked when training starts: the order of the waits, and host memory."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch.distributed as dist

from lightning_cpr._lightning import rank_zero_info
from lightning_cpr.job.handover import restart_is_left
from lightning_cpr.job.job import Job
from lightning_cpr.policy.ladder import Waits, check_order, waits_for
from lightning_cpr.policy.memory import SPARE_BYTES, Need, add_up
from lightning_cpr.recovery.guardian import HANG_TIMEOUT_ENV, SPARES_ENV
from lightning_cpr.recovery.host import available_memory, host_id, shared_memory_free
from lightning_cpr.recovery.stash import size_of
from lightning_cpr.store.chunk import CHUNK_BYTES
from lightning_cpr.store.save import SaveIO

log = logging.getLogger(__name__)


def check_waits(collective: float, commit: float = 0.0) -> Waits:
    """The waits of this job, in order; seconds. What is doubtful about them is logged.

    Raises:
        ConfigError: they contradict each other.
    """
    detection = os.environ.get(HANG_TIMEOUT_ENV)
    waits = waits_for(collective, None if detection is None else float(detection), commit)
    for doubt in check_order(waits):
        log.warning(doubt)
    return waits


def check_memory(job: Job, tracking: int, parity: int = 0) -> None:
    """Log one line for each host that adds up what protection takes of it, and a warning where that is too much.

    A collective. tracking, parity: bytes of this rank.
    """
    owned = size_of(job.owned)
    mine = [shard for shard in job.owned if not shard.spec.replicated]
    need = Need(
        staging=owned + min(owned, (SaveIO.writers + 1) * CHUNK_BYTES),
        tracking=tracking,
        parity=parity,
        spare=SPARE_BYTES * int(os.environ.get(SPARES_ENV, 0)),
        handover=size_of(mine) if restart_is_left() else 0,
    )
    everybody: list[Any] = [None] * job.world_size
    told = (host_id(), os.uname().nodename, need, available_memory(), shared_memory_free())
    dist.all_gather_object(everybody, told)
    if job.rank:
        return
    for host in dict.fromkeys(told[0] for told in everybody):
        ranks = [told for told in everybody if told[0] == host]
        _, name, _, available, shm_free = ranks[0]
        found = add_up(name, [told[2] for told in ranks], available, shm_free)
        rank_zero_info(found.line)
        for problem in found.problems:
            log.warning(problem)
