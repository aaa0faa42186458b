"""`run_ranks` with a guardian's part played by the test: a rank that is killed is replaced, the others live on.

    ends = run_guarded(job, 2, "arg")                # job(rank, world, "arg"), again in each replacement

What ``lightning-cpr run`` does with processes and imports is left out, so that a job with kills costs seconds.
"""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from typing import Any

import torch.distributed as dist

from lightning_cpr.recovery.start import START_ENV
from tests import _ranks


def run_guarded(
    fn: Callable[..., Any], world: int, *args: Any, replacements: int = 8, timeout: float = 240.0
) -> tuple[list[Any], list[int]]:
    """What ``fn`` returned on the last process of each rank, and how often each rank was replaced.

    Raises AssertionError with all tracebacks if a rank raised, crashed by itself, or did not return in time.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    job, port, deadline = uuid.uuid4().hex, store.port, time.monotonic() + timeout
    payload = pickle.dumps((fn, args))
    waiting: dict[Any, int] = {}
    running: dict[int, Any] = {}
    processes: list[Any] = []
    deaths, values = [0] * world, [None] * world
    problems: list[str] = []

    def start(rank: int, replaces: bool) -> None:
        receiver, sender = _ranks._context.Pipe(duplex=False)
        variables = dict(os.environ) | _ranks._rank_env(rank, world, port, job) | {START_ENV: "start"}
        process = _ranks._context.Process(
            target=_guarded_child, args=(rank, world, variables, payload, sender, replaces), daemon=True
        )
        process.start()
        sender.close()
        processes.append(process)
        running[rank] = process
        waiting[receiver] = rank

    try:
        for rank in range(world):
            start(rank, False)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in connection.wait(list(waiting), timeout=left):
                rank = waiting.pop(ready)
                try:
                    values[rank], error = pickle.loads(ready.recv_bytes())
                except EOFError:
                    deaths[rank] += 1
                    running[rank].join(2.0)
                    code = running[rank].exitcode
                    error = "died once more than it may be replaced" if sum(deaths) > replacements else None
                    if code != -signal.SIGKILL:
                        error = f"ended with exit code {code}, which no test asked for"
                    if error is None:
                        start(rank, True)
                if error is not None:
                    problems.append(f"--- rank {rank}: {error}")
                    deadline = min(deadline, time.monotonic() + _ranks.GRACE_S)
        problems += [f"--- rank {rank}: still running at the deadline" for rank in waiting.values()]
    finally:
        for process in processes:
            process.join(2.0)
            if process.is_alive():
                process.kill()
                process.join()
        for receiver in waiting:
            receiver.close()
        del store
    assert not problems, "\n".join(problems)
    return values, deaths


def _guarded_child(
    rank: int, world: int, variables: dict[str, str], payload: bytes, sender: Any, replaces: bool
) -> None:
    from lightning_cpr.recovery.child import show_log
    from lightning_cpr.recovery.guardian import HEARTBEAT_FD_ENV
    from lightning_cpr.recovery.membership import REPLACES_ENV, announce, store_from_env

    page = os.memfd_create("heartbeat")
    os.ftruncate(page, mmap.PAGESIZE)
    variables[HEARTBEAT_FD_ENV] = str(page)
    if replaces:
        store = store_from_env(variables)(30.0)
        variables[REPLACES_ENV] = str(announce(store, rank, "killed by the test", time.time()))
    show_log()
    _ranks._child(rank, world, variables, payload, sender)
