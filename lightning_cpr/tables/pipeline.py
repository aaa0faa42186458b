"""TorchRec's TrainPipelineSparseDist, with what is in it counted, and able to start over without losing a batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from lightning_cpr.tables import _deps

_deps.check()

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist  # noqa: E402

Item = tuple[Any, ...]
"""A batch and whatever its source says of it, e.g. its index."""


class _Feed(Iterator[Any]):
    """What the pipeline pulls batches from: first those to be run again, then the source."""

    def __init__(self, source: Iterator[Item], replay: deque[Item], pending: deque[Item]) -> None:
        self._source = source
        self._replay = replay
        self._pending = pending

    def __next__(self) -> Any:
        item = self._replay.popleft() if self._replay else next(self._source)
        self._pending.append(item)
        return item[0]


class SparsePipeline(TrainPipelineSparseDist[Any, Any]):
    """Overlaps the input distribution of the next batch, and the copy of the one after, with a batch's training.

    model: ``model(batch) -> (loss, output)``. backward: called with the summed loss.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, device: torch.device, backward: Callable[[Tensor], None]
    ) -> None:
        super().__init__(model, optimizer, device, execute_all_batches=True)
        self._run_backward = backward
        self._pending: deque[Item] = deque()
        self._replay: deque[Item] = deque()
        self._source: Iterator[Item] | None = None
        self._feed: _Feed | None = None

    @property
    def in_flight(self) -> int:
        """Batches that were taken from the loader and have not been trained on."""
        return len(self._pending) + len(self._replay)

    def train_next(self, source: Iterator[Item]) -> tuple[Any, Item]:
        """Trains on one batch. Returns the model's output for it, and the item it came as.

        A new ``source`` is a new epoch: what was in flight of the old one is dropped.

        Raises:
            StopIteration: the source is exhausted and nothing is in flight.
        """
        self._follow(source)
        if self._feed is None:
            self._feed = _Feed(source, self._replay, self._pending)
        output = self.progress(self._feed)
        return output, self._pending.popleft()

    def skip_next(self, source: Iterator[Item]) -> Item:
        """Takes the item that `train_next` would train on, without training. Only while the pipeline is empty.

        Raises:
            StopIteration: as `train_next`.
        """
        self._follow(source)
        assert not self._pending, "start_over comes first"
        return self._replay.popleft() if self._replay else next(source)

    def put_first(self, item: Item) -> None:
        """Train on ``item`` next. Only while the pipeline is empty."""
        assert not self._pending, "start_over comes first"
        self._replay.appendleft(item)

    def _follow(self, source: Iterator[Item]) -> None:
        if source is not self._source:
            self.start_over(replay=False)
            self._source = source

    def start_over(self, replay: bool) -> int:
        """Empties the pipeline; after an error, or where an epoch ends. Returns how many batches were in flight.

        With ``replay`` they come again, in order, before the loader's next; else they are dropped. All ranks must call
        it at the same step.
        """
        count = self.in_flight
        self._replay.extendleft(reversed(self._pending))
        self._pending.clear()
        if not replay:
            self._replay.clear()
        self._feed = None
        self.reset()
        return count

    def _backward(self, losses: Tensor) -> None:
        self._run_backward(torch.sum(losses, dim=0))
