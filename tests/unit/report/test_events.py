"""Events are whole lines, in order of time over all ranks; torn lines are left out."""

from __future__ import annotations

import json
from pathlib import Path

from lightning_cpr.report.events import EventLog, metrics_of, read_events
from lightning_cpr.store.storage import Storage


def test_events_of_all_ranks_in_order_of_time(tmp_path: Path) -> None:
    sink, now = Storage(str(tmp_path)), iter([3.0, 1.0, 2.0])
    logs = [EventLog(sink, rank, clock=lambda: next(now)) for rank in (0, 1)]
    logs[0].emit("save_committed", step=5)
    logs[1].emit("fault", kind="wipe")
    logs[0].emit("recovery", pls=0.5)
    assert [e["event"] for e in read_events(sink)] == ["fault", "recovery", "save_committed"]
    assert {p.name for p in tmp_path.iterdir()} == {"events.jsonl", "events-rank1.jsonl"}
    assert json.loads((tmp_path / "events-rank1.jsonl").read_text()) == {
        "time": 1.0,
        "rank": 1,
        "event": "fault",
        "kind": "wipe",
    }


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    sink = Storage(str(tmp_path))
    EventLog(sink, 0).emit("a")
    sink.append("events.jsonl", b'{"time": 1')
    assert [e["event"] for e in read_events(sink)] == ["a"]


def test_metrics_are_the_numbers_of_an_event() -> None:
    event = {"time": 1.0, "rank": 0, "event": "save", "bytes": 7, "stall_s": 0.5, "kind": "base", "exact": True}
    assert metrics_of(event) == {"cpr/save_bytes": 7.0, "cpr/save_stall_s": 0.5}
