"""Degraded reads: a replacement trains while its rows come back.

What a batch looks up is decoded first, in blocks of 4 KiB, while the lookup waits; the rest piece by piece behind the
training. Decoding runs in the exchanges' thread after an exchange, when parity and all members stand at it. A row that
is not back yet changes nowhere, so it is the same at each exchange, and exchanges go on as ever.

A turn is a swap of headers, then at most one round of jobs. Lost ranks say in their headers what they need and how it
goes on; all ranks read all headers, and so do the same. Source: ECRM (arXiv 2104.01981), for synchronous training.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lightning_cpr.errors import RecoveryError
from lightning_cpr.recovery.parity.absent import POLL_S, Absent
from lightning_cpr.recovery.parity.channel import Channel
from lightning_cpr.recovery.parity.pace import EncodePace
from lightning_cpr.recovery.parity.rebuild import Job, Rebuild, Wanted

_HEAD = 4  # words of a header before its blocks: refused, stop, background, microseconds waited
_MOST_BLOCKS = 4096


class DegradedRebuild:
    """The rebuild of lost shards behind the training, on one rank. All ranks `serve` after each exchange.

    finished: all rows are back. demanded: blocks that lookups waited for, of all lost ranks. waited_s: how long they
    did, of the rank that waited longest.

    Args:
        rounds: from `plan_jobs`.
        lost: the ranks that get their rows back.
        absent: this rank's, if it is one of them, and ``rebuild`` writes there.
        shard_bytes: of this rank's rows. limit: the most bytes that come back behind one step.
    """

    def __init__(
        self,
        rounds: Sequence[tuple[Job, ...]],
        rebuild: Rebuild,
        channel: Channel,
        lost: Collection[int],
        absent: Absent | None,
        shard_bytes: int,
        limit: int,
    ) -> None:
        self.absent = absent
        self.finished = False
        self.demanded = 0
        self.waited_s = 0.0
        # One at a time, so that a lookup waits for no more than that
        self._jobs = [job for jobs in rounds for job in jobs]
        self._by_piece = {job.piece.index: job for job in self._jobs}
        self._next = 0
        self._rebuild = rebuild
        self._channel = channel
        self._lost = sorted(lost)
        self._pace = EncodePace(shard_bytes, limit)
        self._left = np.empty((0, 3), np.int64)  # blocks that were asked for and are not decoded yet

    def serve(self) -> None:
        """Until all rows are back, or every lost rank's step is over. Collective.

        Raises:
            LostPeerError: a peer is gone.
            RecoveryError: on all ranks: rows did not decode to what their owner had published.
        """
        before, idled = self._rebuild.bytes, False
        while True:
            header, idle = self._header(before)
            idled = idled or idle
            headers = self._channel.swap([header] * self._channel.world)
            told = {rank: headers[rank] for rank in self._lost}
            self.waited_s = max(int(head[3]) for head in told.values()) / 1e6
            if any(int(head[0]) for head in told.values()):
                raise RecoveryError(
                    "parity: rows of a replacement did not decode to what their owner had published, and were refused. "
                    "The job starts again from the store"
                )
            if self._next > len(self._jobs):
                self.finished = True
                return
            if all(int(head[1]) for head in told.values()):
                self._pace.tell(late=not idled)
                return
            self._turn(told)

    def _turn(self, told: dict[int, Tensor]) -> None:
        jobs = [job for rank, head in told.items() for job in self._demanded(rank, head[_HEAD:].view(-1, 3).numpy())]
        if jobs:
            self._rebuild.run([tuple(jobs)])
        elif any(int(head[2]) for head in told.values()):
            at = self._next
            self._rebuild.round(self._jobs[at : at + 1], self._jobs[max(0, at - 1) : at])
            self._next += 1

    def _header(self, before: int) -> tuple[Tensor, bool]:
        """What this rank says, and whether it waited for something to say. ``before``: bytes back at the exchange."""
        head = torch.zeros(_HEAD, dtype=torch.int64)
        absent, idled = self.absent, False
        if absent is None:
            return head, False
        background = self._rebuild.bytes - before < self._pace.room
        if not (background or self._rebuild.refused or len(self._left) or self._next > len(self._jobs)):
            # Another lost rank may need its rows: then none waits for long.
            idled = not absent.idle(None if len(self._lost) == 1 else POLL_S)
        stopped, hurried, wanted = absent.told()
        self._left = np.unique(np.concatenate([self._left, wanted]), axis=0)
        blocks, self._left = self._left[:_MOST_BLOCKS], self._left[_MOST_BLOCKS:]
        head[0], head[1], head[2] = bool(self._rebuild.refused), stopped, background or hurried
        head[3] = int(absent.waited_s * 1e6)
        return torch.cat([head, torch.from_numpy(blocks.reshape(-1))]), idled

    def _demanded(self, rank: int, blocks: np.ndarray) -> list[Job]:
        """Jobs for these blocks of a lost rank: (piece, part, block), pieces increasing."""
        self.demanded += len(blocks)
        jobs = []
        for index, start, count in zip(*np.unique(blocks[:, 0], return_index=True, return_counts=True), strict=True):
            job, found = self._by_piece[int(index)], blocks[start : start + count]
            member = next(member for member in job.lost if member.rank == rank)
            jobs.append(replace(job, wanted=Wanted(member, found[:, 1], found[:, 2])))
        return jobs
