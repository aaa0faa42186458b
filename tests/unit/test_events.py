"""Events are whole lines, in order of time over all ranks; torn lines are left out."""

from __future__ import annotations

import json

from lightning_cpr.report.events import EventLog, metrics_of, read_events


class MemorySink:
    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def append(self, path: str, data: bytes) -> None:
        self.files[path] = self.files.get(path, b"") + data

    def get(self, path: str) -> bytes:
        return self.files[path]

    def names(self) -> list[str]:
        return list(self.files)


def test_events_of_all_ranks_in_order_of_time() -> None:
    sink, now = MemorySink(), iter([3.0, 1.0, 2.0])
    logs = [EventLog(sink, rank, clock=lambda: next(now)) for rank in (0, 1)]
    logs[0].emit("save_committed", step=5)
    logs[1].emit("fault", kind="wipe")
    logs[0].emit("recovery", pls=0.5)
    assert [e["event"] for e in read_events(sink)] == ["fault", "recovery", "save_committed"]
    assert set(sink.files) == {"events.jsonl", "events-rank1.jsonl"}
    assert json.loads(sink.files["events-rank1.jsonl"]) == {"time": 1.0, "rank": 1, "event": "fault", "kind": "wipe"}


def test_a_torn_last_line_is_left_out() -> None:
    sink = MemorySink()
    EventLog(sink, 0).emit("a")
    sink.append("events.jsonl", b'{"time": 1')
    assert [e["event"] for e in read_events(sink)] == ["a"]


def test_metrics_are_the_numbers_of_an_event() -> None:
    event = {"time": 1.0, "rank": 0, "event": "save", "bytes": 7, "stall_s": 0.5, "kind": "base", "exact": True}
    assert metrics_of(event) == {"cpr/save_bytes": 7.0, "cpr/save_stall_s": 0.5}
