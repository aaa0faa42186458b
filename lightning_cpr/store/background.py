"""Saves in the background: one in flight, on one thread, its error kept until asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from lightning_cpr.errors import CommitError, CPRError

T = TypeVar("T")


class BackgroundWriter(Generic[T]):
    """Runs one save at a time on a thread of its own. All methods are called from one thread, the trainer's.

    ``skipped`` counts saves that came while one was in flight. cancel: set by `close` when its time is up.
    """

    def __init__(self, cancel: threading.Event | None = None) -> None:
        self.skipped = 0
        self._cancel = cancel or threading.Event()
        self._thread: threading.Thread | None = None
        self._future: Future[T] | None = None

    def submit(self, save: Callable[[], T]) -> Future[T] | None:
        """Start a save, e.g. ``partial(save, io, spec, part)``. None, and counted, while another is in flight.

        The future holds what ``save`` returned, or a CPRError: an error of another kind, BaseExceptions included, is
        its cause. A finished save that was not taken by `poll` or `wait` is in flight still.
        """
        if self._future is not None:
            self.skipped += 1
            return None
        future: Future[T] = Future()
        self._future = future
        self._thread = threading.Thread(target=_run, args=(save, future), name="cpr-save", daemon=True)
        self._thread.start()
        return future

    def poll(self) -> Future[T] | None:
        """The save in flight if it has finished, once; None otherwise. Never waits."""
        return self.wait(0.0)

    def wait(self, timeout: float | None = None) -> Future[T] | None:
        """Wait for the save in flight and take it; None if there is none or it has not finished in ``timeout`` s."""
        if self._thread is None:
            return None
        self._thread.join(timeout)
        if self._thread.is_alive():
            return None
        future, self._future, self._thread = self._future, None, None
        return future

    def close(self, timeout: float, grace: float = 5.0) -> Future[T] | None:
        """Let the save in flight end within ``timeout`` seconds, else cancel it and give it ``grace`` more.

        Returns the save that was in flight, or None. Raises CommitError if its thread cannot be ended (stuck storage);
        the thread does not keep the process alive.
        """
        finished = self.wait(timeout)
        if finished is None and self._thread is not None:
            self._cancel.set()
            finished = self.wait(grace)
            if finished is None:
                raise CommitError(f"a save still hangs {timeout + grace:g} s after close; its version is not committed")
        return finished


def _run(save: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(save())
    except CPRError as error:
        future.set_exception(error)
    except BaseException as error:
        wrapped = CommitError(f"a background save failed: {type(error).__name__}: {error}")
        wrapped.__cause__ = error
        future.set_exception(wrapped)
