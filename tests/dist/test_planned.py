"""The callback with the planner, priorities and odd hands: what is saved when, what a failure costs, and memory."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_cpr import CPRCallback, FaultInjector
from lightning_cpr._lightning import Callback
from lightning_cpr.errors import ConfigError
from lightning_cpr.report.events import read_events
from lightning_cpr.store.reader import read_table
from lightning_cpr.store.storage import Storage
from lightning_cpr.strategy import TorchRecStrategy
from lightning_cpr.tables.shards import local_shards
from tests._ranks import run_ranks
from tests._tiny import Tiny, make_trainer
from tests.dist.test_incremental import NAME, Steps, fit, manifests, own_rows, whole
from tests.dist.test_main_job import PLAN, settle, stateful_loader


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"target_pls": 0}, r"target_pls=0: must lie in \(0, 1\]"),
        ({"target_pls": 1.01}, r"target_pls=1.01: must lie in \(0, 1\]"),
        ({"mtbf": "-1h"}, "a duration such as"),
        ({"mtbf": 0}, "mtbf=0.0: must be a finite number above 0"),
        ({"max_pls": 0.05}, "max_pls=0.05: must be at least target_pls=0.1"),
        ({"recovery": "some"}, "recovery='some': must be one of auto, full, partial"),
        ({"incremental": "no"}, "incremental='no': must be one of consecutive, full, intermittent, one_shot"),
        ({"bits": 5}, r"bits=5: must be one of None, 8, 4, 3, 2, 'auto'"),
        ({"priority": "lru"}, "priority='lru': must be one of auto, mfu, scar, ssu, vanilla"),
        ({"ratio": 1.5}, r"ratio=1.5: must lie in \(0, 1\]"),
        ({"ratio": 0}, r"ratio=0: must lie in \(0, 1\]"),
        ({"save_interval": 0}, "save_interval=0.0: must be a finite number above 0"),
        ({"save_interval": "-5min"}, "a duration such as"),
        ({"save_every_n_steps": 0}, "save_every_n_steps=0: must be a whole number"),
        ({"save_every_n_steps": 1, "save_interval": "1h"}, "save_interval=.1h.: set one of them"),
    ],
)
def test_bad_arguments_are_refused_by_name(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CPRCallback("root", **kwargs)


def prioritised(rank: int, world: int, root: str) -> dict[str, Any]:
    kwargs: dict[str, Any] = {"save_every_n_steps": 16, "ratio": 0.125, "recovery": "partial", "priority_tables": ["a"]}
    runs = {}
    for variant in ("mfu", "ssu", "scar"):
        injector = FaultInjector().wipe(1, 21)
        runs[variant] = fit(rank, world, f"{root}/{variant}", 32, injector, priority=variant, **kwargs)
    runs["paper"] = fit(rank, world, f"{root}/paper", 20, priority="mfu", exact_close=False, **kwargs)
    return runs


def test_priority_saves_are_mixed_and_each_cycle_closes_exactly(tmp_path: Path) -> None:
    results = run_ranks(prioritised, 2, str(tmp_path), timeout=150)
    for variant in ("mfu", "ssu", "scar"):
        root = str(tmp_path / variant)
        runs = [r[variant] for r in results]
        found = manifests(root)
        steps = {m.step for m in found}
        assert {m.step for m in found if m.consistency == "exact"} >= {0, 16, 32}
        assert steps >= set(range(0, 21, 2))
        events = read_events(Storage(root))
        recovery = next(e for e in events if e["event"] == "recovery")
        # PLS counts from the step that the failed shards were complete to, not from the newest, mixed version
        version = next(m for m in found if m.version == recovery["version"])
        assert version.consistency == "mixed"
        losses = recovery["ledger"]["losses"]
        complete = min(s.complete_step for s in version.shards if s.spec.owner == 1)
        assert [loss["held"] for loss in losses] == [complete * 8]
        assert complete >= 16
        assert recovery["lost_row_updates_exact"] is True
        for manifest in found:
            for table in "abc":
                weight, states = read_table(Storage(root), manifest, f"{NAME}{table}")
                expected, sums = whole(runs, manifest.step, table)
                stale = (weight != expected).any(1) | (states["sum"] != sums)
                if manifest.consistency == "exact" or table != "a":
                    assert not stale.any(), (manifest.version, table)
                    continue
                # a shard is as complete as it says, and a mixed version writes an eighth of the rows at most
                assert own_rows(manifest) <= 2 * 7
                for record in manifest.shards:
                    if record.spec.table == f"{NAME}a" and record.complete_step == manifest.step:
                        assert not stale[record.spec.row_start : record.spec.row_end].any()
    paper = manifests(str(tmp_path / "paper"))
    assert [m.step for m in paper if m.consistency == "exact"] == [0]
    assert len(paper) == 11


class Planned(Callback):
    """Waits for saves, so that a run of a second sees them committed."""

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        settle(trainer)


def planned(rank: int, world: int, root: str) -> dict[str, Any]:
    model = Tiny(dense="adam")
    callback = CPRCallback(root, target_pls=0.1, mtbf="28h", bits="auto", timeout_s=20)
    injector = FaultInjector().wipe(1, 10)
    trainer = make_trainer(world, TorchRecStrategy(plan=PLAN), callbacks=[callback, Planned(), injector], max_steps=64)
    trainer.fit(model, stateful_loader(rank))
    return {"pls": callback.pls, "counts": callback.counts}


def test_the_planner_needs_nothing_but_a_target_and_an_mtbf(tmp_path: Path) -> None:
    results = run_ranks(planned, 2, str(tmp_path), timeout=90)
    events = read_events(Storage(str(tmp_path)))
    plans = [e for e in events if e["event"] == "replan"]
    assert {e["because"] for e in plans} >= {"saved", "failed", "recovered"}
    assert all(e["mtbf"] == 28 * 3600 and e["reasons"] for e in plans)
    recovery = next(e for e in events if e["event"] == "recovery")
    assert recovery["mode"] == "partial"
    assert recovery["reason"].startswith("PLS will be")
    assert results[0]["pls"] == results[1]["pls"] > 0
    # the end of the run is not known at the first save: 8 bits, the safe width
    assert next(e for e in events if e["event"] == "bits")["bits"] == 8
    assert {m.consistency for m in manifests(str(tmp_path))} >= {"exact"}
    assert events[-1]["event"] == "run_ended"


class Hands(Callback):
    """Writes rows without training: after step 3 they are marked dirty; and scribbles on them during a write."""

    def __init__(self, callback: CPRCallback) -> None:
        self.callback = callback
        self.expected: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        step = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if step == 3:
            with torch.no_grad():
                for shard in local_shards(trainer.lightning_module):
                    shard.weight.fill_(float(step))
            for table in ("a", "b", "c"):
                self.callback.mark_dirty(table)


class Scribble(FaultInjector):
    """At ``pre_write`` and ``mid_write`` of the save of step 6 the live rows are overwritten, and put back after it."""

    def at_point(self, point: str, step: int) -> None:
        if step == 6 and point in ("pre_write", "post_commit"):
            for shard in self._local_shards():  # type: ignore[misc]
                with torch.no_grad():
                    shard.weight.add_(1.0 if point == "pre_write" else -1.0)
        super().at_point(point, step)


def by_hand(rank: int, world: int, root: str) -> list[dict[str, Any]]:
    callback = CPRCallback(root, save_every_n_steps=2, incremental="consecutive", timeout_s=20)
    model, steps = Tiny(dense="adam"), Steps()
    trainer = make_trainer(
        world, TorchRecStrategy(plan=PLAN), callbacks=[Hands(callback), callback, steps, Scribble()], max_steps=6
    )
    trainer.fit(model, stateful_loader(rank))
    before = {k: v.clone() for k, v in steps.rows[6].items()}
    settle(trainer)
    return [{"rows": {4: steps.rows[4], 6: before}}]


def test_marked_rows_are_saved_and_a_write_is_not_disturbed_by_training(tmp_path: Path) -> None:
    results = run_ranks(by_hand, 2, str(tmp_path), timeout=90)
    runs = [r[0] for r in results]
    found = {m.step: m for m in manifests(str(tmp_path))}
    weight, _ = read_table(Storage(str(tmp_path)), found[4], f"{NAME}a")
    assert torch.equal(weight, whole(runs, 4, "a")[0])
    assert own_rows(found[4]) == 100
    assert (weight == 3.0).all(1).any()
    weight, states = read_table(Storage(str(tmp_path)), found[6], f"{NAME}a")
    # what is written is what was there when the save was staged; the scribbling went to the live rows alone
    live = whole(runs, 6, "a")
    assert torch.equal(states["sum"], live[1])
    assert not (weight - live[0]).abs().gt(0.5).any()


class Memory(Callback):
    def __init__(self) -> None:
        self.held: dict[int, int] = {}

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        settle(trainer)
        step = trainer.fit_loop.epoch_loop.batch_progress.total.ready - 1
        if step in (50, 250):
            gc.collect()
            self.held[step] = tracemalloc.get_traced_memory()[0]


def many_saves(rank: int, world: int, root: str) -> dict[str, Any]:
    callback = CPRCallback(root, save_every_n_steps=2, bits=8, timeout_s=20)
    memory = Memory()
    trainer = make_trainer(
        world, TorchRecStrategy(plan=PLAN), callbacks=[callback, memory], max_steps=252, max_epochs=-1
    )
    tracemalloc.start()
    trainer.fit(Tiny(dense="adam"), stateful_loader(rank))
    tracemalloc.stop()
    return {"held": memory.held, "commits": callback.counts["commits"], "staged": callback._cycle.saves.stager.nbytes}


def test_memory_does_not_grow_over_100_saves(tmp_path: Path) -> None:
    (result,) = run_ranks(many_saves, 1, str(tmp_path), timeout=200)
    assert result["commits"] == 127
    # one copy of the rows and their sums, whatever number of saves
    assert result["staged"] == 4 * (100 * 8 + 100 + 7 * 8 + 7 + 1 * 4 + 1)
    assert result["held"][250] - result["held"][50] < 256 << 10
