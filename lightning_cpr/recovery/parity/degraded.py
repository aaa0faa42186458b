"""Degraded reads: a replacement trains while its rows come back.

What a batch looks up is decoded first, in blocks of 2 KiB, while the lookup waits; the rest a round of pieces at a time
behind the training. Decoding runs in the exchanges' thread after an exchange, when parity and all members stand at it.
A row that is not back yet changes nowhere, so it is the same at each exchange, and exchanges go on as ever.

A turn is a swap of headers, then a round of jobs. Lost ranks say in their headers what they need and whether their step
is over; all ranks read all headers, and so do the same. Source: ECRM (arXiv 2104.01981), for synchronous training.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lightning_cpr.errors import RecoveryError
from lightning_cpr.recovery.parity.absent import Absent, places_of
from lightning_cpr.recovery.parity.channel import Channel
from lightning_cpr.recovery.parity.rebuild import Job, Rebuild, Wanted

_HEADER = 4  # whether rows were refused, whether the step is over, microseconds waited, how many blocks are wanted
_MOST_BLOCKS = 8192
REFUSED = (
    "parity: rows of a replacement did not decode to what their owner had published, and were refused. The job starts "
    "again from the store"
)


class DegradedRebuild:
    """The rebuild of lost shards behind the training, on one rank. All ranks `serve` after each exchange.

    finished: all rows are back. refused: some will not come. demanded: blocks that lookups waited for, of all lost
    ranks. waited_s: how long they did, of the rank that waited longest.

    Args:
        rounds: from `plan_jobs`.
        lost: the ranks that get their rows back.
        absent: this rank's, if it is one of them, and ``rebuild`` writes there.
    """

    def __init__(
        self,
        rounds: Sequence[tuple[Job, ...]],
        rebuild: Rebuild,
        channel: Channel,
        lost: Collection[int],
        absent: Absent | None,
    ) -> None:
        self.absent = absent
        self.finished = self.refused = False
        self.demanded = 0
        self.waited_s = 0.0
        self._rounds = [*rounds, ()]  # in the last one what the one before has decoded is delivered
        self._jobs = {job.piece.index: job for jobs in rounds for job in jobs}
        self._decoded: tuple[Job, ...] = ()
        self._next = 0
        self._rebuild = rebuild
        self._channel = channel
        self._lost = sorted(lost)
        self._left = np.empty(0, np.int64)  # blocks that lookups wait for and that were not asked for yet

    def serve(self) -> None:
        """Until all rows are back, or every lost rank's step is over and a round was run. Collective.

        Raises:
            LostPeerError: a peer is gone.
            RecoveryError: on all ranks: rows did not decode to what their owner had published.
        """
        ran = False
        while True:
            header, wanted = self._header()
            headers = torch.stack(self._channel.swap([header] * self._channel.world, [_HEADER] * self._channel.world))
            self.waited_s = int(headers[:, 2].max()) / 1e6
            if bool(headers[:, 0].any()):
                self.refused = True
                raise RecoveryError(REFUSED)
            if self._next == len(self._rounds):
                self.finished = True
                return
            if ran and bool(headers[self._lost, 1].all()):
                return
            counts = headers[:, 3]
            if bool(counts.any()):
                told = self._channel.swap([wanted] * self._channel.world, counts.tolist())
                jobs = [job for rank in self._lost for job in self._demanded(rank, told[rank].numpy())]
                self._rebuild.run([tuple(jobs)])
            else:
                self._rebuild.round(self._rounds[self._next], self._decoded)
                self._decoded = self._rounds[self._next]
                self._next += 1
                ran = True

    def _header(self) -> tuple[Tensor, Tensor]:
        """What this rank says, and the blocks that it wants, by key (`absent.places_of`)."""
        if self.absent is None:
            return torch.zeros(_HEADER, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        stopped, wanted = self.absent.told()
        blocks = np.unique(np.concatenate([self._left, wanted])) if wanted.size else self._left
        blocks, self._left = blocks[:_MOST_BLOCKS], blocks[_MOST_BLOCKS:]
        header = [bool(self._rebuild.refused), stopped, int(self.absent.waited_s * 1e6), len(blocks)]
        return torch.tensor(header), torch.from_numpy(blocks.copy())

    def _demanded(self, rank: int, blocks: np.ndarray) -> list[Job]:
        """Jobs for these blocks of a lost rank, given by increasing keys."""
        self.demanded += len(blocks)
        pieces, parts, blocks = places_of(blocks)
        jobs = []
        for index, start, count in zip(*np.unique(pieces, return_index=True, return_counts=True), strict=True):
            job, at = self._jobs[int(index)], slice(start, start + count)
            member = next(member for member in job.lost if member.rank == rank)
            jobs.append(replace(job, wanted=Wanted(member, parts[at], blocks[at])))
        return jobs
