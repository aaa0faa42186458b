"""What the owner of rows sends to a holder of their parity in one exchange, as int64 words.

A message is one section for each shard of the sender that has rows on that holder, in the order that both sides derive
from the plan: ``[n, p, one cursor a part, rows[n], sums[n], bits[n * width], p times (part, its block sums)]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from lightning_cpr.errors import RecoveryError
from lightning_cpr.recovery.parity import code
from lightning_cpr.recovery.parity.groups import ParityPlan, Part, Piece
from lightning_cpr.recovery.parity.window import Change
from lightning_cpr.spec import ShardSpec


@dataclass(frozen=True)
class Route:
    """The rows of one shard whose parity one holder has: parts by row."""

    spec: ShardSpec
    width: int
    parts: tuple[Part, ...]
    pieces: tuple[Piece, ...]

    @cached_property
    def lows(self) -> Tensor:
        """The first row of each part, int64."""
        return torch.tensor([part.row_lo for part in self.parts])

    @cached_property
    def highs(self) -> Tensor:
        """The end of each part's rows, int64."""
        return torch.tensor([part.row_hi for part in self.parts])


@dataclass
class Section:
    """One shard's share of a message.

    rows: int64 ``[n]``, shard-local, increasing; sums: ``[n]``, the checksum of each row's bits; bits: ``[n, width]``,
    to XOR into parity. cursors: by part, the row up to which its rows are in parity after this exchange. published:
    by part number, the checksums of its blocks as the owner finds them in live memory.
    """

    cursors: Tensor
    rows: Tensor
    sums: Tensor
    bits: Tensor
    published: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Draft:
    """A section that is not written yet.

    places: int64, increasing: which rows of ``change`` belong to it. new: (first row, records) of rows that are new to
    parity.
    """

    route: Route
    cursors: Tensor
    change: Change
    places: Tensor
    new: list[tuple[int, Tensor]]
    published: dict[int, Tensor]

    @property
    def rows(self) -> int:
        return self.places.numel() + sum(len(words) for _, words in self.new)

    @property
    def words(self) -> int:
        """Its share of the message."""
        published = sum(1 + sums.numel() for sums in self.published.values())
        return 2 + self.cursors.numel() + self.rows * (2 + self.route.width) + published

    def write(self, words: Tensor) -> None:
        """Fill its share of the message."""
        count, parts, known = self.rows, self.cursors.numel(), self.places.numel()
        head, rows, sums, bits, published = words.split(
            [
                2 + parts,
                count,
                count,
                count * self.route.width,
                words.numel() - 2 - parts - count * (2 + self.route.width),
            ]
        )
        bits = bits.view(count, self.route.width)
        head[0], head[1], head[2:] = count, len(self.published), self.cursors
        torch.index_select(self.change.rows, 0, self.places, out=rows[:known])
        self.change.join(self.places, bits[:known])
        for start, new in self.new:
            rows[known : known + len(new)] = torch.arange(start, start + len(new))
            bits[known : known + len(new)] = new
            known += len(new)
        if self.new and not bool((rows[1:] > rows[:-1]).all()):
            ordered, order = rows.sort()
            rows.copy_(ordered)
            bits.copy_(bits[order])
        sums.copy_(code.row_sums(bits))
        position = 0
        for part, found in self.published.items():
            published[position] = part
            position += 1 + found.numel()
            published[position - found.numel() : position] = found


def routes_between(
    plan: ParityPlan, sources: Sequence[int], holders: Sequence[int]
) -> dict[tuple[int, int], list[Route]]:
    """Routes by (source, holder), each list in the order of its message's sections."""
    found: dict[tuple[int, int], dict[ShardSpec, list[tuple[Part, Piece]]]] = {}
    wanted, keep = set(sources), set(holders)
    for piece in plan.pieces:
        for holder in keep.intersection(piece.holders):
            for member in piece.members:
                if member.rank in wanted:
                    shards = found.setdefault((member.rank, holder), {})
                    for part in member.parts:
                        shards.setdefault(part.spec, []).append((part, piece))
    return {pair: [_route(spec, parts) for spec, parts in _ordered(shards)] for pair, shards in found.items()}


def write_messages(drafts: Sequence[Sequence[Draft]]) -> list[Tensor]:
    """The message to each rank from its drafts. All lie in one tensor, one after another."""
    sizes = [[draft.words for draft in found] for found in drafts]
    memory = torch.empty(sum(map(sum, sizes)), dtype=torch.int64)
    messages = list(memory.split([sum(found) for found in sizes]))
    for message, found, counts in zip(messages, drafts, sizes, strict=True):
        for draft, share in zip(found, message.split(counts), strict=True):
            draft.write(share)
    return messages


def unpack(message: Tensor, routes: Sequence[Route], source: int) -> list[Section]:
    """The sections of a message, as views of it.

    Raises:
        RecoveryError: the message does not fit the plan.
    """
    sections, position = [], 0

    def take(count: int) -> Tensor:
        nonlocal position
        position += count
        if count < 0 or position > message.numel():
            raise RecoveryError(f"parity: the message of rank {source} is cut short; nothing of it was used")
        return message[position - count : position]

    for route in routes:
        n, published = take(2).tolist()
        cursors, rows, sums = take(len(route.parts)), take(n), take(n)
        section = Section(cursors, rows, sums, take(n * route.width).view(n, route.width))
        for _ in range(published):
            part = int(take(1))
            section.published[part] = take(route.parts[part].blocks)
        sections.append(section)
    if position != message.numel():
        raise RecoveryError(f"parity: the message of rank {source} is longer than its sections; nothing was used")
    return sections


def _ordered(
    shards: dict[ShardSpec, list[tuple[Part, Piece]]],
) -> list[tuple[ShardSpec, list[tuple[Part, Piece]]]]:
    return sorted(shards.items(), key=lambda item: (item[0].table, item[0].row_start, item[0].col_start))


def _route(spec: ShardSpec, parts: list[tuple[Part, Piece]]) -> Route:
    parts = sorted(parts, key=lambda pair: pair[0].row_lo)
    return Route(spec, parts[0][0].width, tuple(p for p, _ in parts), tuple(piece for _, piece in parts))
