"""Decode lost shards from the survivors and parity, each stretch verified before it is written.

The parity holder of a piece decodes it: it gathers what the surviving members have, and sends the lost rows to their
new owner. Holders differ from piece to piece, so all ranks share the work, and the new owner receives its rows once.
One round holds a job for each decoder: memory stays bounded, and what was decoded in the round before is delivered
meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from lightning_cpr.errors import RecoveryError
from lightning_cpr.recovery.parity import code
from lightning_cpr.recovery.parity.channel import Channel
from lightning_cpr.recovery.parity.groups import Member, ParityPlan, Part, Piece
from lightning_cpr.recovery.parity.holder import ParityHolder
from lightning_cpr.recovery.parity.owner import ParityOwner
from lightning_cpr.recovery.parity.records import WORD, runs
from lightning_cpr.spec import ShardSpec

Land = Callable[[ShardSpec, slice | Tensor, Tensor], None]
"""``land(shard, rows, records)``: what becomes of rows that came back: by range or number, int64 ``[n, width]``."""


@dataclass(frozen=True, eq=False)
class Wanted:
    """Some checksum blocks of one lost member of a piece, increasing: int64 ``[n]``, the part's number in the member
    and the block's number in the part."""

    member: Member
    parts: np.ndarray
    blocks: np.ndarray

    @cached_property
    def ranges(self) -> tuple[np.ndarray, np.ndarray]:
        """First word in the piece, and end, of each block."""
        low, high = np.empty_like(self.blocks), np.empty_like(self.blocks)
        for part, blocks, at in self.by_part():
            low[at] = part.offset + blocks * (part.block_rows * part.width)
            high[at] = low[at] + part.rows_of(blocks) * part.width
        return low, high

    def by_part(self) -> Iterator[tuple[Part, np.ndarray, slice]]:
        """Each part with its blocks, and where they are among all."""
        numbers, starts = np.unique(self.parts, return_index=True)
        for number, start, end in zip(numbers, starts, [*starts[1:], len(self.parts)], strict=True):
            yield self.member.parts[number], self.blocks[start:end], slice(start, end)

    def stretches(self, words: Tensor) -> Iterator[tuple[Part, np.ndarray, Tensor]]:
        """Each part with its blocks and, of ``words`` (all blocks one after another), theirs."""
        position = 0
        for part, blocks, _ in self.by_part():
            count = int(part.rows_of(blocks).sum()) * part.width
            yield part, blocks, words[position : position + count]
            position += count


@dataclass(frozen=True, eq=False)
class Job:
    """One piece to decode: ``holders[0]`` decodes; a second one sends its parity where two members are lost.

    wanted: of it these blocks alone; None: everything that was lost.
    """

    piece: Piece
    lost: tuple[Member, ...]
    survivors: tuple[Member, ...]
    holders: tuple[int, ...]
    wanted: Wanted | None = None

    def words_of(self, end: int) -> int:
        """How many words the job is about of a member, or parity, that has ``end`` of the piece's."""
        if self.wanted is None:
            return end
        low, high = self.wanted.ranges
        return int((np.minimum(high, end) - np.minimum(low, end)).sum())

    @property
    def targets(self) -> tuple[Member, ...]:
        """Who gets rows back."""
        return self.lost if self.wanted is None else (self.wanted.member,)


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
            f"members and parity are left (parity that is not encoded to its end yet, or was refused, does not count). "
            f"Restore these shards from the store"
        )
    return [tuple(job for job in jobs if job is not None) for jobs in zip_longest(*queues.values())]


class Rebuild:
    """Runs jobs on one rank. `bytes` counts what this rank got back, `refused` the pieces it did not get.

    Args:
        land: writes rows that came back; into the live shards if it is not given.
    """

    def __init__(self, owner: ParityOwner, holder: ParityHolder, channel: Channel, land: Land | None = None) -> None:
        self.bytes = 0
        self.refused: list[int] = []
        self._owner = owner
        self._holder = holder
        self._channel = channel
        self._land = land or (lambda spec, rows, words: owner.windows[spec].write(rows, words))
        self._gathered: dict[Job, list[tuple[Member | None, Tensor]]] = {}
        self._decoded: dict[tuple[Job, int], Tensor | None] = {}  # None: refused

    def run(self, rounds: Sequence[tuple[Job, ...]]) -> None:
        """All rounds, in order. Collective.

        Raises:
            RecoveryError: a peer is gone.
        """
        for now, before in zip_longest(rounds, ((), *rounds), fillvalue=()):
            self.round(now, before)

    def round(self, now: Sequence[Job], before: Sequence[Job]) -> None:
        """Decode these jobs, and deliver those of the round before. Collective.

        Raises:
            RecoveryError: a peer is gone.
        """
        self._exchange([*_gathers(now), *_deliveries(before)])
        for job in now:
            if job.holders[0] == self._channel.rank:
                self._decode(job)

    def _exchange(self, transfers: Sequence[_Transfer]) -> None:
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
            words.copy_(self._parity(t.job))
        elif t.delivery:
            decoded = self._decoded.pop((t.job, t.member.rank))
            words[0] = decoded is not None
            words[1:] = 0 if decoded is None else decoded
        elif t.job.wanted is None:
            for part in t.member.parts:
                rows = words[part.offset : part.offset + part.words].view(part.rows, part.width)
                self._owner.windows[part.spec].read(slice(part.row_lo, part.row_hi), rows)
        else:
            self._fill_ranges(t.member, *t.job.wanted.ranges, words)

    def _fill_ranges(self, member: Member, low: np.ndarray, high: np.ndarray, words: Tensor) -> None:
        """What the member has of these ranges of the piece; another member's blocks may cut its rows anywhere."""
        position = 0
        for part in member.parts:
            first = np.clip(low - part.offset, 0, part.words)
            count = np.clip(high - part.offset, 0, part.words) - first
            first, count = first[count > 0], count[count > 0]
            row = first // part.width
            rows = -(-(first + count) // part.width) - row
            numbers = torch.from_numpy(runs(part.row_lo + row, rows))
            found = self._owner.windows[part.spec].read(numbers).view(-1)
            if count.sum() < len(found):
                ends = rows.cumsum() * part.width
                found = found[torch.from_numpy(runs(ends - rows * part.width + first - row * part.width, count))]
            words[position : position + len(found)] = found
            position += len(found)

    def _accept(self, t: _Transfer, words: Tensor) -> None:
        if not t.delivery:
            self._gathered.setdefault(t.job, []).append((t.member, words))
            return
        assert t.member is not None
        if not int(words[0]):
            self.refused.append(t.job.piece.index)
            return
        self.bytes += (t.words - 1) * WORD
        if t.job.wanted is None:
            for part in t.member.parts:
                rows = words[1 + part.offset : 1 + part.offset + part.words].view(part.rows, part.width)
                self._land(part.spec, slice(part.row_lo, part.row_hi), rows)
            return
        for part, blocks, stretch in t.job.wanted.stretches(words[1:]):
            numbers = runs(part.row_lo + blocks * part.block_rows, part.rows_of(blocks))
            self._land(part.spec, torch.from_numpy(numbers), stretch.view(-1, part.width))

    def _parity(self, job: Job) -> Tensor:
        parity = self._holder.parity(job.piece)
        if job.wanted is None:
            return parity
        low, high = job.wanted.ranges
        return parity[torch.from_numpy(runs(low, high - low))]

    def _decode(self, job: Job) -> None:
        """Decode a job and keep what is to be delivered."""
        piece = job.piece
        syndromes: list[Tensor | None] = [None, None]
        syndromes[piece.holders.index(job.holders[0])] = self._parity(job).clone()
        gathered = self._gathered.pop(job, [])
        for member, words in gathered:
            if member is None:
                syndromes[piece.holders.index(job.holders[1])] = words.clone()
        for member, words in gathered:
            for exponent, syndrome in zip((0, member.column if member else 0), syndromes, strict=True):
                if member is not None and syndrome is not None:
                    syndrome[: words.numel()] ^= code.times(words, exponent)
        found = code.decode(syndromes[0], syndromes[1], [member.column for member in job.lost])
        decoded = {member.rank: words for member, words in zip(job.lost, found, strict=True)}
        for member in job.targets:
            words = decoded[member.rank]
            good = self._good(job, member, words)
            self._decoded[job, member.rank] = words[: job.words_of(member.words)] if good else None

    def _good(self, job: Job, member: Member, words: Tensor) -> bool:
        if job.wanted is None:
            return self._holder.verify(job.piece, member, words)
        return self._holder.verify_blocks(job.piece, job.wanted.stretches(words))


def _gathers(jobs: Sequence[Job]) -> Iterator[_Transfer]:
    for job in jobs:
        decoder = job.holders[0]
        for member in job.survivors:
            yield _Transfer(job, member.rank, decoder, job.words_of(member.words), member)
        for other in job.holders[1:]:
            yield _Transfer(job, other, decoder, job.words_of(job.piece.words), None)


def _deliveries(jobs: Sequence[Job]) -> Iterator[_Transfer]:
    for job in jobs:
        for member in job.targets:
            yield _Transfer(job, job.holders[0], member.rank, job.words_of(member.words) + 1, member, delivery=True)
