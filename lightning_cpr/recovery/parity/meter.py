"""What parity has cost one rank so far."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from lightning_cpr.recovery.parity.exchange import Outcome


class Meter:
    """Counts, seconds and processor seconds. Each span is timed by one thread, so there is nothing to lock.

    Spans: ``unhidden``, what steps were longer for; ``wait``, the share of it spent waiting for the exchange before;
    ``hidden``, the exchange's thread; ``ahead``, the one that touches rows ahead, told as a part of ``hidden``;
    ``unbegun``, the share of ``unhidden`` spent on touches that this one had not begun by then, for want of a core.
    """

    def __init__(self) -> None:
        self.mismatches = 0
        self._counts = dict.fromkeys(("exchanges", "rows", "bytes_sent"), 0)
        self._seconds = dict.fromkeys(("hidden", "unhidden", "wait", "ahead", "unbegun"), 0.0)
        self._core = dict.fromkeys(self._seconds, 0.0)

    def add(self, outcome: Outcome) -> None:
        """Count a finished exchange."""
        self._counts["exchanges"] += 1
        self._counts["rows"] += outcome.rows
        self._counts["bytes_sent"] += outcome.sent_bytes
        self.mismatches += outcome.mismatches

    @contextmanager
    def timed(self, span: Literal["hidden", "unhidden", "wait", "ahead", "unbegun"]) -> Iterator[None]:
        """Add the time of the block to a span."""
        started, core = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            self._seconds[span] += time.perf_counter() - started
            self._core[span] += time.thread_time() - core

    def values(self) -> dict[str, float]:
        """By name: counts, ``<span>_s``, and ``<span>_core_s``, the processor seconds in it."""
        seconds, core = ({**of, "hidden": of["hidden"] + of["ahead"]} for of in (self._seconds, self._core))
        return {
            **self._counts,
            "mismatches": self.mismatches,
            **{f"{span}_s": seconds[span] for span in ("hidden", "unhidden", "wait")},
            **{f"{span}_core_s": core[span] for span in ("hidden", "unhidden", "unbegun")},
        }
