"""Decode lost shards from the survivors and parity, piece by piece, each verified before it is written.

The parity holder of a piece decodes it: it gathers what the surviving members have, and sends the lost rows to their
new owner. Holders differ from piece to piece, so all ranks share the work, and the new owner receives its rows once.
One round holds a piece for each decoder: memory stays bounded, and pieces of the round before are delivered meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from lightning_cpr.errors import RecoveryError
from lightning_cpr.recovery.parity import code
from lightning_cpr.recovery.parity.channel import Channel
from lightning_cpr.recovery.parity.groups import Member, ParityPlan, Piece
from lightning_cpr.recovery.parity.holder import ParityHolder
from lightning_cpr.recovery.parity.owner import ParityOwner
from lightning_cpr.recovery.parity.records import WORD


@dataclass(frozen=True)
class Job:
    """One piece to decode: ``holders[0]`` decodes; a second one sends its parity where two members are lost."""

    piece: Piece
    lost: tuple[Member, ...]
    survivors: tuple[Member, ...]
    holders: tuple[int, ...]


@dataclass(frozen=True)
class _Transfer:
    """``words`` from one rank to another. ``member`` is None for parity; a delivery has one more word, its verdict."""

    job: Job
    source: int
    target: int
    words: int
    member: Member | None
    delivery: bool = False


def plan_jobs(
    plan: ParityPlan, lost: Collection[int], unusable: Mapping[int, Collection[int]]
) -> list[tuple[Job, ...]]:
    """Rounds of jobs that bring back all rows of the lost ranks. Pure; the same on every rank.

    Args:
        unusable: pieces by holder whose parity is not to be used: not encoded to the end, or refused.

    Raises:
        RecoveryError: a piece lost more than its parity can bring back.
    """
    queues: dict[int, list[Job]] = {}
    hopeless: dict[str, set[int]] = {}
    for piece in plan.pieces:
        gone = tuple(member for member in piece.members if member.rank in lost)
        if not gone:
            continue
        holders = [h for h in piece.holders if h not in lost and piece.index not in unusable.get(h, ())]
        if len(holders) < len(gone):
            for member in gone:
                for part in member.parts:
                    hopeless.setdefault(part.spec.table, set()).add(member.rank)
            continue
        rest = tuple(member for member in piece.members if member.rank not in lost)
        job = Job(piece, gone, rest, tuple(holders[: len(gone)]))
        queues.setdefault(job.holders[0], []).append(job)
    if hopeless:
        names = ", ".join(f"{table} of ranks {sorted(ranks)}" for table, ranks in sorted(hopeless.items()))
        raise RecoveryError(
            f"parity (k={plan.k}, m={plan.m}) cannot bring back {names}: with ranks {sorted(lost)} lost, too few "
            f"members and parity are left. Restore these shards from the store"
        )
    return [tuple(job for job in jobs if job is not None) for jobs in zip_longest(*queues.values())]


class Rebuild:
    """Runs the rounds on one rank. `bytes` counts what this rank got back, `refused` the pieces it did not get."""

    def __init__(self, owner: ParityOwner, holder: ParityHolder, channel: Channel) -> None:
        self.bytes = 0
        self.refused: list[int] = []
        self._owner = owner
        self._holder = holder
        self._channel = channel
        self._gathered: dict[int, list[tuple[Member | None, Tensor]]] = {}
        self._decoded: dict[tuple[int, int], Tensor | None] = {}  # None: refused

    def run(self, rounds: Sequence[tuple[Job, ...]]) -> None:
        """Collective.

        Raises:
            RecoveryError: a peer is gone.
        """
        for now, before in zip_longest(rounds, ((), *rounds), fillvalue=()):
            self._round([*_gathers(now), *_deliveries(before)])
            for job in now:
                if job.holders[0] == self._channel.rank:
                    self._decode(job)

    def _round(self, transfers: Sequence[_Transfer]) -> None:
        rank, world = self._channel.rank, self._channel.world
        outgoing = sorted((t for t in transfers if t.source == rank), key=lambda t: t.target)
        message = torch.empty(sum(t.words for t in outgoing), dtype=torch.int64)
        lengths, sizes, end = [0] * world, [0] * world, 0
        for t in outgoing:
            lengths[t.target] += t.words
            end += t.words
            self._fill(t, message[end - t.words : end])
        for t in transfers:
            if t.target == rank:
                sizes[t.source] += t.words
        received = self._channel.swap(list(message.split(lengths)), sizes)
        position = [0] * world
        for t in transfers:
            if t.target == rank:
                start = position[t.source]
                position[t.source] += t.words
                self._accept(t, received[t.source][start : start + t.words])

    def _fill(self, t: _Transfer, words: Tensor) -> None:
        """Write what this rank sends: of a delivery the verdict, then the rows (zero bits if refused)."""
        if t.member is None:
            words.copy_(self._holder.parity(t.job.piece))
        elif t.delivery:
            decoded = self._decoded.pop((t.job.piece.index, t.member.rank))
            words[0] = decoded is not None
            words[1:] = 0 if decoded is None else decoded
        else:
            for part in t.member.parts:
                rows = words[part.offset : part.offset + part.words].view(part.rows, part.width)
                self._owner.windows[part.spec].read(slice(part.row_lo, part.row_hi), rows)

    def _accept(self, t: _Transfer, words: Tensor) -> None:
        if not t.delivery:
            self._gathered.setdefault(t.job.piece.index, []).append((t.member, words))
            return
        assert t.member is not None
        if not int(words[0]):
            self.refused.append(t.job.piece.index)
            return
        for part in t.member.parts:
            rows = words[1 + part.offset : 1 + part.offset + part.words].view(part.rows, part.width)
            self._owner.windows[part.spec].write(slice(part.row_lo, part.row_hi), rows)
        self.bytes += (t.words - 1) * WORD

    def _decode(self, job: Job) -> None:
        """Decode a piece and keep what is to be delivered."""
        piece = job.piece
        syndromes: list[Tensor | None] = [None, None]
        syndromes[piece.holders.index(job.holders[0])] = self._holder.parity(piece).clone()
        gathered = self._gathered.pop(piece.index, [])
        for member, words in gathered:
            if member is None:
                syndromes[piece.holders.index(job.holders[1])] = words.clone()
        for member, words in gathered:
            for exponent, syndrome in zip((0, member.column if member else 0), syndromes, strict=True):
                if member is not None and syndrome is not None:
                    syndrome[: words.numel()] ^= code.times(words, exponent)
        found = code.decode(syndromes[0], syndromes[1], [member.column for member in job.lost])
        for member, words in zip(job.lost, found, strict=True):
            good = self._holder.verify(piece, member, words)
            self._decoded[piece.index, member.rank] = words[: member.words] if good else None


def _gathers(jobs: Sequence[Job]) -> Iterator[_Transfer]:
    for job in jobs:
        decoder = job.holders[0]
        for member in job.survivors:
            yield _Transfer(job, member.rank, decoder, member.words, member)
        for other in job.holders[1:]:
            yield _Transfer(job, other, decoder, job.piece.words, None)


def _deliveries(jobs: Sequence[Job]) -> Iterator[_Transfer]:
    for job in jobs:
        for member in job.lost:
            yield _Transfer(job, job.holders[0], member.rank, member.words + 1, member, delivery=True)
