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
from lightning_cpr.recovery.parity.absent import Absent
from lightning_cpr.recovery.parity.channel import Channel
from lightning_cpr.recovery.parity.rebuild import Job, Rebuild, Wanted

_HEADER = 4  # whether rows were refused, whether the step is over, microseconds waited, how many blocks are wanted
_MOST_BLOCKS = 4096


class DegradedRebuild:
    """The rebuild of lost shards behind the training, on one rank. All ranks `serve` after each exchange.

    finished: all rows are back. demanded: blocks that lookups waited for, of all lost ranks. waited_s: how long they
    did, of the rank that waited longest.

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
        self.finished = False
        self.demanded = 0
        self.waited_s = 0.0
        self._rounds = [*rounds, ()]  # in the last one what the one before has decoded is delivered
        self._jobs = {job.piece.index: job for jobs in rounds for job in jobs}
        self._decoded: tuple[Job, ...] = ()
        self._next = 0
        self._rebuild = rebuild
        self._channel = channel
        self._lost = sorted(lost)
        self._left = np.empty((0, 3), np.int64)  # blocks that lookups wait for and that were not asked for yet

    def serve(self) -> None:
        """Until all rows are back, or every lost rank's step is over. Collective.

        Raises:
            LostPeerError: a peer is gone.
            RecoveryError: on all ranks: rows did not decode to what their owner had published.
        """
        while True:
            header, wanted = self._header()
            headers = torch.stack(self._channel.swap([header] * self._channel.world, [_HEADER] * self._channel.world))
            self.waited_s = int(headers[:, 2].max()) / 1e6
            if bool(headers[:, 0].any()):
                raise RecoveryError(
                    "parity: rows of a replacement did not decode to what their owner had published, and were refused. "
                    "The job starts again from the store"
                )
            if self._next == len(self._rounds):
                self.finished = True
                return
            if bool(headers[self._lost, 1].all()):
                return
            counts = headers[:, 3]
            if bool(counts.any()):
                told = self._channel.swap([wanted] * self._channel.world, (3 * counts).tolist())
                jobs = [job for rank in self._lost for job in self._demanded(rank, told[rank].view(-1, 3).numpy())]
                self._rebuild.run([tuple(jobs)])
            else:
                self._rebuild.round(self._rounds[self._next], self._decoded)
                self._decoded = self._rounds[self._next]
                self._next += 1

    def _header(self) -> tuple[Tensor, Tensor]:
        """What this rank says, and the blocks that it wants: int64, three words each."""
        if self.absent is None:
            return torch.zeros(_HEADER, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        stopped, wanted = self.absent.told()
        blocks = np.unique(np.concatenate([self._left, wanted]), axis=0)
        blocks, self._left = blocks[:_MOST_BLOCKS], blocks[_MOST_BLOCKS:]
        header = [bool(self._rebuild.refused), stopped, int(self.absent.waited_s * 1e6), len(blocks)]
        return torch.tensor(header), torch.from_numpy(blocks.reshape(-1))

    def _demanded(self, rank: int, blocks: np.ndarray) -> list[Job]:
        """Jobs for these blocks of a lost rank: (piece, part, block), pieces increasing."""
        self.demanded += len(blocks)
        jobs = []
        for index, start, count in zip(*np.unique(blocks[:, 0], return_index=True, return_counts=True), strict=True):
            job, found = self._jobs[int(index)], blocks[start : start + count]
            member = next(member for member in job.lost if member.rank == rank)
            jobs.append(replace(job, wanted=Wanted(member, found[:, 1], found[:, 2])))
        return jobs
