"""The rows of a replacement that are not back yet: a lookup waits for its own, the exchanges' thread brings them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from lightning_cpr.recovery.parity.groups import ParityPlan, Part
from lightning_cpr.recovery.parity.window import Window
from lightning_cpr.spec import ShardSpec

_PART_BIT, _PIECE_BIT = 24, 44  # of a key: a piece has at most 16 MiB, so that no part of it has 2**24 blocks


def places_of(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Piece, the part's number in the member, and the block's in the part: of blocks given by key, int64 ``[n]``. Keys
    are ordered as the blocks are."""
    part = keys >> _PART_BIT & (1 << _PIECE_BIT - _PART_BIT) - 1
    return keys >> _PIECE_BIT, part, keys & (1 << _PART_BIT) - 1


class Absent:
    """Two threads meet here: the training thread says what it needs and waits, the exchanges' thread writes rows.

    A row is written once, before it counts as back, and no step changes it before that. Memory: a byte a row.

    rows: how many are not back yet. waited_s: how long lookups have waited. error: why the others will not come.
    """

    def __init__(self, plan: ParityPlan, rank: int, windows: Mapping[ShardSpec, Window]) -> None:
        self.rows = sum(spec.rows for spec in windows)
        self.waited_s = 0.0
        self.error: Exception | None = None
        self._windows = windows
        self._absent = {spec: np.ones(spec.rows, dtype=bool) for spec in windows}
        self._places = _places(plan, rank)
        self._changed = threading.Condition()
        self._demands: list[tuple[ShardSpec, np.ndarray]] = []
        self._stopped = False

    # The training thread

    def wait_for(self, spec: ShardSpec, ids: Tensor) -> None:
        """Return once these rows (int64, shard-local, repeats allowed) are back. Shards without parity are always here.

        Raises:
            RecoveryError: they will not come: a peer is gone, or parity is refused.
        """
        absent = self._absent.get(spec)
        if self.rows and absent is not None:
            numbers = ids.reshape(-1).cpu().numpy()
            missing = np.unique(numbers[absent[numbers]])
            if missing.size:
                self._wait(lambda: not absent[missing].any(), (spec, missing))

    def wait_for_all(self) -> None:
        """Return once all rows are back.

        Raises:
            RecoveryError: they will not come.
        """
        if self.rows:
            self._wait(lambda: not self.rows)

    def stop(self, stopped: bool) -> None:
        """Whether the training thread waits for the exchanges' thread, and so looks nothing up."""
        self._stopped = stopped

    def _wait(self, back: Callable[[], bool], *demands: tuple[ShardSpec, np.ndarray]) -> None:
        started = time.perf_counter()
        with self._changed:
            self._demands += demands
            self._changed.wait_for(lambda: self.error is not None or back())
            failed = None if back() else self.error
        self.waited_s += time.perf_counter() - started
        if failed is not None:
            raise failed

    # The exchanges' thread

    def write(self, spec: ShardSpec, rows: slice | Tensor, words: Tensor) -> None:
        """Write those of these rows that are not back yet; the others may have been trained on since."""
        absent = self._absent[spec]
        numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows.numpy()
        new = absent[numbers]
        if new.all():
            self._windows[spec].write(rows, words)
        else:
            self._windows[spec].write(torch.from_numpy(numbers[new]), words[torch.from_numpy(new)])
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # the lookup may run on another stream
        with self._changed:
            absent[numbers] = False
            self.rows -= int(new.sum())
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """No more rows will come."""
        with self._changed:
            self.error = error
            self._changed.notify_all()

    def told(self) -> tuple[bool, np.ndarray]:
        """Whether the step is over, and the blocks that lookups wait for, by key (`places_of`)."""
        with self._changed:
            demands, self._demands = self._demands, []
            stopped = self._stopped
        found = [self._blocks(spec, rows) for spec, rows in demands]
        return stopped, np.concatenate([np.empty(0, np.int64), *found])

    def _blocks(self, spec: ShardSpec, rows: np.ndarray) -> np.ndarray:
        places = self._places[spec]
        rows = rows[self._absent[spec][rows]]
        at = np.searchsorted(places.lows, rows, side="right") - 1
        blocks = (rows - places.lows[at]) // places.block_rows
        return places.pieces[at] << _PIECE_BIT | places.numbers[at] << _PART_BIT | blocks


class _Places:
    """Where a shard's rows lie among the pieces, by part in order of rows: first row, piece, number in the member."""

    def __init__(self, found: list[tuple[Part, int, int]]) -> None:
        found = sorted(found, key=lambda entry: entry[0].row_lo)
        self.lows = np.array([part.row_lo for part, _, _ in found])
        self.pieces = np.array([piece for _, piece, _ in found])
        self.numbers = np.array([number for _, _, number in found])
        self.block_rows = found[0][0].block_rows


def _places(plan: ParityPlan, rank: int) -> dict[ShardSpec, _Places]:
    found: dict[ShardSpec, list[tuple[Part, int, int]]] = {}
    for piece in plan.pieces:
        member = piece.member(rank)
        for number, part in enumerate(member.parts if member is not None else ()):
            found.setdefault(part.spec, []).append((part, piece.index, number))
    return {spec: _Places(parts) for spec, parts in found.items()}
