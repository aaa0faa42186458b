"""Touches the rows of a batch while its forward computes, on a thread of its own: the lookup has told their numbers.

A touch is right whenever it runs (see `window`), so nothing here is ordered against steps, exchanges or other batches.
It counts for the window that was open then: the backward touches again what another window has kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from lightning_cpr.recovery.parity.groups import protectable
from lightning_cpr.recovery.parity.meter import Meter
from lightning_cpr.recovery.parity.window import Window
from lightning_cpr.spec import ShardSpec

Told = Iterable[tuple[ShardSpec, Tensor]]
_Kept = list[tuple[ShardSpec, int]]  # and the number of the window that has its rows


@dataclass(frozen=True)
class Coming:
    """Rows that the backward of one batch will change.

    rows: by shard, int64 shard-local numbers, repeats allowed; may be called twice.
    """

    rows: Callable[[], Told]
    job: Future[_Kept | None]


class Ahead:
    """One thread, and the windows that it touches."""

    def __init__(self, windows: Mapping[ShardSpec, Window]) -> None:
        self._windows = windows
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="cpr-parity-ahead")
        self._at_work = Lock()
        self._settled = 0

    def hand_over(self, ids: Tensor, rows: Callable[[], Told], meter: Meter) -> Coming:
        """Begin to touch ``rows()``, views of ``ids`` or made from it. Nobody changes ``ids`` any more."""
        return Coming(rows, self._worker.submit(self._run, rows, _made(ids), meter, self._settled))

    def finish(self, coming: Coming, meter: Meter) -> None:
        """Have the rows kept by the windows that are open now. From the thread that closes windows.

        Raises:
            IndexError: a shard has no such row.
        """
        # a thread that has not begun by now has no core to run on; this one has
        kept = None if coming.job.cancel() else coming.job.result()
        if kept is None or any(self._windows[spec].number != number for spec, number in kept):
            with meter.timed("unbegun"):
                self._touch(coming.rows())

    def settle(self) -> None:
        """Before rows change by other means than steps: none of those handed over so far are touched after this."""
        self._settled += 1  # first: no other touch begins while this waits
        with self._at_work:
            pass

    def close(self) -> None:
        """End the thread."""
        self._worker.shutdown(cancel_futures=True)

    def _run(self, rows: Callable[[], Told], made: torch.Event | None, meter: Meter, settled: int) -> _Kept | None:
        with self._at_work, meter.timed("ahead"):
            if settled != self._settled:
                return None
            if made is not None:
                made.synchronize()
            return self._touch(rows())

    def _touch(self, rows: Told) -> _Kept:
        return [(spec, self._windows[spec].touch(ids)) for spec, ids in rows if protectable(spec)]


def _made(ids: Tensor) -> torch.Event | None:
    """On an accelerator: when ``ids`` is made, and with it the rows that the steps before have changed."""
    if ids.is_cpu:
        return None
    event = torch.Event(ids.device)
    event.record(torch.accelerator.current_stream(ids.device))
    return event
