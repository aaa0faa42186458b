"""Which rows a priority save writes (CPR, section 4.2): vanilla, SCAR, MFU and SSU, one object a shard.

The tracker calls ``observe`` with the shard-local ids of the batches whose backward has run; only training lookups
count. At a save boundary the caller takes ``select``, stages those rows, and calls ``saved`` with *all* rows that it
staged, at that same boundary; if the save is aborted it hands the ``Undo`` back, so that nothing is forgotten. Ids
are int64 in [0, rows).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from lightning_cpr.errors import ConfigError
from lightning_cpr.policy import check
from lightning_cpr.spec import TableSpec

Variant = Literal["vanilla", "scar", "mfu", "ssu"]
VARIANTS: tuple[str, ...] = get_args(Variant)

# Distances are taken over blocks of this many rows, to bound the scratch memory.
_BLOCK = 65536
_COUNT_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class PriorityConfig:
    """ratio: share of a shard's rows that a priority save writes, (0, 1]. seed: of SSU's evictions."""

    variant: str = "ssu"
    ratio: float = 0.125
    seed: int = 0

    def __post_init__(self) -> None:
        check.one_of("variant", self.variant, VARIANTS)
        check.share("ratio", self.ratio)

    def count(self, rows: int) -> int:
        """Rows of a priority save of a shard of ``rows``."""
        return rows if self.variant == "vanilla" else math.ceil(self.ratio * rows)


@dataclass(frozen=True)
class Undo:
    """What ``saved`` forgot: the rows, and their counts or old saved values."""

    rows: Tensor
    values: Tensor


class RowPriority(ABC):
    """The rows of one shard, by how much they deserve to be saved. Selections skip rows that cannot have changed."""

    def __init__(self, rows: int) -> None:
        check.not_negative("rows", rows)
        self.rows = rows

    @abstractmethod
    def observe(self, ids: Tensor, counts: Sequence[int]) -> None:
        """Ids ``[n]`` of the next batches, with repeats, and how many are of each batch, also of those with none."""

    @abstractmethod
    def select(self, k: int) -> Tensor:
        """At most ``k`` rows, int64, strictly increasing. Forgets nothing."""

    @abstractmethod
    def saved(self, row_ids: Tensor) -> Undo:
        """These distinct rows were staged just now."""

    @abstractmethod
    def aborted(self, undo: Undo) -> None:
        """The save that returned ``undo`` was never committed."""

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes of the tensors kept beside the table."""


def make_priority(config: PriorityConfig, weight: Tensor) -> RowPriority:
    """The priority of a shard. ``weight``: its live ``[rows, cols]``, kept by SCAR only; the state lives on its
    device.
    """
    rows = int(weight.shape[0])
    if config.variant == "scar":
        return Scar(weight)
    if config.variant == "mfu":
        return Mfu(rows, weight.device)
    if config.variant == "ssu":
        return Ssu(rows, config.count(rows), config.seed, weight.device)
    return Vanilla(rows)


class Vanilla(RowPriority):
    """All rows, whatever ``k``."""

    def observe(self, ids: Tensor, counts: Sequence[int]) -> None:
        pass

    def select(self, k: int) -> Tensor:
        return torch.arange(self.rows)

    def saved(self, row_ids: Tensor) -> Undo:
        return Undo(row_ids, torch.empty(0))

    def aborted(self, undo: Undo) -> None:
        pass

    @property
    def memory_bytes(self) -> int:
        return 0


class Scar(RowPriority):
    """The rows that moved farthest (L2) since they were last saved; a row with NaN moved infinitely far."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(int(weight.shape[0]))
        self._weight = weight.detach()
        self._copy = self._weight.clone()

    def observe(self, ids: Tensor, counts: Sequence[int]) -> None:
        pass

    def select(self, k: int) -> Tensor:
        moved = torch.empty(self.rows, dtype=torch.float32, device=self._weight.device)
        for start in range(0, self.rows, _BLOCK):
            block = slice(start, start + _BLOCK)
            torch.linalg.vector_norm((self._weight[block].float() - self._copy[block].float()), dim=1, out=moved[block])
        return _largest(moved.nan_to_num_(nan=math.inf, posinf=math.inf), k)

    def saved(self, row_ids: Tensor) -> Undo:
        undo = Undo(row_ids, self._copy[row_ids])
        self._copy[row_ids] = self._weight[row_ids]
        return undo

    def aborted(self, undo: Undo) -> None:
        self._copy[undo.rows] = undo.values

    @property
    def memory_bytes(self) -> int:
        return self._copy.nbytes


class Mfu(RowPriority):
    """The rows looked up most since they were last saved. Only the counters of saved rows are cleared."""

    def __init__(self, rows: int, device: torch.device | None = None) -> None:
        super().__init__(rows)
        self.counts = torch.zeros(rows, dtype=torch.int32, device=device)
        self._bound = 0

    def observe(self, ids: Tensor, counts: Sequence[int]) -> None:
        self._count(ids, torch.ones(1, dtype=torch.int32, device=self.counts.device).expand(ids.numel()))

    def select(self, k: int) -> Tensor:
        return _largest(self.counts, k)

    def saved(self, row_ids: Tensor) -> Undo:
        undo = Undo(row_ids, self.counts[row_ids])
        self.counts[row_ids] = 0
        return undo

    def aborted(self, undo: Undo) -> None:
        self._count(undo.rows, undo.values, int(undo.values.max()) if undo.values.numel() else 0)

    @property
    def memory_bytes(self) -> int:
        return self.counts.nbytes

    def _count(self, ids: Tensor, by: Tensor, most: int | None = None) -> None:
        # No counter exceeds _bound, so that none overflows: one that could is first cut to half the range.
        most = ids.numel() if most is None else most
        if self._bound + most > _COUNT_LIMIT:
            self.counts.clamp_(max=_COUNT_LIMIT // 2)
            by = by.clamp(max=_COUNT_LIMIT // 2)
            self._bound, most = _COUNT_LIMIT // 2, min(most, _COUNT_LIMIT // 2)
        self.counts.scatter_add_(0, ids, by)
        self._bound += most


class Ssu(RowPriority):
    """Rows seen by sub-sampling: the ids of every 2nd batch enter a set of at most ``capacity`` rows; when it is
    full, random members make room. Emptied by each save. The set is one bit a row, at most the paper's 4 * r bytes
    for r >= 1/32.
    """

    def __init__(self, rows: int, capacity: int, seed: int, device: torch.device | None = None) -> None:
        super().__init__(rows)
        self.capacity = capacity
        self._bits = torch.zeros((rows + 7) // 8, dtype=torch.uint8, device=device)
        self._size = 0
        self._batches = 0
        self._random = torch.Generator(device=self._bits.device).manual_seed(seed)

    def __len__(self) -> int:
        return self._size

    def observe(self, ids: Tensor, counts: Sequence[int]) -> None:
        sampled = ids.split(list(counts))[self._batches % 2 :: 2]
        self._batches += len(counts)
        if any(batch.numel() for batch in sampled):
            self._insert(torch.cat(sampled))

    def select(self, k: int) -> Tensor:
        members = self._members()
        if members.numel() > k:
            members = members[self._shuffle(members.numel())[:k]].sort().values
        return members

    def saved(self, row_ids: Tensor) -> Undo:
        undo = Undo(row_ids, self._members())
        self._bits.zero_()
        self._size = 0
        return undo

    def aborted(self, undo: Undo) -> None:
        self._insert(undo.values)

    @property
    def memory_bytes(self) -> int:
        return self._bits.nbytes

    def _insert(self, ids: Tensor) -> None:
        new = _distinct(_where(ids, self._bit_of(ids) == 0))
        if new.numel() > self.capacity:
            new = new[self._shuffle(new.numel())[: self.capacity]]
        excess = self._size + new.numel() - self.capacity
        if excess > 0:
            self._flip(self._draw_members(excess), -1)
        self._flip(new, 1)

    def _draw_members(self, count: int) -> Tensor:
        """``count`` distinct members, each as likely as any other: those of bytes drawn at random."""
        if count * 4 < self._size:
            draws = math.ceil(1.3 * count * self._bits.numel() / self._size) + 64
            drawn = torch.randint(self._bits.numel(), (draws,), generator=self._random, device=self._bits.device)
            found = self._members_of(_distinct(drawn))
            if found.numel() >= count:
                return found[self._shuffle(found.numel())[:count]]
        members = self._members()
        return members[self._shuffle(members.numel())[:count]]

    def _flip(self, ids: Tensor, sign: Literal[1, -1]) -> None:
        # The ids are distinct and all out of (into) the set: sums of their bits are their unions, and never carry.
        bits = torch.ones_like(ids, dtype=torch.uint8) << (ids & 7).to(torch.uint8)
        self._bits.scatter_add_(0, ids >> 3, bits if sign > 0 else -bits)
        self._size += sign * ids.numel()

    def _bit_of(self, ids: Tensor) -> Tensor:
        return (self._bits.index_select(0, ids >> 3) >> (ids & 7).to(torch.uint8)) & 1

    def _members(self) -> Tensor:
        return self._members_of(self._bits.nonzero().flatten())

    def _members_of(self, byte: Tensor) -> Tensor:
        inside = _set_bits(self._bits.index_select(0, byte))
        return byte.index_select(0, inside >> 3) * 8 + (inside & 7)

    def _shuffle(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._random, device=self._bits.device)


def _largest(score: Tensor, k: int) -> Tensor:
    """Rows of the ``k`` largest scores above 0, increasing; of equal scores the lower rows."""
    count = score.numel()
    if k <= 0 or count == 0:
        return torch.empty(0, dtype=torch.int64, device=score.device)
    least = _kth_largest(score, min(k, count))
    if least <= 0:
        return (score > 0).nonzero().flatten()
    keep = score > least
    ties = (score == least).nonzero().flatten()
    keep[ties[: k - int(keep.sum())]] = True
    return keep.nonzero().flatten()


def _kth_largest(score: Tensor, k: int) -> float:
    # On a CPU numpy's selection and sort are 10 x those of torch.
    if score.is_cpu:
        return np.partition(score.numpy(), -k)[-k].item()
    return score.kthvalue(score.numel() - k + 1).values.item()


def _where(ids: Tensor, mask: Tensor) -> Tensor:
    # On a CPU numpy's is 6 x torch's.
    return torch.from_numpy(ids.numpy()[mask.numpy()]) if ids.is_cpu else ids[mask]


def _set_bits(byte: Tensor) -> Tensor:
    """Positions of the set bits, 8 a byte, lowest first."""
    if byte.is_cpu:
        return torch.from_numpy(np.flatnonzero(np.unpackbits(byte.numpy(), bitorder="little").view(np.bool_)))
    shifts = torch.arange(8, dtype=torch.uint8, device=byte.device)
    return ((byte[:, None] >> shifts) & 1).flatten().nonzero().flatten()


def _distinct(ids: Tensor) -> Tensor:
    """Increasing, each once."""
    if ids.is_cpu:
        ids = torch.from_numpy(np.sort(ids.numpy()))
        return ids.unique_consecutive()
    return ids.unique()


def select_tables(
    tables: Sequence[TableSpec], share: float = 0.99, names: Sequence[str] | None = None
) -> tuple[str, ...]:
    """The tables that priority saves apply to, by fqn: those of ``names``, else the fewest, largest ones that hold
    ``share`` of all rows. The others are saved whole. Raises ConfigError on a name that is no table.
    """
    check.share("share", share)
    known = {table.fqn for table in tables}
    if names is not None:
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ConfigError(f"tables {unknown} do not exist: must be some of {sorted(known)}")
        return tuple(dict.fromkeys(names))
    goal, held, chosen = share * sum(table.rows for table in tables), 0, []
    for table in sorted(tables, key=lambda t: (-t.rows, t.fqn)):
        if held >= goal:
            break
        chosen.append(table.fqn)
        held += table.rows
    return tuple(chosen)


def extra_bytes(variant: str, rows: int, row_bytes: int) -> int:
    """What `RowPriority.memory_bytes` of a shard of ``rows`` rows of ``row_bytes`` will be."""
    check.one_of("variant", variant, VARIANTS)
    return {"vanilla": 0, "scar": rows * row_bytes, "mfu": 4 * rows, "ssu": (rows + 7) // 8}[variant]


def choose_variant(row_bytes: Sequence[tuple[int, int]], budget: float = 0.01) -> Literal["mfu", "ssu"]:
    """``mfu`` where its counters take at most ``budget`` of the prioritised tables, else ``ssu``; for (rows, bytes a
    row) of each table.
    """
    table = sum(rows * width for rows, width in row_bytes)
    counters = sum(extra_bytes("mfu", rows, width) for rows, width in row_bytes)
    return "mfu" if table and counters <= budget * table else "ssu"
