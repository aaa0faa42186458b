"""The pipelined base: every batch once, in order; evaluation in between changes nothing; a failed step is repeated."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.utils.data import IterableDataset

from lightning_cpr.strategy import TorchRecStrategy
from lightning_cpr.tables.shards import local_shards
from tests._ranks import run_ranks
from tests._tiny import make_batch, make_loader, make_trainer
from tests.dist.test_training_equality import Pipelined

PLAN = {"net.ebc": "row_wise", "c": "table_wise"}


class Recorded(Pipelined):
    def __init__(self) -> None:
        super().__init__("sgd")
        self.order: list[int] = []

    def training_output(self, output: Any, batch_idx: int) -> None:
        super().training_output(output, batch_idx)
        self.order.append(batch_idx)


class Failing(Recorded):
    """One forward fails before anything was updated; the step is tried again."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.in_flight_then = 0

    def forward(self, batch: Any) -> Any:
        if len(self.losses) == self.at and not self.in_flight_then and self.training:
            raise ValueError("a failed step")
        return super().forward(batch)

    def training_step(self, dataloader_iter: Any) -> None:
        try:
            super().training_step(dataloader_iter)
        except ValueError:
            self.in_flight_then = self.reset()
            super().training_step(dataloader_iter)


class Endless(IterableDataset):  # type: ignore[type-arg]
    """Seven batches, of a length that nobody knows."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Any:
        return iter([make_batch(index, self.rank) for index in range(7)])


def _fit(rank: int, world: int, model: Recorded, loader: Any, *val: Any, **kwargs: Any) -> Recorded:
    trainer = make_trainer(world, TorchRecStrategy(plan=PLAN), **kwargs)
    trainer.fit(model, loader, *val)
    assert trainer.global_step == len(model.losses), (trainer.global_step, model.order, kwargs)
    return model


def _rows(model: Any) -> list[torch.Tensor]:
    return [tensor.clone() for s in local_shards(model) for tensor in (s.weight, *s.states.values())]


def _run(rank: int, world: int) -> dict[str, Any]:
    logging.disable(logging.WARNING)
    plain = _fit(rank, world, Recorded(), make_loader(rank, 7))
    rows = _rows(plain)
    found: dict[str, Any] = {"plain": (plain.order, plain.flying)}
    others = {
        "validated": (Recorded(), make_loader(rank, 7), {"val_check_interval": 2}, [make_loader(rank, 2)]),
        "unknown length": (Recorded(), torch.utils.data.DataLoader(Endless(rank), batch_size=None), {}, []),
        "failed": (Failing(3), make_loader(rank, 7), {}, []),
    }
    for name, (model, data, options, val) in others.items():
        _fit(rank, world, model, data, *val, **options)
        assert model.losses == plain.losses, name
        assert all(torch.equal(a, b) for a, b in zip(_rows(model), rows, strict=True)), name
        found[name] = (model.order, model.flying)
    limited = _fit(rank, world, Recorded(), make_loader(rank, 7), limit_train_batches=3, max_epochs=2)
    assert limited.losses[:3] == plain.losses[:3]
    found["limited"] = (limited.order, limited.flying, limited.in_flight)
    found["in flight at the failure"] = others["failed"][0].in_flight_then  # type: ignore[attr-defined]
    return found


def test_every_batch_is_trained_on_once_and_in_order() -> None:
    for found in run_ranks(_run, 2, timeout=150):
        flying = [2, 2, 2, 2, 2, 1, 0]
        for name in ("plain", "validated", "unknown length", "failed"):
            assert found[name] == (list(range(7)), flying), name
        assert found["limited"] == ([0, 1, 2, 0, 1, 2], [2] * 6, 0)
        assert found["in flight at the failure"] == 3
