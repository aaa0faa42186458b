"""What the recovery benchmark runs: ``trainer.fit`` of a small dense part over tables of a chosen size. It never ends.

2 row-wise and 4 table-wise tables of width 64, row-wise Adagrad. ``--way stock``: without lightning_cpr's callback;
each rank keeps its shards in a file of its own by ``torch.save``, and reads it when it starts again, as is done by hand
where a Trainer's checkpoint holds rank 0's shards only.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from benchmarks.recovery import STOCK_STEP, TABLES, WIDTH
from lightning_cpr.callback import CPRCallback
from lightning_cpr.store.fetch import Fetcher
from lightning_cpr.strategy import TorchRecStrategy
from lightning_cpr.tables.rebind import tables_uninitialised
from lightning_cpr.tables.shards import local_shards

BATCH = 64


class Batches(Dataset):
    def __init__(self, rank: int, rows: int, count: int) -> None:
        self.rank, self.rows, self.count = rank, rows, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> KeyedJaggedTensor:
        generator = torch.Generator().manual_seed(1000 * index + self.rank)
        values = torch.randint(0, self.rows, (TABLES * BATCH,), generator=generator)
        lengths = torch.ones(TABLES * BATCH, dtype=torch.int64)
        return KeyedJaggedTensor([f"f{i}" for i in range(TABLES)], values, lengths=lengths)


class Loader(DataLoader):
    """In the order of the data set, from any batch on."""

    first = 0

    def seek(self, batches: int) -> None:
        self.first = batches

    def __iter__(self) -> Any:
        return (self.dataset[i] for i in range(self.first, len(self.dataset)))  # type: ignore[arg-type]


class Model(pl.LightningModule):
    def __init__(self, rows: int) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(name=f"t{i}", num_embeddings=rows, embedding_dim=WIDTH, feature_names=[f"f{i}"])
            for i in range(TABLES)
        ]
        self.ebc = EmbeddingBagCollection(configs, device=torch.device("meta"))
        apply_optimizer_in_backward(RowWiseAdagrad, self.ebc.parameters(), {"lr": 0.1})
        self.mlp = nn.Sequential(nn.Linear(TABLES * WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: KeyedJaggedTensor, batch_idx: int) -> torch.Tensor:
        return self.mlp(self.ebc(batch).values()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.mlp.parameters(), lr=0.01)


class Probe(pl.Callback):
    """Writes what this process sees, one JSON line each, and what it fetches of table files."""

    def __init__(self, out: Path) -> None:
        self.file = (out / f"{os.environ['RANK']}-{os.getpid()}.jsonl").open("a", buffering=1)
        self.fetched, self.opened = 0, set()
        count = Fetcher._count

        def counted(fetcher: Fetcher, entry: Any, read: int) -> None:
            self.fetched += read
            self.opened.add(entry.path)
            count(fetcher, entry, read)

        Fetcher._count = counted  # type: ignore[method-assign]
        self.record("start", began=process_start())

    def record(self, event: str, **told: Any) -> None:
        self.file.write(json.dumps({"event": event, "time": time.time(), **told}) + "\n")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        shards = local_shards(trainer.strategy.model)
        self.record("built", bytes=sum(t.nbytes for s in shards for t in (s.weight, *s.states.values())))

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.record("training", fetched=self.fetched, opened=len(self.opened))

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.record("step", step=trainer.global_step)

    def restore_shards(self, recovery: Any, lost: Any, shards: Any) -> None:
        pass

    def on_recovered(self, recovery: Any, lost: Any) -> None:
        self.record(
            "restored", seconds=recovery.seconds, lost=recovery.lost, fetched=self.fetched, opened=len(self.opened)
        )


class Stock(pl.Callback):
    """A checkpoint by hand: one file a rank, weights and optimizer states."""

    def __init__(self, out: Path) -> None:
        self.path = out / f"rank{os.environ['RANK']}.pt"

    def on_train_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if self.path.exists():
            saved = torch.load(self.path, weights_only=True)
            for name, tensor in tensors(trainer).items():
                tensor.copy_(saved[name])

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == STOCK_STEP and not self.path.exists():
            torch.save(tensors(trainer), self.path)


def tensors(trainer: pl.Trainer) -> dict[str, torch.Tensor]:
    return {
        f"{shard.spec}.{name}": tensor
        for shard in local_shards(trainer.strategy.model)
        for name, tensor in (("weight", shard.weight), *shard.states.items())
    }


def process_start() -> float:
    """When this process was made, ``time.time()``."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--way", default="spare")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    plan = {f"t{i}": "row_wise" if i < 2 else "table_wise" for i in range(TABLES)}
    probe = Probe(options.out)
    stock = options.way == "stock"
    # One version, before the first batch: the interval is longer than the run.
    mode: Any = "full" if options.way == "restart" else "partial"  # full: nothing is handed over
    root = str(options.out / "root")
    saves = Stock(options.out) if stock else CPRCallback(root, save_every_n_steps=10**6, recovery=mode)
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, strategy=TorchRecStrategy(plan=plan), callbacks=[probe, saves], max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    again = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) > 0
    with tables_uninitialised() if again and options.way in ("restart", "handover") else nullcontext():
        trainer.fit(Model(options.rows), Loader(Batches(rank, options.rows, 10**6), batch_size=None))


if __name__ == "__main__":
    main()
