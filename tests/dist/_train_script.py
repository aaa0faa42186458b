"""A user's script, for tests of launchers: trains TINY three steps on two ranks. Argument: the Lightning package."""

import json
import os
import sys

if sys.argv[1] == "lightning":
    from lightning import Trainer
else:
    from pytorch_lightning import Trainer

import torch
import torch.distributed as dist

import lightning_cpr
from lightning_cpr.tables.shards import local_shards
from tests._tiny import Tiny, make_loader


def main() -> None:
    rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.set_num_threads(1)
    model = Tiny()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="torchrec",
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(model, make_loader(rank, 4))
    mine = (rank, type(trainer).__module__, model.losses, [s.spec.table for s in local_shards(model)])
    gathered: list[object] = [None, None]
    dist.all_gather_object(gathered, mine)
    base = lightning_cpr.TorchRecStrategy.__mro__[1].__module__
    if rank == 0:
        sys.stdout.write(json.dumps({"base": base, "ranks": gathered}) + "\n")


if __name__ == "__main__":
    main()
