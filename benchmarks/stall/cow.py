"""Copy-on-write staging, as a prototype: a base is gathered behind training, and a batch's rows are copied before it.

At the boundary all rows are marked. A thread copies them piece by piece; before a batch updates rows that are still
marked, training copies those itself.
"""

from __future__ import annotations

import threading
import time

import torch
from torch import Tensor

from lightning_cpr.spec import Shard

PIECE = 1 << 14


class CopyOnWrite:
    """One shard's base. ``stall``: seconds of the boundary and of all `before_batch` until everything is gathered;
    ``cpu``: the CPU seconds of the training thread in them.
    """

    def __init__(self, shard: Shard) -> None:
        self._live = [shard.weight, *shard.states.values()]
        self._marked = torch.zeros(shard.spec.rows, dtype=torch.bool)
        self._lock = threading.Lock()
        self.buffers = [torch.zeros_like(tensor) for tensor in self._live]
        self.stall = self.cpu = 0.0
        self.batches = 0
        self._thread: threading.Thread | None = None

    def boundary(self) -> None:
        started, cpu = time.perf_counter(), time.thread_time()
        self._marked.fill_(True)
        self._thread = threading.Thread(target=self._gather, daemon=True)
        self._thread.start()
        self.stall, self.cpu, self.batches = time.perf_counter() - started, time.thread_time() - cpu, 0

    def _gather(self) -> None:
        with torch.no_grad():
            for start in range(0, len(self._marked), PIECE):
                with self._lock:
                    self._copy(torch.arange(start, min(start + PIECE, len(self._marked))))

    def _copy(self, rows: Tensor) -> None:
        marked = self._marked[rows]
        if not bool(marked.all()):
            rows = rows[marked]
        for live, buffer in zip(self._live, self.buffers, strict=True):
            buffer[rows] = live[rows]
        self._marked[rows] = False

    def before_batch(self, rows: Tensor) -> None:
        if self.gathering:
            started, cpu = time.perf_counter(), time.thread_time()
            with self._lock, torch.no_grad():
                self._copy(rows)
            self.stall += time.perf_counter() - started
            self.cpu += time.thread_time() - cpu
            self.batches += 1

    @property
    def gathering(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
