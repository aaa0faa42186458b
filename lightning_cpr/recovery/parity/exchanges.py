"""The exchanges of one rank, one under way at a time, on a thread of their own; and where the job stood at each."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from lightning_cpr.errors import RecoveryError
from lightning_cpr.recovery.parity.absent import Absent
from lightning_cpr.recovery.parity.agree import RankState, holder_move, owner_move
from lightning_cpr.recovery.parity.channel import Channel
from lightning_cpr.recovery.parity.degraded import DegradedRebuild
from lightning_cpr.recovery.parity.exchange import Outcome, Probe, Progress, run_exchange
from lightning_cpr.recovery.parity.holder import ParityHolder
from lightning_cpr.recovery.parity.meter import Meter
from lightning_cpr.recovery.parity.owner import Closed, ParityOwner

log = logging.getLogger(__name__)


class Point(NamedTuple):
    """Where the job stood at an exchange."""

    step: int
    samples: int


class Exchanges:
    """Called from the training thread alone, but for `abort`.

    channel: to the other ranks; None: they are not in touch. encoded: as of the last exchange, all rows of all ranks
    are in parity, and there. degraded: a rebuild behind the training, until all rows are back. now: where training
    stands. points: the exchanges that this rank can be told to stand at.
    """

    def __init__(self, rank: int, owner: ParityOwner, holder: ParityHolder, probe: Probe) -> None:
        self.owner, self.holder = owner, holder
        self.channel: Channel | None = None
        self.progress = Progress()
        self.encoded = False
        self.degraded: DegradedRebuild | None = None
        self.now = Point(0, 0)
        self.points: dict[int, Point] = {}
        self.meter = Meter()
        self._rank = rank
        self._probe = probe
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="cpr-parity")
        self._inflight: Future[Outcome | None] | None = None
        self._closed: Closed | None = None

    @property
    def late(self) -> bool | None:
        """Whether the one under way has not ended; None: there is none."""
        return None if self._inflight is None else not self._inflight.done()

    @property
    def absent(self) -> Absent | None:
        """Rows of this rank that are not back yet, where they come behind the training."""
        return None if self.degraded is None else self.degraded.absent

    def begin(self, encode_bytes: int, scrub_every: int) -> None:
        """End the exchange under way, and begin the next one: with what changed until ``now``.

        Raises:
            LostPeerError: the one under way failed.
        """
        if self.channel is None or self.progress.fresh:
            raise RecoveryError("parity is not running on this rank: call start or rebuild first")
        with self.meter.timed("unhidden"):
            self._stop(True)
            self.join()
            self._stop(False)
            number = self.progress.closed + 1
            closed = self._closed = self.owner.close(number, 0 if self.degraded else encode_bytes)
            self.progress.closed = number
            self.points[number] = self.now
            every = scrub_every if self.encoded else 0
            self._inflight = self._worker.submit(self._run, closed, self.channel, every)

    def serve(self, degraded: DegradedRebuild) -> None:
        """Begin to bring rows back behind the training. None is under way."""
        assert self.channel is not None
        self.degraded = degraded
        self._inflight = self._worker.submit(self._run, None, self.channel, 0)

    def _stop(self, stopped: bool) -> None:
        if self.absent is not None:
            self.absent.stop(stopped)

    def _run(self, closed: Closed | None, channel: Channel, scrub_every: int) -> Outcome | None:
        """The exchange, if there is one, and what of the rows that are to come back can come behind the next step."""
        outcome = None
        try:
            if closed is not None:
                with self.meter.timed("hidden"):
                    outcome = run_exchange(
                        closed, self.owner, self.holder, channel, self.progress, scrub_every, self._probe
                    )
            if self.degraded is not None:
                self.degraded.serve()
            return outcome
        except RecoveryError as error:
            self._give_up(error)
            raise
        except Exception as error:
            number = self.progress.closed
            failed = RecoveryError(f"parity: exchange {number} failed on rank {self._rank}: {error!r}")
            self._give_up(failed)
            raise failed from error
        finally:
            if closed is not None:
                closed.taken.set()

    def _give_up(self, error: Exception) -> None:
        """No thread of any rank waits for rows that will not come."""
        if self.degraded is not None:
            if self.absent is not None:
                self.absent.fail(error)
            self.abort()

    def join(self) -> None:
        """Wait until all ranks have the exchange under way, if there is one, and all rows that are to come back.

        Raises:
            LostPeerError: it failed.
        """
        if self._inflight is None:
            return
        with self.meter.timed("wait"):
            self.encoded = False
            outcome = self._inflight.result()
        self._inflight = self._closed = None
        self.points = {e: point for e, point in self.points.items() if e >= self.progress.acknowledged}
        if self.degraded is not None and self.degraded.finished:
            self.degraded = None
        if outcome is not None:
            self.encoded = outcome.unfinished == 0 and self.degraded is None
            self.meter.add(outcome)

    def wait_for_rows(self) -> None:
        """Until this rank has all its rows and, if all ranks wait here, all others theirs. Steps need not go on.

        Raises:
            RecoveryError: they will not come.
        """
        if self.absent is not None:
            self.absent.wait_for_all()
        if self.degraded is not None and self._inflight is not None:
            wait([self._inflight])

    def let_rows_change(self) -> None:
        """Wait until the exchange under way has read the rows that its steps changed.

        Raises:
            RecoveryError: it broke on this rank before that.
        """
        closed = self._closed
        if closed is None or closed.whole:
            return
        with self.meter.timed("wait"):
            closed.taken.wait()
        if not closed.whole:
            self.join()

    def abort(self) -> None:
        """Break off the one under way, and the wait for it. From any thread."""
        if self.channel is not None:
            self.channel.abort()

    def quit(self) -> None:
        """Have none under way, whether it ends or fails."""
        try:
            self.join()
        except RecoveryError as error:
            log.warning("parity: exchange %d was broken off: %s", self.progress.closed, error)
            self._inflight = None

    def state(self) -> RankState:
        """How far this rank's exchanges have come."""
        return self.progress.state(self._rank)

    def forget(self) -> None:
        """This rank has no parity, and none of its rows are in any."""
        self.holder.reset()
        self.owner.forget_all()
        self._closed = self.degraded = None
        self.encoded = False
        self.meter = Meter()

    def go_to(self, exchange: int) -> None:
        """Take a survivor's parity and windows to the agreed exchange."""
        state = self.state()
        parity, rows = holder_move(state, exchange), owner_move(state, exchange)
        if parity != "stay":
            self.holder.flip()
        self.holder.drop()
        if rows == "reopen":
            assert self._closed is not None
            self.owner.reopen(self._closed)
        self._closed = None
        self.stand_at(exchange, self.points[exchange])

    def stand_at(self, exchange: int, point: Point) -> None:
        """All ranks are at this exchange."""
        self.points = {exchange: point}
        self.progress.stand_at(exchange)

    def close(self) -> None:
        """End the thread."""
        self._worker.shutdown()
