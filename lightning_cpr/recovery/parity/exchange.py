"""One exchange: differences go from owners to holders, parity follows, everybody hears of it.

Nothing that would be needed to go back is given up before every rank has told this one that it applied the exchange.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_cpr.errors import RecoveryError
from lightning_cpr.recovery.parity.agree import RankState
from lightning_cpr.recovery.parity.channel import Channel
from lightning_cpr.recovery.parity.holder import ParityHolder
from lightning_cpr.recovery.parity.owner import Closed, ParityOwner
from lightning_cpr.recovery.parity.records import WORD

log = logging.getLogger(__name__)

Probe = Callable[[str, int], None]  # (point, exchange): where tests let a rank die
POINTS = ("closed", "packed", "received", "applied", "acknowledged")


@dataclass
class Progress:
    """The newest exchange that passed each point on this rank: see `agree`."""

    fresh: bool = True
    closed: int = 0
    received: int = 0
    applied: int = 0
    acknowledged: int = 0

    def state(self, rank: int) -> RankState:
        return RankState(rank, self.fresh, self.closed, self.received, self.applied, self.acknowledged)

    def stand_at(self, exchange: int) -> None:
        self.fresh = False
        self.closed = self.received = self.applied = self.acknowledged = exchange


@dataclass(frozen=True)
class Outcome:
    """What an exchange did. The last two are sums over all ranks."""

    rows: int
    sent_bytes: int
    mismatches: int
    unfinished: int


def run_exchange(
    closed: Closed,
    owner: ParityOwner,
    holder: ParityHolder,
    channel: Channel,
    progress: Progress,
    scrub_every: int,
    probe: Probe,
) -> Outcome:
    """Collective; the background half of an exchange.

    Raises:
        RecoveryError: a peer is gone. This rank's ``progress`` says how far it came.
    """
    number = closed.exchange
    closed.take()
    probe("closed", number)
    outgoing = owner.messages(closed, scrub_every)
    rows = sum(change.rows.numel() for change in closed.changes.values())
    unfinished = owner.unfinished
    probe("packed", number)
    incoming = channel.swap(outgoing)
    sent = sum(message.numel() for message in outgoing) * WORD
    del outgoing
    holder.stage(incoming)
    progress.received = number
    probe("received", number)
    holder.flip()
    progress.applied = number
    probe("applied", number)
    mismatches = _scrub(holder, number, scrub_every)
    # the commit: whoever gets all of these knows that no rank will need to stand before this exchange
    votes = torch.stack(
        channel.swap([torch.tensor([number, mismatches, unfinished])] * channel.world, [3] * channel.world)
    )
    if not bool((votes[:, 0] == number).all()):
        raise RecoveryError(
            f"parity: ranks are at different exchanges ({votes[:, 0].tolist()}); restart the protection"
        )
    holder.drop()
    progress.acknowledged = number
    probe("acknowledged", number)
    return Outcome(rows, sent, int(votes[:, 1].sum()), int(votes[:, 2].sum()))


def _scrub(holder: ParityHolder, exchange: int, every: int) -> int:
    if not every:
        return 0
    parts = holder.check_published()
    for part in parts:
        log.error(
            "parity: rows %d to %d of table %s on rank %d are not what their owner last sent: they were changed "
            "without being tracked, or memory is corrupt. Their parity is refused",
            part.spec.row_start + part.row_lo,
            part.spec.row_start + part.row_hi,
            part.spec.table,
            part.spec.owner,
        )
    pieces = holder.check_parity(exchange, every)
    for piece in pieces:
        log.error("parity: piece %d on rank %d does not match its members; it is refused", piece.index, holder.rank)
    return len(parts) + len(pieces)
