"""torchrec#575: an id == num_rows changes row 0. torchrec#2773: ranks and batches without ids. torchrec#3114: looked-up
rows change, no other; the module is not wrapped in DDP twice."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch

from lightning_cpr.strategy import TorchRecStrategy
from lightning_cpr.tables.lookup import register_lookup_hook
from lightning_cpr.tables.shards import local_shards
from tests._ranks import run_ranks
from tests._tiny import DENSE_IN, Tiny, make_loader, make_trainer, pattern

A = "net.ebc.embedding_bags.a"


class Tracked(Tiny):
    """``touched``: rows of table a by global number."""

    def __init__(self) -> None:
        super().__init__()
        self.touched: set[int] = set()
        self.ddp = 0

    def on_train_start(self) -> None:
        def fn(shard: Any, ids: torch.Tensor) -> None:
            if shard.table == A:
                self.touched |= {shard.row_start + i for i in ids.tolist()}

        register_lookup_hook(self, fn)
        self.ddp = sum(isinstance(m, DistributedDataParallel) for m in self.trainer.strategy.model.modules())


def _batch(ids: list[int], size: int = 2) -> Batch:
    """All ids in the first sample's bag of feature f_a; ``[]`` is a batch with keys and no values."""
    lengths = torch.tensor([len(ids), *[0] * (3 * size - 1)])
    kjt = KeyedJaggedTensor(keys=["f_a", "f_b", "f_c"], values=torch.tensor(ids, dtype=torch.long), lengths=lengths)
    return Batch(torch.ones(size, DENSE_IN), kjt, torch.ones(size))


def _run(rank: int, world: int, batches: list[list[Batch]], plan: Any) -> tuple[set[int], set[int], int]:
    """(rows told by the hook, rows that changed, DDP wrappers) of table a on this rank."""
    logging.disable(logging.WARNING)
    model = Tracked()
    make_trainer(world, TorchRecStrategy(plan=plan), max_steps=5).fit(model, make_loader(batches=batches[rank]))
    start = pattern("a", 100, 8)
    changed: set[int] = set()
    for shard in local_shards(model):
        if shard.spec.table == A:
            spec = shard.spec
            moved = (shard.weight != start[spec.row_start : spec.row_end]).any(dim=1)
            changed |= {spec.row_start + i for i in torch.nonzero(moved).flatten().tolist()}
            untouched = ~moved
            assert torch.equal(shard.states["sum"][untouched], torch.zeros(int(untouched.sum())))
    return model.touched, changed, model.ddp


def test_t16_only_looked_up_rows_change() -> None:
    ((touched, changed, wrappers),) = run_ranks(_run, 1, [[_batch([0])] * 5], "table_wise")
    assert touched == changed == {0}
    assert wrappers == 1


def test_t12_an_id_beyond_the_table_touches_row_0() -> None:
    ((touched, changed, _),) = run_ranks(_run, 1, [[_batch([100, 41])] * 2], "table_wise")
    assert touched == changed == {0, 41}


def test_t13_ranks_and_batches_without_ids() -> None:
    # Rank 1 never has an id; the last batch of rank 0 has one sample and none either.
    plan = {"net.ebc": "row_wise", "c": "table_wise"}
    batches = [[_batch([3, 60]), _batch([]), _batch([], size=1)], [_batch([]), _batch([]), _batch([], size=1)]]
    first, second = run_ranks(_run, 2, batches, plan)
    assert first[0] == first[1] == {3}
    assert second[0] == second[1] == {60}
    (nothing,) = run_ranks(_run, 1, [[_batch([])] * 2], "table_wise")
    assert nothing[:2] == (set(), set())
