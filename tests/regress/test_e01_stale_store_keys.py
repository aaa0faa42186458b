"""E01 (pytorch#135712): a restart under torchrun finds the store as the last attempt left it. A process that came up
first read its peer's old address there, and the restart failed.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lightning_cpr.errors import RecoveryError
from lightning_cpr.job.rendezvous import fresh_store


def start(store: Any, order: list[int]) -> dict[int, Any]:
    """One start of a job of these ranks, which come up in this order, 0.05 s apart at least."""
    found: dict[int, Any] = {}
    threads = []
    for rank in order:
        thread = threading.Thread(
            target=lambda rank=rank: found.update({rank: fresh_store(store.clone(), rank, len(order), 20.0)})
        )
        thread.start()
        thread.join(0.05)
        threads.append(thread)
    for thread in threads:
        thread.join(30)
    assert sorted(found) == sorted(order)
    return found


def test_e01_every_start_has_keys_of_its_own() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    for attempt, order in enumerate(([0, 1, 2], [1, 2, 0], [2, 0, 1])):
        # A process that died before it joined has said hello too.
        store.set("lightning_cpr/hello/1", f"dead{attempt}")
        found = start(store, order)
        for rank, own in found.items():
            assert not own.check(["address"]), (attempt, rank)
        found[0].set("address", str(attempt))
        assert [found[rank].get("address") for rank in range(3)] == [str(attempt).encode()] * 3


def test_e01_who_does_not_come_up_is_named() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    with pytest.raises(RecoveryError, match=r"ranks \[1, 2\] did not come up within 0.05 s"):
        fresh_store(store, 0, 3, 0.05)
    with pytest.raises(RecoveryError, match=r"ranks \[0\] did not come up"):
        fresh_store(store, 1, 3, 0.05)
