"""The newest version is of the timeline that the run is in: after a rewind, a step back by name, a failed last save."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from lightning_cpr import CPRCallback, FaultInjector
from lightning_cpr._lightning import Callback
from lightning_cpr.report.events import read_events
from lightning_cpr.store.find import find_version
from lightning_cpr.store.manifest import Manifest
from lightning_cpr.store.reader import read_table
from lightning_cpr.store.storage import Storage
from lightning_cpr.store.versions import list_versions, load_manifest
from lightning_cpr.strategy import TorchRecStrategy
from tests._ranks import run_ranks
from tests._tiny import BATCH_SIZE, TABLES, Tiny, make_trainer
from tests.dist.test_main_job import rows_of, stateful_loader

BATCHES = 20


class Flush(Callback):
    """Ends each save before the next batch, so that a fault meets the versions that the test means."""

    def __init__(self, callback: CPRCallback) -> None:
        self.callback = callback

    def on_train_batch_start(self, *args: Any) -> None:
        if self.callback._cycle.saves.busy:
            self.callback._cycle.take(self.callback._cycle.saves.poll(20))


class Stop(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.step:
            raise InterruptedError


def fit(
    root: str, wipe: int = 0, stop: int = 0, full: int = 0, ckpt_path: str | None = None, **options: Any
) -> tuple[Tiny, CPRCallback]:
    model, injector = Tiny(dense="adam"), FaultInjector()
    callback = CPRCallback(root, save_every_n_steps=5, recovery="full", timeout_s=20, **options)
    if wipe:
        injector.wipe(0, wipe)
    if full:
        injector.disk_full(0, full)
    strategy = TorchRecStrategy(plan=dict.fromkeys(TABLES, "table_wise"))
    trainer = make_trainer(1, strategy, callbacks=[callback, Flush(callback), Stop(stop), injector])
    try:
        trainer.fit(model, stateful_loader(0, BATCHES), ckpt_path=ckpt_path)
    except InterruptedError:
        assert stop
    assert (injector.count("wipe"), injector.count("disk_full")) == (bool(wipe), bool(full))
    return model, callback


class Scheduled(Tiny):
    """Its tables' rate changes after the batch that the version of an epoch's last step is taken at."""

    def configure_optimizers(self) -> Any:
        optimizer = self.trainer.strategy.add_fused_groups(super().configure_optimizers())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"}}


def fit_epochs(root: str, wipe: int) -> list[float]:
    model, injector = Scheduled(), FaultInjector()
    callback = CPRCallback(root, save_every_n_steps=5, recovery="full", timeout_s=20)
    if wipe:
        injector.wipe(0, wipe)
    strategy = TorchRecStrategy(plan=dict.fromkeys(TABLES, "table_wise"))
    trainer = make_trainer(1, strategy, callbacks=[callback, Flush(callback), injector], max_epochs=2)
    trainer.fit(model, stateful_loader(0, 5))
    return model.losses


def rewound(rank: int, world: int, folder: str) -> None:
    # A save announced before the failure must not be made again in the new timeline: the delta of step 10 would be
    # one of no rows upon step 5.
    root = f"{folder}/consecutive"
    model, callback = fit(root, wipe=13, incremental="consecutive")
    version, live = find_version(root), rows_of(model)
    assert version.manifest.step == BATCHES
    for table, (rows, _) in TABLES.items():
        name = f"net.ebc.embedding_bags.{table}"
        weight, states = read_table(version.storage, version.manifest, name)
        assert torch.equal(weight, live[f"{name}[0:{rows},0]"])
        assert torch.equal(states["sum"], live[f"{name}[0:{rows},0].sum"])
    committed = [e["step"] for e in read_events(Storage(root)) if e["event"] == "save_committed"]
    assert committed == [0, 5, 10, 15, 20]
    assert callback.counts["commits"] == len(committed)
    plain = model.losses[:13] + model.losses[16:]
    assert model.losses[10:13] == model.losses[13:16]

    # Back to before the first batch, then a crash: the loops count on from there as if nothing had happened.
    root = f"{folder}/first"
    before, _ = fit(root, wipe=3, stop=13)
    assert before.losses == plain[:3] + plain[:12]
    after, callback = fit(root)
    assert after.losses == plain[10:]
    assert callback.samples == 4 * BATCHES

    # Back over an epoch's end, where the tables' kernels are told a rate that they had before the failure.
    plain = fit_epochs(f"{folder}/plain", wipe=0)
    assert fit_epochs(f"{folder}/epochs", wipe=7) == plain[:7] + plain[5:]


def test_saves_after_a_full_recovery_are_of_the_new_timeline(tmp_path: Path) -> None:
    run_ranks(rewound, 1, str(tmp_path))


def ended_and_gone_back(rank: int, world: int, folder: str) -> None:
    # The save of the last step, which is also a scheduled one, fails: it is made again before fit returns.
    root = f"{folder}/run"
    model, callback = fit(root, full=BATCHES)
    assert callback.counts["failed"] == 1
    assert find_version(root).manifest.step == BATCHES

    # The user goes back to step 5 by name: a failure does not bring the run forward to the versions left behind, and
    # neither does a crash.
    again, _ = fit(root, wipe=7, stop=8, ckpt_path=f"{root}@5")
    assert again.losses == model.losses[5:7] + model.losses[5:7]
    assert find_version(root).manifest.step == 5
    assert find_version(f"{root}@{BATCHES}").manifest.step == BATCHES


def wiped_early_and_after_a_crash(rank: int, world: int, folder: str) -> None:
    def fit_partial(root: str, injector: FaultInjector, stop: int = 0) -> CPRCallback:
        cpr = CPRCallback(
            root, save_every_n_steps=16, recovery="partial", priority="mfu", ratio=0.25, timeout_s=20
        )  # fmt: skip
        model, strategy = Tiny(dense="adam"), TorchRecStrategy(plan=dict.fromkeys(TABLES, "table_wise"))
        callbacks = [cpr, Stop(stop), injector, *([Flush(cpr)] if stop else [])]
        trainer = make_trainer(1, strategy, callbacks=callbacks)
        with contextlib.suppress(InterruptedError):
            trainer.fit(model, stateful_loader(0, BATCHES))
        return cpr

    # A shard is lost while the first version is still written: that one is waited for.
    early = FaultInjector().slow(0, 0, 1.0).wipe(0, 1)
    assert fit_partial(f"{folder}/early", early).counts["recoveries"] == 1
    assert (early.count("slow"), early.count("wipe")) == (1, 1)

    # The crashed job's last version is a priority save of batch 12. The next job goes on from batch 0's, the newest
    # exact one, and loses a shard at batch 3: it must not get rows of a batch 12 that is not in its past.
    root = f"{folder}/crash"
    fit_partial(root, FaultInjector(), stop=14)
    assert [m.consistency for m in manifests(root)] == ["exact", "mixed", "mixed", "mixed"]
    wiped = FaultInjector().wipe(0, 3)
    cpr = fit_partial(root, wiped, stop=4)
    assert wiped.count("wipe") == 1
    recovery = [e for e in read_events(Storage(root)) if e["event"] == "recovery"][-1]
    held = find_version(f"{root}@{recovery['version']}").manifest
    assert (held.epoch, held.step, held.consistency) == (1, 0, "exact")
    assert cpr.ledger.lost
    assert cpr.samples == 3 * BATCH_SIZE


def manifests(root: str) -> list[Manifest]:
    storage = Storage(root)
    return [load_manifest(storage, ref) for ref in reversed(list_versions(storage))]


def test_a_shard_lost_before_the_first_version_or_after_a_crash_between_exact_ones(tmp_path: Path) -> None:
    run_ranks(wiped_early_and_after_a_crash, 1, str(tmp_path))


def test_the_newest_version_is_where_the_run_stands(tmp_path: Path) -> None:
    run_ranks(ended_and_gone_back, 1, str(tmp_path))
