"""The YAML files give a model and a data module that fit each other, read as LightningCLI reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
from jsonargparse import ArgumentParser

from lightning_cpr._lightning import pl
from recipes.dlrm import DLRMModule, check_tables
from recipes.loader import RecipeDataModule
from recipes.synthetic import criteo_like_tables

FOLDER = Path(__file__).parents[3] / "recipes"


# cpr_paper.yaml is the setting of benchmarks/cpr_paper, not a Trainer's config
NAMES = sorted({p.stem for p in FOLDER.glob("*.yaml")} - {"cpr_paper"})


@pytest.mark.parametrize("name", NAMES)
def test_model_and_data_fit(name: str) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--seed_everything", type=int)
    parser.add_argument("--trainer", type=dict)
    parser.add_subclass_arguments(pl.LightningModule, "model")
    parser.add_subclass_arguments(pl.LightningDataModule, "data")
    config = parser.parse_path(FOLDER / f"{name}.yaml")
    made = parser.instantiate_classes(config)
    assert isinstance(made.model, DLRMModule)
    assert isinstance(made.data, RecipeDataModule)
    check_tables(made.model.tables, made.model.hparams["dense_features"], made.data.tables, made.data.dense_features)
    pl.Trainer(**{**config.trainer, "accelerator": "cpu", "devices": 1, "strategy": "auto", "logger": False})


def test_synthetic_names_its_tables() -> None:
    assert set(NAMES) == {"movielens", "synthetic", "criteo_kaggle", "criteo_terabyte"}
    text = "".join((FOLDER / "synthetic.yaml").read_text().split())
    assert "{" + ",".join(f"{k}:{v}" for k, v in criteo_like_tables(1_000_000).items()) + "}" in text
