"""L12, L14 (the data half): resume inside an epoch sees batches k+1, k+2, ... exactly once, with or without a length.

Stock Lightning, one process; the checkpoint is Lightning's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from recipes.batch import Batch, Columns
from recipes.criteo import CriteoDataModule
from recipes.loader import IndexedSource, RecipeDataModule
from tests.unit.recipes.lines import samples, write

BATCHES, ROWS = 64, 4


class Recorder(pl.LightningModule):
    """Trains one number and keeps the samples it saw; saves after batch ``save_at`` of the run."""

    def __init__(self, path: Path | None = None, save_at: int = -1) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []
        self.path, self.save_at = path, save_at

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.seen.append(samples(batch))
        return self.weight * batch.dense.mean()

    def on_train_batch_end(self, *_: Any) -> None:
        if len(self.seen) == self.save_at:
            self.trainer.save_checkpoint(self.path)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(data: RecipeDataModule, model: Recorder, ckpt: Path | None = None, **limits: int) -> pl.Trainer:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **limits,
    )
    trainer.fit(model, datamodule=data, ckpt_path=ckpt)
    return trainer


def _data(root: Path, sized: bool, workers: int) -> CriteoDataModule:
    # a split needs the number of lines, so that loader has a length; a whole text file's loader has none
    share = 1 / 3 if sized else 0.0
    held_out = None if sized else "train.txt"
    return CriteoDataModule(
        str(root), 1000, val=held_out, batch_size=ROWS, val_fraction=0.0, test_fraction=share, num_workers=workers
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    roots = {sized: tmp_path_factory.mktemp(f"sized_{sized}") for sized in (True, False)}
    write(roots[True] / "train.txt", BATCHES * ROWS * 3 // 2)
    write(roots[False] / "train.txt", BATCHES * ROWS)
    return roots


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("save_at", "workers"), [(37, 0), (37, 2), (63, 0), (64, 0), (64 + 37, 0)])
@pytest.mark.parametrize("sized", [True, False])
def test_l12_resume_inside_an_epoch(
    root: dict[bool, Path], tmp_path: Path, sized: bool, workers: int, save_at: int
) -> None:
    path = tmp_path / "at.ckpt"
    reference = Recorder(path, save_at)
    _fit(_data(root[sized], sized, workers), reference, max_epochs=2)
    expected = [[e * ROWS + i for i in range(ROWS)] for e in range(BATCHES)] * 2
    assert reference.seen == expected

    resumed = Recorder()
    _fit(_data(root[sized], sized, workers), resumed, path, max_epochs=2)
    assert resumed.seen == expected[save_at:]


class Shuffled(IndexedSource):
    """Sample i holds id i + 1; each epoch has its own order."""

    tables: ClassVar[dict[str, int]] = {"cat_0": 1000}
    rows = BATCHES * ROWS

    def order(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng(epoch).permutation(self.rows)

    def take(self, rows: NDArray[np.int64]) -> Columns:
        return Columns(np.zeros((len(rows), 1), np.float32), rows + 1, np.zeros(len(rows), np.float32))


class ShuffledData(RecipeDataModule):
    def source(self, stage: str) -> Shuffled:
        return Shuffled()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("save_at", [37, 64, 64 + 37])
def test_l12_the_epochs_order_survives_the_resume(tmp_path: Path, save_at: int) -> None:
    path = tmp_path / "at.ckpt"
    reference = Recorder(path, save_at)
    _fit(ShuffledData(ROWS), reference, max_epochs=3)
    orders = [Shuffled().order(e).reshape(BATCHES, ROWS).tolist() for e in range(3)]
    assert reference.seen == orders[0] + orders[1] + orders[2]

    resumed = Recorder()
    _fit(ShuffledData(ROWS), resumed, path, max_epochs=3)
    assert resumed.seen == reference.seen[save_at:]


@pytest.mark.filterwarnings("ignore")
def test_l14_resume_with_an_unknown_length_stops_at_max_steps(root: dict[bool, Path], tmp_path: Path) -> None:
    path = tmp_path / "at.ckpt"
    _fit(_data(root[False], False, 0), Recorder(path, 10), max_steps=10)
    resumed = Recorder()
    trainer = _fit(_data(root[False], False, 0), resumed, path, max_steps=20)
    assert trainer.global_step == 20
    assert resumed.seen == [[e * ROWS + i for i in range(ROWS)] for e in range(10, 20)]
