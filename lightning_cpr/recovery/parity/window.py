"""What the owner of a shard keeps: the bits that its rows had at the last exchange, for each row touched since."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_cpr.recovery.parity.records import ShardRows


@dataclass
class Change:
    """What one exchange says about one shard. rows: int64 ``[n]``, shard-local, distinct; bits: ``[n, words]``, XOR of
    the rows' records before and after."""

    rows: Tensor
    bits: Tensor

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.bits.nbytes

    def tidy(self) -> Change:
        """By row number, without rows that kept their bits."""
        rows, order = self.rows.sort()
        changed = self.bits.any(dim=1)[order]
        if not bool(changed.all()):
            rows, order = rows[changed], order[changed]
        return Change(rows, self.bits.index_select(0, order))


class Window:
    """The first-touch bits of one shard since the last exchange. Memory: 4 bytes a row, and the touched rows in a
    buffer that grows by doubling and is kept."""

    def __init__(self, rows: ShardRows) -> None:
        self._shard = rows
        self._slot = torch.full((rows.spec.rows,), -1, dtype=torch.int32)
        self._rows = torch.empty(0, dtype=torch.int64)
        self._before = torch.empty((0, rows.record.words), dtype=torch.int64)
        self._count = 0

    @property
    def nbytes(self) -> int:
        return self._slot.nbytes + self._rows.nbytes + self._before.nbytes

    def touch(self, rows: Tensor | None) -> None:
        """Keep the rows' bits if this is their first touch. Call before they change.

        Args:
            rows: int64 shard-local numbers, in any order, repeats allowed. None: every row.
        """
        if rows is None:
            fresh = torch.nonzero(self._slot < 0).view(-1)
        else:
            rows = rows.detach().reshape(-1).to("cpu", torch.int64)
            fresh = rows[self._slot.index_select(0, rows) < 0]
            # of a repeated row one number sticks: the entry that reads its own number back is the one to keep
            numbers = torch.arange(fresh.numel(), dtype=torch.int32)
            self._slot.index_put_((fresh,), numbers)
            fresh = fresh[self._slot.index_select(0, fresh) == numbers]
        self._add(fresh, self._shard.read(fresh))

    def close(self) -> Change:
        """Start a new window: what changed in this one."""
        rows = self._rows[: self._count].clone()
        change = Change(rows, self._shard.read(rows).bitwise_xor_(self._before[: self._count]))
        self.restart()
        return change

    def read(self, rows: slice) -> Tensor:
        """Records of a range of rows as they stood when the window opened."""
        words = self._shard.read(rows)
        slots = self._slot[rows]
        touched = torch.nonzero(slots >= 0).view(-1)
        if touched.numel():
            words[touched] = self._before.index_select(0, slots[touched])
        return words

    def reopen(self, change: Change) -> None:
        """Move the window's start back to before ``change``, the last one that was closed."""
        slots = self._slot.index_select(0, change.rows)
        open_now = slots >= 0
        self._before[slots[open_now].long()] ^= change.bits[open_now]
        rows = change.rows[~open_now]
        self._add(rows, self._shard.read(rows).bitwise_xor_(change.bits[~open_now]))

    def roll_back(self) -> None:
        """Give the live shard the bits that it had when the window opened, and start a new window."""
        self._shard.write(self._rows[: self._count], self._before[: self._count])
        self.restart()

    def restart(self) -> None:
        """Start a new window and forget what changed."""
        self._slot[self._rows[: self._count]] = -1
        self._count = 0

    def write(self, rows: slice, words: Tensor) -> None:
        """Restore a range of live rows. The window holds none of them."""
        self._shard.write(rows, words)

    def _add(self, rows: Tensor, before: Tensor) -> None:
        end = self._count + rows.numel()
        if end > self._rows.numel():
            room = min(self._slot.numel(), max(end, 2 * self._rows.numel()))
            self._rows, old_rows = torch.empty(room, dtype=torch.int64), self._rows
            self._before, old_before = torch.empty((room, before.shape[1]), dtype=torch.int64), self._before
            self._rows[: self._count] = old_rows[: self._count]
            self._before[: self._count] = old_before[: self._count]
        self._slot[rows] = torch.arange(self._count, end, dtype=torch.int32)
        self._rows[self._count : end] = rows
        self._before[self._count : end] = before
        self._count = end
