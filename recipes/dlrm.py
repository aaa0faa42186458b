"""A plain LightningModule around TorchRec's DLRM: un-sharded tables on meta, for ``strategy="torchrec"`` to shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchmetrics.classification import BinaryAUROC
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_cpr._lightning import pl
from lightning_cpr.errors import ConfigError
from recipes.batch import Batch

SPARSE_OPTIMIZERS: dict[str, Any] = {
    "rowwise_adagrad": RowWiseAdagrad,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
}
# fbgemm's table-batched embeddings have no CPU kernel for Adam
CPU_SPARSE_OPTIMIZERS = ("rowwise_adagrad", "adagrad", "sgd")
DENSE_OPTIMIZERS: dict[str, Any] = {
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}
# Even in the logit, so that the rare clicks' small probabilities are told apart; memory does not grow with samples.
AUC_THRESHOLDS = torch.sigmoid(torch.linspace(-10.0, 10.0, 1001))


class DLRMModule(pl.LightningModule):
    """DLRM (https://arxiv.org/abs/1906.00091) for click prediction.

    tables: rows of each table, by feature name; every table is ``embedding_dim`` wide and pools by sum.
    dense_features: width of ``Batch.dense``; DLRM needs at least one (a data set without any gives a constant).
    dense_layers: hidden sizes of the bottom network, whose last layer is ``embedding_dim`` wide.
    over_layers: hidden sizes of the top network, whose last layer is the logit.
    sparse_optimizer: rowwise_adagrad, adagrad, sgd (and adam on a GPU), applied in backward to the tables.
    dense_optimizer: adagrad, adam or sgd, for all other parameters.
    table_device: "meta" leaves the tables to the strategy; "cpu" makes an un-sharded model for one process.
    Logs ``train/loss``, ``val/loss``, ``val/auc``, ``test/loss``, ``test/auc``; predicts click probabilities.

    Raises `ConfigError` for an unknown optimizer, at set-up for one without a kernel on the device and for a data
    module with other features, more rows than a table has, or another number of dense features.
    """

    def __init__(
        self,
        tables: dict[str, int],
        embedding_dim: int = 16,
        dense_features: int = 13,
        dense_layers: Sequence[int] = (64, 32),
        over_layers: Sequence[int] = (64, 32),
        sparse_optimizer: str = "rowwise_adagrad",
        sparse_lr: float = 0.05,
        dense_optimizer: str = "adam",
        dense_lr: float = 0.001,
        table_device: str = "meta",
    ) -> None:
        super().__init__()
        _known("sparse_optimizer", sparse_optimizer, SPARSE_OPTIMIZERS)
        _known("dense_optimizer", dense_optimizer, DENSE_OPTIMIZERS)
        self.save_hyperparameters()
        self.tables = dict(tables)
        configs = [
            EmbeddingBagConfig(name=name, embedding_dim=embedding_dim, num_embeddings=rows, feature_names=[name])
            for name, rows in tables.items()
        ]
        self.dlrm = DLRM(
            EmbeddingBagCollection(tables=configs, device=torch.device(table_device)),
            dense_in_features=dense_features,
            dense_arch_layer_sizes=[*dense_layers, embedding_dim],
            over_arch_layer_sizes=[*over_layers, 1],
        )
        apply_optimizer_in_backward(
            SPARSE_OPTIMIZERS[sparse_optimizer], self.dlrm.sparse_arch.parameters(), {"lr": sparse_lr}
        )
        self.val_auc = BinaryAUROC(thresholds=AUC_THRESHOLDS)
        self.test_auc = BinaryAUROC(thresholds=AUC_THRESHOLDS)

    def setup(self, stage: str) -> None:
        if self.trainer.strategy.root_device.type == "cpu":
            _known("sparse_optimizer on CPU", self.hparams["sparse_optimizer"], CPU_SPARSE_OPTIMIZERS)
        data = getattr(self.trainer, "datamodule", None)
        if data is not None and hasattr(data, "tables"):
            check_tables(self.tables, self.hparams["dense_features"], data.tables, data.dense_features)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        dense = [p for _, p in in_backward_optimizer_filter(self.named_parameters())]
        return DENSE_OPTIMIZERS[self.hparams["dense_optimizer"]](dense, lr=self.hparams["dense_lr"])

    def forward(self, batch: Batch) -> Tensor:
        """Logits ``[B]``, padding rows included."""
        return self.dlrm(batch.dense, batch.sparse).squeeze(-1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss, _ = self._loss(batch)
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=batch.valid)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("val", self.val_auc, batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("test", self.test_auc, batch)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return torch.sigmoid(self(batch)[: batch.valid])

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy and logits of the rows that are not padding (0 where all are)."""
        logits = self(batch)[: batch.valid]
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels[: batch.valid], reduction="sum")
        return loss / max(batch.valid, 1), logits

    def _evaluate(self, stage: str, auc: BinaryAUROC, batch: Batch) -> None:
        loss, logits = self._loss(batch)
        if batch.valid:
            auc.to(logits.device).update(torch.sigmoid(logits), batch.labels[: batch.valid].long())
        self.log(f"{stage}/loss", loss, on_epoch=True, sync_dist=True, batch_size=batch.valid)
        self.log(f"{stage}/auc", auc, on_epoch=True, prog_bar=True, batch_size=batch.valid)


def check_tables(model: Mapping[str, int], model_dense: int, data: Mapping[str, int], data_dense: int) -> None:
    """Raises `ConfigError` unless every id that the data may hold has a row in the model."""
    if list(model) != list(data):
        raise ConfigError(f"model tables {list(model)} are not the data's features {list(data)}, in this order")
    for name, rows in data.items():
        if rows > model[name]:
            raise ConfigError(
                f"table {name!r}: the data has ids up to {rows - 1}, the model has {model[name]} rows; "
                f"set model.tables.{name} to {rows} or let the data module hash to fewer rows"
            )
    if model_dense != data_dense:
        raise ConfigError(f"dense_features is {model_dense}, the data has {data_dense}")


def _known(what: str, name: str, names: Any) -> None:
    if name not in names:
        raise ConfigError(f"{what} {name!r} is not supported; use one of {', '.join(names)}")
