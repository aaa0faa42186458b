"""A rank that waits for a peer that never comes is freed by SIGTERM, and one that gets on is left alone."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from lightning_cpr.job.rendezvous import join_afresh
from lightning_cpr.recovery.election import is_lost_peer
from lightning_cpr.recovery.stuck import StuckWatch, end_group
from tests._ranks import run_ranks


def _wait_for_rank_1(rank: int, world: int) -> str:
    ports = join_afresh("gloo", rank, world, timedelta(seconds=30))
    assert ports[0]
    assert ports[0] < ports[1]
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["freed"], timedelta(seconds=30))
        return ""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    watch = StuckWatch(partial(end_group, *ports), patience=0.5)
    watch.install()
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    try:
        dist.recv(torch.zeros(1), 1)
        error = "none"
    except RuntimeError as e:
        error = str(e) if is_lost_peer(e) else f"not known as a lost peer: {e}"
    store.set("freed", "")
    watch.remove()
    signal.signal(signal.SIGTERM, before)
    assert signal.set_wakeup_fd(-1) == -1
    return error


def test_a_rank_that_is_stuck_is_freed() -> None:
    error, _ = run_ranks(_wait_for_rank_1, 2)
    assert error != "none"
    assert not error.startswith("not known"), error


def test_one_that_steps_is_left_alone_and_nothing_stays() -> None:
    released = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    files = len(os.listdir("/proc/self/fd"))
    watch = StuckWatch(released.set, patience=0.5)
    watch.install()
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(8):
        time.sleep(0.1)  # the work of a step
        watch.step()
    assert not released.is_set()
    assert released.wait(5.0)
    watch.remove()
    signal.signal(signal.SIGTERM, before)
    assert len(os.listdir("/proc/self/fd")) == files
