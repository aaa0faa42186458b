"""Accumulated gradients are in no version: a save that falls due inside a window waits for the window's end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_cpr import CPRCallback
from lightning_cpr.report.events import read_events
from lightning_cpr.store.storage import Storage
from lightning_cpr.strategy import TorchRecStrategy
from tests._ranks import run_ranks
from tests._tiny import Tiny, dense_optimizer, make_trainer
from tests.dist.test_main_job import assert_equal, rows_of, stateful_loader

WINDOW, BATCHES = 3, 12


class Unfused(Tiny):
    def __init__(self) -> None:
        super().__init__(sparse=None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return dense_optimizer("adam", self.parameters())


def fit(rank: int, world: int, root: str, batches: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = Unfused()
    trainer = make_trainer(
        world,
        TorchRecStrategy(plan="table_wise"),
        callbacks=[CPRCallback(root, save_every_n_steps=5, timeout_s=30)],
        accumulate_grad_batches=WINDOW,
        max_steps=batches // WINDOW,
    )
    trainer.fit(model, stateful_loader(rank, count=BATCHES))
    return {"losses": model.losses, "rows": rows_of(model)}


def both(rank: int, world: int, folder: str) -> tuple[dict[str, Any], ...]:
    whole = fit(rank, world, f"{folder}/whole", BATCHES)
    return whole, fit(rank, world, f"{folder}/parts", 6), fit(rank, world, f"{folder}/parts", BATCHES)


def test_saves_wait_for_the_end_of_a_window_and_resume_exactly(tmp_path: Path) -> None:
    for whole, first, second in run_ranks(both, 2, str(tmp_path)):
        assert first["losses"] + second["losses"] == whole["losses"]
        assert_equal(second["rows"], whole["rows"])
    events = read_events(Storage(str(tmp_path / "whole")))
    assert [e["step"] for e in events if e["event"] == "save_committed"] == [0, 6, 12]
