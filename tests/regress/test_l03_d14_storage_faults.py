"""L03 (pytorch-lightning#21431), D14 (pytorch/xla#7919), and storage that lies or fails, by the fault injector: the run
goes on and counts, and the next resume, or a recovery, walks back to the last good version.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_cpr import CPRCallback, FaultInjector
from lightning_cpr._lightning import Callback
from lightning_cpr.errors import CorruptShardError, CPRError
from lightning_cpr.report.events import EventLog, read_events
from lightning_cpr.store import Storage, list_versions, load_manifest, newest
from lightning_cpr.strategy import TorchRecStrategy
from tests._ranks import run_ranks
from tests._tiny import Tiny, make_trainer
from tests.dist.test_main_job import PLAN, assert_equal, rows_of, stateful_loader
from tests.regress.jobs import Logged, Noting, Settled, StopAt, steps_of

STEPS = 13


class Rows(Callback):
    """This rank's rows after each batch."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.taken.append(rows_of(pl_module))


def faulty(rank: int, world: int, folder: str, recovery: Any) -> dict[str, Any]:
    """A run for each kind of storage fault, at step 10 on rank 1; it crashes at the end, or its shard is wiped."""
    found: dict[str, Any] = {}
    for kind in ("torn_write", "bit_flip", "disk_full"):
        injector = FaultInjector()
        getattr(injector, kind)(rank=1, step=10)
        rows = Rows()
        cpr = CPRCallback(f"{folder}/{kind}", save_every_n_steps=5, recovery=recovery or "partial", timeout_s=30)
        callbacks = [rows, Settled(cpr), cpr, injector]
        if recovery:
            injector.wipe(rank=1, step=12)
        else:
            callbacks.append(StopAt(STEPS))
        trainer = make_trainer(world, TorchRecStrategy(plan=PLAN), max_steps=STEPS, callbacks=callbacks)
        model = Noting(rank, dense="adam")
        try:
            trainer.fit(model, stateful_loader(rank))
        except KeyError:
            found["stopped"] = True
        found[kind] = {
            "fired": injector.count(kind), "counts": dict(cpr.counts), "ids": model.ids, "losses": model.losses,
            "rows": rows.taken, "after": rows_of(model), "pls": cpr.pls,
        }  # fmt: skip
    return found


def resumed(rank: int, world: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in ("torn_write", "bit_flip", "disk_full"):
        cpr = CPRCallback(f"{folder}/{kind}", save_every_n_steps=100, timeout_s=30)
        model = Noting(rank, dense="adam", filled=False)
        trainer = make_trainer(world, TorchRecStrategy(plan=PLAN), max_steps=STEPS, callbacks=[cpr])
        with Logged() as logged:
            trainer.fit(model, stateful_loader(rank))
        found[kind] = {
            "ids": model.ids, "losses": model.losses, "damaged": logged.having("is damaged"), "after": rows_of(model),
        }  # fmt: skip
    return found


def test_the_run_goes_on_and_the_next_resume_walks_back(tmp_path: Path) -> None:
    runs = run_ranks(faulty, 2, str(tmp_path), None, timeout=240)
    again = run_ranks(resumed, 2, str(tmp_path), timeout=240)
    for rank, run in enumerate(runs):
        for kind in ("torn_write", "bit_flip", "disk_full"):
            first, second = run[kind], again[rank][kind]
            assert first["fired"] == (rank == 1)
            assert first["ids"] == list(range(STEPS))
            assert first["counts"]["failed"] == (kind != "bit_flip")
            assert second["ids"] == list(range(5, STEPS))
            assert second["losses"] == first["losses"][5:]
            assert_equal(second["after"], first["rows"][-1])
            assert len(second["damaged"]) == (kind == "bit_flip")
    for kind, text in (("torn_write", "bytes in storage"), ("disk_full", "no space left")):
        events = read_events(Storage(str(tmp_path / kind)))
        (failed,) = [e for e in events if e["event"] == "save_failed"]
        assert text in failed["error"], failed
        assert failed["failed"] == 1
        assert steps_of(events, "save_committed") == [0, 5, 13]
    events = read_events(Storage(str(tmp_path / "bit_flip")))
    assert [e["version"].split("-")[0] for e in events if e["event"] == "version_refused"] == ["manifests/000000000010"]
    assert sum(e["event"] == "fault" for e in events) == 1


@pytest.mark.parametrize("mode", ["partial", "full"])
def test_a_recovery_walks_back_too(tmp_path: Path, mode: str) -> None:
    for run in run_ranks(faulty, 2, str(tmp_path), mode, timeout=240):
        for kind in ("torn_write", "bit_flip", "disk_full"):
            ours = run[kind]
            assert ours["counts"]["recoveries"] == 1
            (recovery,) = [e for e in read_events(Storage(str(tmp_path / kind))) if e["event"] == "recovery"]
            assert (recovery["mode"], recovery["step"]) == (mode, 12)
            assert recovery["version"].split(".")[2] == "000000000005"
            if mode == "full":
                assert ours["ids"] == [*range(12), *range(5, STEPS)]
                assert ours["losses"][12:19] == ours["losses"][5:12]
                assert ours["pls"] == 0.0
            else:
                assert ours["ids"] == list(range(STEPS))
                # seven of thirteen steps of one of two ranks with 456 and 404 of 860 elements
                assert ours["pls"] in (pytest.approx(456 / 860 * 7 / 13), pytest.approx(404 / 860 * 7 / 13))


def base_run(rank: int, world: int, folder: str) -> dict[str, Any]:
    cpr = CPRCallback(f"{folder}/root", save_every_n_steps=5, incremental="full", timeout_s=30)
    rows = Rows()
    trainer = make_trainer(world, TorchRecStrategy(plan=PLAN), max_steps=10, callbacks=[rows, Settled(cpr), cpr])
    trainer.fit(Tiny(dense="adam"), stateful_loader(rank))
    return {"at5": rows.taken[4], "at10": rows.taken[9]}


def damaged(rank: int, world: int, folder: str, number: int) -> dict[str, tuple[str, dict[str, Any], str]]:
    """Loads roots 0 to number - 1, each with one damage, as a root and by name."""
    found = {}
    for at in range(number):
        for name, path in (("root", f"{folder}/{at}"), ("named", f"{folder}/{at}@10")):
            model = Tiny(dense="adam", filled=False)
            trainer = make_trainer(world, TorchRecStrategy(plan=PLAN))
            error = ""
            try:
                trainer.validate(model, stateful_loader(rank, 1), ckpt_path=path, verbose=False)
            except CPRError as e:
                error = f"{type(e).__name__}: {e}"
            found[f"{at} {name}"] = (name, rows_of(model), error)
    return found


def test_l03_d14_each_damaged_file_is_named_and_the_version_before_used(tmp_path: Path) -> None:
    results = run_ranks(base_run, 2, str(tmp_path), timeout=120)
    root = Storage(str(tmp_path / "root"))
    ref = list_versions(root)[0]
    manifest = load_manifest(root, ref)
    files = [stored.path for stored in manifest.stored] + [ref.path]
    cases = [(path, how) for path in files for how in ("flip", "half", "empty")]
    cases = [c for i, c in enumerate(cases) if c[1] == "flip" or i % 4 == 0]
    for at, (path, how) in enumerate(cases):
        shutil.copytree(tmp_path / "root", tmp_path / str(at))
        file = tmp_path / str(at) / path
        raw = bytearray(file.read_bytes())
        if how == "flip":
            raw[len(raw) // 2] ^= 16
        file.write_bytes(raw if how == "flip" else raw[: len(raw) // 2] if how == "half" else b"")
    assert newest(root).require().step == 10
    for ours, run in zip(run_ranks(damaged, 2, str(tmp_path), len(cases), timeout=280), results, strict=True):
        for at, (path, how) in enumerate(cases):
            _, rows, error = ours[f"{at} root"]
            assert error == "", (path, how)
            assert_equal(rows, run["at5"])
            _, _, error = ours[f"{at} named"]
            assert path.rpartition("/")[2] in error or path in error, (path, how, error)
            assert error.startswith((CorruptShardError.__name__, "ManifestError")), error


def test_events_survive_a_torn_line_and_storage_that_fails(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    EventLog(storage, 0).emit("first", x=1)
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"time": 1, "rank": 0, "event": "half')  # killed while it wrote
    log = EventLog(storage, 0)
    log.emit("second")
    (tmp_path / "events.jsonl").rename(tmp_path / "kept")
    (tmp_path / "events.jsonl").mkdir()
    with Logged() as logged:
        log.emit("third")
    assert len(logged.having("'third' is not in the log yet")) == 1
    (tmp_path / "events.jsonl").rmdir()
    (tmp_path / "kept").rename(tmp_path / "events.jsonl")
    log.emit("fourth")
    assert [e["event"] for e in read_events(storage)] == ["first", "second", "third", "fourth"]
