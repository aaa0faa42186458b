"""The owner's side of an exchange: what its shards tell the holders of their parity.

Rows enter parity a slice at a time: a row that is not in parity yet counts there as zero bits, so encoding it is to
send its current bits as a difference. Encoding thus needs no protocol of its own, and training goes on meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lightning_cpr.recovery.parity import code
from lightning_cpr.recovery.parity.groups import ParityPlan, Part, Piece
from lightning_cpr.recovery.parity.records import WORD, runs
from lightning_cpr.recovery.parity.window import Change, Window
from lightning_cpr.recovery.parity.wire import Draft, Route, routes_between, write_messages
from lightning_cpr.spec import ShardSpec

Cursors = dict[int, list[Tensor]]  # by holder and route, int64 ``[parts]``: the first row that is not in parity


@dataclass
class Closed:
    """An exchange, from the end of its last step on. Its parts happen in this order, the last two behind the training.

    changes: the touched rows. encoded: (holder, route number, first row, end) of rows that are new to parity.
    live: (holder, route number, part number) of whole parts, for the comparison with parity.
    taken: set once `take` has ended, or was given up: ``whole`` says which. Only then may rows change again.
    """

    exchange: int
    changes: dict[ShardSpec, Change]
    cursors_before: Cursors
    cursors_after: Cursors
    encoded: list[tuple[int, int, int, int]] = field(default_factory=list)
    live: list[tuple[int, int, int]] = field(default_factory=list)
    taken: threading.Event = field(default_factory=threading.Event)
    whole: bool = False

    def take(self) -> None:
        """Read the touched rows as the exchange's last step left them, where that is not done yet."""
        for change in self.changes.values():
            change.take()
        self.whole = True
        self.taken.set()


class ParityOwner:
    """The windows of a rank's shards and how far its rows are in parity, by holder."""

    def __init__(self, plan: ParityPlan, rank: int, windows: Mapping[ShardSpec, Window]) -> None:
        self._plan = plan
        self.windows = dict(windows)
        pairs = routes_between(plan, [rank], range(plan.world))
        self._routes = {holder: routes for (_, holder), routes in sorted(pairs.items())}
        self._parts = [
            (holder, number, i, part, piece)
            for holder, routes in self._routes.items()
            for number, route in enumerate(routes)
            for i, (part, piece) in enumerate(zip(route.parts, route.pieces, strict=True))
        ]
        self._due: dict[tuple[int, int], list[tuple[int, int, int, Part, Piece]]] = {}
        self._cursors: Cursors = {}
        self.unfinished = 0
        """Rows that are not in parity yet, counted once for each holder."""
        self.forget(self._routes)

    @property
    def nbytes(self) -> int:
        return sum(window.nbytes for window in self.windows.values())

    def forget(self, holders: Iterable[int]) -> None:
        """These holders have none of the rows any more: encode them again."""
        for holder in set(holders) & self._routes.keys():
            self._cursors[holder] = [route.lows.clone() for route in self._routes[holder]]
        self._count_unfinished()

    def forget_all(self) -> None:
        """No row is in parity, and none counts as changed."""
        self.forget(self._routes)
        for window in self.windows.values():
            window.restart()

    def resume(self, holder: int, unfinished: Mapping[tuple[int, int], int]) -> None:
        """A holder has all rows but those from the given ones on, by (route number, part number): what
        `ParityHolder.unfinished` says.
        """
        self._cursors[holder] = [
            torch.tensor([unfinished.get((number, i), part.row_hi) for i, part in enumerate(route.parts)])
            for number, route in enumerate(self._routes.get(holder, []))
        ]
        self._count_unfinished()

    def close(self, exchange: int, encode_bytes: int) -> Closed:
        """Close all windows and choose what this exchange encodes. Runs between two steps, and copies nothing.

        Args:
            encode_bytes: how much of the rows that are not in parity yet enters it; a row at least, unless it is 0.
        """
        changes = {spec: window.close() for spec, window in self.windows.items()}
        closed = Closed(exchange, changes, self._cursors, self._cursors)
        if self.unfinished and encode_bytes:
            self._cursors = closed.cursors_after = {h: [c.clone() for c in found] for h, found in self._cursors.items()}
            closed.encoded = self._encode(encode_bytes)
            self._count_unfinished()
        return closed

    def messages(self, closed: Closed, scrub_every: int) -> list[Tensor]:
        """One message a rank, of an exchange that is taken. Training may go on meanwhile."""
        for change in closed.changes.values():
            change.tidy()
        for holder, number, i, part, _ in self._scrub_due(closed.exchange, scrub_every):
            if int(closed.cursors_before[holder][number][i]) == part.row_hi:
                closed.live.append((holder, number, i))
        drafts: list[list[Draft]] = [[] for _ in range(self._plan.world)]
        for holder, routes in self._routes.items():
            drafts[holder] = [self._draft(closed, holder, number, route) for number, route in enumerate(routes)]
        return write_messages(drafts)

    def reopen(self, closed: Closed) -> None:
        """Go back to before an exchange: its rows count as changed in the window that is open now."""
        closed.take()
        for spec, change in closed.changes.items():
            self.windows[spec].reopen(change)
        self._cursors = closed.cursors_before
        self._count_unfinished()

    def _encode(self, room: int) -> list[tuple[int, int, int, int]]:
        slices: list[tuple[int, int, int, int]] = []
        for holder, number, i, part, _ in self._parts:
            cursors = self._cursors[holder][number]
            start = int(cursors[i])
            if start < part.row_hi:
                end = min(part.row_hi, start + max(0 if slices else 1, room // (part.width * WORD)))
                if end == start:
                    break
                slices.append((holder, number, start, end))
                room -= (end - start) * part.width * WORD
                cursors[i] = end
        return slices

    def _scrub_due(self, exchange: int, every: int) -> list[tuple[int, int, int, Part, Piece]]:
        if not every:
            return []
        key = (exchange % every, every)
        if key not in self._due:
            self._due[key] = [entry for entry in self._parts if self._plan.scrub_due(entry[4], exchange, every)]
        return self._due[key]

    def _count_unfinished(self) -> None:
        self.unfinished = sum(
            int((route.highs - cursors).sum())
            for holder, routes in self._routes.items()
            for route, cursors in zip(routes, self._cursors.get(holder, []), strict=False)
        )

    def _draft(self, closed: Closed, holder: int, number: int, route: Route) -> Draft:
        change = closed.changes[route.spec]
        # of each part the rows that are in parity already
        ends = torch.minimum(route.highs, closed.cursors_before[holder][number])
        low, high = np.searchsorted(change.rows.numpy(), torch.stack([route.lows, ends]).numpy())
        places = torch.from_numpy(runs(low, high - low))
        window = self.windows[route.spec]
        new = [
            (start, window.read(slice(start, end))) for h, n, start, end in closed.encoded if (h, n) == (holder, number)
        ]
        published = {}
        for h, n, i in closed.live:
            if (h, n) == (holder, number):
                part = route.parts[i]
                published[i] = code.block_sums(window.read(slice(part.row_lo, part.row_hi)), part.block_rows)
        return Draft(route, closed.cursors_after[holder][number], change, places, new, published)
