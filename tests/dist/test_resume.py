"""A resumed run equals the uninterrupted one bit for bit: batches, losses, rows, optimizer states, schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cpr import CPRCallback, CPRCheckpointIO
from lightning_cpr._lightning import Callback, pl
from lightning_cpr.errors import IncompatiblePlanError
from lightning_cpr.store.find import find_version
from lightning_cpr.store.versions import list_versions
from lightning_cpr.strategy import TorchRecStrategy
from tests._ranks import run_ranks
from tests._tiny import TABLES, Tiny, make_ebc, make_trainer
from tests.dist.test_main_job import PLAN, assert_equal, rows_of, stateful_loader

COUNT = 24
EPOCHS = 2


class Scheduled(Tiny):
    """Adam with a one-cycle schedule that also drives the tables' learning rate."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(dense="adam", **kwargs)
        self.rates: list[tuple[float, ...]] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.net.mlp.parameters(), lr=0.01)
        self.trainer.strategy.add_fused_groups(optimizer)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.02, 0.2], total_steps=COUNT * EPOCHS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.rates.append(tuple(g["lr"] for g in self.optimizers().param_groups))
        # a random draw a step: the random stream is part of the state
        return loss * (1 + 0.001 * torch.rand(()))


class SaveAt(Callback):
    """Calls ``trainer.save_checkpoint`` at the end of chosen batches, counted over all epochs."""

    def __init__(self, paths: dict[int, str]) -> None:
        self.paths = paths

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        step = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if step in self.paths:
            trainer.save_checkpoint(self.paths[step])


class Stop(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready == self.step:
            raise KeyError("stop here")


def reference(rank: int, world: int, folder: str) -> dict[str, Any]:
    torch.manual_seed(7)
    model = Scheduled()
    saves = SaveAt({step: f"{folder}/at{step}.ckpt" for step in (11, 24, 37)})
    cpr = CPRCallback(f"{folder}/root", save_every_n_steps=37, timeout_s=30)
    trainer = make_trainer(world, TorchRecStrategy(plan=PLAN), max_epochs=EPOCHS, callbacks=[saves, cpr])
    trainer.fit(model, stateful_loader(rank, COUNT))
    return outcome(model)


def outcome(model: Scheduled) -> dict[str, Any]:
    dense = {n: p.detach().clone() for n, p in model.net.mlp.named_parameters()}
    adam = model.trainer.optimizers[0].state_dict()["state"]
    return {"losses": model.losses, "rates": model.rates, "rows": rows_of(model), "dense": dense, "adam": adam}


def resumed(rank: int, world: int, path: str, root: str | None = None) -> dict[str, Any]:
    torch.manual_seed(99 + rank)
    model = Scheduled(filled=False)
    callbacks = [] if root is None else [CPRCallback(root, save_every_n_steps=37, timeout_s=30)]
    trainer = make_trainer(world, TorchRecStrategy(plan=PLAN), max_epochs=EPOCHS, callbacks=callbacks)
    trainer.fit(model, stateful_loader(rank, COUNT), ckpt_path=path or None)
    return outcome(model)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, run_ranks(reference, 2, str(folder))


def same_from(step: int, runs: list[dict[str, Any]], references: list[dict[str, Any]]) -> None:
    for run, ref in zip(runs, references, strict=True):
        assert run["losses"] == ref["losses"][step:]
        assert run["rates"] == ref["rates"][step:]
        assert_equal(run["rows"], ref["rows"])
        assert_equal(run["dense"], ref["dense"])
        for index, states in ref["adam"].items():
            assert_equal(run["adam"][index], states)


@pytest.mark.parametrize("step", [11, 24, 37])
def test_a_lightning_checkpoint_resumes_exactly(step: int, whole: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, references = whole
    same_from(step, run_ranks(resumed, 2, f"{folder}/at{step}.ckpt"), references)


def test_a_version_of_the_root_resumes_exactly(whole: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, references = whole
    same_from(37, run_ranks(resumed, 2, f"{folder}/root@37"), references)


def crashed(rank: int, world: int, root: str) -> str:
    torch.manual_seed(7)
    cpr = CPRCallback(root, save_every_n_steps=10, timeout_s=30)
    trainer = make_trainer(world, TorchRecStrategy(plan=PLAN), max_epochs=EPOCHS, callbacks=[cpr, Stop(27)])
    try:
        trainer.fit(Scheduled(), stateful_loader(rank, COUNT))
    except KeyError as e:
        return str(e)
    return "did not stop"


def test_a_crashed_run_goes_on_by_itself(tmp_path: Path, whole: tuple[Path, list[dict[str, Any]]]) -> None:
    root = str(tmp_path / "root")
    assert run_ranks(crashed, 2, root) == ["'stop here'"] * 2
    step = find_version(root).manifest.step
    assert step in (10, 20)
    runs = run_ranks(resumed, 2, "", root)
    same_from(step, runs, whole[1])
    epochs = {ref.epoch for ref in list_versions(find_version(root).storage)}
    assert epochs == {0, 1}


def stages(rank: int, world: int, path: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for stage in ("validate", "test"):
        trainer = make_trainer(world, TorchRecStrategy(plan="table_wise"))
        (metrics,) = getattr(trainer, stage)(Tiny(filled=False), stateful_loader(rank, 4), ckpt_path=path)
        results[stage] = next(iter(metrics.values()))
    trainer = make_trainer(world, TorchRecStrategy(plan="table_wise"))
    results["predict"] = trainer.predict(Tiny(filled=False), stateful_loader(rank, 4), ckpt_path=path)
    return results


def test_evaluation_stages_and_an_unsharded_model_load_it(whole: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = whole
    results = run_ranks(stages, 2, f"{folder}/at37.ckpt")
    model = CPRCheckpointIO.load_model(Tiny(device="cpu", sparse=None), f"{folder}/at37.ckpt")
    losses = []
    for rank, result in enumerate(results):
        batches = list(stateful_loader(rank, 4))
        with torch.no_grad():
            for batch, predicted in zip(batches, result["predict"], strict=True):
                assert torch.allclose(model(batch).sigmoid(), predicted, atol=1e-6)
            losses += [model.net(b)[0] for b in batches]
    expected = torch.stack(losses).mean().item()
    for result in results:
        assert result["validate"] == pytest.approx(expected, abs=1e-6)
        assert result["test"] == pytest.approx(expected, abs=1e-6)


def resharded(rank: int, world: int, path: str, plan: Any) -> dict[str, Tensor]:
    model = Scheduled(filled=False)
    saves = Keep()
    trainer = make_trainer(world, TorchRecStrategy(plan=plan), max_epochs=EPOCHS, callbacks=[saves])
    trainer.fit(model, stateful_loader(rank, COUNT), ckpt_path=path)
    return saves.rows


class Keep(Callback):
    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.rows = rows_of(pl_module)
        trainer.should_stop = True


@pytest.mark.parametrize(
    ("world", "plan"),
    [
        (1, "table_wise"),
        (3, {"a": "row_wise", "b": "data_parallel", "c": "table_wise"}),
        (2, {"a": "column_wise", "b": "column_wise", "c": "data_parallel"}),
    ],
)
def test_another_world_and_plan(world: int, plan: Any, whole: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = whole
    version = find_version(f"{folder}/at24.ckpt")
    runs = run_ranks(resharded, world, f"{folder}/at24.ckpt", plan)
    from lightning_cpr.store.reader import read_table

    for name in TABLES:
        fqn = f"net.ebc.embedding_bags.{name}"
        weight, states = read_table(version.storage, version.manifest, fqn)
        shards = {key: rows for run in runs for key, rows in run.items() if key.startswith(f"{fqn}[")}
        seen = torch.zeros_like(weight)
        for key, rows in shards.items():
            span, kind = key[len(fqn) :].split("]")
            (low, high), col = map(int, span[1:].split(",")[0].split(":")), int(span.split(",")[1])
            if kind == "":
                assert torch.equal(rows, weight[low:high, col : col + rows.shape[1]]), key
                seen[low:high, col : col + rows.shape[1]] = 1
            else:
                assert torch.equal(rows, states["sum"][low:high]), key
        assert seen.all()
        assert any(key.endswith("].sum") for key in shards)


def on_four(rank: int, world: int, path: str) -> dict[str, Tensor]:
    model = Scheduled()
    trainer = make_trainer(world, TorchRecStrategy(plan="table_wise"), max_epochs=EPOCHS, callbacks=[SaveAt({8: path})])
    trainer.limit_train_batches = 8
    trainer.fit_loop.max_epochs = 1
    trainer.fit(model, stateful_loader(rank, COUNT))
    return rows_of(model)


def tables_of(runs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Whole tables and their optimizer states, put together from the shards that all ranks hold."""
    whole: dict[str, dict[tuple[int, int], Tensor]] = {}
    for run in runs:
        for key, rows in run.items():
            fqn, _, rest = key.partition("[")
            span, _, kind = rest.partition("]")
            low, column = int(span.partition(":")[0]), int(span.partition(",")[2])
            whole.setdefault(fqn + kind, {})[column, low] = rows
    assert all(column == 0 for parts in whole.values() for column, _ in parts)
    return {name: torch.cat([parts[at] for at in sorted(parts)]) for name, parts in whole.items()}


def test_four_ranks_table_wise_restore_on_two_row_wise(tmp_path: Path) -> None:
    """What the two hold is compared with what the four held, by no reader of ours. One table has a single row."""
    path = f"{tmp_path}/four.ckpt"
    before = tables_of(run_ranks(on_four, 4, path))
    after = tables_of(run_ranks(resharded, 2, path, {"a": "row_wise", "b": "row_wise", "c": "table_wise"}))
    assert {name.rpartition(".")[2] for name in before if not name.endswith(".sum")} == set(TABLES)
    assert sum(name.endswith(".sum") for name in before) == len(TABLES)
    assert_equal(after, before)
    assert all(rows.count_nonzero() for rows in before.values())


def test_load_model_refuses_what_does_not_fit(whole: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = whole

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Module()
            self.net.ebc = make_ebc({"a": (100, 8), "d": (3, 8)}, device="cpu")

    model = Other()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(IncompatiblePlanError, match=r"no table net\.ebc\.embedding_bags\.d.*embedding_bags\.b is not"):
        CPRCheckpointIO.load_model(model, f"{folder}/at24.ckpt")
    assert_equal(before, dict(model.state_dict()))


def test_load_model_refuses_tables_on_meta(whole: tuple[Path, list[dict[str, Any]]]) -> None:
    """Values copied onto meta are gone without an error."""
    folder, _ = whole
    model = Tiny(device="meta", sparse=None)
    before = model.net.mlp[0].weight.clone()
    with pytest.raises(IncompatiblePlanError, match=r"net\.ebc\.embedding_bags\.a\.weight, .*to_empty"):
        CPRCheckpointIO.load_model(model, f"{folder}/at24.ckpt")
    assert torch.equal(model.net.mlp[0].weight, before)
