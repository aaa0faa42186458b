"""TINY of the regression list: tables a 100x8, b 7x8, c 1x4, row-wise Adagrad lr 0.1, dense MLP, 64 batches of 4.

Table rows start from `pattern`, a function of (table, row, column) alone, so that runs under different plans and world
sizes start equal; dense parameters from seed 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from lightning_cpr._lightning import pl

TABLES = {"a": (100, 8), "b": (7, 8), "c": (1, 4)}
DENSE_IN = 3
BATCH_SIZE = 4
NUM_BATCHES = 64

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "rowwise_adagrad": (RowWiseAdagrad, {"lr": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
}


def pattern(table: str, rows: int, cols: int) -> Tensor:
    """The start value of a whole table, ``[rows, cols]``: distinct small numbers, exact in float32."""
    base = (sorted(TABLES).index(table) + 1) / 8
    grid = torch.arange(rows * cols, dtype=torch.float32).reshape(rows, cols)
    return base + (grid % 256) / 1024


def make_ebc(tables: dict[str, tuple[int, int]] | None = None, device: str = "meta") -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=cols, feature_names=[f"f_{name}"])
            for name, (rows, cols) in (tables or TABLES).items()
        ],
        device=torch.device(device),
    )


class TinyNet(nn.Module):
    """EBC + MLP; ``forward(batch) -> (loss, logits)``, what a `TrainPipelineSparseDist` wants too."""

    def __init__(
        self,
        sparse: str | None = "rowwise_adagrad",
        device: str = "meta",
        tables: dict[str, tuple[int, int]] | None = None,
    ) -> None:
        super().__init__()
        self.ebc = make_ebc(tables, device)
        if sparse is not None:
            optimizer, kwargs = OPTIMIZERS[sparse]
            apply_optimizer_in_backward(optimizer, self.ebc.parameters(), dict(kwargs))
        self.keys = [f"f_{name}" for name in tables or TABLES]
        width = sum(cols for _, cols in (tables or TABLES).values())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.mlp = nn.Sequential(nn.Linear(width + DENSE_IN, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        pooled = self.ebc(batch.sparse_features)
        # By key: the order of a sharded collection's output depends on its plan.
        features = [pooled[key] for key in self.keys]
        logits = self.mlp(torch.cat([*features, batch.dense_features], dim=1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels), logits


class Tiny(pl.LightningModule):
    """A plain LightningModule around `TinyNet`. ``losses`` has the loss of each training batch of this process."""

    def __init__(
        self,
        dense: str = "sgd",
        sparse: str | None = "rowwise_adagrad",
        device: str = "meta",
        tables: dict[str, tuple[int, int]] | None = None,
        filled: bool = True,
    ) -> None:
        super().__init__()
        self.net = TinyNet(sparse, device, tables)
        self.dense = dense
        self.filled = filled
        self.losses: list[float] = []
        self.seen: list[int] = []

    def on_fit_start(self) -> None:
        if self.filled:
            fill_tables(self)

    def forward(self, batch: Batch) -> Tensor:
        return self.net(batch)[1]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss, _ = self.net(batch)
        self.losses.append(loss.item())
        self.seen.append(batch_idx)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch)[0], batch_size=BATCH_SIZE, sync_dist=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("test_loss", self.net(batch)[0], batch_size=BATCH_SIZE, sync_dist=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch).sigmoid()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return dense_optimizer(self.dense, self.net.mlp.parameters())


def dense_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(parameters, lr=0.01)
    return torch.optim.SGD(parameters, lr=0.05)


def fill_tables(model: nn.Module) -> None:
    """Writes `pattern` into every local shard of a sharded model, zeros into its optimizer states."""
    from lightning_cpr.tables.shards import local_shards

    for shard in local_shards(model):
        spec = shard.spec
        rows, cols = TABLES.get(spec.table.rsplit(".", 1)[1], (spec.row_end, spec.col_end))
        whole = pattern(spec.table.rsplit(".", 1)[1], rows, cols)
        shard.weight.copy_(whole[spec.row_start : spec.row_end, spec.col_start : spec.col_end])
        for state in shard.states.values():
            state.zero_()


def make_batch(
    index: int, rank: int = 0, size: int = BATCH_SIZE, tables: dict[str, tuple[int, int]] | None = None
) -> Batch:
    """Batch ``index`` of a rank: 0 to 3 ids a bag, a label that depends on them, all from the seed (index, rank)."""
    generator = torch.Generator().manual_seed(1000 * rank + index)
    tables = tables or TABLES
    lengths = torch.randint(0, 4, (len(tables) * size,), generator=generator)
    values = [
        torch.randint(0, rows, (int(lengths[i * size : (i + 1) * size].sum()),), generator=generator)
        for i, (rows, _) in enumerate(tables.values())
    ]
    kjt = KeyedJaggedTensor(keys=[f"f_{name}" for name in tables], values=torch.cat(values), lengths=lengths)
    dense = torch.rand(size, DENSE_IN, generator=generator)
    return Batch(dense_features=dense, sparse_features=kjt, labels=(dense.sum(1) > DENSE_IN / 2).float())


class TinyDataset(Dataset[Batch]):
    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches = list(batches)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Batch:
        return self.batches[index]


def make_loader(rank: int = 0, count: int = NUM_BATCHES, batches: Sequence[Batch] | None = None) -> DataLoader[Batch]:
    """The rank's fixed batches in order, or the given ones. Needs ``use_distributed_sampler=False``."""
    if batches is None:
        batches = [make_batch(index, rank) for index in range(count)]
    return DataLoader(TinyDataset(batches), batch_size=None, shuffle=False)


def make_trainer(world: int, strategy: Any = "torchrec", **kwargs: Any) -> pl.Trainer:
    """A quiet CPU Trainer for one `run_ranks` job."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world,
        "strategy": strategy,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(**(defaults | kwargs))
