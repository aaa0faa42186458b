"""L06 (AsyncCheckpointIO), L17 (pytorch-lightning#6467), L18 (#6691, #14485), L22 (#20274, pytorch#148252, #153350),
X02 (torchsnapshot PR171): what is refused, and how, and two callbacks in one Trainer.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from lightning_cpr import CPRCallback, CPRCheckpointIO, FaultInjector
from lightning_cpr._lightning import AsyncCheckpointIO, DDPStrategy, pl
from lightning_cpr.errors import (
    ConfigError,
    CPRError,
    ForeignRunError,
    IncompatiblePlanError,
    ManifestError,
    StorageError,
    UnsupportedError,
)
from lightning_cpr.store import Storage, list_versions, newest
from lightning_cpr.strategy import TorchRecStrategy
from tests._ranks import run_ranks
from tests._tiny import Tiny, make_batch, make_trainer
from tests.dist.test_main_job import PLAN, assert_equal, rows_of, stateful_loader
from tests.regress.jobs import Logged, Noting, Settled, StopAt


def test_l06_wrapped_checkpoint_ios_are_refused_when_the_trainer_is_made() -> None:
    for plugin in (AsyncCheckpointIO(CPRCheckpointIO()), AsyncCheckpointIO(), pl.plugins.TorchCheckpointIO()):
        with pytest.raises(ConfigError, match=r"CheckpointIO cannot save the tables of all ranks.*CPRCallback"):
            make_trainer(1, TorchRecStrategy(plan=PLAN), plugins=[plugin])
    make_trainer(1, TorchRecStrategy(plan=PLAN), plugins=[CPRCheckpointIO(timeout_s=9)])


def test_l17_two_callbacks_of_one_root_are_refused_when_the_trainer_is_made(tmp_path: Path) -> None:
    pair = [CPRCallback(str(tmp_path), save_every_n_steps=n) for n in (2, 3)]
    with pytest.raises(RuntimeError, match="Found more than one stateful callback of type `CPRCallback`"):
        make_trainer(1, TorchRecStrategy(plan=PLAN), callbacks=pair)


def two(rank: int, world: int, folder: str, stop: int | None, ckpt: str | None = None) -> dict[str, Any]:
    fast = CPRCallback(f"{folder}/fast", save_every_n_steps=3, timeout_s=30)
    rare = CPRCallback(f"{folder}/rare", save_every_n_steps=7, timeout_s=30)
    callbacks = [Settled(fast), Settled(rare), fast, rare, *([StopAt(stop)] if stop else [])]
    trainer = make_trainer(world, TorchRecStrategy(plan=PLAN), max_steps=16, callbacks=callbacks)
    model = Noting(rank, dense="adam", filled=stop is not None)
    try:
        trainer.fit(model, stateful_loader(rank), ckpt_path=ckpt)
    except KeyError:
        return {}
    return {
        "ids": model.ids, "samples": (fast.samples, rare.samples), "rows": rows_of(model),
        "keys": (fast.state_key, rare.state_key), "commits": (fast.counts["commits"], rare.counts["commits"]),
    }  # fmt: skip


def test_l17_two_callbacks_keep_their_own_state(tmp_path: Path) -> None:
    run_ranks(two, 2, str(tmp_path), 11, timeout=120)
    roots = [Storage(str(tmp_path / name)) for name in ("fast", "rare")]
    assert [newest(root).require().step for root in roots] == [9, 7]
    before = [newest(root).require().run_id for root in roots]
    # The newer of the two is resumed from; each root goes on with its own run.
    for run in run_ranks(two, 2, str(tmp_path), None, timeout=120):
        assert run["ids"] == list(range(9, 16))
        assert run["samples"] == (16 * 8, 16 * 8)
        assert len(set(run["keys"])) == 2
        # before 0, 3, 6 (the version of step 9 does not count itself) and 0, 7; after 12, 15, 16 and 9, 16
        assert run["commits"] == (3 + 3, 2 + 2)
    for root, run_id in zip(roots, before, strict=True):
        refs = list_versions(root)
        assert {ref.run_id for ref in refs} == {run_id}
        assert (refs[0].step, refs[0].epoch) == (16, 1)


def test_a_root_goes_on_with_its_run_from_another_checkpoint(tmp_path: Path) -> None:
    """Two runs in one root would be told apart by their steps alone."""
    run_ranks(two, 2, str(tmp_path / "a"), 14, timeout=120)
    run_ranks(two, 2, str(tmp_path / "b"), 8, timeout=120)
    fast = Storage(str(tmp_path / "a/fast"))
    first = newest(fast).require()
    assert first.step == 12
    runs = run_ranks(two, 2, str(tmp_path / "a"), None, f"{tmp_path}/b/rare@7", timeout=120)
    assert all(run["ids"] == list(range(7, 16)) for run in runs)
    refs = list_versions(fast)
    assert {ref.run_id for ref in refs} == {first.run_id}
    assert [(ref.epoch, ref.step) for ref in refs][:4] == [(1, 16), (1, 13), (1, 10), (1, 7)]


def stock(rank: int, world: int, folder: str) -> dict[str, str]:
    """W=1: whoever saves alone must not be let."""
    found = {}
    trainer = make_trainer(world, DDPStrategy(), max_steps=1, plugins=[CPRCheckpointIO()])
    cases = {
        "callback": lambda: make_trainer(
            world, DDPStrategy(), max_steps=1, callbacks=[CPRCallback(f"{folder}/r", save_every_n_steps=1)]
        ).fit(Untouched(), stateful_loader(rank, 1)),
        "io": lambda: (
            trainer.fit(Untouched(), stateful_loader(rank, 1)),
            trainer.save_checkpoint(f"{folder}/io.ckpt"),
        ),
    }
    for name, run in cases.items():
        try:
            run()
        except UnsupportedError as error:
            found[name] = str(error)
    return found


class Untouched(Tiny):
    """On a device, and without optimizers in backward: what a stock strategy can train."""

    def __init__(self) -> None:
        super().__init__(device="cpu", sparse=None, filled=False)


def test_l18_stock_strategies_are_refused(tmp_path: Path) -> None:
    (found,) = run_ranks(stock, 1, str(tmp_path), timeout=120)
    assert set(found) == {"callback", "io"}
    for text in found.values():
        assert 'Use Trainer(strategy="torchrec")' in text
        assert "rank 0 only" in text
    assert not list(tmp_path.rglob("*.ckpt"))


OTHER = {"a": (100, 8), "d": (5, 8), "c": (1, 4)}
OTHER_PLAN = {"a": "row_wise", "d": "table_wise", "c": "table_wise"}


class Loose(Tiny):
    """Table d instead of b; what does not fit is left alone."""

    def __init__(self, strict: bool) -> None:
        super().__init__(dense="adam", tables=OTHER, filled=False)
        self.strict_loading = strict


def strictness(rank: int, world: int, folder: str) -> dict[str, Any]:
    model = Tiny(dense="adam")
    trainer = make_trainer(world, TorchRecStrategy(plan=PLAN), max_steps=5)
    trainer.fit(model, stateful_loader(rank))
    trainer.save_checkpoint(f"{folder}/x.ckpt")
    found: dict[str, Any] = {"saved": rows_of(model)}
    for strict in (True, False):
        other = Loose(strict)
        loader = stateful_loader(rank, 2)
        loader.dataset.batches = [make_batch(i, rank, tables=OTHER) for i in range(2)]  # type: ignore[attr-defined]
        trainer = make_trainer(world, TorchRecStrategy(plan=OTHER_PLAN))
        with Logged() as logged:
            try:
                trainer.validate(other, loader, ckpt_path=f"{folder}/x.ckpt", verbose=False)
            except IncompatiblePlanError as error:
                found["error"] = str(error)
        if not strict:
            found |= {"rows": rows_of(other), "warned": logged.having("does not fit the model")}
    return found


def test_l22_strict_lists_what_does_not_fit_and_loose_warns(tmp_path: Path) -> None:
    listed = "it has no table net.ebc.embedding_bags.d; its table net.ebc.embedding_bags.b is not in the model"
    for found in run_ranks(strictness, 2, str(tmp_path), timeout=120):
        assert listed in found["error"]
        assert len(found["warned"]) == 1
        assert listed in found["warned"][0]
        same = {k: v for k, v in found["rows"].items() if "bags.d" not in k}
        assert_equal(same, {k: v for k, v in found["saved"].items() if "bags.b" not in k})


def differing(rank: int, world: int) -> tuple[str, str]:
    trainer = make_trainer(world, TorchRecStrategy(plan=PLAN), max_steps=1)
    trainer.fit(Tiny(), stateful_loader(rank))

    def work() -> None:
        raise ManifestError("gone") if rank == 0 else StorageError(5, "broken")

    try:
        trainer.strategy.job.together(work)
    except CPRError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_ranks_that_fail_differently_raise_one_kind_of_error() -> None:
    """They decide by it what they do next, e.g. whether an older version is tried."""
    assert run_ranks(differing, 2, timeout=120) == [("ManifestError", "gone"), ("ManifestError", "rank 0: gone")]


def refusals(rank: int, world: int, folder: str) -> dict[str, str]:
    places = {"missing": f"{folder}/none", "empty": f"{folder}/empty", "torn": f"{folder}/torn", "other": f"{folder}/o"}
    found = {}
    for name, path in places.items():
        try:
            make_trainer(world, TorchRecStrategy(plan=PLAN)).validate(
                Tiny(filled=False), stateful_loader(rank, 1), ckpt_path=path, verbose=False
            )
        except CPRError as error:
            found[name] = str(error)
    for name, resume in (("foreign", "auto"), ("model", "reshard"), ("never", "never")):
        plan: Any = "table_wise" if name == "foreign" else PLAN
        model = Tiny(sparse="adagrad") if name == "model" else Tiny()
        callback = CPRCallback(f"{folder}/run", save_every_n_steps=9, resume=resume)  # type: ignore[arg-type]
        trainer = make_trainer(world, TorchRecStrategy(plan=plan), max_steps=1, callbacks=[callback])
        try:
            trainer.fit(model, stateful_loader(rank))
        except ForeignRunError as error:
            found[name] = str(error)
    pair = [CPRCallback(f"{folder}/{name}", save_every_n_steps=9) for name in ("one", "two")]
    wipe = FaultInjector().wipe(rank=0, step=1)
    try:
        make_trainer(world, TorchRecStrategy(plan=PLAN), callbacks=[wipe, *pair]).fit(Tiny(), stateful_loader(rank))
    except ConfigError as error:
        found["wipe"] = str(error)
    return found


def make_run(rank: int, world: int, root: str) -> list[str]:
    """Begins a run, goes on with it, and with another plan; what each start said of it."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pytorch_lightning").addHandler(handler)
    starts: list[tuple[Any, int, Any]] = [
        (PLAN, 2, "auto"), (PLAN, 3, "auto"), ("table_wise", 4, "reshard"), (PLAN, 5, "reshard"),
    ]  # fmt: skip
    for plan, steps, resume in starts:
        callback = CPRCallback(root, save_every_n_steps=9, resume=resume)
        trainer = make_trainer(
            world, TorchRecStrategy(plan=plan), max_steps=steps, max_epochs=9, callbacks=[callback]
        )  # fmt: skip
        trainer.fit(Tiny(), stateful_loader(rank))
        assert trainer.global_step == steps
    callback = CPRCallback(f"{root}-own", save_every_n_steps=9, resume="never")  # of this run it may, in a second fit
    for steps in (2, 4):
        trainer = make_trainer(
            world, TorchRecStrategy(plan=PLAN), max_steps=steps, max_epochs=9, callbacks=[callback]
        )  # fmt: skip
        trainer.fit(Tiny(), stateful_loader(rank))
        assert trainer.global_step == steps
    assert [ref.step for ref in list_versions(Storage(f"{root}-own"))] == [4, 2, 0]
    return [text for text in said if text.startswith("CPRCallback")]


def test_x02_a_path_that_serves_nothing_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn/chunks/run.000000.000000000010.n0").mkdir(parents=True)
    (tmp_path / "o").mkdir()
    (tmp_path / "o/notes.txt").write_text("")
    said, _ = run_ranks(make_run, 2, str(tmp_path / "run"), timeout=120)
    assert [text.split()[1] for text in said] == ["begins", "resumes", "resumes", "resumes", "begins", "resumes"]
    steps = ["step 2", "step 3", "step 4"]
    assert [text.rpartition(", ")[2] for text in said] == [
        "which holds none yet", *steps, "which holds none yet", "step 2",
    ]  # fmt: skip
    first, second = run_ranks(refusals, 2, str(tmp_path), timeout=120)
    assert first == second
    assert "no such folder" in first["missing"]
    assert "the folder is empty" in first["empty"]
    assert "unfinished first save" in first["torn"]
    assert "holds no version of lightning_cpr, but other files" in first["other"]
    assert "another sharding plan or world size than this job" in first["foreign"]
    assert f"ckpt_path='{tmp_path}/run'" in first["foreign"]
    assert "has other tables or another model" in first["model"]
    assert "at step 5, and resume='never'" in first["never"]
    assert "needs exactly one CPRCallback" in first["wipe"]
