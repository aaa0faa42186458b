"""ParityKeeper: one rank's part in keeping parity of all live shards, and in bringing lost ones back.

Call order, each call on every rank at the same step::

    keeper = ParityKeeper(...); keeper.start(step)              # job start, restore from the store, new sharding
    coming = keeper.look_ahead(...)                             # as early as the rows are known
    keeper.before_step(coming); <the step>; keeper.after_step(step)
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
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from lightning_cpr.errors import ConfigError, RecoveryError
from lightning_cpr.recovery.parity.absent import Absent
from lightning_cpr.recovery.parity.agree import RankState, agree
from lightning_cpr.recovery.parity.ahead import Ahead, Coming, Told
from lightning_cpr.recovery.parity.channel import Channel, swap_values
from lightning_cpr.recovery.parity.config import ParityConfig
from lightning_cpr.recovery.parity.degraded import DegradedRebuild
from lightning_cpr.recovery.parity.exchange import Probe
from lightning_cpr.recovery.parity.exchanges import Exchanges, Point
from lightning_cpr.recovery.parity.groups import plan_parity, protectable
from lightning_cpr.recovery.parity.holder import ParityHolder
from lightning_cpr.recovery.parity.owner import ParityOwner
from lightning_cpr.recovery.parity.pace import EncodePace
from lightning_cpr.recovery.parity.rebuild import Rebuild, plan_jobs
from lightning_cpr.recovery.parity.records import WORD, ShardRows, record_of
from lightning_cpr.recovery.parity.window import Window
from lightning_cpr.spec import Shard, ShardSpec, TableSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rebuilt:
    """What a rebuild reached: the lost ranks' shards hold the bits that they had at ``point``.

    restored: this rank's shards that came back, or will, behind the training; empty on a survivor. nbytes, seconds: of
    this rank, until then.
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
        known = {spec for spec in specs if spec.owner == rank and protectable(spec)}
        strays = known ^ {shard.spec for shard in shards if protectable(shard.spec)}
        if strays:
            raise ConfigError(
                f"parity: rank {rank} and the list of all shards disagree on {strays}; pass both complete"
            )
        windows = {
            shard.spec: Window(ShardRows(shard, record_of(tables[shard.spec.table], shard.spec)))
            for shard in shards
            if protectable(shard.spec)
        }
        self._owner = ParityOwner(self.plan, rank, windows)
        self._holder = ParityHolder(self.plan, rank)
        self._exchanges = Exchanges(rank, self._owner, self._holder, probe)
        self._ahead = Ahead(windows)
        self._make_channel = make_channel
        self._bytes = dict.fromkeys(range(len(hosts)), 0)
        for spec in filter(protectable, specs):
            self._bytes[spec.owner] += WORD * spec.rows * record_of(tables[spec.table], spec).words
        self._pace = self._new_pace()

    def _new_pace(self) -> EncodePace:
        return EncodePace(self._bytes[self.rank], self.config.encode_mb << 20)

    # State

    @property
    def protected(self) -> bool:
        """Whether a lost shard would come back: everything is encoded, nothing was refused, the ranks are in touch."""
        exchanges = self._exchanges
        return exchanges.encoded and exchanges.meter.mismatches == 0 and exchanges.channel is not None

    @property
    def degraded(self) -> DegradedRebuild | None:
        """The rebuild behind the training, until all ranks have their rows."""
        return self._exchanges.degraded

    @property
    def whole(self) -> bool:
        """Whether this rank holds all its rows: a replacement may have been given them in part."""
        absent = self._exchanges.absent
        return absent is None or not absent.rows

    @property
    def point(self) -> Point:
        """The last exchange that all ranks have: what a failure now would go back to at the earliest."""
        return self._exchanges.points.get(self._exchanges.progress.acknowledged, self._exchanges.now)

    @property
    def mismatches(self) -> int:
        """Pieces of all ranks that did not match their members, since `start`."""
        return self._exchanges.meter.mismatches

    def standing(self) -> tuple[RankState, dict[int, Point]]:
        """How far this rank's exchanges have come, and where the job stood at those that it could be told to stand at.

        Settled only while none is under way.
        """
        return self._exchanges.state(), dict(self._exchanges.points)

    def step_of(self, exchange: int) -> int:
        """The last step of an exchange that is not acknowledged yet."""
        return self._exchanges.points[exchange].step

    def rows_bytes(self, ranks: Collection[int]) -> int:
        """Of these ranks the most bytes of protected rows that one has."""
        return max(self._bytes[rank] for rank in ranks)

    @property
    def memory_bytes(self) -> int:
        """Host memory of this rank: parity, checksums, touched rows, exchanges under way."""
        return self._holder.nbytes + self._owner.nbytes

    def metrics(self) -> dict[str, float]:
        """Totals of this rank since `start` (see `Meter`) and where it stands now: seconds, bytes, steps, rows.

        ``mismatches`` and ``protected`` are of the whole job.
        """
        absent = self._exchanges.absent
        return {
            **self._exchanges.meter.values(),
            "lag_steps": self._exchanges.now.step - self.point.step,
            "memory_bytes": self.memory_bytes,
            "parity_bytes": 8 * self.plan.parity_words(self.rank),
            "unfinished_rows": self._owner.unfinished,
            "absent_rows": 0 if absent is None else absent.rows,
            "protected": float(self.protected),
        }

    # Upkeep

    def start(self, step: int, samples: int = 0) -> None:
        """Protect the shards as they are now; parity is encoded with the exchanges that follow. Collective in effect.

        Also the way back from a mismatch and from a restore out of the store, at the same step on every rank.

        Raises:
            RecoveryError: a rebuild behind the training broke: some of this rank's rows are not back.
        """
        exchanges = self._exchanges
        self._quit()
        if not self.whole:
            raise RecoveryError(f"parity: rank {self.rank}, a replacement, does not have all its rows")
        exchanges.channel = exchanges.channel or self._make_channel()
        exchanges.forget()
        self._pace = self._new_pace()
        exchanges.now = Point(step, samples)
        exchanges.stand_at(0, exchanges.now)

    def look_ahead(self, ids: Tensor, rows: Callable[[], Told]) -> Coming:
        """Begin to keep the bits of rows that a later step changes, on a thread. Give `before_step` what this returns.

        Args:
            ids: as the lookup got them; nobody changes them any more.
            rows: makes of them int64 shard-local row numbers by shard, repeats allowed; from any thread, maybe twice.
        """
        with self._exchanges.meter.timed("unhidden"):
            return self._ahead.hand_over(ids, rows, self._exchanges.meter)

    def before_step(self, touched: Mapping[ShardSpec, Tensor | None] | Coming) -> None:
        """Keep the bits of rows that the coming step changes.

        Args:
            touched: int64 shard-local row numbers by shard, repeats allowed; None: any row may change. Or what
                `look_ahead` said. May be called several times a step, always before the rows change.

        Raises:
            RecoveryError: the exchange under way broke on this rank before it had read its rows.
        """
        with self._exchanges.meter.timed("unhidden"):
            self.let_rows_change()
            if isinstance(touched, Coming):
                self._ahead.finish(touched, self._exchanges.meter)
                return
            for spec, rows in touched.items():
                if protectable(spec):
                    self._owner.windows[spec].touch(rows)

    def wait_for(self, spec: ShardSpec, rows: Tensor) -> None:
        """Before a step looks rows up (int64, shard-local): return once they are back, where they come behind it.

        Raises:
            RecoveryError: they will not come: a peer is gone, or parity is refused.
        """
        if self._exchanges.absent is not None:
            self._exchanges.absent.wait_for(spec, rows)

    def wait_for_rows(self) -> None:
        """Return once this rank has all its rows and, where all ranks call this, all others theirs.

        Raises:
            RecoveryError: as `wait_for`.
        """
        self._exchanges.wait_for_rows()

    def let_rows_change(self) -> None:
        """Wait until the exchange under way has read the rows that its steps changed; `before_step` does so itself.

        Raises:
            RecoveryError: it broke on this rank before that.
        """
        self._exchanges.let_rows_change()

    def after_step(self, step: int, samples: int = 0) -> None:
        """The step is done on this rank; hand its changes to the background if an exchange is due.

        Raises:
            LostPeerError: the exchange before failed: a rank is gone. Find out which, then `rebuild`.
        """
        exchanges = self._exchanges
        exchanges.now = Point(step, samples)
        every = self.config.every_n_steps if exchanges.encoded else 1
        if step - exchanges.points[exchanges.progress.closed].step >= every:
            if exchanges.late is not None:
                self._pace.tell(exchanges.late)
            exchanges.begin(self._pace.room, self.config.scrub_every)

    def join(self) -> None:
        """Wait until all ranks have the exchange under way, if there is one, and all rows that are to come back.

        Raises:
            LostPeerError: it failed.
        """
        self._exchanges.join()

    def flush(self) -> None:
        """Exchange now, and wait until all ranks have it."""
        self._exchanges.begin(self.config.encode_mb << 20, self.config.scrub_every)
        self.join()

    def encode(self) -> None:
        """Exchange until all rows of all ranks are in parity."""
        while not self._exchanges.encoded:
            self.flush()

    def close(self) -> None:
        """Finish the exchange under way and end the threads."""
        self._quit()
        self._ahead.close()
        self._exchanges.close()

    # Failure

    def abort(self) -> None:
        """Break off the exchange under way, and the wait for it: a rank is gone.

        Safe from any thread. Not once the rebuild has begun: it would break off the new channel.
        """
        self._exchanges.abort()

    def hold(self) -> tuple[RankState, dict[int, int]]:
        """A rank is gone: break off the exchange under way. Where this rank stands then, and the step of each exchange
        that it can be told to stand at; neither changes until `stand_at` or `rebuild`.
        """
        self._break_off()
        state, points = self.standing()
        return state, {exchange: point.step for exchange, point in points.items()}

    def stand_at(self, exchange: int) -> None:
        """Go back to an exchange that `agree.agree` found: the parity held here and this rank's own rows."""
        self._exchanges.go_to(exchange)
        self.roll_back()

    def rebuild(self, lost: Collection[int], behind: bool = False) -> Rebuilt:
        """Bring the shards of lost ranks back. Collective, on a fresh channel, with replacements in the lost places.

        behind: return at once; rows come back behind the training (`degraded`), a step waits for its own (`wait_for`).

        Survivors' live rows stay as they are; `roll_back` takes them to the exchange that the lost shards stand at.
        Parity that was lost is encoded anew with the exchanges that follow; protection is off until then. After a
        failure of the rebuild itself, call it again with all ranks that are lost by then.

        Raises:
            LostPeerError: another rank is gone.
            RecoveryError: on all ranks: too much is lost, or parity did not match its checksums. The lost shards'
                content is then undefined: restore them from the store, then `start`.
        """
        started = time.perf_counter()
        exchanges = self._exchanges
        self._break_off()
        exchanges.encoded, exchanges.degraded = False, None
        self._pace = self._new_pace()
        channel = exchanges.channel = self._make_channel()
        if self.rank in lost:
            exchanges.progress.fresh = True
        mine = {"state": asdict(exchanges.state()), "points": exchanges.points}
        answers = swap_values(channel, mine)
        agreement = agree([RankState(**answer["state"]) for answer in answers], lost)
        exchange, is_lost = agreement.exchange, self.rank in agreement.lost
        point = Point(*next(a["points"][str(exchange)] for a in answers if a["state"]["rank"] not in agreement.lost))
        if is_lost:
            exchanges.forget()
            exchanges.now = point
        else:
            exchanges.go_to(exchange)
        held = {"unfinished": self._holder.unfinished(), "bad": sorted(self._holder.bad)}
        parity = swap_values(channel, {**held, "mismatches": exchanges.meter.mismatches})
        unusable = {r: {*p["bad"], *(piece for piece, *_ in p["unfinished"])} for r, p in enumerate(parity)}
        rounds = plan_jobs(self.plan, agreement.lost, unusable)
        absent = Absent(self.plan, self.rank, self._owner.windows) if behind and is_lost else None
        job = Rebuild(self._owner, self._holder, channel, None if absent is None else absent.write)
        if not behind:
            job.run(rounds)
            self._raise_refused(swap_values(channel, {"refused": job.refused}))
        for holder, answer in enumerate(parity) if is_lost else ():
            mine_there = [found for found in answer["unfinished"] if found[1] == self.rank]
            self._owner.resume(holder, {(number, i): row for _, _, number, i, row in mine_there})
        self._owner.forget(agreement.lost)
        exchanges.meter.mismatches = max(answer["mismatches"] for answer in parity)
        exchanges.stand_at(exchange, point)
        if behind:
            exchanges.serve(DegradedRebuild(rounds, job, channel, agreement.lost, absent))
        restored = tuple(self._owner.windows) if is_lost else ()
        return Rebuilt(exchange, point, agreement.lost, restored, job.bytes, time.perf_counter() - started)

    def roll_back(self) -> Point:
        """Give this rank's rows the bits of the last agreed exchange.

        After a rebuild on all ranks, nothing is lost: everybody stands at that step.
        """
        for window in self._owner.windows.values():
            window.roll_back()
        exchanges = self._exchanges
        exchanges.now = exchanges.points[exchanges.progress.closed]
        return exchanges.now

    # Inner parts

    def _quit(self) -> None:
        """No thread is at work."""
        self._ahead.settle()
        self._exchanges.quit()

    def _break_off(self) -> None:
        """`_quit`, and the ranks are not in touch any more."""
        self._exchanges.abort()
        self._exchanges.channel = None
        self._quit()

    def _raise_refused(self, answers: Sequence[Mapping[str, Any]]) -> None:
        refused = sorted({piece for answer in answers for piece in answer["refused"]})
        if refused:
            self._exchanges.meter.mismatches += len(refused)
            log.error("parity: pieces %s did not decode to what their owners published", refused)
            raise RecoveryError(
                f"parity: {len(refused)} pieces ({refused[:5]}...) did not decode to what their owners published "
                f"and were refused. Restore the lost shards from the store, then start the protection anew"
            )
