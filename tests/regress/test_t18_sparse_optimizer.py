"""T18: Adam has no CPU kernel for sharded tables; the recipe says so in one line before anything is built."""

from __future__ import annotations

from pathlib import Path

import pytest
import pytorch_lightning as pl

from lightning_cpr.errors import ConfigError
from recipes.dlrm import DLRMModule
from recipes.synthetic import SyntheticDataModule

LINE = "sparse_optimizer on CPU 'adam' is not supported; use one of rowwise_adagrad, adagrad, sgd"


@pytest.mark.filterwarnings("ignore")
def test_t18_adam_on_cpu_is_refused_in_one_line(tmp_path: Path) -> None:
    model = DLRMModule({"a": 10}, 8, 13, (8,), (8,), sparse_optimizer="adam", table_device="cpu")
    trainer = pl.Trainer(default_root_dir=tmp_path, accelerator="cpu", devices=1, max_steps=1, logger=False)
    with pytest.raises(ConfigError) as caught:
        trainer.fit(model, datamodule=SyntheticDataModule({"a": 10}, train=64, val=8, test=8, batch_size=8))
    assert str(caught.value) == LINE


def test_t18_an_unknown_optimizer_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="'lamb' is not supported; use one of rowwise_adagrad, adagrad, sgd, adam"):
        DLRMModule({"a": 10}, sparse_optimizer="lamb")
