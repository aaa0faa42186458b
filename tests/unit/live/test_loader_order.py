"""Whether a replacement's loader can come to the batches of an epoch, from its type alone."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_cpr.live.loader import _knows_order

DATA = list(range(8))


class Counting:
    """Counts its epochs by itself."""


class Seeking(Counting):
    def seek(self, batches: int) -> None: ...


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(DATA)


@pytest.mark.parametrize(
    ("loader", "first", "later"),
    [
        (DataLoader(DATA), True, True),
        (DataLoader(DATA, shuffle=True), False, False),
        (StatefulDataLoader(DATA, shuffle=True), False, False),
        (DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0)), True, True),
        (DataLoader(DATA, batch_sampler=BatchSampler(DistributedSampler(DATA, 2, 0), 2, False)), True, True),
        (DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 2, False)), True, True),
        (DataLoader(Stream()), True, True),
        (Counting(), True, False),
        (Seeking(), True, True),
    ],
)
def test_an_order_that_a_fresh_loader_cannot_know(loader: Any, first: bool, later: bool) -> None:
    assert (_knows_order(loader, 0), _knows_order(loader, 3)) == (first, later)
