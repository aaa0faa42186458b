"""Who is alive: epochs in the job's store, joining one, and the process group of each.

An epoch starts when a replacement announces itself. In it every rank first `meet`s the others (says what it holds,
hears what they hold), then, when it is ready, `form`s the epoch's group with them. If the epoch moves meanwhile they
meet again. Each epoch has its own group on its own store prefix; a prefix is never used twice, also not after a failed
start. Nothing is a collective until the group stands.

Keys, under ``cpr/<run id>/<token>/`` (`recovery.start`): ``epoch`` (a counter), ``epoch/<n>`` (why n began),
``<n>/position/<rank>``, ``<n>/hold/<rank>``, ``<n>/ready/<rank>``, ``<n>/ports/<rank>``, ``<n>/broke`` (a rank has left
the group: a collective of it failed or took too long), ``<n>/pg/...`` (the group's own), ``error`` (of the user's
code, on some rank: no peer was lost).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from lightning_cpr.errors import ConfigError, RecoveryError
from lightning_cpr.recovery.election import Holding, is_lost_peer
from lightning_cpr.recovery.sockets import new_listeners, shut_down
from lightning_cpr.recovery.start import published_error, run_store, token_of

log = logging.getLogger(__name__)

REPLACES_ENV = "LIGHTNING_CPR_REPLACES"
"""Set in a replacement's environment: the epoch that it announced."""

OVERDUE = 2
# The store's own wait() prints a warning at each timeout, and cannot be woken: so short questions instead.
_WATCH_POLL_S = 0.05
_JOIN_POLL_S = 0.005


@dataclass(frozen=True)
class Timeouts:
    """Seconds. Each wait has one; `check` says what must hold between them.

    collective: of the process group; a rank for which the others wait longer, whatever it does, is stuck. announce:
    from a broken collective until a replacement announces itself. join: from there until all ranks are ready for the
    new group (a replacement builds its model first). free: until a rank that was told of a new epoch, or that others
    have left the group, has left it too; else it is stuck, ends itself, and is replaced.
    """

    collective: float = 60.0
    announce: float = 120.0  # a busy host takes its time to import torch
    join: float = 180.0
    free: float = 20.0

    def check(self) -> None:
        if min(self.collective, self.announce, self.join, self.free) <= 0:
            raise ConfigError(f"{self}: all must be above 0")
        if self.join < self.announce:
            raise ConfigError(f"{self}: a cold replacement needs join >= announce")
        if self.announce <= self.free:
            raise ConfigError(f"{self}: the replacement of a stuck rank comes after 'free', so announce must be longer")


@dataclass(frozen=True)
class Epoch:
    """An epoch in which this rank has met all others: its number and what each of them holds, by rank."""

    number: int
    holdings: tuple[Holding, ...]


class _EpochMovedError(Exception):
    """A newer epoch has begun."""


class Membership:
    """One rank's place in the job: `meet`, `form`, train, `leave`, and so on; `close` ends the watcher thread.

    Args:
        connect: makes a new client of the job's store, already under the job's prefix.
        on_beat: called now and then; says whether this process is asked to end (0: no, 1: yes, 2: and it is overdue).
        backend: of the process group. ``nccl`` groups are freed by abort instead of closed sockets.
    """

    def __init__(
        self,
        connect: Callable[[float], dist.Store],
        rank: int,
        world_size: int,
        backend: str = "gloo",
        timeouts: Timeouts | None = None,
        on_beat: Callable[[], int] | None = None,
    ) -> None:
        self.timeouts = timeouts or Timeouts()
        self.timeouts.check()
        self.rank = rank
        self.world_size = world_size
        self.backend = backend
        self.epoch = -1
        self.on_release: Callable[[], None] | None = None  # called too when the group of an epoch is ended
        self._connect = connect
        self.store = connect(self.timeouts.collective)
        self._on_beat = on_beat
        self._poll_s = max(_WATCH_POLL_S, world_size * 1e-3)  # the store serves all ranks
        self._listeners: set[int] = set()
        self._group_up = False
        self._released = -1  # the newest epoch whose group was ended
        self._changed = threading.Condition()
        self._closing = False
        self._asked_to_end = 0
        self._watcher = threading.Thread(target=self._watch, name="cpr-membership", daemon=True)
        self._watcher.start()

    @classmethod
    def from_env(
        cls, env: MutableMapping[str, str] = os.environ, timeouts: Timeouts | None = None, **kwargs: object
    ) -> Membership:
        """The membership of a process that torchrun, or a guardian under it, has started."""
        timeouts = timeouts or Timeouts()
        connect = store_from_env(env, timeouts.join)
        return cls(connect, int(env["RANK"]), int(env["WORLD_SIZE"]), timeouts=timeouts, **kwargs)  # type: ignore[arg-type]

    def meet(self, holding: Holding, after: int, position: str = "") -> Epoch:
        """Meet all ranks in the newest epoch above ``after``. Leaves the group of an older one.

        ``position`` is what a replacement needs to know of this rank's place in the run, see `position_of`.

        Raises:
            RecoveryError: no newer epoch, a rank that did not come, or an exception in the user's code on some rank.
        """
        if self._group_up:
            self.store.set(f"{self.epoch}/broke", "")
        self.leave()
        number = self._wait_newer(after)
        deadline = time.monotonic() + self.timeouts.join
        while True:
            self.store.set(f"{number}/position/{self.rank}", position)
            self.store.set(f"{number}/hold/{self.rank}", holding.to_json())
            try:
                told = self._gather(number, "hold", deadline)
                return Epoch(number, tuple(Holding.from_json(value) for value in told))
            except _EpochMovedError:
                number = self._current()

    def position_of(self, epoch: Epoch, rank: int) -> str:
        """The ``position`` that ``rank`` gave when it met the others."""
        return self.store.get(f"{epoch.number}/position/{rank}").decode()

    def died_at(self, after: int, epoch: int) -> float:
        """When (``time.time()`` of their hosts) the first of the processes ended that were replaced in the epochs above
        ``after``, up to ``epoch``."""
        return min(float(json.loads(self.store.get(f"epoch/{n}"))["died_at"]) for n in range(after + 1, epoch + 1))

    def form(self, epoch: Epoch) -> bool:
        """Make the process group of an epoch with all its ranks. False if a newer epoch has begun: `meet` again."""
        self.store.set(f"{epoch.number}/ready/{self.rank}", "")
        try:
            self._gather(epoch.number, "ready", time.monotonic() + self.timeouts.join)
            self._make_group(epoch.number)
        except _EpochMovedError:
            return False
        except RuntimeError as e:
            if not is_lost_peer(e):
                raise
            log.warning("epoch %d broke while its group was made: %s", epoch.number, e)
            return False
        return True

    def leave(self) -> None:
        """Drop the process group, if there is one. Peers that still wait in it are woken by the closed connections."""
        with self._changed:
            up, self._group_up = self._group_up, False
            self._changed.notify_all()
        if up:
            self._release(self.store, self.epoch)
            dist.destroy_process_group()

    def confirm(self, error: BaseException) -> None:
        """Raise what ended the job, if some rank published an exception: then ``error`` is only its echo."""
        if self._asked_to_end:
            raise RecoveryError(f"rank {self.rank} was asked to end while it waited for the others") from error
        failed = published_error(self.store)
        if failed is not None and failed[0] != self.rank:
            raise RecoveryError(f"rank {failed[0]} failed with {failed[1]}; no peer was lost") from error

    @property
    def broken(self) -> bool:
        """Whether a peer is gone and this rank, which waits in no collective, still stands in the group of then."""
        return self._group_up and self._released == self.epoch

    def close(self) -> None:
        """End the watcher thread; the group stays as it is."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._watcher.join(timeout=5.0)

    def _current(self) -> int:
        return self.store.add("epoch", 0)

    def _wait_newer(self, after: int) -> int:
        deadline = time.monotonic() + self.timeouts.announce
        while (number := self._current()) <= after:
            self.confirm(RecoveryError("left the group"))
            if time.monotonic() > deadline:
                raise RecoveryError(
                    f"rank {self.rank} lost a peer after epoch {after}, and no replacement came within"
                    f" {self.timeouts.announce:g} s; start the job with 'lightning-cpr run', or see its guardian's log"
                )
            time.sleep(_JOIN_POLL_S)
        return number

    def _gather(self, number: int, what: str, deadline: float) -> list[str]:
        keys = [f"{number}/{what}/{rank}" for rank in range(self.world_size)]
        while not self.store.check(keys):
            self.confirm(RecoveryError("meeting the other ranks"))
            if self._current() != number:
                raise _EpochMovedError
            if time.monotonic() > deadline:
                missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                raise RecoveryError(
                    f"epoch {number}: ranks {missing} did not come within {self.timeouts.join:g} s ({what})"
                )
            time.sleep(_JOIN_POLL_S)
        if self._current() != number:
            raise _EpochMovedError
        return [value.decode() for value in self.store.multi_get(keys)]

    def _make_group(self, number: int) -> None:
        if dist.is_initialized():  # a replacement's stand-in group
            dist.destroy_process_group()
        self._listeners = set()
        with new_listeners(self._listeners):
            dist.init_process_group(
                self.backend,
                store=dist.PrefixStore(f"{number}/pg", self._connect(self.timeouts.announce)),
                rank=self.rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=self.timeouts.collective),
            )
        self.store.set(f"{number}/ports/{self.rank}", json.dumps(sorted(self._listeners)))
        with self._changed:
            self.epoch, self._group_up = number, True
            self._changed.notify_all()

    # The watcher thread, which is the heartbeat too, from before the first group on: building a model may take long.
    # Its store client is its own: a client serves one blocking call at a time.

    def _watch(self) -> None:
        store = self._connect(self.timeouts.collective)
        while not self._closing:
            number = self.epoch
            try:
                moved = store.add("epoch", 0) > number or (self._group_up and store.check([f"{number}/broke"]))
            except RuntimeError as e:
                log.warning("the job's store is gone, nobody watches for failures any more: %s", e)
                return
            if moved:
                if self._group_up and self.epoch == number:
                    self._release(store, number)
                self._await_departure(number)
            self._pause(self._poll_s)

    def _pause(self, seconds: float) -> None:
        if self._on_beat is not None and (asked := self._on_beat()) > self._asked_to_end:
            self._asked_to_end = asked
            if asked == OVERDUE and self._group_up:  # the main thread may be blocked, and cannot see the signal
                self._release(self._connect(self.timeouts.announce), self.epoch)
        with self._changed:
            if not self._closing:
                self._changed.wait(seconds)

    def _release(self, store: dist.Store, number: int) -> None:
        """End the group of epoch ``number`` under whoever waits in it, on this rank and on its peers."""
        self._released = number
        if self.on_release is not None:
            self.on_release()
        if self.backend != "gloo":
            dist.distributed_c10d._abort_process_group()
            return
        peers = [f"{number}/ports/{rank}" for rank in range(self.world_size)]
        ports = {port for key in peers if store.check([key]) for port in json.loads(store.get(key))}
        ended = shut_down(self._listeners, ports - self._listeners)
        log.info("epoch %d is over: %d connections of its group shut down", number, ended)

    def _await_departure(self, number: int) -> None:
        deadline = time.monotonic() + self.timeouts.free
        while self.epoch == number and not self._closing:
            if self._group_up and time.monotonic() > deadline:
                log.error(
                    "rank %d is stuck: the others left epoch %d, it did not within %g s: ending it",
                    self.rank,
                    number,
                    self.timeouts.free,
                )
                os.kill(os.getpid(), signal.SIGKILL)
            self._pause(0.5)


def store_from_env(
    env: MutableMapping[str, str] = os.environ, timeout_s: float = 60.0
) -> Callable[[float], dist.Store]:
    """How to connect to the job's store, under the prefix of this start. All its ranks come here, see `token_of`.

    Raises:
        RecoveryError: ranks did not come up within ``timeout_s``.
        UnsupportedError: there is no such store, see `run_store`.
    """
    token = token_of(env, timeout_s)
    return lambda timeout: run_store(env, timeout, token)


def announce(store: dist.Store, rank: int, reason: str, died_at: float) -> int:
    """Begin a new epoch: a replacement for ``rank``, which ended at ``died_at``, is on its way. Returns its number."""
    number = store.add("epoch", 1)
    store.set(f"epoch/{number}", json.dumps({"rank": rank, "reason": reason, "died_at": died_at}))
    return number
