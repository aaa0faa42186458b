"""What the callback's arguments come to once the job's tables are known."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_cpr import CPRCallback
from lightning_cpr._lightning import pl
from lightning_cpr.errors import ConfigError
from lightning_cpr.spec import TableSpec
from lightning_cpr.strategy import TorchRecStrategy


def job_of(rows: dict[str, int]) -> Any:
    specs = {f"net.{n}": TableSpec(f"net.{n}", r, 16, torch.float32, "sgd", row_sparse=True) for n, r in rows.items()}
    return SimpleNamespace(specs=specs, owned=[], module=torch.nn.Module())


def test_priority_tables_that_do_not_exist_are_refused_with_those_that_do() -> None:
    settings = CPRCallback("root", priority="mfu", priority_tables=["users", "net.items", "itmes"]).settings
    with pytest.raises(
        ConfigError, match=r"tables \['itmes'\] do not exist: must be some of \['net.items', 'net.users'\]"
    ):
        settings.tracker(job_of({"users": 5, "items": 9}), count=False)


def test_priority_tables_go_by_their_own_names_and_by_full_ones() -> None:
    settings = CPRCallback("root", priority="mfu", priority_tables=["users", "net.items"]).settings
    tracker = settings.tracker(job_of({"users": 5, "items": 9, "rest": 1}), count=False)
    assert tracker._prioritised == {"net.users", "net.items"}


def test_two_callbacks_with_one_root_are_refused_however_it_is_spelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "root").mkdir()
    (tmp_path / "link").symlink_to("root")
    for other in (f"{tmp_path}/root", "a/../root", "link"):  # "root/" is refused by Lightning
        callbacks = [CPRCallback("root"), CPRCallback(other)]
        trainer = pl.Trainer(strategy=TorchRecStrategy(), accelerator="cpu", logger=False, callbacks=callbacks)
        with pytest.raises(ConfigError, match="its own root"):
            callbacks[1].setup(trainer, pl.LightningModule(), "fit")
    assert CPRCallback("s3://b/root").settings.place != CPRCallback("root").settings.place
