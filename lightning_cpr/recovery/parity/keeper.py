"""ParityKeeper: one rank's part in keeping parity of all live shards, and in bringing lost ones back.

Call order, each call on every rank at the same step::

    keeper = ParityKeeper(...); keeper.start(step)              # job start, restore from the store, new sharding
    keeper.before_step(touched); <the step>; keeper.after_step(step)
    keeper.hold() on survivors, keeper = ParityKeeper(...) on a replacement
    keeper.stand_at(exchange) on survivors                      # where nothing is to be lost
    keeper.rebuild(lost) on all ranks

The differences of a step are made and travel while the next one computes: on a thread and a process group of their own.
One exchange is on its way at a time; `after_step` waits for the one before, and `before_step` until that thread has
read what the last step changed. Memory beside the parity: three times the rows touched between two exchanges, twice as
an owner and once as a holder. Source: ECRM (arXiv 2104.01981), with XOR of bits in place of float sums.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from torch import Tensor

from lightning_cpr.errors import ConfigError, RecoveryError
from lightning_cpr.recovery.election import LostPeerError
from lightning_cpr.recovery.parity.agree import RankState, agree, holder_move, owner_move
from lightning_cpr.recovery.parity.channel import Channel, swap_values
from lightning_cpr.recovery.parity.config import ParityConfig
from lightning_cpr.recovery.parity.exchange import Outcome, Probe, Progress, run_exchange
from lightning_cpr.recovery.parity.groups import plan_parity
from lightning_cpr.recovery.parity.holder import ParityHolder
from lightning_cpr.recovery.parity.meter import Meter
from lightning_cpr.recovery.parity.owner import Closed, ParityOwner
from lightning_cpr.recovery.parity.pace import EncodePace
from lightning_cpr.recovery.parity.rebuild import Rebuild, plan_jobs
from lightning_cpr.recovery.parity.records import WORD, ShardRows, record_of
from lightning_cpr.recovery.parity.window import Window
from lightning_cpr.spec import Shard, ShardSpec, TableSpec

log = logging.getLogger(__name__)


class Point(NamedTuple):
    """Where the job stood at an exchange."""

    step: int
    samples: int


@dataclass(frozen=True)
class Rebuilt:
    """What a rebuild reached: the lost ranks' shards hold the bits that they had at ``point``.

    restored: this rank's shards that came back, empty on a survivor. nbytes, seconds: of this rank.
    """

    exchange: int
    point: Point
    lost: tuple[int, ...]
    restored: tuple[ShardSpec, ...]
    nbytes: int
    seconds: float


class ParityKeeper:
    """Parity of a job's shards, one keeper a rank.

    Args:
        shards: this rank's live shards.
        tables: all tables by name.
        specs: every shard of every rank.
        hosts: the host of each rank; its length is the world size.
        make_channel: makes the channel to the other ranks, anew after each failure.
        probe: called at each point of an exchange (see `exchange.POINTS`): for fault injection.

    Raises:
        ConfigError: parity is not possible with so few ranks.
    """

    def __init__(
        self,
        config: ParityConfig,
        shards: Sequence[Shard],
        tables: Mapping[str, TableSpec],
        specs: Sequence[ShardSpec],
        hosts: Sequence[str],
        rank: int,
        make_channel: Callable[[], Channel],
        probe: Probe = lambda point, exchange: None,
    ) -> None:
        self.config = config
        self.rank = rank
        self.plan = plan_parity(config, specs, tables, hosts)
        for warning in self.plan.warnings if rank == 0 else ():
            log.warning("parity: %s", warning)
        known = {spec for spec in specs if spec.owner == rank and _protectable(spec)}
        strays = known ^ {shard.spec for shard in shards if _protectable(shard.spec)}
        if strays:
            raise ConfigError(
                f"parity: rank {rank} and the list of all shards disagree on {strays}; pass both complete"
            )
        windows = {
            shard.spec: Window(ShardRows(shard, record_of(tables[shard.spec.table], shard.spec)))
            for shard in shards
            if _protectable(shard.spec)
        }
        self._owner = ParityOwner(self.plan, rank, windows)
        self._holder = ParityHolder(self.plan, rank)
        self._make_channel = make_channel
        self._channel: Channel | None = None
        self._probe = probe
        self._progress = Progress()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="cpr-parity")
        self._inflight: Future[Outcome] | None = None
        self._closed: Closed | None = None
        self._points: dict[int, Point] = {}
        self._now = Point(0, 0)
        self._encoded = False
        words = (spec.rows * record_of(tables[spec.table], spec).words for spec in windows)
        self._shard_bytes = WORD * sum(words)
        self._pace = EncodePace(self._shard_bytes, config.encode_mb << 20)
        self._meter = Meter()

    # State

    @property
    def protected(self) -> bool:
        """Whether a lost shard would come back: everything is encoded, nothing was refused, the ranks are in touch."""
        return self._encoded and self._meter.mismatches == 0 and self._channel is not None

    @property
    def point(self) -> Point:
        """The last exchange that all ranks have: what a failure now would go back to at the earliest."""
        return self._points.get(self._progress.acknowledged, self._now)

    @property
    def mismatches(self) -> int:
        """Pieces of all ranks that did not match their members, since `start`."""
        return self._meter.mismatches

    def standing(self) -> tuple[RankState, dict[int, Point]]:
        """How far this rank's exchanges have come, and where the job stood at those that it could be told to stand at.

        Settled only while none is under way.
        """
        return self._progress.state(self.rank), dict(self._points)

    def step_of(self, exchange: int) -> int:
        """The last step of an exchange that is not acknowledged yet."""
        return self._points[exchange].step

    @property
    def memory_bytes(self) -> int:
        """Host memory of this rank: parity, checksums, touched rows, exchanges under way."""
        return self._holder.nbytes + self._owner.nbytes

    def metrics(self) -> dict[str, float]:
        """Totals of this rank since `start` (see `Meter`) and where it stands now: seconds, bytes, steps, rows.

        ``mismatches`` and ``protected`` are of the whole job.
        """
        return {
            **self._meter.values(),
            "lag_steps": self._now.step - self.point.step,
            "memory_bytes": self.memory_bytes,
            "parity_bytes": 8 * self.plan.parity_words(self.rank),
            "unfinished_rows": self._owner.unfinished,
            "protected": float(self.protected),
        }

    # Upkeep

    def start(self, step: int, samples: int = 0) -> None:
        """Protect the shards as they are now; parity is encoded with the exchanges that follow. Collective in effect.

        Also the way back from a mismatch and from a restore out of the store, at the same step on every rank.
        """
        self._quit_exchange(abort=False)
        if self._channel is None:
            self._channel = self._make_channel()
        self._reset()
        self._progress.stand_at(0)
        self._now = Point(step, samples)
        self._points = {0: self._now}

    def before_step(self, touched: Mapping[ShardSpec, Tensor | None]) -> None:
        """Keep the bits of rows that the coming step changes.

        Args:
            touched: int64 shard-local row numbers by shard, repeats allowed; None: any row may change. May be called
                several times a step, always before the rows change.

        Raises:
            RecoveryError: the exchange under way broke on this rank before it had read its rows.
        """
        with self._meter.timed("unhidden"):
            self.let_rows_change()
            for spec, rows in touched.items():
                if _protectable(spec):
                    self._owner.windows[spec].touch(rows)

    def let_rows_change(self) -> None:
        """Wait until the exchange under way has read the rows that its steps changed; `before_step` does so itself.

        Raises:
            RecoveryError: it broke on this rank before that.
        """
        closed = self._closed
        if closed is None or closed.whole:
            return
        with self._meter.timed("wait"):
            closed.taken.wait()
        if not closed.whole:
            self._join()

    def after_step(self, step: int, samples: int = 0) -> None:
        """The step is done on this rank; hand its changes to the background if an exchange is due.

        Raises:
            LostPeerError: the exchange before failed: a rank is gone. Find out which, then `rebuild`.
        """
        self._now = Point(step, samples)
        every = self.config.every_n_steps if self._encoded else 1
        if step - self._points[self._progress.closed].step >= every:
            if self._inflight is not None:
                self._pace.tell(late=not self._inflight.done())
            self._exchange(self._pace.room)

    def join(self) -> None:
        """Wait until all ranks have the exchange under way, if there is one.

        Raises:
            LostPeerError: it failed.
        """
        self._join()

    def flush(self) -> None:
        """Exchange now, and wait until all ranks have it."""
        self._exchange(self.config.encode_mb << 20)
        self._join()

    def encode(self) -> None:
        """Exchange until all rows of all ranks are in parity."""
        while not self._encoded:
            self.flush()

    def close(self) -> None:
        """Finish the exchange under way and end the thread."""
        self._quit_exchange(abort=False)
        self._worker.shutdown()

    # Failure

    def abort(self) -> None:
        """Break off the exchange under way, and the wait for it: a rank is gone.

        Safe from any thread. Not once the rebuild has begun: it would break off the new channel.
        """
        if self._channel is not None:
            self._channel.abort()

    def hold(self) -> tuple[RankState, dict[int, int]]:
        """A rank is gone: break off the exchange under way. Where this rank stands then, and the step of each exchange
        that it can be told to stand at; neither changes until `stand_at` or `rebuild`.
        """
        self._quit_exchange(abort=True)
        state, points = self.standing()
        return state, {exchange: point.step for exchange, point in points.items()}

    def stand_at(self, exchange: int) -> None:
        """Go back to an exchange that `agree.agree` found: the parity held here and this rank's own rows."""
        self._go_to(exchange)
        self.roll_back()

    def rebuild(self, lost: Collection[int]) -> Rebuilt:
        """Bring the shards of lost ranks back. Collective, on a fresh channel, with replacements in the lost places.

        Survivors' live rows stay as they are; `roll_back` takes them to the exchange that the lost shards stand at.
        Parity that was lost is encoded anew with the exchanges that follow; protection is off until then. After a
        failure of the rebuild itself, call it again with all ranks that are lost by then.

        Raises:
            LostPeerError: another rank is gone.
            RecoveryError: on all ranks: too much is lost, or parity did not match its checksums. The lost shards'
                content is then undefined: restore them from the store, then `start`.
        """
        started = time.perf_counter()
        self._quit_exchange(abort=True)
        self._encoded = False
        self._pace = EncodePace(self._shard_bytes, self.config.encode_mb << 20)
        channel = self._channel = self._make_channel()
        if self.rank in lost:
            self._progress.fresh = True
        mine = {"state": asdict(self._progress.state(self.rank)), "points": self._points}
        answers = swap_values(channel, mine)
        agreement = agree([RankState(**answer["state"]) for answer in answers], lost)
        exchange = agreement.exchange
        point = Point(*next(a["points"][str(exchange)] for a in answers if a["state"]["rank"] not in agreement.lost))
        if self.rank in agreement.lost:
            self._reset()
            self._now = point
            self._points = {exchange: point}
        else:
            self._go_to(exchange)
        held = {"unfinished": self._holder.unfinished(), "bad": sorted(self._holder.bad)}
        parity = swap_values(channel, {**held, "mismatches": self._meter.mismatches})
        unusable = {r: {*p["bad"], *(piece for piece, *_ in p["unfinished"])} for r, p in enumerate(parity)}
        job = Rebuild(self._owner, self._holder, channel)
        job.run(plan_jobs(self.plan, agreement.lost, unusable))
        self._raise_refused(swap_values(channel, {"refused": job.refused}))
        if self.rank in agreement.lost:
            for holder, answer in enumerate(parity):
                mine_there = [found for found in answer["unfinished"] if found[1] == self.rank]
                self._owner.resume(holder, {(number, i): row for _, _, number, i, row in mine_there})
        self._owner.forget(agreement.lost)
        self._meter.mismatches = max(answer["mismatches"] for answer in parity)
        self._progress.stand_at(exchange)
        restored = tuple(self._owner.windows) if self.rank in agreement.lost else ()
        return Rebuilt(exchange, point, agreement.lost, restored, job.bytes, time.perf_counter() - started)

    def roll_back(self) -> Point:
        """Give this rank's rows the bits of the last agreed exchange.

        After a rebuild on all ranks, nothing is lost: everybody stands at that step.
        """
        for window in self._owner.windows.values():
            window.roll_back()
        self._now = self._points[self._progress.closed]
        return self._now

    # Inner parts

    def _exchange(self, encode_bytes: int) -> None:
        if self._channel is None or self._progress.fresh:
            raise RecoveryError("parity is not running on this rank: call start or rebuild first")
        with self._meter.timed("unhidden"):
            self._join()
            number = self._progress.closed + 1
            every = self.config.scrub_every if self._encoded else 0
            self._closed = self._owner.close(number, encode_bytes, every)
            self._progress.closed = number
            self._points[number] = self._now
            self._inflight = self._worker.submit(self._background, self._closed, self._channel, every)

    def _background(self, closed: Closed, channel: Channel, scrub_every: int) -> Outcome:
        with self._meter.timed("hidden"):
            try:
                return run_exchange(
                    closed, self._owner, self._holder, channel, self._progress, scrub_every, self._probe
                )
            except LostPeerError:
                raise
            except (RuntimeError, MemoryError) as error:
                raise RecoveryError(
                    f"parity: exchange {closed.exchange} failed on rank {self.rank}: {error}"
                ) from error
            finally:
                closed.taken.set()

    def _join(self) -> None:
        """Wait for the exchange under way and take its outcome."""
        if self._inflight is None:
            return
        with self._meter.timed("wait"):
            self._encoded = False
            outcome = self._inflight.result()
        self._inflight = self._closed = None
        self._points = {e: point for e, point in self._points.items() if e >= self._progress.acknowledged}
        self._encoded = outcome.unfinished == 0
        self._meter.add(outcome)

    def _quit_exchange(self, abort: bool) -> None:
        if abort:
            self.abort()
            self._channel = None
        try:
            self._join()
        except RecoveryError as error:
            log.warning("parity: exchange %d was broken off: %s", self._progress.closed, error)
            self._inflight = None

    def _reset(self) -> None:
        self._holder.reset()
        self._owner.forget(range(self.plan.world))
        for window in self._owner.windows.values():
            window.restart()
        self._closed = None
        self._encoded = False
        self._pace = EncodePace(self._shard_bytes, self.config.encode_mb << 20)
        self._meter = Meter()

    def _go_to(self, exchange: int) -> None:
        """A survivor takes its parity and its windows to the agreed exchange."""
        state = self._progress.state(self.rank)
        parity, rows = holder_move(state, exchange), owner_move(state, exchange)
        if parity != "stay":
            self._holder.flip()
        self._holder.drop()
        if rows == "reopen":
            assert self._closed is not None
            self._owner.reopen(self._closed)
        self._closed = None
        self._points = {exchange: self._points[exchange]}
        self._progress.stand_at(exchange)

    def _raise_refused(self, answers: Sequence[Mapping[str, Any]]) -> None:
        refused = sorted({piece for answer in answers for piece in answer["refused"]})
        if refused:
            self._meter.mismatches += len(refused)
            log.error("parity: pieces %s did not decode to what their owners published", refused)
            raise RecoveryError(
                f"parity: {len(refused)} pieces ({refused[:5]}...) did not decode to what their owners published "
                f"and were refused. Restore the lost shards from the store, then start the protection anew"
            )


def _protectable(spec: ShardSpec) -> bool:
    return spec.rows > 0 and not spec.replicated
