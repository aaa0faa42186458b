"""The event log of a run of two hours: saves of all kinds, a compaction, recoveries, a failed and a skipped save."""

from __future__ import annotations

from typing import Any

_CYCLE = (("base", "exact"), ("delta", "mixed"), ("delta", "mixed"), ("delta", "exact"), ("delta", "exact"))
_BYTES = {("base", "exact"): 1_000_000, ("delta", "mixed"): 100_000, ("delta", "exact"): 300_000}


def run_events() -> list[dict[str, Any]]:
    """All events, by time."""
    events: list[dict[str, Any]] = []

    def add(minute: float, event: str, **fields: Any) -> None:
        events.append({"time": 1.7e9 + 60 * minute, "rank": 0, "event": event, **fields})

    add(0, "run_started", run_id="run1", epoch=0, step=0, samples=0)
    for number, (kind, consistency) in enumerate(_CYCLE * 2):
        step = 100 * (number + 1)
        what = {"kind": kind, "consistency": consistency, "step": step}
        add(10 * number + 1, "save_started", stall_s=0.02, **what)
        add(10 * number + 2, "save_committed", bytes=_BYTES[kind, consistency], samples=8 * step, **what)
    add(35, "save_skipped", step=350, due="close", skipped=1)
    add(55, "save_failed", error="disk full <here>", failed=1)
    add(62, "recovery", mode="partial", step=620, seconds=1.0, pls=0.02, rows=1000, version="run1.0")
    add(75, "compacted", step=700, bytes=900_000, before=1.5, after=1.0)
    add(88, "recovery", mode="partial", step=880, seconds=2.0, pls=0.05, rows=1000, version="run1.1")
    add(120, "run_ended", step=1200, samples=9600, pls=0.05)
    return sorted(events, key=lambda event: event["time"])
