"""L01 (pytorch-lightning#21800), L07 (#17915), L08 (#20187, #6430), D07 (CheckpointException is no Exception), D13
(torchtitan#930), X08 (torchft#323): saves that fail, on some rank, and errors while a save is on its way.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from lightning_cpr import CPRCallback, FaultInjector
from lightning_cpr._lightning import Callback, pl
from lightning_cpr.checkpoint_io import find_version
from lightning_cpr.errors import CommitError, CPRError
from lightning_cpr.report.events import read_events
from lightning_cpr.store import Storage, newest
from lightning_cpr.strategy import TorchRecStrategy
from tests._ranks import rank_outcomes, run_ranks
from tests._tiny import make_trainer
from tests.dist.test_main_job import PLAN, rows_of, stateful_loader
from tests.regress.jobs import Logged, Noting, Settled, assert_same, step_of


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that a user other than root can reach."""
    folder = Path(tempfile.mkdtemp(prefix="cpr-l01-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def unwritable(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Saves at step 3, then the folder is made read-only, and both kinds of saves meet that."""

    class Close(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if step_of(trainer) == 3:
                trainer.save_checkpoint(f"{folder}/ck/good.ckpt")
                trainer.strategy.barrier()
                if rank == 0:
                    for place in [p for p in Path(folder).rglob("*") if p.is_dir()]:
                        place.chmod(0o555)
                trainer.strategy.barrier()
                if os.geteuid() == 0:
                    os.seteuid(65534)  # root writes anywhere

    found: dict[str, Any] = {}
    if os.geteuid() == 0 and rank == 0:
        for name in ("ck", "root"):
            os.makedirs(f"{folder}/{name}")
            os.chmod(f"{folder}/{name}", 0o755)
    cpr = CPRCallback(f"{folder}/root", save_every_n_steps=5, max_failed_saves=2, timeout_s=20)
    trainer = make_trainer(world, TorchRecStrategy(plan=PLAN), callbacks=[Close(), Settled(cpr), cpr])
    model = Noting(rank)
    started = time.monotonic()
    try:
        trainer.fit(model, stateful_loader(rank))
    except CPRError as error:
        found["background"] = (type(error).__name__, str(error), trainer.global_step, cpr.counts["failed"])
    trainer.state.status = pl.trainer.states.TrainerStatus.FINISHED
    try:
        trainer.save_checkpoint(f"{folder}/ck/bad.ckpt")
    except CommitError as error:
        found["own"] = (type(error).__name__, str(error))
    found["seconds"] = time.monotonic() - started
    return found


def test_l01_an_unwritable_place_is_told_on_every_rank(shared_folder: Path) -> None:
    results = run_ranks(unwritable, 2, str(shared_folder), timeout=120)
    for found in results:
        kind, text, step, failed = found["background"]
        assert (kind, failed) == ("CommitError", 2)
        assert step in (11, 12)  # saves of steps 5 and 10 failed, training went on until then
        assert "permission denied" in text
        assert "2 saves in a row failed" in text
        kind, text = found["own"]
        assert "permission denied" in text
        assert "was not committed, the one before it stands" in text
        assert found["seconds"] < 60
    assert find_version(shared_folder / "ck/good.ckpt").manifest.step == 3
    assert newest(Storage(str(shared_folder / "root"))).require().step == 0
    assert not (shared_folder / "ck/bad.ckpt").exists()


def raising(rank: int, world: int, folder: str, saves_on_exception: bool) -> None:
    class Bug(Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if step_of(trainer) == 6 and rank == 1:
                raise ValueError("x")

    cpr = CPRCallback(f"{folder}/root", save_every_n_steps=5, timeout_s=600)
    keeper = pl.callbacks.ModelCheckpoint(
        f"{folder}/ck", every_n_train_steps=4, save_last=True, save_top_k=-1, save_on_exception=True
    )
    rescue = pl.callbacks.OnExceptionCheckpoint(f"{folder}/rescue")
    trainer = make_trainer(
        world, TorchRecStrategy(plan=PLAN), callbacks=[Settled(cpr), Bug(), cpr, keeper, rescue],
        enable_checkpointing=True,
    )  # fmt: skip
    trainer.fit(Noting(rank), stateful_loader(rank))


def test_l08_the_real_error_comes_first_and_nobody_hangs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    outcomes = rank_outcomes(raising, 2, str(tmp_path), True, timeout=100)
    assert time.monotonic() - started < 90
    failed, other = outcomes[1], outcomes[0]
    assert failed.error is not None
    assert failed.error.rstrip().endswith("ValueError: x")
    assert "During handling" not in failed.error
    assert other.error is not None
    assert "still running" not in other.error
    # no new snapshot, the old ones are valid
    assert sorted(p.name for p in (tmp_path / "ck").iterdir() if p.is_file() or p.is_symlink()) == [
        "epoch=0-step=4.ckpt", "last.ckpt",
    ]  # fmt: skip
    assert find_version(tmp_path / "ck/last.ckpt").manifest.step == 4
    assert not (tmp_path / "rescue").exists() or not [p for p in (tmp_path / "rescue").iterdir() if p.is_file()]
    assert newest(Storage(str(tmp_path / "root"))).require().step == 5
    assert "is not saved: an error ends the run" in capfd.readouterr().err


class Announced(pl.loggers.logger.Logger):
    """Opens the newest version whenever a commit is announced."""

    name, version = "announced", 0

    def __init__(self, root: str, rank: int) -> None:
        super().__init__()
        self.root, self.steps, self.files = root, [], []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "cpr/save_committed_samples" in metrics:
            version = find_version(self.root)
            version.rank_blobs()
            assert version.manifest.samples >= metrics["cpr/save_committed_samples"]
            self.steps.append(round(metrics["cpr/save_committed_samples"] / 8))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        return

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self.files.append(find_version(checkpoint_callback._last_checkpoint_saved).manifest.step)


def announced(rank: int, world: int, folder: str) -> tuple[list[int], list[int], int]:
    logger = Announced(f"{folder}/root", rank)
    cpr = CPRCallback(f"{folder}/root", save_every_n_steps=5, timeout_s=30)
    keeper = pl.callbacks.ModelCheckpoint(f"{folder}/ck", every_n_train_steps=6, save_top_k=-1)
    trainer = make_trainer(
        world, TorchRecStrategy(plan=PLAN), max_steps=12, callbacks=[Settled(cpr), cpr, keeper], logger=logger,
        enable_checkpointing=True,
    )  # fmt: skip
    trainer.fit(Noting(rank), stateful_loader(rank))
    return logger.steps, logger.files, cpr.counts["commits"]


def test_l07_a_commit_is_announced_once_it_can_be_read(tmp_path: Path) -> None:
    first, second = run_ranks(announced, 2, str(tmp_path), timeout=120)
    assert first == ([0, 5, 10, 12], [6, 12], 4)
    assert second[0] == []


class Odd(FaultInjector):
    """Raises at a save's point what is no Exception."""

    def at_point(self, point: str, step: int) -> None:
        if point == "mid_write" and step in (5, 10) and self._rank == 1:
            raise CheckpointException("no exception", {})


def odd(rank: int, world: int, root: str) -> tuple[str, int]:
    cpr = CPRCallback(root, save_every_n_steps=5, max_failed_saves=2, timeout_s=20)
    trainer = make_trainer(world, TorchRecStrategy(plan=PLAN), callbacks=[Settled(cpr), cpr, Odd()])
    try:
        trainer.fit(Noting(rank), stateful_loader(rank))
    except CommitError as error:
        return str(error), cpr.counts["failed"]
    return "", 0


def test_d07_what_is_no_exception_surfaces_as_an_error_of_ours(tmp_path: Path) -> None:
    assert not issubclass(CheckpointException, Exception)
    for text, failed in run_ranks(odd, 2, str(tmp_path), timeout=120):
        assert "CheckpointException" in text
        assert "rank 1 failed" in text
        assert failed == 2
    assert newest(Storage(str(tmp_path))).require().step == 0


def stalled(rank: int, world: int, folder: str, point: str, step: int) -> dict[str, Any]:
    cpr = CPRCallback(folder, save_every_n_steps=5, timeout_s=2, max_failed_saves=1)
    injector = FaultInjector().hang(rank=1, step=step, point=point)  # type: ignore[arg-type]
    trainer = make_trainer(
        world, TorchRecStrategy(plan=PLAN), max_steps=8, callbacks=[Settled(cpr, until=4), cpr, injector]
    )
    raised: list[float] = []

    class Watch(Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            raised.append(time.monotonic())

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            self.last = time.monotonic()

    watch = Watch()
    trainer.callbacks.append(watch)
    error = ""
    try:
        trainer.fit(Noting(rank), stateful_loader(rank))
    except Exception as e:
        error = f"{type(e).__name__}: {e}"
    return {
        "error": error,
        "waited": raised[0] - watch.last if raised else None,
        "ended": time.monotonic() - watch.last,
    }


@pytest.mark.parametrize(("point", "step"), [("pre_write", 8), ("pre_commit", 8), ("pre_write", 5)])
def test_x08_the_timeout_holds_at_every_wait(tmp_path: Path, point: str, step: int) -> None:
    outcomes = rank_outcomes(stalled, 2, str(tmp_path), point, step, timeout=100)
    for outcome in outcomes:
        assert outcome.value is not None, outcome.error
        assert outcome.value["error"], outcome
        assert outcome.value["waited"] < 8, outcome.value
        assert outcome.value["ended"] < 30, outcome.value
    assert newest(Storage(str(tmp_path))).require().step == (5 if step == 8 else 0)


def slow(rank: int, world: int, root: str) -> dict[str, Any]:
    cpr = CPRCallback(root, save_every_n_steps=5, timeout_s=60)
    injector = FaultInjector().slow(rank=1, step=7, seconds=1.5)
    trainer = make_trainer(world, TorchRecStrategy(plan=PLAN), max_steps=7, callbacks=[Settled(cpr), cpr, injector])
    model = Noting(rank)
    trainer.fit(model, stateful_loader(rank))
    kept = rows_of(model)
    again = Noting(rank, filled=False)
    with Logged():
        trainer = make_trainer(world, TorchRecStrategy(plan=PLAN))
        trainer.validate(again, stateful_loader(rank, 1), ckpt_path=root, verbose=False)
    return {"fired": injector.count("slow"), "kept": kept, "read": rows_of(again)}


def test_d13_a_load_right_after_a_slow_save_gets_it(tmp_path: Path) -> None:
    results = run_ranks(slow, 2, str(tmp_path), timeout=120)
    assert [r["fired"] for r in results] == [0, 1]
    for result in results:
        weights = {k: v for k, v in result["read"].items() if k.endswith("]")}
        assert_same(weights, {k: result["kept"][k] for k in weights})
    events = read_events(Storage(str(tmp_path)))
    assert next(e["seconds"] for e in events if e["event"] == "save_committed" and e["step"] == 7) >= 1.5


def test_the_errno_of_a_refusal_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="a file stands where a folder is needed") as caught:
        Storage(str(tmp_path / "file")).put("x", b"y")
    assert caught.value.errno == errno.ENOTDIR
    assert isinstance(caught.value, CPRError)
