"""Frees a process that was asked to end while it waits in a collective for a peer that is gone.

Python runs a signal's handler between two instructions of the main thread, so not while that thread is in a collective,
and gloo tells some survivors nothing when a peer dies. The signal's number comes through a pipe at once, though: a
thread reads it and, where the main thread makes no step any more, ends the group's connections under it. The collective
then fails as on a lost peer.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

from lightning_cpr.recovery.sockets import shut_down

log = logging.getLogger(__name__)

PATIENCE_S = 8.0
"""Of torchrun's 30 s between SIGTERM and SIGKILL: leaves the rest for handing rows over."""


class StuckWatch:
    """Call `install` and `remove` in the main thread, `step` whenever it got somewhere.

    Args:
        release: ends the process group under the main thread.
        patience: seconds after SIGTERM without a step that mean that there comes none.
    """

    def __init__(self, release: Callable[[], None], patience: float = PATIENCE_S) -> None:
        self._release = release
        self._patience = patience
        self._stepped = time.monotonic()
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stop_read, self._stop_write = os.pipe2(os.O_CLOEXEC)
        self._previous = -1
        self._thread = threading.Thread(target=self._watch, name="cpr-stuck", daemon=True)

    def install(self) -> None:
        self._previous = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread.start()

    def step(self) -> None:
        self._stepped = time.monotonic()

    def remove(self) -> None:
        signal.set_wakeup_fd(self._previous)
        os.close(self._stop_write)
        self._thread.join(timeout=5.0)
        for file in (self._read, self._write, self._stop_read):
            os.close(file)

    def _watch(self) -> None:
        asked_at: float | None = None
        while True:
            left = None if asked_at is None else max(asked_at, self._stepped) + self._patience - time.monotonic()
            if left is not None and left <= 0:
                log.warning("asked to end, and no step for %g s: the process group is ended", self._patience)
                self._release()
                return
            ready, _, _ = select.select([self._read, self._stop_read], [], [], left)
            if self._stop_read in ready:
                return
            with suppress(BlockingIOError):
                if self._read in ready and signal.SIGTERM in os.read(self._read, 4096):
                    asked_at = asked_at or time.monotonic()


def end_group(own_ports: frozenset[int], all_ports: frozenset[int]) -> None:
    """End the default process group under whoever waits in it. Ports: that its ranks listen on, for gloo."""
    if dist.get_backend() != "gloo":
        dist.distributed_c10d._abort_process_group()
        return
    ended = shut_down(own_ports, all_ports - own_ports)
    log.info("%d connections of the process group shut down", ended)
