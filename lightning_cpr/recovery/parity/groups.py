"""Parity groups: which rows of which ranks share parity, and which ranks hold it. Pure.

The rows of all ranks are laid one after another, host by host, on a line that is folded into k lines of equal length L
(McNaughton's wrap-around rule). A host holds at most L of it, so at no position do two lines belong to the same host:
what stands at one position forms a group. The folded line is cut wherever its owners change, and finer, into *pieces*;
each piece's parity goes to the least loaded rank of a host that has no member in it. So shards of unequal size need no
padding, memory and traffic are even, and parity is 1/k of the rows unless one host alone holds more than that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from lightning_cpr.errors import ConfigError
from lightning_cpr.recovery.parity.config import ParityConfig
from lightning_cpr.recovery.parity.records import WORD, record_of
from lightning_cpr.spec import ShardSpec, TableSpec

MAX_PIECE_WORDS = (16 << 20) // WORD
MIN_PIECE_WORDS = 1024
PIECES_A_RANK = 8
BLOCK_WORDS = 2048 // WORD


@dataclass(frozen=True, slots=True)
class Part:
    """Rows ``[row_lo, row_hi)`` (shard-local) of a shard, at word ``offset`` of a piece; records of ``width`` words."""

    spec: ShardSpec
    row_lo: int
    row_hi: int
    offset: int
    width: int

    @property
    def rows(self) -> int:
        return self.row_hi - self.row_lo

    @property
    def words(self) -> int:
        return self.rows * self.width

    @property
    def block_rows(self) -> int:
        """Rows of one checksum block, about 2 KiB: the least that is decoded, and then verified, by itself."""
        return max(1, BLOCK_WORDS // self.width)

    @property
    def blocks(self) -> int:
        return math.ceil(self.rows / self.block_rows)

    def rows_of(self, blocks: np.ndarray) -> np.ndarray:
        """How many rows each of these blocks has: all as many, but the last one."""
        return np.minimum(self.block_rows, self.rows - blocks * self.block_rows)


@dataclass(frozen=True, slots=True)
class Member:
    """What one rank has in a piece. ``column`` is its weight in Q."""

    rank: int
    column: int
    parts: tuple[Part, ...]

    @property
    def words(self) -> int:
        return self.parts[-1].offset + self.parts[-1].words


@dataclass(frozen=True, slots=True)
class Piece:
    """One parity group's stretch of memory. ``holders``: the rank of P and, with m = 2, that of Q."""

    index: int
    words: int
    members: tuple[Member, ...]
    holders: tuple[int, ...]

    def member(self, rank: int) -> Member | None:
        return next((member for member in self.members if member.rank == rank), None)


@dataclass(frozen=True)
class ParityPlan:
    """All groups of a job. Every rank computes the same one.

    ``host_safe``: the loss of any ``m`` hosts leaves every piece decodable. ``warnings`` say in words why not, or why
    parity takes more memory than 1/k.
    """

    world: int
    k: int
    m: int
    pieces: tuple[Piece, ...]
    data_words: int
    host_safe: bool
    warnings: tuple[str, ...] = field(default=())

    def parity_words(self, rank: int) -> int:
        """Words of parity that a rank holds."""
        return sum(piece.words for piece in self.pieces if rank in piece.holders)

    @property
    def overhead(self) -> float:
        """Parity bytes over protected bytes."""
        return self.m * sum(piece.words for piece in self.pieces) / max(1, self.data_words)

    def scrub_due(self, piece: Piece, exchange: int, every: int) -> bool:
        """Whether a piece is compared at an exchange: each once in ``every`` exchanges, evenly; never if that is 0."""
        return every > 0 and piece.index * every // len(self.pieces) == exchange % every


@dataclass(frozen=True)
class _Line:
    """The rows of one rank on the line: (shard, record words, first word) and the end."""

    rank: int
    shards: tuple[tuple[ShardSpec, int, int], ...]
    start: int
    end: int


def protectable(spec: ShardSpec) -> bool:
    """Whether a shard needs parity: it has rows, and no other rank has them."""
    return spec.rows > 0 and not spec.replicated


def plan_parity(
    config: ParityConfig, specs: Sequence[ShardSpec], tables: Mapping[str, TableSpec], hosts: Sequence[str]
) -> ParityPlan:
    """Groups for a job.

    Args:
        specs: every shard of every rank. Replicated shards are left out: their replicas protect them.
        tables: by name.
        hosts: the host of each rank.

    Raises:
        ConfigError: fewer than ``m + 1`` ranks.
    """
    world = len(hosts)
    k = min(config.k, world - config.m)
    if k < 1:
        raise ConfigError(f"parity with m={config.m} needs at least {config.m + 1} ranks; this job has {world}")
    host_safe = len(set(hosts)) >= k + config.m
    units = [host if host_safe else str(rank) for rank, host in enumerate(hosts)]
    lines = _lay_out(specs, tables, units)
    total = lines[-1].end
    sizes: dict[str, int] = {}
    for line in lines:
        sizes[units[line.rank]] = sizes.get(units[line.rank], 0) + line.end - line.start
    length = max(math.ceil(total / k), *sizes.values(), 1)
    pieces = list(_pieces(lines, total, length, _piece_words(length, world)))
    holders = _holders(pieces, units, config.m)
    placed = tuple(Piece(i, words, members, holders[i]) for i, (words, members) in enumerate(pieces))
    warnings = []
    if not host_safe:
        warnings.append(
            f"{len(set(hosts))} hosts cannot keep {k} members and {config.m} parity apart: the loss of a host may lose "
            f"rows for good (to the store's last version). Hosts wanted: {k + config.m}"
        )
    if length > math.ceil(total / k) > 0:
        largest = max(sizes, key=lambda unit: sizes[unit])
        warnings.append(
            f"{'host' if host_safe else 'rank'} {largest} holds {sizes[largest] / total:.0%} of the rows: parity takes "
            f"more than 1/{k} of their memory. Shard the tables more evenly"
        )
    return ParityPlan(world, k, config.m, placed, total, host_safe, tuple(warnings))


def unrecoverable(plan: ParityPlan, lost: frozenset[int]) -> set[ShardSpec]:
    """The shards of lost ranks that parity cannot bring back, all of parity being encoded."""
    gone: set[ShardSpec] = set()
    for piece in plan.pieces:
        members = [member for member in piece.members if member.rank in lost]
        if len(members) > len(set(piece.holders) - lost):
            gone.update(part.spec for member in members for part in member.parts)
    return gone


def _piece_words(length: int, world: int) -> int:
    return max(MIN_PIECE_WORDS, min(MAX_PIECE_WORDS, math.ceil(length / (PIECES_A_RANK * world))))


def _lay_out(specs: Sequence[ShardSpec], tables: Mapping[str, TableSpec], units: Sequence[str]) -> list[_Line]:
    first = {unit: rank for rank, unit in reversed(list(enumerate(units)))}
    lines, position = [], 0
    for rank in sorted(range(len(units)), key=lambda r: (first[units[r]], r)):
        start, shards = position, []
        mine = [s for s in specs if s.owner == rank and protectable(s)]
        for spec in sorted(mine, key=lambda s: (s.table, s.row_start, s.col_start)):
            words = record_of(tables[spec.table], spec).words
            shards.append((spec, words, position))
            position += spec.rows * words
        lines.append(_Line(rank, tuple(shards), start, position))
    return lines


def _pieces(
    lines: Sequence[_Line], total: int, length: int, piece_words: int
) -> Iterator[tuple[int, tuple[Member, ...]]]:
    """(parity words, members) of each piece, in order of position."""
    cuts = sorted({0, length} | {line.start % length for line in lines} | {total % length})
    for low, high in pairwise(cuts):
        count = math.ceil((high - low) / piece_words)
        edges = [low + (high - low) * i // count for i in range(count + 1)]
        for a, b in pairwise(edges):
            members = []
            for column in range(math.ceil(total / length)):
                found = _member(lines, column, column * length + a, column * length + b)
                if found is not None:
                    members.append(found)
            if members:
                yield max(member.words for member in members), tuple(members)


def _member(lines: Sequence[_Line], column: int, low: int, high: int) -> Member | None:
    """The rows that start at ``[low, high)`` of the line: all of one rank, since pieces are cut at every owner."""
    for line in lines:
        if line.start <= low < line.end:
            parts, offset = [], 0
            for spec, width, base in line.shards:
                row_lo = max(0, math.ceil((low - base) / width))
                row_hi = min(spec.rows, math.ceil((high - base) / width))
                if row_lo < row_hi:
                    parts.append(Part(spec, row_lo, row_hi, offset, width))
                    offset += parts[-1].words
            return Member(line.rank, column, tuple(parts)) if parts else None
    return None


def _holders(
    pieces: Sequence[tuple[int, tuple[Member, ...]]], units: Sequence[str], m: int
) -> dict[int, tuple[int, ...]]:
    """Holders by piece: the least loaded ranks outside its members' hosts; pieces with the least choice come first."""
    load = [0] * len(units)
    choices = {}
    for index, (_, members) in enumerate(pieces):
        taken = {units[member.rank] for member in members}
        choices[index] = [rank for rank in range(len(units)) if units[rank] not in taken]
    holders: dict[int, tuple[int, ...]] = {}
    for index in sorted(choices, key=lambda i: (len(choices[i]), i)):
        eligible, chosen = choices[index], []
        for _ in range(m):
            rank = min(eligible, key=lambda r: (load[r], (r - index) % len(units)))
            eligible = [r for r in eligible if units[r] != units[rank]]
            load[rank] += pieces[index][0]
            chosen.append(rank)
        # P and Q change places with every piece: Q costs its holder a multiplication
        holders[index] = tuple(chosen if index % 2 == 0 else reversed(chosen))
    return holders
