"""The parity that one rank holds for others, and what it needs to go back one exchange.

Beside the parity itself: for each part of each member the checksums of its row blocks, kept by the differences that the
owner publishes. They tell whether parity, and what is decoded from it, is what the owners said it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from lightning_cpr.recovery.parity import code
from lightning_cpr.recovery.parity.groups import Member, ParityPlan, Part, Piece
from lightning_cpr.recovery.parity.records import WORD
from lightning_cpr.recovery.parity.wire import Route, Section, routes_between, unpack


@dataclass
class _Incoming:
    """Rows of one shard of another rank: where their parity lies, how far they are encoded, their checksums.

    sums: int64, by block, the blocks of a part behind those of the part before; ``first_block`` is that of each part.
    """

    route: Route
    bases: list[int]
    exponents: list[int]
    cursors: Tensor
    first_block: list[int]
    sums: Tensor

    def sums_of(self, part: int) -> Tensor:
        start = self.first_block[part]
        return self.sums[start : start + self.route.parts[part].blocks]


class ParityHolder:
    """One rank's parity. Memory: the parity, 8 bytes of checksum for each 64 KiB of each member, and the differences of
    the exchange that is not acknowledged yet.

    ``bad``: pieces whose checksums did not match; they are never decoded from.
    """

    def __init__(self, plan: ParityPlan, rank: int) -> None:
        self.rank = rank
        self._plan = plan
        self.pieces = [piece for piece in plan.pieces if rank in piece.holders]
        self.bad: set[int] = set()
        self._base: dict[int, int] = {}
        end = 0
        for piece in self.pieces:
            self._base[piece.index] = end
            end += piece.words
        self._parity = torch.zeros(end, dtype=torch.int64)
        routes = routes_between(plan, range(plan.world), [rank])
        self._incoming = {source: [self._track(r, source) for r in found] for (source, _), found in routes.items()}
        self._at = {
            (piece.index, part): (incoming, i)
            for tracked in self._incoming.values()
            for incoming in tracked
            for i, (part, piece) in enumerate(zip(incoming.route.parts, incoming.route.pieces, strict=True))
        }
        self._staged: list[tuple[_Incoming, Section]] = []

    @property
    def nbytes(self) -> int:
        kept = sum((s.rows.numel() * 2 + s.bits.numel()) * WORD for _, s in self._staged)
        sums = sum(incoming.sums.nbytes for tracked in self._incoming.values() for incoming in tracked)
        return self._parity.nbytes + sums + kept

    def stage(self, messages: Sequence[Tensor]) -> None:
        """Keep an exchange's messages, one from each rank, without using them yet.

        Raises:
            RecoveryError: a message does not fit the plan.
        """
        staged = []
        for source, incoming in self._incoming.items():
            sections = unpack(messages[source], [i.route for i in incoming], source)
            staged += list(zip(incoming, sections, strict=True))
        self._staged = staged

    def flip(self) -> None:
        """XOR the staged differences into parity: applies them, or undoes them if they are applied."""
        whole = False
        try:
            for incoming, section in self._staged:
                self._xor(incoming, section)
                incoming.cursors, section.cursors = section.cursors, incoming.cursors
            whole = True
        finally:
            if not whole:  # out of memory halfway: parity is of two exchanges
                self.bad.update(piece.index for piece in self.pieces)

    def drop(self) -> None:
        """Forget the staged exchange: every rank has it."""
        for incoming, _ in self._staged:
            incoming.cursors = incoming.cursors.clone()  # else a view keeps the whole message alive
        self._staged = []

    def check_published(self) -> list[Part]:
        """Compare the checksums that owners took from their live rows with those kept here; the parts that differ."""
        wrong = []
        for incoming, section in self._staged:
            for i, sums in section.published.items():
                if not torch.equal(sums, incoming.sums_of(i)):
                    wrong.append(incoming.route.parts[i])
                    self.bad.add(incoming.route.pieces[i].index)
        return wrong

    def check_parity(self, exchange: int, every: int) -> list[Piece]:
        """Compare parity with the checksums of its members, for the pieces due; the pieces that differ."""
        wrong = []
        for piece in self.pieces:
            if self._plan.scrub_due(piece, exchange, every) and self._parity_sum(piece) != code.flat_sum(
                self.parity(piece)
            ):
                wrong.append(piece)
                self.bad.add(piece.index)
        return wrong

    def parity(self, piece: Piece) -> Tensor:
        """The parity words of a piece, a view."""
        return self._parity[self._base[piece.index] : self._base[piece.index] + piece.words]

    def verify(self, piece: Piece, member: Member, words: Tensor) -> bool:
        """Whether decoded words are what the member's owner last published, with nothing behind them."""
        if bool(words[member.words :].any()):
            self.bad.add(piece.index)
            return False
        for part in member.parts:
            rows = words[part.offset : part.offset + part.words].view(part.rows, part.width)
            incoming, i = self._at[piece.index, part]
            if not torch.equal(code.block_sums(rows, part.block_rows), incoming.sums_of(i)):
                self.bad.add(piece.index)
                return False
        return True

    def unfinished(self) -> list[tuple[int, int, int]]:
        """(piece, source, first row that is not in parity) of each part that is not encoded to its end."""
        return [
            (piece.index, source, cursor)
            for source, tracked in self._incoming.items()
            for incoming in tracked
            for part, piece, cursor in zip(
                incoming.route.parts, incoming.route.pieces, incoming.cursors.tolist(), strict=True
            )
            if cursor < part.row_hi
        ]

    def reset(self) -> None:
        """Parity of nothing."""
        self._parity.zero_()
        self._staged = []
        self.bad.clear()
        for tracked in self._incoming.values():
            for incoming in tracked:
                incoming.sums.zero_()
                incoming.cursors = torch.tensor([part.row_lo for part in incoming.route.parts])

    def _track(self, route: Route, source: int) -> _Incoming:
        exponents = []
        for piece in route.pieces:
            member = piece.member(source)
            assert member is not None
            exponents.append(member.column if piece.holders.index(self.rank) else 0)
        blocks = [0, *accumulate(part.blocks for part in route.parts)]
        return _Incoming(
            route,
            [self._base[piece.index] + part.offset for part, piece in zip(route.parts, route.pieces, strict=True)],
            exponents,
            torch.tensor([part.row_lo for part in route.parts]),
            blocks[:-1],
            torch.zeros(blocks[-1], dtype=torch.int64),
        )

    def _xor(self, incoming: _Incoming, section: Section) -> None:
        parts = incoming.route.parts
        edges = torch.searchsorted(section.rows, torch.tensor([[p.row_lo, p.row_hi] for p in parts])).tolist()
        for i, (part, (low, high)) in enumerate(zip(parts, edges, strict=True)):
            if low == high:
                continue
            index = section.rows[low:high] - part.row_lo
            bits = code.times(section.bits[low:high], incoming.exponents[i])
            base = incoming.bases[i]
            memory = self._parity[base : base + part.words].view(part.rows, part.width)
            first, last = int(index[0]), int(index[-1])
            if last - first == high - low - 1:
                memory[first : last + 1] ^= bits
            else:
                memory.index_copy_(0, index, memory.index_select(0, index).bitwise_xor_(bits))
        of = torch.searchsorted(torch.tensor([p.row_lo for p in parts]), section.rows, right=True) - 1
        index = section.rows - torch.tensor([p.row_lo for p in parts])[of]
        block_rows = parts[0].block_rows
        blocks = index // block_rows + torch.tensor(incoming.first_block)[of]
        placed = code.times_each(section.sums, index % block_rows * incoming.route.width)
        blocks, change = code.xor_by_block(placed, blocks)
        incoming.sums[blocks] ^= change

    def _parity_sum(self, piece: Piece) -> int:
        """The checksum that the piece's parity must have."""
        total = 0
        second = piece.holders.index(self.rank) == 1
        for member in piece.members:
            for part in member.parts:
                incoming, i = self._at[piece.index, part]
                places = torch.arange(part.blocks) * (part.block_rows * part.width) + part.offset
                placed = code.times_each(incoming.sums_of(i), places + (member.column if second else 0))
                total ^= code.xor_all(placed)
        return total
