"""What the owner of a shard keeps: the bits that its rows had at the last exchange, for each row touched since.

A row changes only after a touch of it has ended in the window that is open, and a touch reads only rows that no touch
before it named in that window. So what it reads has not changed since the window opened: however long before the change
it runs, and whatever other rows change meanwhile.

Three threads meet here. Touches come from the training thread and from `ahead`'s, all else that says what a window
keeps from the training thread: one at a time. The exchange's thread calls `Change.take` before rows change again, and
`Window.read` at any time: a row's first bits are kept before its slot says so, and that before the row changes, so that
`read`, which looks at the row first and at the slot then, never misses them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from lightning_cpr.recovery.parity.records import ShardRows

_TAKE_ROWS = 1024  # as many as stay in the processor's cache
_MAX_SLOT = 1 << 30
_numbers = count()


@dataclass
class Change:
    """What one exchange says about one shard.

    rows: int64 ``[n]``, shard-local, distinct, increasing after `tidy`; fields: the rows' bits before the exchange's
    steps, after `take` their XOR with those behind them. Both lie in the window's spare buffer until its next `close`.
    order: where in ``fields`` each row lies; None: at the same place. taken: how many rows are XORed.
    """

    shard: ShardRows
    rows: Tensor
    fields: list[Tensor]
    order: Tensor | None = None
    taken: int = 0

    def take(self) -> None:
        """XOR with the bits that the rows have now, before they change again. Goes on where it was broken off."""
        room = self.shard.room(min(_TAKE_ROWS, self.rows.numel()))
        for start in range(self.taken, self.rows.numel(), _TAKE_ROWS):
            rows = self.rows[start : start + _TAKE_ROWS]
            now = [field[: rows.numel()] for field in room]
            self.shard.take(rows, now)
            for field, after in zip(self.fields, now, strict=True):
                field[start : start + _TAKE_ROWS].bitwise_xor_(after)
            self.taken += rows.numel()

    def tidy(self) -> None:
        """By row number, without rows that kept their bits."""
        rows = self.rows.numpy()
        if bool((rows[1:] < rows[:-1]).any()):
            self.order = torch.from_numpy(rows.argsort())
            self.rows = self.rows[self.order]
        suspects = torch.nonzero(self.fields[0][:, 0] == 0).view(-1)
        if suspects.numel():
            same = torch.ones(suspects.numel(), dtype=torch.bool)
            for field in self.fields:
                same &= (field.index_select(0, suspects) == 0).all(dim=1)
            changed = torch.ones(rows.size, dtype=torch.bool)
            changed[suspects[same]] = False
            order = torch.arange(rows.size) if self.order is None else self.order
            kept = changed[order]
            if not bool(kept.all()):
                self.rows, self.order = self.rows[kept], order[kept]

    def join(self, places: Tensor, words: Tensor) -> None:
        """Write the XORs of the rows at these places of ``rows`` (int64, increasing) as records, ``[n, words]``."""
        where = places if self.order is None else self.order[places]
        for start in range(0, where.numel(), _TAKE_ROWS):
            some = where[start : start + _TAKE_ROWS]
            first, end = int(some[0]), int(some[-1]) + 1
            if self.order is None and end - first == some.numel():
                fields = [field[first:end] for field in self.fields]
            else:
                fields = [field.index_select(0, some) for field in self.fields]
            self.shard.join(fields, words[start : start + _TAKE_ROWS])


class _Touched:
    """Rows and their bits in a buffer that grows by a quarter and is kept."""

    def __init__(self, shard: ShardRows) -> None:
        self._shard = shard
        self.rows = torch.empty(0, dtype=torch.int64)
        self.fields = shard.room(0)

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + sum(field.nbytes for field in self.fields)

    def reserve(self, used: int, end: int) -> None:
        if end > self.rows.numel():
            room = min(self._shard.spec.rows, max(end, self.rows.numel() * 5 // 4))
            rows, fields = torch.empty(room, dtype=torch.int64), self._shard.room(room)
            for new, old in zip([rows, *fields], [self.rows, *self.fields], strict=True):
                new[:used] = old[:used]
            self.rows, self.fields = rows, fields


class Window:
    """The first-touch bits of one shard since the last exchange. Memory: 4 bytes a row, and twice the touched rows: of
    this window and of the one before, which is under way.

    ``number``: which window is open; no two windows, of whatever shards, have the same.
    """

    def __init__(self, rows: ShardRows) -> None:
        self._shard = rows
        # a row's place among the touched ones, counted on from window to window: below `_first` it is an older window's
        self._slot = torch.full((rows.spec.rows,), -1, dtype=torch.int32)
        self._first = 0
        self._count = 0
        self._touched, self._spare = _Touched(rows), _Touched(rows)
        self._lock = Lock()
        self.number = next(_numbers)

    @property
    def nbytes(self) -> int:
        return self._slot.nbytes + self._touched.nbytes + self._spare.nbytes

    @property
    def touched(self) -> Tensor:
        """The rows that this window keeps, int64, in the order of their first touch."""
        return self._touched.rows[: self._count]

    def touch(self, rows: Tensor | None) -> int:
        """Keep the rows' bits if this is their first touch; the number of the window that has them now.

        Args:
            rows: int64 shard-local numbers, in any order, repeats allowed. None: every row.

        Raises:
            IndexError: the shard has no such row.
        """
        slots = self._slot.numpy()
        if rows is not None:
            ordered = np.sort(rows.detach().reshape(-1).to("cpu", torch.int64).numpy())
            if ordered.size and not 0 <= ordered[0] <= ordered[-1] < slots.size:
                raise IndexError(f"parity: rows {ordered[0]} to {ordered[-1]} were touched of {slots.size}")
            distinct = np.ones(ordered.size, dtype=bool)
            np.not_equal(ordered[1:], ordered[:-1], out=distinct[1:])
            named = ordered[distinct]
        with self._lock:
            fresh = np.flatnonzero(slots < self._first) if rows is None else named[slots.take(named) < self._first]
            self._add(torch.from_numpy(fresh))
            return self.number

    def close(self) -> Change:
        """Start a new window: what changed in this one, once it is taken."""
        with self._lock:
            kept, end = self._touched, self._count
            self._touched, self._spare = self._spare, kept
            self._open()
        return Change(self._shard, kept.rows[:end], [field[:end] for field in kept.fields])

    def read(self, rows: slice | Tensor, out: Tensor | None = None) -> Tensor:
        """Records of rows, a range or by number, as they stood when the window opened; in ``out`` if it is given."""
        words = self._shard.read(rows, out)
        slots = self._slot[rows] - self._first
        touched = torch.nonzero(slots >= 0).view(-1)
        if touched.numel():
            places = slots[touched].long()
            before = torch.empty((places.numel(), words.shape[1]), dtype=torch.int64)
            self._shard.join([field.index_select(0, places) for field in self._touched.fields], before)
            words[touched] = before
        return words

    def reopen(self, change: Change) -> None:
        """Move the window's start back to before ``change``, the last one that was closed."""
        order = torch.arange(change.rows.numel()) if change.order is None else change.order
        with self._lock:
            slots = self._slot[change.rows] - self._first
            known, new = torch.nonzero(slots >= 0).view(-1), torch.nonzero(slots < 0).view(-1)
            start = self._count
            places = slots[known].long()
            self._add(change.rows[new])
            for before, bits in zip(self._touched.fields, change.fields, strict=True):
                before[places] ^= bits[order[known]]
                before[start : self._count] ^= bits[order[new]]

    def roll_back(self) -> None:
        """Give the live shard the bits that it had when the window opened, and start a new window."""
        with self._lock:
            self._shard.put(self.touched, [field[: self._count] for field in self._touched.fields])
            self._open()

    def restart(self) -> None:
        """Start a new window and forget what changed."""
        with self._lock:
            self._open()

    def _open(self) -> None:
        self.number = next(_numbers)
        self._first += self._count
        self._count = 0
        if self._first > _MAX_SLOT:
            self._slot.fill_(-1)
            self._first = 0

    def write(self, rows: slice | Tensor, words: Tensor) -> None:
        """Restore live rows, a range or by number. The window holds none of them."""
        self._shard.write(rows, words)

    def _add(self, rows: Tensor) -> None:
        start, end = self._count, self._count + rows.numel()
        kept = self._touched
        kept.reserve(start, end)
        kept.rows[start:end] = rows
        self._shard.take(rows, [field[start:end] for field in kept.fields])
        self._slot.numpy()[rows.numpy()] = np.arange(self._first + start, self._first + end, dtype=np.int32)
        self._count = end
