"""SIGTERM on one rank of a fit: both ranks save the same step, which a new job resumes from, and leave with 143."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lightning_cpr import CPRCallback
from lightning_cpr._lightning import Callback
from lightning_cpr.checkpoint_io import find_version
from lightning_cpr.recovery.preempt import EXIT_PREEMPTED
from lightning_cpr.strategy import TorchRecStrategy
from tests._ranks import run_ranks
from tests._tiny import Tiny, make_trainer
from tests.dist._jobs import ROOT, run_job, still_running
from tests.dist.test_main_job import PLAN, assert_equal, rows_of, stateful_loader

JOB = ROOT / "tests" / "dist" / "preempt_job.py"
GUARDED = ["-m", "lightning_cpr.cli", "run", "--standalone", "--max-restarts=0", "--nproc-per-node=2", "--spares=0"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=0", "--nproc-per-node=2"]


class Ask(Callback):
    """SIGTERM in batch 12 of rank 1."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and trainer.fit_loop.total_batch_idx == 11:
            os.kill(os.getpid(), signal.SIGTERM)


def preempted(rank: int, world: int, root: str) -> tuple[Any, int, dict[str, Tensor], list[int], dict[str, Tensor]]:
    """(exit code, batches, rows then; batches of the job that goes on, its rows when it starts to train)."""
    before = signal.getsignal(signal.SIGTERM)
    model = Tiny(dense="adam")
    callback = CPRCallback(root, save_every_n_steps=1000, timeout_s=30)
    trainer = make_trainer(world, TorchRecStrategy(plan=PLAN), callbacks=[callback, Ask()], max_epochs=200)
    code: Any = None
    try:
        trainer.fit(model, stateful_loader(rank))
    except SystemExit as end:
        code = end.code
    assert signal.getsignal(signal.SIGTERM) == before
    stopped, rows = len(model.seen), rows_of(model)

    seen_rows: dict[str, Tensor] = {}

    class First(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
            if not seen_rows:
                seen_rows.update(rows_of(module))

    again = Tiny(dense="adam")
    trainer = make_trainer(
        world, TorchRecStrategy(plan=PLAN), callbacks=[CPRCallback(root, save_every_n_steps=1000), First()],
        max_steps=stopped + 2,
    )  # fmt: skip
    trainer.fit(again, stateful_loader(rank))
    return code, stopped, rows, again.seen, seen_rows


def test_a_job_that_was_asked_to_end_goes_on_where_it_stopped(tmp_path: Path) -> None:
    results = run_ranks(preempted, 2, str(tmp_path), timeout=200)
    (stopped,) = {stopped for _, stopped, _, _, _ in results}
    assert stopped >= 14
    for code, _, rows, seen, seen_rows in results:
        assert code == EXIT_PREEMPTED
        assert_equal(rows, seen_rows)
        assert seen == [stopped % 64, (stopped + 1) % 64]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "target"),
    [(GUARDED, "parent"), (TORCHRUN, "self"), ([], "self")],
    ids=["lightning-cpr run", "torchrun", "Lightning's launcher"],
)
def test_both_ranks_save_the_same_step_and_leave(launcher: list[str], target: str, tmp_path: Path) -> None:
    job = run_job(JOB, tmp_path, ["--target", target], [], timeout=240, launch=[sys.executable, *launcher])
    told = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert {t["error"] for t in told} == {f"SystemExit({EXIT_PREEMPTED})"}, job.stderr[-4000:]
    (stop,) = {t["step"] for t in told}
    assert 14 <= stop < 120
    manifest = find_version(str(tmp_path / "root")).manifest
    assert (manifest.step, manifest.consistency) == (stop, "exact")
    assert job.code == (1 if launcher == TORCHRUN else EXIT_PREEMPTED)
    if launcher:
        assert f"exitcode  : {EXIT_PREEMPTED}" in job.stderr
    assert "takes over" not in job.stderr
    assert still_running(tmp_path) == []
