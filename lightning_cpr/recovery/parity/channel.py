"""The wire under parity: ranks swap int64 messages, all with all, over a process group of their own.

Every rank waits for every other one in each swap, so the death of any of them reaches all; `abort` releases a wait that
only the group's timeout would end, on this rank and, with `open_channel`, on its peers.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cpr.recovery.election import LostPeerError
from lightning_cpr.recovery.sockets import new_listeners, shut_down


class Channel(Protocol):
    """Swaps messages between the ranks of a job. Calls are collective and come from one thread at a time."""

    rank: int
    world: int

    def swap(self, outgoing: Sequence[Tensor], sizes: Sequence[int] | None = None) -> list[Tensor]:
        """Send ``outgoing[r]`` (int64, 1-D, host memory) to rank r; return what each rank sent here.

        Args:
            sizes: words to expect from each rank, where the ranks know them; None: they are swapped first.

        Raises:
            LostPeerError: a peer is gone, too slow, or the channel was aborted.
        """

    def abort(self) -> None:
        """Make the swap in progress, and every later one, raise. Safe from any thread."""


class GroupChannel:
    """A channel over a process group with a CPU backend (gloo), which serves nothing else.

    Args:
        group: from ``torch.distributed.new_group``, or a bare ``ProcessGroupGloo``: no default group is needed.
        timeout: the longest wait for one swap.
        on_abort: ends the group's connections.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout: timedelta = timedelta(seconds=60),
        on_abort: Callable[[], object] = lambda: None,
    ) -> None:
        self.rank = group.rank()
        self.world = group.size()
        self._group = group
        self._timeout = timeout.total_seconds()
        self._on_abort = on_abort
        self._wake = threading.Event()
        self._aborted = False
        self._stuck: list[Any] = []  # an abandoned operation still writes to its buffers

    def swap(self, outgoing: Sequence[Tensor], sizes: Sequence[int] | None = None) -> list[Tensor]:
        if sizes is None:
            received = torch.empty(self.world, dtype=torch.int64)
            self._all_to_all(received, torch.tensor([message.numel() for message in outgoing]), [], [])
            sizes = received.tolist()
        incoming = torch.empty(sum(sizes), dtype=torch.int64)
        self._all_to_all(incoming, _joined(outgoing), list(sizes), [len(message) for message in outgoing])
        return list(incoming.split(list(sizes)))

    def abort(self) -> None:
        if not self._aborted:
            self._aborted = True
            self._wake.set()
            self._on_abort()

    def _all_to_all(self, output: Tensor, source: Tensor, out_sizes: list[int], in_sizes: list[int]) -> None:
        self._wake.clear()  # before the look at _aborted: an abort in between would be missed
        if self._aborted:
            raise LostPeerError("parity: the channel was aborted; rebuild on a fresh process group")
        try:
            work = self._group.alltoall_base(output, source, out_sizes, in_sizes)
            # The group's own thread runs and drops the callback. It holds the event alone: were it the last to hold the
            # channel, the group would end in that thread, join it, and take the process along.
            wake = self._wake
            work.get_future().add_done_callback(lambda _: wake.set())
            finished = wake.wait(self._timeout)
            if finished and not self._aborted:
                work.wait()
                return
        except RuntimeError as error:
            raise LostPeerError(f"parity: rank {self.rank} lost a peer ({error})") from error
        self._stuck.append((work, output, source))
        reason = "was aborted" if self._aborted else f"waited {self._timeout:.0f} s for a peer"
        raise LostPeerError(f"parity: the swap of rank {self.rank} {reason}; rebuild on a fresh process group")


def _joined(messages: Sequence[Tensor]) -> Tensor:
    """All messages in one tensor: their own memory, where they lie in it one after another."""
    memory = messages[0].untyped_storage().data_ptr()
    position = messages[0].storage_offset()
    start = position
    for message in messages:
        if message.untyped_storage().data_ptr() != memory or message.storage_offset() != position:
            return torch.cat(list(messages))
        position += message.numel()
    return messages[0].as_strided((position - start,), (1,), start)


def open_channel(store: dist.Store, rank: int, world: int, timeout: timedelta) -> GroupChannel:
    """A channel over a gloo group of its own, whose connections `abort` ends. Collective.

    Args:
        store: under a prefix that served no group before.

    Raises:
        LostPeerError: a peer did not come.
    """
    listeners: set[int] = set()
    try:
        with new_listeners(listeners):
            group = dist.ProcessGroupGloo(store, rank, world, timeout)
    except RuntimeError as error:
        raise LostPeerError(f"parity: rank {rank} could not reach its peers ({error})") from error
    peers: set[int] = set()
    channel = GroupChannel(group, timeout, lambda: shut_down(listeners, peers - listeners))  # type: ignore[arg-type]
    peers.update(port for told in swap_values(channel, {"ports": sorted(listeners)}) for port in told["ports"])
    return channel


def swap_values(channel: Channel, value: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rank's plain JSON value, in order of rank."""
    data = json.dumps(value).encode()
    padded = data + b" " * (-len(data) % 8)
    message = torch.frombuffer(bytearray(padded), dtype=torch.int64)
    received = channel.swap([message] * channel.world)
    return [json.loads(part.numpy().tobytes()) for part in received]
