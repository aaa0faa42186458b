"""What the owner of rows sends to a holder of their parity in one exchange, as int64 words.

A message is one section for each shard of the sender that has rows on that holder, in the order that both sides derive
from the plan: ``[n, p, one cursor a part, rows[n], sums[n], bits[n * width], p times (part, its block sums)]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_cpr.errors import RecoveryError
from lightning_cpr.recovery.parity.groups import ParityPlan, Part, Piece
from lightning_cpr.spec import ShardSpec


@dataclass(frozen=True)
class Route:
    """The rows of one shard whose parity one holder has: parts by row."""

    spec: ShardSpec
    width: int
    parts: tuple[Part, ...]
    pieces: tuple[Piece, ...]


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


def pack(sections: Sequence[Section]) -> Tensor:
    """The message of these sections."""
    words: list[Tensor] = []
    for s in sections:
        words += [torch.tensor([s.rows.numel(), len(s.published)]), s.cursors, s.rows, s.sums, s.bits.reshape(-1)]
        for part, sums in s.published.items():
            words += [torch.tensor([part]), sums]
    return torch.cat(words) if words else torch.empty(0, dtype=torch.int64)


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
