"""The job that saves are timed in: one table of width 64, row-wise Adagrad, a small dense part, one rank on the CPU.

Each period of batches looks up the same share of the rows once, so that every delta holds that share.
"""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from lightning_cpr import TorchRecStrategy

WIDTH = 64


class Model(pl.LightningModule):
    def __init__(self, rows: int) -> None:
        super().__init__()
        config = EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=WIDTH, feature_names=["f"])
        self.ebc = EmbeddingBagCollection([config], device=torch.device("meta"))
        apply_optimizer_in_backward(RowWiseAdagrad, self.ebc.parameters(), {"lr": 0.1})
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 1))

    def training_step(self, batch: KeyedJaggedTensor, batch_idx: int) -> Tensor:
        return self.mlp(self.ebc(batch).values()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.mlp.parameters(), lr=0.01)


class Batches(IterableDataset):
    """Endless. ``period`` batches look up ``share`` of the rows, ``bag`` ids a sample."""

    def __init__(self, rows: int, share: float, period: int, bag: int = 8) -> None:
        ids = torch.randperm(rows, generator=torch.Generator().manual_seed(0))[: int(rows * share)]
        self.batches = []
        for part in ids.chunk(period):
            mine = part[: len(part) // bag * bag]
            lengths = torch.full((len(mine) // bag,), bag)
            self.batches.append(KeyedJaggedTensor(["f"], mine.clone(), lengths=lengths))

    def __iter__(self) -> Any:
        while True:
            yield from self.batches


def fit(rows: int, share: float, period: int, callbacks: list[pl.Callback], **kwargs: Any) -> pl.Trainer:
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=TorchRecStrategy(), callbacks=callbacks, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=1,
        use_distributed_sampler=False, num_sanity_val_steps=0, **kwargs,
    )  # fmt: skip
    trainer.fit(Model(rows), DataLoader(Batches(rows, share, period), batch_size=None))
    return trainer
