"""Which rows changed since which version, and how often: one byte a row of each shard that this rank saves.

A row counts when the backward of a batch that looked it up has run, so that a save at a batch's end neither misses a
row that an early-lookup pipeline has seen nor takes one that validation has. Rows are told apart by row only where the
optimizer touches looked-up rows alone (`TableSpec.row_sparse`): SGD, Adagrad and row-wise Adagrad without decay, in
fused kernels. All other tables are wholly dirty, data-parallel ones too: they are small by choice, held by dense
kernels, and updated with the ids of all ranks.

A save owns the bits that it takes (`RowTracker.take`): `settle` drops them once the version is committed and adds them
back if it is not, together with what the row priorities forgot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from lightning_cpr.errors import ConfigError
from lightning_cpr.policy.priority import Mfu, PriorityConfig, RowPriority, Undo, make_priority
from lightning_cpr.spec import Shard, ShardSpec, TableSpec
from lightning_cpr.tables.lookup import Looked, LookupHook, by_shard

Rows = Literal["all", "since_base", "since_last", "priority"]
"""What a save takes: every row; those that differ from the base; from the newest version; the most urgent of these."""

_LAST, _BASE = 1, 2
_BOTH = _LAST | _BASE
# Ids that wait to be noted: many at a time cost a fraction, and at a save they hold training up for about 1 ms.
_WAITING = 1 << 18


@dataclass
class _Taken:
    """What a save owns of a shard: its bits, uint8 ``[rows]``, and what else it made the shard forget."""

    flags: Tensor
    lookups: int
    mixed: bool
    complete_step: int
    undo: list[tuple[RowPriority, Undo]]


@dataclass
class _Track:
    """A shard. flags: uint8 ``[rows]``, of `_LAST` and `_BASE`; None: wholly dirty, always.

    lookups: since the shard was last taken with all its changed rows; ``mixed``: rows were taken without all since.
    seen: lookups, and batches, since it is tracked.
    """

    shard: Shard
    flags: Tensor | None
    complete_step: int = 0
    lookups: int = 0
    mixed: bool = False
    seen: int = 0
    batches: int = 0
    priority: RowPriority | None = None
    counter: Mfu | None = None

    @property
    def observers(self) -> list[RowPriority]:
        found = [each for each in (self.priority, self.counter) if each is not None]
        return found[:1] if self.priority is self.counter else found

    def note(self, ids: Tensor, counts: Sequence[int]) -> None:
        """The rows that batches of so many ids looked up have changed."""
        self.lookups += len(ids)
        self.seen += len(ids)
        self.batches += len(counts)
        if self.flags is None:
            return
        if ids.is_cpu:
            self.flags.numpy()[ids.numpy()] = _BOTH  # half the cost of index_fill_
        else:
            self.flags.index_fill_(0, ids, _BOTH)
        for each in self.observers:
            each.observe(ids, counts)

    @property
    def unsaved(self) -> tuple[int, bool]:
        """(row updates since each row was last taken, exact): else, where no counter tells whose they are, too many."""
        if self.counter is None:
            return self.lookups, not self.mixed
        return int(self.counter.counts.sum(dtype=torch.int64)), True


@dataclass(frozen=True)
class Selection:
    """What a save writes of this rank. rows: by shard, int64, increasing, on the CPU; a shard that is missing is
    written whole. complete: by shard, the step that its rows are then complete to. lacking: row updates done by then
    that the save leaves out, 0 where all shards are complete.
    """

    rows: Mapping[ShardSpec, Tensor] = field(default_factory=dict)
    complete: Mapping[ShardSpec, int] = field(default_factory=dict)
    lacking: int = 0


class RowTracker:
    """The touched rows of the shards that this rank saves. Made on every rank once the model is sharded.

    Args:
        model: the sharded model.
        shards: the shards that this rank saves.
        specs: all tables by name.
        priority: how priority saves choose rows, None if there are none. tables: which tables they choose rows of; of
            the others they take every changed row.
        count: keep a counter a row beside it, for `lost_updates`.

    ``since``: the version that rows not dirty are equal to; empty while all are dirty. ``updates``: of rows of sharded
    tables on this rank, so far.

    Memory: 1 byte a row, 4 more if counted, and what the priority keeps; another byte a row while a save is in flight;
    the ids of the newest batches, up to about 2 MB.
    """

    def __init__(
        self,
        model: nn.Module,
        shards: Iterable[Shard],
        specs: Mapping[str, TableSpec],
        *,
        priority: PriorityConfig | None = None,
        tables: Iterable[str] = (),
        count: bool = False,
    ) -> None:
        self._specs = specs
        self._config = priority
        self._prioritised = frozenset(tables) if priority is not None else frozenset()
        self._count = count
        self._tracks: dict[ShardSpec, _Track] = {}
        self.updates = 0
        self._taken: tuple[str, dict[ShardSpec, _Taken]] | None = None
        self.adopt(shards)
        self._hook = LookupHook(model, lambda looked: partial(self._observe, looked))

    def adopt(self, shards: Iterable[Shard]) -> None:
        """Track these shards instead, every row dirty."""
        self._tracks, self._taken, self.since = {}, None, ""
        self._waiting: list[Looked] = []
        self._waiting_ids = 0
        for shard in shards:
            flags = None
            if self._specs[shard.spec.table].row_sparse and not shard.spec.replicated:
                flags = torch.full((shard.spec.rows,), _BOTH, dtype=torch.uint8, device=shard.weight.device)
            self._tracks[shard.spec] = _Track(shard, flags)
            self._forget(self._tracks[shard.spec])

    def _forget(self, track: _Track) -> None:
        """Start the counters and the priority of a shard anew."""
        track.lookups, track.mixed = 0, False
        if track.flags is None:
            return
        weight = track.shard.weight
        if track.shard.spec.table in self._prioritised and self._config is not None:
            track.priority = make_priority(self._config, weight)
        if isinstance(track.priority, Mfu):
            track.counter = track.priority
        elif self._count:
            track.counter = Mfu(track.shard.spec.rows, weight.device)

    def _observe(self, looked: Looked) -> None:
        self.updates += looked.total
        self._waiting.append(looked)
        self._waiting_ids += looked.values.numel()
        if self._waiting_ids > _WAITING:
            self._note_waiting()

    def _note_waiting(self) -> None:
        """Note the ids of the batches so far. Before anything that reads or writes bits or counters."""
        waiting, self._waiting, self._waiting_ids = self._waiting, [], 0
        for spec, ids, counts in by_shard(waiting):
            if spec in self._tracks:
                self._tracks[spec].note(ids, counts)

    @property
    def memory_bytes(self) -> int:
        """Bytes kept beside the tables."""
        seen = {id(each): each for track in self._tracks.values() for each in track.observers}
        flags = sum(track.flags.nbytes for track in self._tracks.values() if track.flags is not None)
        return flags + sum(each.memory_bytes for each in seen.values())

    def hooks_lost(self) -> list[str]:
        """Tables whose lookups were no longer seen (a reshard made new ones); they are hooked again.

        Their rows may have changed unseen, on shards that are no more: call `adopt` with the shards of now.
        """
        lost = self._hook.still_ours()
        if lost:
            self._hook.rechain()
        return lost

    def close(self) -> None:
        """Take the hooks away."""
        self._hook.remove()

    def mark(self, table: str, rows: Tensor | None = None) -> None:
        """Rows of a table (global numbers, any shape; None: all) were written by other means than training.

        Raises:
            ConfigError: no such table, or no such rows.
        """
        self._note_waiting()
        names = [fqn for fqn in self._specs if table in (fqn, fqn.rpartition(".")[2])]
        if len(names) != 1:
            raise ConfigError(f"table {table!r}: must be one of {', '.join(self._specs)}")
        ids = None if rows is None else torch.as_tensor(rows).flatten().long()
        count = self._specs[names[0]].rows
        if ids is not None and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < count:
            raise ConfigError(
                f"rows {int(ids.min())}..{int(ids.max())} of table {names[0]}: it has rows 0..{count - 1}"
            )
        for spec, track in self._tracks.items():
            if spec.table != names[0] or track.flags is None:
                continue
            if ids is None:
                track.flags.fill_(_BOTH)
            else:
                mine = ids[(ids >= spec.row_start) & (ids < spec.row_end)] - spec.row_start
                track.flags.index_fill_(0, mine.to(track.flags.device), _BOTH)

    def dirty(self, since: Literal["base", "last"]) -> dict[ShardSpec, Tensor]:
        """By shard tracked by row: the shard-local rows that may differ from that version, on the CPU."""
        self._note_waiting()
        bit = _BASE if since == "base" else _LAST
        return {spec: _nonzero(t.flags & bit) for spec, t in self._tracks.items() if t.flags is not None}

    def take(self, version: str, rows: Rows, step: int) -> Selection:
        """What a save of ``version`` at ``step`` writes; it owns these bits until `settle`."""
        assert self._taken is None, "the save before was not settled"
        self._note_waiting()
        selected: dict[ShardSpec, Tensor] = {}
        taken: dict[ShardSpec, _Taken] = {}
        for spec, track in self._tracks.items():
            chosen, owned, complete = _choose(track, rows, self._config)
            if chosen is not None:
                selected[spec] = chosen
            undo = []
            if track.observers:
                changed = _nonzero(owned & _LAST) if chosen is None or rows == "since_base" else chosen
                undo = [(each, each.saved(changed.to(owned.device))) for each in track.observers]
            taken[spec] = _Taken(owned, track.lookups if complete else 0, track.mixed, track.complete_step, undo)
            track.mixed = not complete
            if complete:
                track.complete_step, track.lookups = step, 0
        self._taken = (version, taken)
        lacking = sum(track.unsaved[0] for track in self._tracks.values() if track.mixed)
        return Selection(selected, {spec: track.complete_step for spec, track in self._tracks.items()}, lacking)

    def settle(self, committed: str | None) -> None:
        """End the save in flight, if there is one: ``committed`` is the newest version that stands."""
        if self._taken is None:
            return
        (version, taken), self._taken = self._taken, None
        if version == committed:
            self.since = version
            return
        for spec, owned in taken.items():
            track = self._tracks[spec]
            if track.flags is not None:
                track.flags |= owned.flags
            track.lookups += owned.lookups
            track.mixed = owned.mixed
            track.complete_step = owned.complete_step
            for each, undo in owned.undo:
                each.aborted(undo)

    def restored(
        self, version: str, rows_since_base: Callable[[ShardSpec], Tensor], complete: Callable[[ShardSpec], int]
    ) -> None:
        """The shards hold the rows of the newest version: none differs from it, and these (shard-local) from its base.

        complete: the step that each shard is complete to in that version.
        """
        self._note_waiting()
        self.since = version
        for spec, track in self._tracks.items():
            if track.flags is not None:
                track.flags.zero_().index_fill_(0, rows_since_base(spec).to(track.flags.device), _BASE)
            track.complete_step = complete(spec)
            self._forget(track)

    def lost_updates(self) -> tuple[int, bool]:
        """(row updates that are lost if these shards go back to the newest version, exact): lookups since each row
        was saved. Not exact, and then too high, where priority saves took some rows and no counter tells whose.
        """
        self._note_waiting()
        unsaved = [track.unsaved for track in self._sharded]
        return sum(lost for lost, _ in unsaved), all(exact for _, exact in unsaved)

    @property
    def updates_per_batch(self) -> float:
        """Row updates of these shards in a batch, on average; 0 before the first."""
        self._note_waiting()
        return sum(track.seen / track.batches for track in self._sharded if track.batches)

    @property
    def _sharded(self) -> list[_Track]:
        return [track for track in self._tracks.values() if not track.shard.spec.replicated]


def _choose(track: _Track, rows: Rows, config: PriorityConfig | None) -> tuple[Tensor | None, Tensor, bool]:
    """(rows to write, None for all; the bits that the save owns; whether it holds all that changed)."""
    flags = track.flags
    if flags is None:
        return None, torch.empty(0, dtype=torch.uint8), True
    if rows == "all":
        owned = flags.clone()
        flags.zero_()
        return None, owned, True
    owned = flags & _LAST
    chosen = _nonzero(flags & _BASE if rows == "since_base" else owned)
    if rows == "priority" and track.priority is not None and config is not None:
        most = config.count(len(flags))
        if len(chosen) > most:
            picked = track.priority.select(most)
            picked = picked[owned[picked] != 0]
            owned.zero_().index_fill_(0, picked, _LAST)
            flags ^= owned
            return picked.cpu(), owned, False
    flags &= _BASE
    return chosen, owned, True


def _nonzero(flags: Tensor) -> Tensor:
    # On a CPU numpy's is several times faster than torch's, of booleans most of all.
    return torch.from_numpy(np.flatnonzero(flags.ne(0).cpu().numpy()))
