"""The owner's side of an exchange: what its shards tell the holders of their parity.

Rows enter parity a slice at a time: a row that is not in parity yet counts there as zero bits, so encoding it is to
send its current bits as a difference. Encoding thus needs no protocol of its own, and training goes on meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_cpr.recovery.parity import code
from lightning_cpr.recovery.parity.groups import ParityPlan
from lightning_cpr.recovery.parity.records import WORD
from lightning_cpr.recovery.parity.window import Change, Window
from lightning_cpr.recovery.parity.wire import Route, Section, pack, routes_between
from lightning_cpr.spec import ShardSpec

Cursors = dict[int, list[list[int]]]  # by holder, route and part: the first row that is not in parity


@dataclass
class Closed:
    """What left the shards at the end of an exchange's last step; all that its background work needs.

    encoded: (holder, route number, first row, records) of rows that are new to parity. live: (holder, route number,
    part number, records) of whole parts, for the comparison with parity.
    """

    exchange: int
    changes: dict[ShardSpec, Change]
    cursors_before: Cursors
    cursors_after: Cursors
    encoded: list[tuple[int, int, int, Tensor]] = field(default_factory=list)
    live: list[tuple[int, int, int, Tensor]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        slices = sum(t.nbytes for *_, t in self.encoded) + sum(t.nbytes for *_, t in self.live)
        return slices + sum(change.nbytes for change in self.changes.values())


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
        self._cursors: Cursors = {}
        self.forget(self._routes)

    @property
    def nbytes(self) -> int:
        return sum(window.nbytes for window in self.windows.values())

    @property
    def unfinished(self) -> int:
        """Rows that are not in parity yet, counted once for each holder."""
        return sum(part.row_hi - self._cursors[h][n][i] for h, n, i, part, _ in self._parts)

    def forget(self, holders: Iterable[int]) -> None:
        """These holders have none of the rows any more: encode them again."""
        for holder in set(holders) & self._routes.keys():
            self._cursors[holder] = [[p.row_lo for p in r.parts] for r in self._routes[holder]]

    def resume(self, holder: int, unfinished: Mapping[int, int]) -> None:
        """A holder has all rows but those from the given ones on, by piece (what `ParityHolder.unfinished` says)."""
        self._cursors[holder] = [
            [unfinished.get(piece.index, part.row_hi) for part, piece in zip(r.parts, r.pieces, strict=True)]
            for r in self._routes.get(holder, [])
        ]

    def close(self, exchange: int, encode_bytes: int, scrub_every: int) -> Closed:
        """Close all windows and take the slices of this exchange. Runs between two steps; copies, sends nothing."""
        changes = {spec: window.close() for spec, window in self.windows.items()}
        before = self._cursors
        self._cursors = {holder: [list(c) for c in cursors] for holder, cursors in before.items()}
        closed = Closed(exchange, changes, before, self._cursors)
        for holder, number, i, part, piece in self._parts:
            cursors = self._cursors[holder][number]
            if cursors[i] < part.row_hi:
                room = max(0 if closed.encoded else 1, encode_bytes // (part.width * WORD))
                end = min(part.row_hi, cursors[i] + room)
                if end > cursors[i]:
                    words = self.windows[part.spec].read(slice(cursors[i], end))
                    closed.encoded.append((holder, number, cursors[i], words))
                    encode_bytes -= words.nbytes
                    cursors[i] = end
            elif self._plan.scrub_due(piece, exchange, scrub_every):
                words = self.windows[part.spec].read(slice(part.row_lo, part.row_hi))
                closed.live.append((holder, number, i, words))
        return closed

    def messages(self, closed: Closed) -> list[Tensor]:
        """One message a rank. Puts the changes in order and frees the slices."""
        closed.changes = {spec: change.tidy() for spec, change in closed.changes.items()}
        sums = {spec: code.row_sums(change.bits) for spec, change in closed.changes.items()}
        outgoing = [torch.empty(0, dtype=torch.int64)] * self._plan.world
        for holder, routes in self._routes.items():
            sections = [
                self._section(closed, holder, number, route, sums[route.spec]) for number, route in enumerate(routes)
            ]
            outgoing[holder] = pack(sections)
        closed.encoded, closed.live = [], []
        return outgoing

    def reopen(self, closed: Closed) -> None:
        """Go back to before an exchange: its rows count as changed in the window that is open now."""
        for spec, change in closed.changes.items():
            self.windows[spec].reopen(change)
        self._cursors = closed.cursors_before

    def _section(self, closed: Closed, holder: int, number: int, route: Route, sums: Tensor) -> Section:
        change = closed.changes[route.spec]
        lows = torch.tensor([part.row_lo for part in route.parts])
        part = torch.searchsorted(lows, change.rows, right=True) - 1
        known = torch.tensor(closed.cursors_before[holder][number])[part]
        ours = torch.nonzero((part >= 0) & (change.rows < known)).view(-1)
        rows, sums, bits = change.rows[ours], sums[ours], change.bits.index_select(0, ours)
        new = [(start, words) for h, n, start, words in closed.encoded if (h, n) == (holder, number)]
        if new:
            rows = torch.cat([rows, *(torch.arange(start, start + len(words)) for start, words in new)])
            sums = torch.cat([sums, *(code.row_sums(words) for _, words in new)])
            bits = torch.cat([bits, *(words for _, words in new)])
            if not bool((rows[1:] > rows[:-1]).all()):
                rows, order = rows.sort()
                sums, bits = sums[order], bits.index_select(0, order)
        published = {
            i: code.block_sums(words, route.parts[i].block_rows)
            for h, n, i, words in closed.live
            if (h, n) == (holder, number)
        }
        return Section(torch.tensor(closed.cursors_after[holder][number]), rows, sums, bits, published)
