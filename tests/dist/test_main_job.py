"""The main job: a run saves behind its training, loses a shard, and gets only that shard back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_cpr import CPRCallback, FaultInjector
from lightning_cpr._lightning import Callback
from lightning_cpr.policy.ledger import event_from_json, replay
from lightning_cpr.report.events import read_events
from lightning_cpr.store import retention
from lightning_cpr.store.find import find_version
from lightning_cpr.store.manifest import split_version
from lightning_cpr.store.reader import read_table
from lightning_cpr.store.storage import Storage
from lightning_cpr.store.verify import verify
from lightning_cpr.store.versions import list_versions, load_manifest
from lightning_cpr.strategy import TorchRecStrategy
from lightning_cpr.tables.shards import local_shards
from tests._ranks import run_ranks
from tests._tiny import NUM_BATCHES, Tiny, TinyDataset, make_batch, make_trainer

PLAN = {"a": "row_wise", "b": "table_wise", "c": "table_wise"}


class Snapshots(Callback):
    """Copies of this rank's shards after the batches asked for, before and after CPRCallback has acted on them."""

    def __init__(self, steps: tuple[int, ...]) -> None:
        self.steps = steps
        self.taken: dict[tuple[str, int], dict[str, Tensor]] = {}

    def _take(self, when: str, trainer: Any) -> None:
        step = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if step in self.steps:
            self.taken[when, step] = rows_of(trainer.lightning_module)

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        settle(trainer)
        step = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if step - 1 in self.steps:
            self.taken["next", step - 1] = rows_of(trainer.lightning_module)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self._take("end", trainer)


def settle(trainer: Any) -> None:
    """Let the save in flight end: what a recovery finds must not depend on how fast the machine is."""
    saves = next(c for c in trainer.callbacks if isinstance(c, CPRCallback))._cycle.saves
    thread = saves._writer._thread
    if thread is not None:
        thread.join(20)
        assert not thread.is_alive()


def rows_of(model: Any) -> dict[str, Tensor]:
    """This rank's rows and optimizer states, copied, by shard."""
    return {
        f"{s.spec.table}[{s.spec.row_start}:{s.spec.row_end},{s.spec.col_start}]{name}": tensor.clone()
        for s in local_shards(model)
        for name, tensor in {"": s.weight, **{f".{n}": t for n, t in s.states.items()}}.items()
    }


def stateful_loader(rank: int, count: int = NUM_BATCHES) -> StatefulDataLoader[Any]:
    """The rank's fixed batches, in order, from a loader that knows where it stands."""
    return StatefulDataLoader(TinyDataset([make_batch(index, rank) for index in range(count)]), batch_size=None)


def wiped_run(rank: int, world: int, root: str, recovery: str) -> dict[str, Any]:
    model = Tiny(dense="adam")
    snapshots = Snapshots((10, 20, 23))
    injector = FaultInjector().wipe(rank=1, step=23)
    callback = CPRCallback(root, save_every_n_steps=10, recovery=recovery, timeout_s=30)
    trainer = make_trainer(world, TorchRecStrategy(plan=PLAN), callbacks=[callback, snapshots, injector])
    trainer.fit(model, stateful_loader(rank, count=32))
    return {
        "losses": model.losses,
        "taken": snapshots.taken,
        "fired": injector.count("wipe"),
        "pls": callback.pls,
        "rows": rows_of(model),
        "counts": callback.counts,
    }


def test_a_wiped_shard_alone_comes_back(tmp_path: Path) -> None:
    results = run_ranks(wiped_run, 2, str(tmp_path), "partial")
    assert [r["fired"] for r in results] == [0, 1]
    # the survivor's rows are bit-identical across the recovery
    survivor = results[0]["taken"]
    assert_equal(survivor["end", 23], survivor["next", 23])
    # the wiped shard is bit-equal to its last saved version: of step 20, or 10 if that was not committed yet
    lost = results[1]["taken"]
    events = read_events(Storage(str(tmp_path)))
    recovery = next(e for e in events if e["event"] == "recovery")
    step = split_version(recovery["version"]).step
    assert step in (10, 20)
    assert_equal(lost["next", 23], lost["end", step])
    assert not torch.equal(*[lost["end", s]["net.ebc.embedding_bags.a[50:100,0]"] for s in (step, 23)])
    # PLS of the formula: the steps since then of 32, weighted by rank 1's share of the elements
    elements = {0: 50 * 8 + 7 * 8, 1: 50 * 8 + 1 * 4}
    if "net.ebc.embedding_bags.c[0:1,0]" not in lost["end", 20]:
        elements = {0: 50 * 8 + 1 * 4, 1: 50 * 8 + 7 * 8}
    expected = elements[1] / sum(elements.values()) * (23 - step) / 32
    assert results[0]["pls"] == results[1]["pls"] == pytest.approx(expected, rel=1e-12)
    ledger = replay(sum(elements.values()), [event_from_json(recovery["ledger"])])
    assert ledger.pls(recovery["total_samples"]) == results[0]["pls"]
    assert recovery["mode"] == "partial"
    assert recovery["failed"] == [1]
    assert [e["event"] for e in events if e["event"] == "fault"] == ["fault"]


def test_full_recovery_rewinds_everybody(tmp_path: Path) -> None:
    wiped = run_ranks(wiped_run, 2, str(tmp_path / "wiped"), "full")
    plain = run_ranks(plain_run, 2, str(tmp_path / "plain"))
    events = read_events(Storage(str(tmp_path / "wiped")))
    step = next(split_version(e["version"]).step for e in events if e["event"] == "recovery")
    assert step in (10, 20)
    for ours, reference in zip(wiped, plain, strict=True):
        # the steps since the version were done twice, with the same losses
        assert ours["losses"][:23] == reference["losses"][:23]
        assert ours["losses"][23:] == reference["losses"][step:]
        assert_equal(ours["rows"], reference["rows"])
        assert ours["pls"] == 0.0


def plain_run(rank: int, world: int, root: str) -> dict[str, Any]:
    model = Tiny(dense="adam")
    callback = CPRCallback(root, save_every_n_steps=10, timeout_s=30)
    trainer = make_trainer(world, TorchRecStrategy(plan=PLAN), callbacks=[callback])
    trainer.fit(model, stateful_loader(rank, count=32))
    return {"losses": model.losses, "rows": rows_of(model), "counts": callback.counts}


def test_every_version_is_whole_and_the_last_is_the_end_state(tmp_path: Path) -> None:
    results = run_ranks(plain_run, 2, str(tmp_path))
    version = find_version(str(tmp_path))
    assert version.manifest.step == 32
    rows: dict[str, Tensor] = {k: v for r in results for k, v in r["rows"].items()}
    weight, states = read_table(version.storage, version.manifest, "net.ebc.embedding_bags.a")
    name = "net.ebc.embedding_bags.a"
    assert torch.equal(weight, torch.cat([rows[f"{name}[0:50,0]"], rows[f"{name}[50:100,0]"]]))
    assert torch.equal(states["sum"], torch.cat([rows[f"{name}[0:50,0].sum"], rows[f"{name}[50:100,0].sum"]]))
    committed = [e["step"] for e in read_events(Storage(str(tmp_path))) if e["event"] == "save_committed"]
    assert committed[0] == 0
    assert committed[-1] == 32


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def moved_run(rank: int, world: int, root: str) -> list[tuple[int, float, dict[str, int]]]:
    seen = []
    for epochs, name in ((1, "first"), (2, "second")):
        callback = CPRCallback(f"{root}/{name}", save_every_n_steps=10, recovery="partial", timeout_s=30)
        faults = [FaultInjector().wipe(rank=0, step=23)] if name == "first" else []
        strategy = TorchRecStrategy(plan=PLAN)
        trainer = make_trainer(world, strategy, callbacks=[callback, *faults], max_epochs=epochs)
        trainer.fit(Tiny(dense="adam"), stateful_loader(rank, count=32))
        seen.append((callback.samples, callback.pls, {k: callback.counts[k] for k in ("recoveries", "failed")}))
        if name == "first":
            os.rename(f"{root}/first", f"{root}/second")
    return seen


def test_a_run_goes_on_in_a_root_that_was_renamed(tmp_path: Path) -> None:
    ((first, second),) = run_ranks(moved_run, 1, str(tmp_path))
    # the same samples are lost, of twice as many
    assert first[1] > 0
    assert second[:2] == (2 * first[0], pytest.approx(first[1] / 2, rel=1e-12))
    assert first[2] == second[2] == {"recoveries": 1, "failed": 0}
    started = [e["step"] for e in read_events(Storage(str(tmp_path / "second"))) if e["event"] == "run_started"]
    assert started == [0, 32]


def kept_run(rank: int, world: int, root: str) -> None:
    retention.GRACE_S = 0.0
    callback = CPRCallback(root, save_every_n_steps=4, incremental="consecutive", keep_last=2, timeout_s=30)
    trainer = make_trainer(world, TorchRecStrategy(plan=PLAN), callbacks=[callback])
    trainer.fit(Tiny(dense="adam"), stateful_loader(rank, count=32))


def test_old_versions_go_and_what_is_kept_is_whole(tmp_path: Path) -> None:
    run_ranks(kept_run, 1, str(tmp_path))
    storage = Storage(str(tmp_path))
    events = [e for e in read_events(storage) if e["event"] == "save_committed"]
    versions = list_versions(storage)
    assert len(events) > len(versions) == 2
    assert versions[0].step == 32
    for ref in versions:
        assert verify(storage, load_manifest(storage, ref)) == []
