"""L05 (pytorch-lightning#14035), L16 (#14466, #19251, #11451): what ModelCheckpoint keeps, removes, links and names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lightning_cpr._lightning import Callback, pl
from lightning_cpr.checkpoint_io import find_version
from lightning_cpr.strategy import TorchRecStrategy
from tests._ranks import run_ranks
from tests._tiny import Tiny, make_trainer
from tests.dist.test_main_job import PLAN, assert_equal, rows_of, stateful_loader
from tests.regress.jobs import Noting, step_of

Keeper = pl.callbacks.ModelCheckpoint


class Scores(Callback):
    """A metric that is lowest at batch 6, on every rank alike."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        pl_module.log("score", abs(step_of(trainer) - 6.0))


def kept(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Several ModelCheckpoints in one run, each in a folder of its own."""
    keepers = {
        "top1": Keeper(f"{folder}/top1", every_n_train_steps=2),  # the newest only
        "best2": Keeper(f"{folder}/best2", every_n_train_steps=2, monitor="score", save_top_k=2, filename="{step}"),
        "all": Keeper(f"{folder}/all", every_n_train_steps=4, save_top_k=-1, save_last=True),
        "link": Keeper(f"{folder}/link", every_n_train_steps=3, save_top_k=-1, save_last="link"),
        "same": Keeper(f"{folder}/same", every_n_train_steps=5, save_top_k=-1, filename="name"),
        "light": Keeper(f"{folder}/light", every_n_train_steps=9, save_weights_only=True),
    }
    trainer = make_trainer(
        world, TorchRecStrategy(plan=PLAN), max_steps=10, callbacks=[Scores(), *keepers.values()],
        enable_checkpointing=True,
    )  # fmt: skip
    model = Noting(rank, dense="adam")
    trainer.fit(model, stateful_loader(rank))
    trainer.save_checkpoint(f"{folder}/light.ckpt", weights_only=True)
    return {"best": keepers["best2"].best_model_path, "rows": rows_of(model)}


def from_light(rank: int, world: int, folder: str) -> dict[str, Any]:
    model = Tiny(filled=False)
    trainer = make_trainer(world, TorchRecStrategy(plan=PLAN))
    found = {}
    for name in ("light.ckpt", "best2/step=6.ckpt"):
        for flag in (True, False, None):
            trainer.validate(model, stateful_loader(rank, 2), f"{folder}/{name}", weights_only=flag, verbose=False)
            found[name, flag] = rows_of(model)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    path = tmp_path_factory.mktemp("kept")
    return path, run_ranks(kept, 2, str(path), timeout=180)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name != "cpr-chunks")


def steps(folder: Path) -> dict[str, int]:
    """The checkpoints of a folder with their steps; checks that there are no files of others."""
    found = {name: find_version(folder / name).manifest for name in names(folder)}
    assert {p.name for p in (folder / "cpr-chunks").iterdir()} == {m.version for m in found.values()}
    return {name: manifest.step for name, manifest in found.items()}


def test_l05_what_is_removed_is_gone_with_its_files(folder: tuple[Path, list[dict[str, Any]]]) -> None:
    path, results = folder
    assert steps(path / "top1") == {"epoch=0-step=10.ckpt": 10}
    assert steps(path / "best2") == {"step=4.ckpt": 4, "step=6.ckpt": 6}
    assert results[0]["best"] == results[1]["best"] == f"{path}/best2/step=6.ckpt"


def test_l16_last_links_and_numbered_names(folder: tuple[Path, list[dict[str, Any]]]) -> None:
    path, _ = folder
    assert steps(path / "all") == {"epoch=0-step=4.ckpt": 4, "epoch=0-step=8.ckpt": 8, "last.ckpt": 8}
    assert steps(path / "link") == {
        "epoch=0-step=3.ckpt": 3,
        "epoch=0-step=6.ckpt": 6,
        "epoch=0-step=9.ckpt": 9,
        "last.ckpt": 9,
    }
    assert os.readlink(path / "link/last.ckpt") == "epoch=0-step=9.ckpt"
    assert steps(path / "same") == {"name.ckpt": 5, "name-v1.ckpt": 10}
    assert steps(path / "light") == {"epoch=0-step=9.ckpt": 9}


def test_l19_every_flavour_of_weights_only(folder: tuple[Path, list[dict[str, Any]]]) -> None:
    path, results = folder
    light = find_version(path / "light.ckpt").blob("job.pt")
    assert "optimizer_states" not in light
    assert "callbacks" not in light
    for ours, trained in zip(run_ranks(from_light, 2, str(path), timeout=120), results, strict=True):
        for flag in (True, False, None):
            weights = {k: v for k, v in ours["light.ckpt", flag].items() if k.endswith("]")}
            assert_equal(weights, {k: v for k, v in trained["rows"].items() if k.endswith("]")})
            assert_equal(ours["best2/step=6.ckpt", flag], ours["best2/step=6.ckpt", None])


def extended(rank: int, world: int, folder: str, until: int) -> tuple[list[int], int, list[float]]:
    keeper = Keeper(folder, every_n_train_steps=5, save_top_k=-1, save_last=True)
    trainer = make_trainer(
        world, TorchRecStrategy(plan=PLAN), max_steps=until, callbacks=[keeper], enable_checkpointing=True
    )
    model = Noting(rank, dense="adam")
    trainer.fit(model, stateful_loader(rank), ckpt_path="last")
    return model.ids, trainer.global_step, model.losses


def test_l16_last_is_the_one_of_the_highest_step(tmp_path: Path) -> None:
    for number, until in enumerate((5, 10, 15)):
        for ids, step, _ in run_ranks(extended, 2, str(tmp_path), until, timeout=120):
            assert ids == list(range(until - 5, until))
            assert step == until
        if number == 1:
            # Clocks of several hosts: the file times say the reverse of the steps.
            for name in names(tmp_path):
                at = 2_000_000_000 - 1000 * find_version(tmp_path / name).manifest.step
                os.utime(tmp_path / name, (at, at))
    assert len([n for n in names(tmp_path) if n.startswith("last")]) == 3
    assert {find_version(tmp_path / n).manifest.step for n in names(tmp_path) if n.startswith("last")} == {15}
