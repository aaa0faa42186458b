"""What the recovery benchmark runs: ``trainer.fit`` of a small dense part over tables of a chosen size. It never ends.

2 row-wise and 4 table-wise tables of width 64, row-wise Adagrad. Lost rows are filled with a constant (memory speed: no
source is as fast, the store's and parity's reads have their own benchmarks).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from lightning_cpr.strategy import TorchRecStrategy

TABLES, WIDTH, BATCH = 6, 64, 64


class Batches(Dataset):
    def __init__(self, rank, rows, count):
        self.rank, self.rows, self.count = rank, rows, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(1000 * index + self.rank)
        values = torch.randint(0, self.rows, (TABLES * BATCH,), generator=generator)
        lengths = torch.ones(TABLES * BATCH, dtype=torch.int64)
        return KeyedJaggedTensor([f"f{i}" for i in range(TABLES)], values, lengths=lengths)


class Model(pl.LightningModule):
    def __init__(self, rows):
        super().__init__()
        configs = [
            EmbeddingBagConfig(name=f"t{i}", num_embeddings=rows, embedding_dim=WIDTH, feature_names=[f"f{i}"])
            for i in range(TABLES)
        ]
        self.ebc = EmbeddingBagCollection(configs, device=torch.device("meta"))
        apply_optimizer_in_backward(RowWiseAdagrad, self.ebc.parameters(), {"lr": 0.1})
        self.mlp = nn.Sequential(nn.Linear(TABLES * WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        return self.mlp(self.ebc(batch).values()).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.mlp.parameters(), lr=0.01)


class Probe(pl.Callback):
    def __init__(self, out):
        rank = int(os.environ["RANK"])
        self.file = (out / f"{rank}-{os.getpid()}.jsonl").open("a", buffering=1)
        self.record("start")

    def record(self, event, **told):
        self.file.write(json.dumps({"event": event, "time": time.time(), **told}) + "\n")

    def on_train_batch_end(self, trainer, *args):
        self.record("step", step=trainer.global_step)

    def restore_shards(self, recovery, lost, shards):
        if recovery.lost:
            for shard in shards:
                for tensor in (shard.weight, *shard.states.values()):
                    tensor.fill_(0.5)

    def on_recovered(self, recovery, lost):
        self.record("restored", seconds=recovery.seconds)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    plan = {f"t{i}": "row_wise" if i < 2 else "table_wise" for i in range(TABLES)}
    probe = Probe(options.out)
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, strategy=TorchRecStrategy(plan=plan), callbacks=[probe], max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Model(options.rows), DataLoader(Batches(rank, options.rows, 10**6), batch_size=None))


if __name__ == "__main__":
    main()
