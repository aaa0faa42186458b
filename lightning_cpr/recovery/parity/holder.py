"""The parity that one rank holds for others, and what it needs to go back one exchange.

Beside the parity itself: for each part of each member the checksums of its row blocks, kept by the differences that the
owner publishes. They tell whether parity, and what is decoded from it, is what the owners said it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from lightning_cpr.recovery.parity import code
from lightning_cpr.recovery.parity.groups import Member, ParityPlan, Part, Piece
from lightning_cpr.recovery.parity.records import WORD, runs
from lightning_cpr.recovery.parity.wire import Route, Section, routes_between, unpack

_XOR_ROWS = 512  # as many as stay in the processor's cache


@dataclass
class _Incoming:
    """Rows of one shard of another rank: where their parity lies, how far they are encoded, their checksums.

    By part, int64: bases, the first word of its parity; exponents, its weight there; cursors.

    sums: int64, by block, the blocks of a part behind those of the part before; ``first_block`` is that of each part.
    """

    route: Route
    bases: Tensor
    exponents: Tensor
    cursors: Tensor
    first_block: Tensor
    sums: Tensor

    def sums_of(self, part: int) -> Tensor:
        start = int(self.first_block[part])
        return self.sums[start : start + self.route.parts[part].blocks]

    def weighted(self, bits: Tensor, counts: np.ndarray) -> Tensor:
        """``bits`` (``[n, width]``, ``counts[i]`` of them of part i) as parity counts them."""
        if not bool(self.exponents.any()):
            return bits
        stretches = zip(bits.split(counts.tolist()), self.exponents.tolist(), strict=True)
        return torch.cat([code.times(stretch, exponent) for stretch, exponent in stretches])


class ParityHolder:
    """One rank's parity. Memory: the parity, 8 bytes of checksum for each 2 KiB of each member, and the differences of
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
        self._due: dict[tuple[int, int], list[Piece]] = {}

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
        key = (exchange % every, every)
        if key not in self._due:
            self._due[key] = [piece for piece in self.pieces if self._plan.scrub_due(piece, exchange, every)]
        wrong = [piece for piece in self._due[key] if self._parity_sum(piece) != code.flat_sum(self.parity(piece))]
        self.bad.update(piece.index for piece in wrong)
        return wrong

    def parity(self, piece: Piece) -> Tensor:
        """The parity words of a piece, a view."""
        return self._parity[self._base[piece.index] : self._base[piece.index] + piece.words]

    def verify(self, piece: Piece, member: Member, words: Tensor) -> bool:
        """Whether decoded words are what the member's owner last published, with nothing behind them."""
        good = not bool(words[member.words :].any())
        for part in member.parts if good else ():
            rows = words[part.offset : part.offset + part.words].view(part.rows, part.width)
            incoming, i = self._at[piece.index, part]
            good = good and torch.equal(code.block_sums(rows, part.block_rows), incoming.sums_of(i))
        if not good:
            self.bad.add(piece.index)
        return good

    def verify_blocks(self, piece: Piece, stretches: Iterable[tuple[Part, np.ndarray, Tensor]]) -> bool:
        """`verify` for some blocks of a member: (part, block numbers, their rows' words one after another)."""
        good = True
        for part, blocks, words in stretches:
            counts = part.rows_of(blocks)
            within = runs(np.zeros_like(counts), counts)
            sums = code.row_sums(words.view(-1, part.width))
            placed = code.times_each(sums, torch.from_numpy(within * part.width))
            incoming, i = self._at[piece.index, part]
            found = code.xor_by_block(placed, torch.from_numpy(blocks.repeat(counts)))[1]
            good = good and torch.equal(found, incoming.sums_of(i)[torch.from_numpy(blocks)])
        if not good:
            self.bad.add(piece.index)
        return good

    def unfinished(self) -> list[tuple[int, int, int, int, int]]:
        """(piece, source, route number, part number, first row that is not in parity) of each part that is not encoded
        to its end. A piece may have several parts of one source.
        """
        return [
            (incoming.route.pieces[i].index, source, number, i, cursor)
            for source, tracked in self._incoming.items()
            for number, incoming in enumerate(tracked)
            for i, cursor in enumerate(incoming.cursors.tolist())
            if cursor < incoming.route.parts[i].row_hi
        ]

    def reset(self) -> None:
        """Parity of nothing."""
        self._parity.zero_()
        self._staged = []
        self.bad.clear()
        for tracked in self._incoming.values():
            for incoming in tracked:
                incoming.sums.zero_()
                incoming.cursors = incoming.route.lows.clone()

    def _track(self, route: Route, source: int) -> _Incoming:
        exponents = []
        for piece in route.pieces:
            member = piece.member(source)
            assert member is not None
            exponents.append(member.column if piece.holders.index(self.rank) else 0)
        blocks = [0, *accumulate(part.blocks for part in route.parts)]
        return _Incoming(
            route,
            torch.tensor(
                [self._base[piece.index] + p.offset for p, piece in zip(route.parts, route.pieces, strict=True)]
            ),
            torch.tensor(exponents),
            route.lows.clone(),
            torch.tensor(blocks[:-1]),
            torch.zeros(blocks[-1], dtype=torch.int64),
        )

    def _xor(self, incoming: _Incoming, section: Section) -> None:
        if not section.rows.numel():
            return
        route, width, rows = incoming.route, incoming.route.width, section.rows.numpy()
        counts = np.diff(np.searchsorted(rows, route.lows.numpy()), append=rows.size)
        index = rows - route.lows.numpy().repeat(counts)
        starts = incoming.bases.numpy().repeat(counts) + index * width
        self._xor_words(starts, incoming.weighted(section.bits, counts).numpy())
        block, within = np.divmod(index, route.parts[0].block_rows)
        placed = code.times_each(section.sums, torch.from_numpy(within * width))
        blocks = torch.from_numpy(block + incoming.first_block.numpy().repeat(counts))
        blocks, change = code.xor_by_block(placed, blocks)
        incoming.sums[blocks] ^= change

    def _xor_words(self, starts: np.ndarray, bits: np.ndarray) -> None:
        """XOR rows into parity, each from the word ``starts[i]`` on."""
        parity, width = self._parity.numpy(), bits.shape[1]
        # every stretch of `width` words as a row of its own; the ones that are written do not overlap
        stretches = as_strided(parity, (parity.size - width + 1, width), parity.strides * 2)
        for first in range(0, len(starts), _XOR_ROWS):
            at, change = starts[first : first + _XOR_ROWS], bits[first : first + _XOR_ROWS]
            if at[-1] - at[0] == (len(at) - 1) * width and bool((np.diff(at) == width).all()):
                parity[at[0] : at[-1] + width] ^= change.reshape(-1)
            else:
                rows = stretches[at]
                rows ^= change
                stretches[at] = rows

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
