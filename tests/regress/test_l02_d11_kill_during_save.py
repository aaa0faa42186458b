"""L02 (pytorch-lightning#688, #19970), D11 (awsome-distributed-ai#190), E02 as far as the job's end goes
(pytorch#146371): SIGKILL at each point of a save, and what the next run makes of it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from lightning_cpr import CPRCallback, FaultInjector
from lightning_cpr.report.events import read_events
from lightning_cpr.store import Storage, newest, torn_versions
from lightning_cpr.strategy import TorchRecStrategy
from tests._ranks import rank_outcomes, run_ranks
from tests._tiny import make_trainer
from tests.dist.test_main_job import PLAN, assert_equal, rows_of, stateful_loader
from tests.regress.jobs import Logged, Noting, Settled

STEPS = 16


def killed(rank: int, world: int, root: str, victim: int, point: str) -> None:
    cpr = CPRCallback(root, save_every_n_steps=5, timeout_s=30)
    # The save of step 5 has ended before step 10 comes; the one of step 10 is met on its way.
    settled = Settled(cpr, until=9)
    injector = FaultInjector().kill(rank=victim, step=10, point=point)  # type: ignore[arg-type]
    trainer = make_trainer(world, TorchRecStrategy(plan=PLAN), max_steps=STEPS, callbacks=[settled, cpr, injector])
    trainer.fit(Noting(rank, dense="adam"), stateful_loader(rank))


def resumed(rank: int, world: int, root: str) -> dict[str, Any]:
    cpr = CPRCallback(root, save_every_n_steps=100, timeout_s=30)
    model = Noting(rank, dense="adam", filled=False)
    trainer = make_trainer(world, TorchRecStrategy(plan=PLAN), max_steps=STEPS, callbacks=[cpr])
    with Logged() as logged:
        trainer.fit(model, stateful_loader(rank))
    return {
        "ids": model.ids, "losses": model.losses, "rows": rows_of(model), "samples": cpr.samples,
        "torn": logged.having("save that was not committed"),
    }  # fmt: skip


def uninterrupted(rank: int, world: int) -> dict[str, Any]:
    model = Noting(rank, dense="adam")
    make_trainer(world, TorchRecStrategy(plan=PLAN), max_steps=STEPS).fit(model, stateful_loader(rank))
    return {"losses": model.losses, "rows": rows_of(model)}


@pytest.fixture(scope="module")
def references() -> list[dict[str, Any]]:
    return run_ranks(uninterrupted, 2, timeout=120)


@pytest.mark.parametrize(
    ("victim", "point"),
    [(1, "forward"), (1, "pre_write"), (1, "mid_write"), (1, "pre_commit"), (1, "post_commit"), (0, "pre_commit")],
)
def test_l02_d11_the_version_before_stands(
    tmp_path: Path, references: list[dict[str, Any]], victim: int, point: str
) -> None:
    started = time.monotonic()
    outcomes = rank_outcomes(killed, 2, str(tmp_path), victim, point, timeout=120)
    assert outcomes[victim].exitcode == -9
    # the other one is told by its broken connection, and ends
    assert outcomes[1 - victim].error
    assert time.monotonic() - started < 100

    storage = Storage(str(tmp_path))
    faults = [e for e in read_events(storage) if e["event"] == "fault"]
    assert [(e["rank"], e["kind"], e["point"], e["step"]) for e in faults] == [(victim, "kill", point, 10)]
    expected = 10 if point == "post_commit" else 5
    assert newest(storage).require().step == expected
    assert not [p for p in (tmp_path / "manifests").iterdir() if not p.name.endswith((".json", ".fence"))]

    # A rank that lives may have cleaned up after the aborted save already.
    torn = torn_versions(storage)
    assert torn or (victim, point) != (0, "pre_commit")
    runs = run_ranks(resumed, 2, str(tmp_path), timeout=120)
    for run, ref in zip(runs, references, strict=True):
        assert run["ids"] == list(range(expected, STEPS))
        assert run["losses"] == ref["losses"][expected:]
        assert_equal(run["rows"], ref["rows"])
        assert run["samples"] == STEPS * 4 * 2
    assert bool(runs[0]["torn"]) == bool(torn)
    # what the killed save left is gone after the next commit
    assert torn_versions(storage) == []
    assert newest(storage).require().step == STEPS
