"""The channel under parity, over real gloo groups."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_cpr.recovery.election import LostPeerError
from lightning_cpr.recovery.parity.channel import GroupChannel
from tests._ranks import run_ranks

LIMIT = timedelta(seconds=30)


def _drop_channel_in_a_swap(rank: int, world: int) -> str:
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), timeout=LIMIT)
    group = dist.ProcessGroupGloo(dist.PrefixStore("parity", store), rank, world, LIMIT)
    if rank == 1:
        store.wait(["given up"], LIMIT)
        del group
        store.set("peer left", "")
        return "left"
    channel = GroupChannel(group, timedelta(seconds=0.05))
    del group
    outcome = "swapped"
    try:
        channel.swap([torch.zeros(1, dtype=torch.int64)] * world)
    except LostPeerError:
        outcome = "given up"
    store.set(outcome, "")
    del channel  # the swap goes on in the group's thread, until the peer leaves
    store.wait(["peer left"], LIMIT)
    return outcome


def test_a_channel_that_is_dropped_while_it_swaps_does_not_end_the_process() -> None:
    """Its group ended in its own thread, which joined itself: SIGABRT, in a survivor of a failure."""
    assert run_ranks(_drop_channel_in_a_swap, 2) == ["given up", "left"]
