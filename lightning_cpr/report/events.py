"""The event log: one JSON line for each thing that happened to a job's state.

Rank 0 writes ``events.jsonl`` in the root, rank r ``events-rank<r>.jsonl``: one writer a file, no locks. An event has
``time`` (seconds since the epoch), ``rank``, ``event`` (its kind) and the fields of its kind, all plain JSON values.
The PLS ledger can be recomputed from the log alone (``policy.ledger.replay``).
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from lightning_cpr.errors import StorageError
from lightning_cpr.store.storage import Storage

log = logging.getLogger(__name__)


class EventLog:
    """Appends events of one rank. Safe to use from the writer thread; each event is on storage when `emit` returns,
    unless storage fails: a job does not end because its log cannot be written.
    """

    def __init__(self, storage: Storage, rank: int, clock: Callable[[], float] = time.time) -> None:
        self._storage = storage
        self._rank = rank
        self._clock = clock
        self._lock = threading.Lock()
        self.path = "events.jsonl" if rank == 0 else f"events-rank{rank}.jsonl"
        # Where there are events, a new line first: a process that died may have left half of one.
        self._unwritten = "\n" if self._has_events() else ""

    def _has_events(self) -> bool:
        try:
            return bool(self._storage.size(self.path))
        except StorageError:
            return True

    def emit(self, event: str, **fields: Any) -> dict[str, Any]:
        """Write one event and return it as written. While storage fails events are kept, and written with the next."""
        record = {"time": round(self._clock(), 6), "rank": self._rank, "event": event, **fields}
        line = json.dumps(record, separators=(",", ":"), allow_nan=False, default=str) + "\n"
        with self._lock:
            self._unwritten += line
            try:
                self._storage.append(self.path, self._unwritten.encode())
            except StorageError as error:
                log.error("event %r is not in the log yet: %s", event, error)
                self._unwritten = "\n" + self._unwritten.lstrip("\n")
            else:
                self._unwritten = ""
        return record


def read_events(storage: Storage) -> list[dict[str, Any]]:
    """All events of all ranks under the storage's root, in order of time. Lines torn by a death are left out."""
    events: list[dict[str, Any]] = []
    for path in [e.path for e in storage.list() or [] if e.path.startswith("events") and e.path.endswith(".jsonl")]:
        for line in bytes(storage.get(path)).decode(errors="replace").split("\n"):
            try:
                events += [json.loads(line)] if line else []
            except ValueError:
                log.warning("%s: half an event is left out: %.60r", path, line)
    return sorted(events, key=lambda e: e["time"])


def metrics_of(event: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an event as ``cpr/<event>_<field>`` metrics for a Trainer's loggers."""
    return {
        f"cpr/{event['event']}_{name}": float(value)
        for name, value in event.items()
        if name not in ("time", "rank", "event") and isinstance(value, int | float) and not isinstance(value, bool)
    }
