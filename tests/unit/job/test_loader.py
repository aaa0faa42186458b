"""A resume from a tracked loader's state continues with the batch after the one trained last."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_cpr.job.loader import Position, TrackedLoader


class Numbers(IterableDataset):
    """0..9, with a position that can be saved."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 10:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def batches(loader: TrackedLoader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("trained", [0, 1, 2])
@pytest.mark.parametrize("workers", [0, 1])
def test_resume_at_the_next_untrained_batch(ahead: int, trained: int, workers: int) -> None:
    in_flight = 0
    loader = TrackedLoader(
        StatefulDataLoader(Numbers(), batch_size=2, num_workers=workers), lambda: Position(in_flight, False)
    )
    iterator = iter(loader)
    for i in range(trained + ahead):
        next(iterator)
        in_flight = max(0, i + 1 - trained)
    state = loader.state_dict()
    iterator.close()
    fresh = TrackedLoader(StatefulDataLoader(Numbers(), batch_size=2, num_workers=workers), lambda: Position(0, False))
    fresh.load_state_dict(state)
    assert batches(fresh) == [[2 * i, 2 * i + 1] for i in range(trained, 5)]


def test_other_attributes_are_the_loaders() -> None:
    loader = TrackedLoader(StatefulDataLoader(Numbers(), batch_size=2), lambda: Position(0, False))
    assert loader.batch_size == 2
    assert not hasattr(loader, "no_such_thing")


def test_after_an_epochs_last_batch_the_next_epoch_begins() -> None:
    loader = TrackedLoader(StatefulDataLoader(Numbers(), batch_size=2), lambda: Position(0, True), runs_ahead=False)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = loader.state_dict()
    fresh = TrackedLoader(StatefulDataLoader(Numbers(), batch_size=2), lambda: Position(0, False))
    fresh.load_state_dict(state)
    assert batches(fresh) == [[2 * i, 2 * i + 1] for i in range(5)]


def test_the_iterator_is_made_at_once() -> None:
    """It draws its seed from the global stream then, as it does without tracking."""
    loader = TrackedLoader(StatefulDataLoader(Numbers(), batch_size=2), lambda: Position(0, False))
    torch.manual_seed(0)
    iterator = iter(loader)
    after = torch.get_rng_state()
    next(iterator)
    assert torch.equal(after, torch.get_rng_state())
