"""A job breaks and starts again with other ranks: survivors' rows are resharded, the lost ranks' are the store's.

The restarts are real but for torchrun, whose part `run_ranks` plays: one parent for both starts.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_cpr import CPRCallback
from lightning_cpr._lightning import Callback
from lightning_cpr.errors import StorageError
from lightning_cpr.policy.ledger import event_from_json, replay
from lightning_cpr.recovery.election import LostPeerError
from lightning_cpr.recovery.host import SHM
from lightning_cpr.report.events import read_events
from lightning_cpr.store.find import find_version
from lightning_cpr.store.manifest import Manifest
from lightning_cpr.store.reader import read_table
from lightning_cpr.store.storage import Storage
from lightning_cpr.store.verify import verify
from lightning_cpr.store.versions import list_versions, load_manifest
from lightning_cpr.strategy import TorchRecStrategy
from lightning_cpr.tables.dense import dense_state
from lightning_cpr.tables.scalars import fused_scalars
from tests._ranks import Outcome, rank_outcomes, run_ranks
from tests._tiny import BATCH_SIZE, TABLES, Tiny, make_trainer
from tests.dist.test_main_job import rows_of, stateful_loader
from tests.regress.jobs import PREFIX, Settled, assert_same, whole

BEFORE = {"a": "row_wise", "b": "table_wise", "c": "data_parallel"}
AFTER = {"a": "column_wise", "b": "row_wise", "c": "data_parallel"}
STEP = 24


def state_of(model: Any) -> dict[str, Any]:
    dense = {name: value.clone() for name, value in dense_state(model).items()}
    return {"rows": rows_of(model), "dense": dense, "scalars": fused_scalars(model, model.trainer.optimizers)}


class Break(Callback):
    """In batch ``step`` the lost ranks are killed; without any, all come to know that somebody is gone."""

    def __init__(self, lost: tuple[int, ...], step: int) -> None:
        self.lost, self.step = lost, step

    def on_before_backward(self, trainer: Any, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.step and trainer.global_rank in self.lost:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.step and not self.lost:
            raise LostPeerError("a peer is gone")


class First(Callback):
    """What is there when training begins."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if not hasattr(self, "state"):
            progress = trainer.fit_loop.epoch_loop.batch_progress
            self.state = state_of(module) | {"batch": batch_idx, "total": progress.total.ready}


def first_job(rank: int, world: int, root: str, lost: tuple[int, ...], count: int, step: int = STEP) -> dict[str, Any]:
    cpr = CPRCallback(root, save_every_n_steps=10, timeout_s=30, resume="reshard")
    model = Tiny(dense="adam")
    callbacks = [cpr, Settled(cpr), Break(lost, step)]
    trainer = make_trainer(world, TorchRecStrategy(plan=BEFORE), callbacks=callbacks, max_epochs=2)
    with pytest.raises(RuntimeError):
        trainer.fit(model, stateful_loader(rank, count))
    return state_of(model)


class Full(CPRCallback):
    """Its storage takes no more chunks until training starts."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        intercept = Storage.put

        def put(self: Storage, path: str, data: Any) -> int:
            if path.startswith("chunks/") and path.endswith(".safetensors"):
                raise StorageError(f"{path}: no space left on device")
            return intercept(self, path, data)

        Storage.put = put  # type: ignore[method-assign]
        try:
            super().on_fit_start(trainer, pl_module)
        finally:
            Storage.put = intercept  # type: ignore[method-assign]


def second_job(
    rank: int, world: int, root: str, count: int, plan: dict[str, str] = AFTER, full: bool = False
) -> dict[str, Any]:
    kind = Full if full else CPRCallback
    cpr, first = kind(root, save_every_n_steps=10, timeout_s=30, resume="reshard"), First()
    model = Tiny(dense="adam", filled=False)
    trainer = make_trainer(world, TorchRecStrategy(plan=plan), callbacks=[cpr, first], max_epochs=2)
    trainer.fit(model, stateful_loader(rank, count))
    more = {"pls": cpr.pls, "samples": cpr.samples, "counts": cpr.counts, "ledger": cpr.ledger}
    return first.state | more | {"end": trainer.global_step, "trained": len(model.losses)}


def broken(root: str, world: int, lost: tuple[int, ...], count: int, step: int = STEP) -> dict[int, dict[str, Any]]:
    """What the survivors had when their job broke, by rank."""
    env = {"TORCHELASTIC_MAX_RESTARTS": "1"}
    outcomes: list[Outcome] = rank_outcomes(first_job, world, root, lost, count, step, env=env)
    assert [o.rank for o in outcomes if o.exitcode == -signal.SIGKILL] == list(lost)
    survivors = {o.rank: o.value for o in outcomes if o.rank not in lost}
    assert all(survivors.values()), [o.error for o in outcomes]
    assert len(left(root)) == 2 * len(survivors)
    return survivors


def left(root: str) -> list[Path]:
    """What lies of the run in shared memory."""
    return list(SHM.glob(f"lightning-cpr-{list_versions(Storage(root))[0].run_id}.*"))


def tables_of(root: str, manifest: Manifest) -> dict[str, Tensor]:
    """Whole tables and states of a version, under the names of `whole`."""
    tables = {}
    for name in TABLES:
        weight, states = read_table(Storage(root), manifest, PREFIX + name)
        tables |= {name: weight} | {f"{name}.{state}@0": values for state, values in states.items()}
    return tables


def with_rows(tables: dict[str, Tensor], rows: dict[str, Tensor]) -> None:
    """Write what a rank of `BEFORE` held into whole tables."""
    for key, values in rows.items():
        name, span = key.removeprefix(PREFIX).split("[")
        span, kind = span.split("]")
        low, high = map(int, span.split(",")[0].split(":"))
        tables[f"{name}{kind}@0" if kind else name][low:high] = values


def assert_rows(runs: list[dict[str, Any]], wanted: dict[str, Tensor]) -> None:
    """Each column block of a row has a copy of its state."""
    got = whole([run["rows"] for run in runs], TABLES)
    for column in [key for key in got if key.startswith("a.sum@")]:
        assert torch.equal(got.pop(column), wanted["a.sum@0"]), column
    assert_same(got, {name: values for name, values in wanted.items() if name != "a.sum@0"})


# The last one breaks in the first batch of its second epoch.
@pytest.mark.parametrize(
    ("world", "lost", "then", "count"), [(4, (2, 3), 2, 30), (2, (0,), 3, 30), (2, (1,), 2, 30), (3, (), 2, STEP - 1)]
)
def test_survivors_rows_are_resharded(world: int, lost: tuple[int, ...], then: int, count: int, tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    storage = Storage(root)
    survivors = broken(root, world, lost, count)
    parent = find_version(root).manifest
    assert (parent.step, parent.samples, parent.consistency) == (20, 20 * world * BATCH_SIZE, "exact")
    runs = run_ranks(second_job, then, root, count)
    assert left(root) == []

    # Rows: the survivors' bit for bit as they left them, the lost ones' of the newest version.
    wanted = tables_of(root, parent)
    for state in survivors.values():
        with_rows(wanted, state["rows"])
    assert_rows(runs, wanted)
    donor = survivors[min(survivors)]
    for run in runs:
        assert_same(run["dense"], donor["dense"])
        for fqn, values in run["scalars"].items():
            assert values["iter"] in (STEP - 1, STEP)  # a broken batch may have got as far as the tables
            assert values["lr"] == pytest.approx(0.1), fqn
    # Place: the broken batch is the next; each batch is counted once.
    samples, todo = (STEP - 1) * world * BATCH_SIZE, 2 * count - STEP + 1
    places = {(r["batch"], r["total"], r["trained"], r["end"]) for r in runs}
    assert places == {((STEP - 1) % count, STEP, todo, 2 * count)}
    assert {r["samples"] for r in runs} == {samples + todo * then * BATCH_SIZE}

    # The version: of the old plan, mixed, and never taken for the state of a step.
    (made,) = [load_manifest(storage, ref) for ref in list_versions(storage) if "-handed" in ref.version]
    assert (made.step, made.samples, made.world_size, made.parent) == (STEP - 1, samples, world, parent.path)
    assert (made.consistency, made.plan_fingerprint) == ("mixed", parent.plan_fingerprint)
    assert {(r.spec.owner, r.complete_step) for r in made.shards if not r.spec.replicated} <= {
        (rank, 20 if rank in lost else STEP - 1) for rank in range(world)
    }
    assert verify(storage, made) == []
    assert find_version(f"{root}@{made.version}").manifest == made
    assert find_version(root).manifest.step == 2 * count
    assert made.epoch < find_version(root).manifest.epoch

    # PLS: the lost ranks' part alone.
    events = read_events(storage)
    started = [e for e in events if e["event"] == "run_started"][1]
    assert (started["resharded"], started["handed_over"], started["step"]) == (True, sorted(survivors), STEP - 1)
    recoveries = [e for e in events if e["event"] == "recovery"]
    assert len(recoveries) == bool(lost) == runs[0]["counts"]["recoveries"]
    sharded = [r.spec for r in parent.shards if not r.spec.replicated]
    gone = sum(spec.elements for spec in sharded if spec.owner in lost)
    loss = gone * (samples - parent.samples) / sum(spec.elements for spec in sharded) / runs[0]["samples"]
    assert runs[0]["pls"] == pytest.approx(loss, rel=1e-9)
    assert replay(sum(s.elements for s in sharded), [event_from_json(e["ledger"]) for e in recoveries]).lost == (
        gone * (samples - parent.samples)
    )
    for recovery in recoveries:
        assert (recovery["failed"], recovery["handed_over"]) == (list(lost), sorted(survivors))
        assert (recovery["version"], recovery["step"], recovery["resharded"]) == (parent.version, STEP - 1, True)


def test_without_room_for_the_version_the_newest_exact_one_is_used(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    broken(root, 3, (2,), 30)
    parent = find_version(root).manifest
    runs = run_ranks(second_job, 2, root, 30, AFTER, True)
    assert left(root) == []
    assert_rows(runs, tables_of(root, parent))
    assert {(r["batch"], r["pls"], r["end"]) for r in runs} == {(20, 0.0, 60)}
    events = read_events(Storage(root))
    (failed,) = [e for e in events if e["event"] == "save_failed"]
    assert "no space left" in failed["error"]
    assert not [ref for ref in list_versions(Storage(root)) if "-handed" in ref.version]
    assert [e["step"] for e in events if e["event"] == "run_started"] == [0, 20]


def test_a_job_that_breaks_again_before_its_first_save_is_resharded_once_more(tmp_path: Path) -> None:
    """3 ranks, 2 and 3 again: the last plan is that of the first job, the newest version of the one in between."""
    root, more = str(tmp_path / "root"), 3
    storage = Storage(root)
    broken(root, 3, (2,), 30)
    survivors = broken(root, 2, (1,), 30, STEP + more)
    first = load_manifest(storage, list_versions(storage)[0])
    assert (first.step, first.consistency) == (STEP - 1, "mixed")
    assert find_version(root).manifest.step == 20
    runs = run_ranks(second_job, 3, root, 30, BEFORE)
    assert left(root) == []
    wanted = tables_of(root, first)
    with_rows(wanted, survivors[0]["rows"])
    assert_rows(runs, wanted)
    assert {(r["batch"], r["end"]) for r in runs} == {(STEP + more - 1, 60)}
    # Each failure is charged for what it lost, from where the rows it lost were whole.
    charges = runs[0]["ledger"].charges
    lost = [(loss.owner, charge.samples - loss.held) for charge in charges for loss in charge.losses if loss.elements]
    assert lost == [(2, 3 * 3 * BATCH_SIZE), (1, more * 2 * BATCH_SIZE)]
