"""Every test leaves the process as it found it: environment, threads, child processes, shared memory."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

JOIN_S = 5.0
SHARED = pytest.StashKey[set[str]]()


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    environment, threads, shared = dict(os.environ), set(threading.enumerate()), shared_memory()
    yield
    left = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST" and environment.get(k) != v}
    gone = environment.keys() - os.environ.keys() - {"PYTEST_CURRENT_TEST"}
    assert not left, f"the test changed the environment: {left}"
    assert not gone, f"the test removed from the environment: {gone}"
    deadline = time.monotonic() + JOIN_S
    for thread in set(threading.enumerate()) - threads:
        if not thread.daemon:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), f"the test left the thread {thread.name}"
    gc.collect()  # an iterator that an exception's traceback held ends its workers when it goes
    for child in multiprocessing.active_children():
        child.join(max(0.0, deadline - time.monotonic()))
    assert not multiprocessing.active_children(), "the test left child processes"
    if not os.environ.get("PYTEST_XDIST_WORKER"):  # else names of another worker's test may be among them
        assert not shared_memory() - shared, "the test left shared memory"


def pytest_sessionstart(session: pytest.Session) -> None:
    session.stash[SHARED] = shared_memory()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not os.environ.get("PYTEST_XDIST_WORKER") and (left := shared_memory() - session.stash[SHARED]):
        print(f"\nthe tests left shared memory: {sorted(left)}")
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def shared_memory() -> set[str]:
    """Our names in host shared memory."""
    folder = Path("/dev/shm")
    return {p.name for p in folder.iterdir() if "cpr" in p.name} if folder.is_dir() else set()
