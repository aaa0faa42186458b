"""A CPRCheckpointIO that would miss ranks is refused before the first batch, by the installed entry point."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_cpr import CPRCheckpointIO
from lightning_cpr._lightning import Callback, pl
from lightning_cpr.errors import UnsupportedError


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(folder: Path, *plugins: Any) -> pl.Trainer:
    return pl.Trainer(
        default_root_dir=folder, accelerator="cpu", devices=1, max_epochs=1, logger=False, plugins=list(plugins),
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip


def test_a_stock_strategy_is_refused_at_set_up(tmp_path: Path) -> None:
    model = Plain()
    with pytest.raises(UnsupportedError, match=r'SingleDeviceStrategy saves on rank 0 only.*strategy="torchrec"'):
        trainer(tmp_path, CPRCheckpointIO()).fit(model, DataLoader(torch.ones(4, 2)))
    assert model.steps == 0


def test_other_trainers_are_left_alone(tmp_path: Path) -> None:
    model, plain = Plain(), trainer(tmp_path)
    plain.fit(model, DataLoader(torch.ones(4, 2)))
    assert model.steps == 4
    callbacks: list[Callback] = plain.callbacks  # type: ignore[attr-defined]
    assert [type(c).__name__ for c in callbacks].count("CheckpointGuard") == 1
