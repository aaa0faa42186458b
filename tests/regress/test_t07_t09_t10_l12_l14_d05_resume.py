"""T07 (FBGEMM#3597), T09 (tnt PR554, gcsfs PR1063), T10 (torchrec#2679), T12 (torchrec#575), T17 (torchrec#766),
L12 (pytorch-lightning#19764, #18780, #5325), L14 (#20565), D05 (pytorch#129079, #140900): a resume inside an epoch, in
processes that never stepped.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch

from lightning_cpr import CPRCallback, FaultInjector
from lightning_cpr._lightning import Callback
from lightning_cpr.strategy import TorchRecStrategy
from lightning_cpr.tables.scalars import fused_kernels
from tests._ranks import run_ranks
from tests._tiny import NUM_BATCHES, make_batch, make_loader, make_trainer
from tests.dist.test_main_job import assert_equal, rows_of, stateful_loader
from tests.regress.jobs import Logged, Noting, SaveAt, Settled, step_of

# b's optimizer is an ordinary one, whose state is made at its first step.
PLAN = {"a": "table_wise", "b": "data_parallel", "c": "table_wise"}
WARNING = "cannot say where it stands"


class Rated(Noting):
    """Dense Adam on a one-cycle schedule; the tables' rate is set by hand after batch 5."""

    def __init__(self, rank: int, **kwargs: Any) -> None:
        super().__init__(rank, dense="adam", **kwargs)
        self.rates: list[float] = []
        self.table_rates: list[list[float]] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.net.mlp.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=NUM_BATCHES)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        groups = self.trainer.strategy.fused_optimizer.param_groups
        kernels = [float(k.emb_module.get_learning_rate()) for _, k in fused_kernels(self)]
        self.table_rates.append(sorted([*(g["lr"] for g in groups), *(round(rate, 6) for rate in kernels)]))
        return super().training_step(batch, batch_idx)


class SetRate(Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if step_of(trainer) == 5:
            for group in trainer.strategy.fused_optimizer.param_groups:
                group["lr"] = 0.05


def outcome(model: Rated) -> dict[str, Any]:
    dense = {n: p.detach().clone() for n, p in model.net.mlp.named_parameters()}
    states = {f"{i}.{k}": v for i, s in model.trainer.optimizers[0].state_dict()["state"].items() for k, v in s.items()}
    return {
        "losses": model.losses, "rates": model.rates, "table_rates": model.table_rates, "ids": model.ids,
        "tensors": rows_of(model) | dense | states,
    }  # fmt: skip


def odd_loader(rank: int) -> StatefulDataLoader[Any]:
    """Batch 3 has id 3 a thousand times in one bag, batch 12 an id one past the end of table a."""
    loader = stateful_loader(rank)
    for index, ids in ((3, [3] * 1000), (12, [100])):
        batch = make_batch(index, rank)
        lengths = torch.zeros(12, dtype=torch.long)
        lengths[0] = len(ids)
        batch.sparse_features = KeyedJaggedTensor(keys=["f_a", "f_b", "f_c"], values=torch.tensor(ids), lengths=lengths)
        loader.dataset.batches[index] = batch  # type: ignore[attr-defined]
    return loader


def reference(rank: int, world: int, folder: str) -> dict[str, Any]:
    torch.manual_seed(7)
    model = Rated(rank)
    saves = SaveAt({step: f"{folder}/at{step}.ckpt" for step in (10, 37)})
    trainer = make_trainer(world, TorchRecStrategy(plan=PLAN), callbacks=[saves, SetRate()])
    trainer.fit(model, odd_loader(rank))
    return outcome(model)


def resumed(rank: int, world: int, path: str) -> dict[str, Any]:
    torch.manual_seed(99 + rank)
    model = Rated(rank, filled=False)
    with Logged() as logged:
        trainer = make_trainer(world, TorchRecStrategy(plan=PLAN))
        trainer.fit(model, odd_loader(rank), ckpt_path=path)
    return outcome(model) | {"warned": logged.having(WARNING)}


Runs = tuple[Path, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    return folder, run_ranks(reference, 2, str(folder), timeout=180)


@pytest.mark.parametrize("step", [10, 37])
def test_t07_t09_t12_t17_l12_d05_goes_on_exactly(runs: Runs, step: int) -> None:
    folder, references = runs
    for run, ref in zip(run_ranks(resumed, 2, f"{folder}/at{step}.ckpt", timeout=180), references, strict=True):
        assert run["ids"] == list(range(step, NUM_BATCHES)) == ref["ids"][step:]
        assert run["losses"] == ref["losses"][step:]
        assert run["rates"] == ref["rates"][step:]
        assert run["table_rates"] == ref["table_rates"][step:]
        assert_equal(run["tensors"], ref["tensors"])
        assert run["warned"] == []
    # b in both ranks' ordinary optimizer, a and c in a fused one somewhere: all at the rate set by hand
    assert {rate for ref in references for rates in ref["table_rates"][6:] for rate in rates} == {0.05}
    assert {round(rate, 6) for ref in references for rates in ref["table_rates"][:5] for rate in rates} == {0.1}


def test_t10_every_file_loads_without_pickle(runs: Runs) -> None:
    folder, _ = runs
    files = [p for p in folder.rglob("*") if p.is_file()]
    blobs = [str(p) for p in files if p.suffix == ".blob"]
    assert len(blobs) == 2 * 3  # of two versions: the job's and one a rank
    assert {p.suffix for p in files} == {".ckpt", ".safetensors", ".blob"}
    assert not [p for p in files if b"ShardedTensor" in p.read_bytes()]
    code = "import sys, torch\nfor path in sys.argv[1:]:\n    torch.load(path)"
    subprocess.run([sys.executable, "-c", code, *blobs], check=True, timeout=120)


class Unsized(IterableDataset[Batch]):
    """Batches without a length; ``stateful``: it can say where it stands."""

    def __init__(self, rank: int) -> None:
        self.rank, self.at = rank, 0

    def __iter__(self) -> Any:
        for index in range(self.at, NUM_BATCHES):
            self.at = index + 1
            yield make_batch(index, self.rank)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def unsized(rank: int, world: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in ("stateful", "stateless"):

        def loader(kind: str = kind) -> Any:
            make = StatefulDataLoader if kind == "stateful" else DataLoader
            return make(Unsized(rank), batch_size=None)

        whole = Noting(rank, dense="adam")
        saves = SaveAt({10: f"{folder}/{kind}.ckpt"})
        make_trainer(world, TorchRecStrategy(plan=PLAN), max_steps=20, callbacks=[saves]).fit(whole, loader())
        rest = Noting(rank, dense="adam", filled=False)
        trainer = make_trainer(world, TorchRecStrategy(plan=PLAN), max_steps=20)
        with Logged() as logged:
            trainer.fit(rest, loader(), ckpt_path=f"{folder}/{kind}.ckpt")
        found[kind] = (
            whole.ids,
            rest.ids,
            trainer.global_step,
            logged.having(WARNING),
            rest.losses == whole.losses[10:],
        )
    return found


def test_l14_a_loader_without_a_length(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(unsized, 2, str(tmp_path), timeout=180)):
        assert found["stateful"] == (list(range(20)), list(range(10, 20)), 20, [], True)
        ids, again, step, warned, _ = found["stateless"]
        assert (ids, again, step) == (list(range(20)), list(range(10)), 20)
        assert len(warned) == (rank == 0)
        assert not warned or "10 batches" in warned[0]


def stateless(rank: int, world: int, folder: str) -> dict[str, Any]:
    """A plain DataLoader: on a resume inside the epoch, and where a full recovery rewinds."""
    saves = SaveAt({37: f"{folder}/stateless.ckpt"})
    make_trainer(world, TorchRecStrategy(plan=PLAN), max_steps=38, callbacks=[saves]).fit(
        Noting(rank), make_loader(rank)
    )
    rest = Noting(rank, filled=False)
    trainer = make_trainer(world, TorchRecStrategy(plan=PLAN))
    with Logged() as logged:
        trainer.fit(rest, make_loader(rank), ckpt_path=f"{folder}/stateless.ckpt")
    cpr = CPRCallback(f"{folder}/root", save_every_n_steps=10, recovery="full", timeout_s=30)
    injector = FaultInjector().wipe(rank=1, step=13)
    model = Noting(rank)
    trainer = make_trainer(world, TorchRecStrategy(plan=PLAN), max_steps=15, callbacks=[Settled(cpr), cpr, injector])
    with Logged() as rewound:
        trainer.fit(model, make_loader(rank))
    return {
        "ids": rest.ids, "warned": logged.having(WARNING), "rewound": rewound.having(WARNING), "again": model.ids,
        "step": trainer.global_step, "wiped": injector.count("wipe"),
    }  # fmt: skip


def test_l12_a_stateless_loader_is_warned_of(tmp_path: Path) -> None:
    found = run_ranks(stateless, 2, str(tmp_path), timeout=180)
    assert [f["wiped"] for f in found] == [0, 1]
    for rank, run in enumerate(found):
        assert run["ids"] == list(range(NUM_BATCHES - 37))
        assert run["again"] == [*range(13), *range(5)]
        assert run["step"] == 15
        for warned, batches in ((run["warned"], "37 batches"), (run["rewound"], "10 batches")):
            assert len(warned) == (rank == 0)
            assert not warned or batches in warned[0]
            assert not warned or "StatefulDataLoader" in warned[0]
