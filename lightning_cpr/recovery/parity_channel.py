"""The wire under parity: ranks swap int64 messages, all with all, over a process group of their own.

Every rank waits for every other one in each swap, so the death of any of them reaches all; `abort` releases a wait that
only the group's timeout would end.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cpr.errors import RecoveryError


class Channel(Protocol):
    """Swaps messages between the ranks of a job. Calls are collective and come from one thread at a time."""

    rank: int
    world: int

    def swap(self, outgoing: Sequence[Tensor], sizes: Sequence[int] | None = None) -> list[Tensor]:
        """Send ``outgoing[r]`` (int64, 1-D, host memory) to rank r; return what each rank sent here.

        Args:
            sizes: words to expect from each rank, where the ranks know them; None: they are swapped first.

        Raises:
            RecoveryError: a peer is gone, too slow, or the channel was aborted.
        """

    def abort(self) -> None:
        """Make the swap in progress, and every later one, raise. Safe from any thread."""


class GroupChannel:
    """A channel over a process group with a CPU backend (gloo), which serves nothing else.

    Args:
        group: from ``torch.distributed.new_group``, or a bare ``ProcessGroupGloo``: no default group is needed.
        timeout: the longest wait for one swap.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta = timedelta(seconds=60)) -> None:
        self.rank = group.rank()
        self.world = group.size()
        self._group = group
        self._timeout = timeout.total_seconds()
        self._wake = threading.Event()
        self._aborted = False
        self._stuck: list[Any] = []  # an abandoned operation still writes to its buffers

    def swap(self, outgoing: Sequence[Tensor], sizes: Sequence[int] | None = None) -> list[Tensor]:
        if sizes is None:
            received = torch.empty(self.world, dtype=torch.int64)
            self._all_to_all(received, torch.tensor([message.numel() for message in outgoing]), [], [])
            sizes = received.tolist()
        incoming = torch.empty(sum(sizes), dtype=torch.int64)
        self._all_to_all(incoming, torch.cat(list(outgoing)), list(sizes), [len(message) for message in outgoing])
        return list(incoming.split(list(sizes)))

    def abort(self) -> None:
        self._aborted = True
        self._wake.set()

    def _all_to_all(self, output: Tensor, source: Tensor, out_sizes: list[int], in_sizes: list[int]) -> None:
        self._wake.clear()  # before the look at _aborted: an abort in between would be missed
        if self._aborted:
            raise RecoveryError("parity: the channel was aborted; rebuild on a fresh process group")
        try:
            work = self._group.alltoall_base(output, source, out_sizes, in_sizes)
            work.get_future().add_done_callback(lambda _: self._wake.set())
            finished = self._wake.wait(self._timeout)
            if finished and not self._aborted:
                work.wait()
                return
        except RuntimeError as error:
            raise RecoveryError(f"parity: rank {self.rank} lost a peer ({error})") from error
        self._stuck.append((work, output, source))
        reason = "was aborted" if self._aborted else f"waited {self._timeout:.0f} s for a peer"
        raise RecoveryError(f"parity: the swap of rank {self.rank} {reason}; rebuild on a fresh process group")


def swap_values(channel: Channel, value: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rank's plain JSON value, in order of rank."""
    data = json.dumps(value).encode()
    padded = data + b" " * (-len(data) % 8)
    message = torch.frombuffer(bytearray(padded), dtype=torch.int64)
    received = channel.swap([message] * channel.world)
    return [json.loads(part.numpy().tobytes()) for part in received]
