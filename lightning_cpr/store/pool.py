"""A small pool of daemon threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")


class DaemonPool:
    """As ``ThreadPoolExecutor``, whose threads however are joined when the interpreter ends: hung storage would hang
    the process. Leaving the ``with`` block drops what has not begun and waits for what has.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(threads)]

    def __enter__(self) -> DaemonPool:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while True:
            try:
                self._tasks.get_nowait()
            except queue.Empty:
                break
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        self._tasks.put(run)
        return future

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
