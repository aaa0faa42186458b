from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.streamable import Pipelineable

from lightning_cpr.errors import ConfigError
from recipes.batch import Batch
from recipes.dlrm import DLRMModule, check_tables
from recipes.movielens import TABLES
from recipes.synthetic import SyntheticDataModule


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SMALL = {"a": 50, "b": 30}


def _data(**options: int) -> SyntheticDataModule:
    return SyntheticDataModule(SMALL, train=256, val=50, test=50, batch_size=16, **options)


def _model(**options: object) -> DLRMModule:
    torch.manual_seed(0)
    return DLRMModule(SMALL, 8, 13, (16,), (16,), **{"table_device": "cpu", **options})


def test_tables_are_on_meta_and_not_in_the_dense_optimizer() -> None:
    model = _model(table_device="meta")
    tables = list(model.dlrm.sparse_arch.parameters())
    assert [t.device.type for t in tables] == ["meta", "meta"]
    optimized = {id(p) for group in model.configure_optimizers().param_groups for p in group["params"]}
    assert optimized == {id(p) for p in model.parameters()} - {id(t) for t in tables}


def test_in_backward_updates_only_looked_up_rows_and_padding_trains_nothing() -> None:
    model = _model(sparse_optimizer="sgd", sparse_lr=1.0)
    batch = next(iter(_data().train_dataloader()))
    padded = Batch(batch.dense, batch.sparse, batch.labels, padding=6)
    before = {n: p.detach().clone() for n, p in model.dlrm.sparse_arch.named_parameters()}
    model._loss(padded)[0].backward()
    for name, table in model.dlrm.sparse_arch.named_parameters():
        feature = name.split(".")[-2]
        changed = set(torch.nonzero((table != before[name]).any(dim=1)).flatten().tolist())
        assert changed == set(batch.sparse[feature].values()[:10].tolist())


def test_the_loss_is_the_mean_of_valid_rows() -> None:
    model, batch = _model(), next(iter(_data().train_dataloader()))
    logits = model(batch).detach()
    each = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
    assert torch.equal(model._loss(batch)[0].detach(), each.sum() / 16)
    padded = Batch(batch.dense, batch.sparse, batch.labels, padding=3)
    assert model._loss(padded)[0].item() == pytest.approx(each[:13].mean().item(), rel=1e-6)
    assert torch.equal(model.predict_step(padded, 0), torch.sigmoid(logits[:13]))
    assert model._loss(Batch(batch.dense, batch.sparse, batch.labels, padding=16))[0].item() == 0


def test_checks_name_what_does_not_fit() -> None:
    check_tables({"a": 9, "b": 5}, 3, {"a": 9, "b": 4}, 3)
    with pytest.raises(ConfigError, match=r"table 'b': the data has ids up to 5, the model has 5 rows; set model"):
        check_tables({"a": 9, "b": 5}, 3, {"a": 9, "b": 6}, 3)
    with pytest.raises(ConfigError, match=r"\['a', 'b'\] are not the data's features \['b', 'a'\]"):
        check_tables({"a": 9, "b": 5}, 3, {"b": 5, "a": 9}, 3)
    with pytest.raises(ConfigError, match="dense_features is 3, the data has 4"):
        check_tables({"a": 9}, 3, {"a": 9}, 4)
    with pytest.raises(ConfigError, match="dense_optimizer 'lion' is not supported; use one of adagrad, adam, sgd"):
        _model(dense_optimizer="lion")


def _trainer(root: Path, **options: object) -> pl.Trainer:
    return pl.Trainer(
        default_root_dir=root,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


@pytest.mark.filterwarnings("ignore")
def test_trains_towards_the_best_auc(tmp_path: Path) -> None:
    tables = {f"t{i}": 40 for i in range(6)}
    data = SyntheticDataModule(tables, train=25_000, val=2_000, test=5_003, batch_size=256)
    torch.manual_seed(0)
    model = DLRMModule(tables, 8, 13, (16,), (32,), "rowwise_adagrad", 0.1, "adam", 0.01, table_device="cpu")
    trainer = _trainer(tmp_path, max_epochs=2)
    trainer.fit(model, datamodule=data)
    assert set(trainer.callback_metrics) == {"train/loss", "val/loss", "val/auc"}
    (result,) = trainer.test(model, datamodule=data, verbose=False)
    best = data.source("test").bayes_auc()
    assert best - 0.03 < result["test/auc"] < best + 0.02
    predicted = trainer.predict(model, datamodule=data)
    assert sum(map(len, predicted)) == 5_003
    labels = torch.cat([b.labels[: b.valid] for b in data.test_dataloader()]).double()
    p = torch.cat(predicted).double()
    loss = -(labels * p.log() + (1 - labels) * (1 - p).log()).mean().item()
    assert result["test/loss"] == pytest.approx(loss, rel=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_a_table_that_is_too_small_stops_the_run_at_setup(tmp_path: Path) -> None:
    model = DLRMModule({"a": 50, "b": 29}, 8, 13, (16,), (16,), table_device="cpu")
    with pytest.raises(ConfigError, match="table 'b': the data has ids up to 29, the model has 29 rows"):
        _trainer(tmp_path, max_steps=1).fit(model, datamodule=_data())


def test_batch_moves_as_a_whole() -> None:
    batch = next(iter(_data().train_dataloader()))
    assert isinstance(batch, Pipelineable)
    moved = Batch(batch.dense, batch.sparse, batch.labels, 2).to(torch.device("meta"))
    assert {moved.dense.device.type, moved.sparse.values().device.type, moved.labels.device.type} == {"meta"}
    assert (moved.padding, moved.valid) == (2, 14)


class _Train(torch.nn.Module):
    def __init__(self, model: DLRMModule) -> None:
        super().__init__()
        self.dlrm = model.dlrm

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.dlrm(batch.dense, batch.sparse).squeeze(-1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, loss.detach()


@pytest.fixture
def one_process_group(tmp_path: Path) -> Iterator[None]:
    environment = dict(os.environ)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)


def test_sharded_and_through_the_pipeline_it_trains_alike(one_process_group: None) -> None:
    def losses(pipelined: bool) -> list[float]:
        torch.manual_seed(0)
        module = _model(table_device="meta", dense_optimizer="sgd")
        # left alone, the planner makes tables this small data-parallel, which no in-backward optimizer trains
        planner = EmbeddingShardingPlanner(constraints={n: ParameterConstraints(["table_wise"]) for n in SMALL})
        train, sharders = _Train(module), get_default_sharders()
        plan = planner.collective_plan(train, sharders, dist.group.WORLD)
        model = DistributedModelParallel(train, device=torch.device("cpu"), plan=plan, sharders=sharders)
        torch.manual_seed(1)
        for p in model.parameters():
            p.data.uniform_(-0.1, 0.1)
        dense = {n: p for n, p in model.named_parameters() if "sparse_arch" not in n}
        optimizer = CombinedOptimizer(
            [model.fused_optimizer, KeyedOptimizerWrapper(dense, lambda p: torch.optim.SGD(p, lr=0.1))]
        )
        loader, found = _data().train_dataloader(), []
        if pipelined:
            pipeline, batches = TrainPipelineSparseDist(model, optimizer, torch.device("cpu")), iter(loader)
            for _ in range(len(loader)):
                found.append(pipeline.progress(batches).item())
        else:
            for batch in loader:
                optimizer.zero_grad()
                loss, _ = model(batch)
                loss.backward()
                optimizer.step()
                found.append(loss.item())
        return found

    plain = losses(False)
    assert len(plain) == 16
    assert losses(True) == plain
    assert len(set(plain)) == 16


def test_movielens_fits_the_default_names() -> None:
    model = DLRMModule(dict(TABLES), 4, 5, (4,), (4,))
    assert model.dlrm.sparse_arch.sparse_feature_names == list(TABLES)
