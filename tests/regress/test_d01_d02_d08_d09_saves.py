"""D01 (pytorch#144657), D02 (pytorch#170163), D08 (pytorch#125740, #121519), D09 (pytorch#156002): what a save holds,
costs, and who reads what of it.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_cpr import CPRCallback, FaultInjector
from lightning_cpr._lightning import Callback
from lightning_cpr.checkpoint_io import find_version
from lightning_cpr.errors import CommitError, ManifestError
from lightning_cpr.job.job import Job
from lightning_cpr.store import Storage, list_versions, newest, read_table
from lightning_cpr.strategy import TorchRecStrategy
from lightning_cpr.tables.shards import local_shards
from tests._ranks import run_ranks
from tests._tiny import Tiny, make_batch, make_trainer
from tests.dist.test_main_job import stateful_loader
from tests.regress.jobs import PREFIX, Settled, step_of

BIG = {"a": (500_000, 8)}
MEDIUM = {"a": (278_000, 8)}  # 10 MB with its row state


def loader(rank: int, tables: dict[str, tuple[int, int]], count: int) -> Any:
    batches = stateful_loader(rank, count)
    batches.dataset.batches = [make_batch(i, rank, tables=tables) for i in range(count)]  # type: ignore[attr-defined]
    return batches


class Mark(Callback):
    """Sets a whole table to the number of the batch, right before the save and right after it was started."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for shard in local_shards(pl_module):
            shard.weight.fill_(float(step_of(trainer)))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for shard in local_shards(pl_module):
            shard.weight.add_(1000.0)


def marked(rank: int, world: int, root: str) -> int:
    cpr = CPRCallback(root, save_every_n_steps=2, incremental="full", timeout_s=60)
    injector = FaultInjector().slow(rank=0, step=2, seconds=0.5)
    trainer = make_trainer(
        world, TorchRecStrategy(plan="table_wise"), max_steps=4, callbacks=[Settled(cpr), Mark(), cpr, injector]
    )
    trainer.fit(Tiny(tables=BIG, filled=False), loader(rank, BIG, 4))
    return injector.count("slow")


def test_d01_a_save_holds_the_values_of_its_step(tmp_path: Path) -> None:
    assert run_ranks(marked, 1, str(tmp_path), timeout=120) == [1]
    storage = Storage(str(tmp_path))
    at2 = find_version(f"{tmp_path}@2")
    weight, _ = read_table(storage, at2.manifest, f"{PREFIX}a")
    assert weight.numel() == 4_000_000
    assert torch.equal(weight, torch.full_like(weight, 2.0))


class Memory(Callback):
    """The process's memory, and the keys in its store, after each batch; keeps the newest version only."""

    def __init__(self, root: str) -> None:
        self.storage, self.rss, self.keys = Storage(root), [], []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.rss.append(pages * os.sysconf("SC_PAGE_SIZE"))
        self.keys.append(dist.distributed_c10d._get_default_store().num_keys())
        for ref in list_versions(self.storage)[2:]:
            self.storage.delete([ref.path])
            shutil.rmtree(f"{self.storage.root}/chunks/{ref.version}")


def many(rank: int, world: int, root: str, saves: int) -> tuple[list[int], list[int], int]:
    cpr = CPRCallback(root, save_every_n_steps=1, incremental="full", timeout_s=60)
    memory = Memory(root)
    trainer = make_trainer(
        world,
        TorchRecStrategy(plan="table_wise"),
        max_epochs=-1,
        max_steps=saves,
        callbacks=[Settled(cpr), memory, cpr],
    )
    trainer.fit(Tiny(tables=MEDIUM, filled=False), loader(rank, MEDIUM, 50))
    return memory.rss, memory.keys, cpr.counts["commits"]


def test_d02_a_hundred_saves_do_not_grow_the_process(tmp_path: Path) -> None:
    ((rss, keys, commits),) = run_ranks(many, 1, str(tmp_path), 200, timeout=280)
    assert commits == 101  # every other step: a save is decided a batch before it comes, while one is in flight
    assert max(rss[20:]) - rss[20] < 30e6
    assert max(keys[20:]) <= max(keys[:20])


def opened(rank: int, world: int, root: str) -> dict[str, Any]:
    cpr = CPRCallback(root, save_every_n_steps=5, incremental="full", recovery="partial", timeout_s=30)
    injector = FaultInjector().wipe(rank=2, step=8)
    paths: list[str] = []

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str) and args[0].startswith(root) and paths is not None:
            paths.append(args[0])

    class Watch(Callback):
        """From the wipe on; the next save comes at step 10."""

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if step_of(trainer) == 8:
                paths.clear()
                sys.addaudithook(audit)

    tables = {"a": (400, 8), "b": (40, 8), "c": (1, 4)}
    plan = {"a": "row_wise", "b": "table_wise", "c": "table_wise"}
    trainer = make_trainer(
        world, TorchRecStrategy(plan=plan), max_steps=9, callbacks=[Settled(cpr), Watch(), cpr, injector]
    )
    trainer.fit(Tiny(tables=tables, filled=False), loader(rank, tables, 9))
    return {"paths": paths, "wiped": injector.count("wipe"), "mine": [s.spec for s in trainer.strategy.job.owned]}


def test_d08_only_the_failed_rank_opens_row_files(tmp_path: Path) -> None:
    results = run_ranks(opened, 4, str(tmp_path), timeout=180)
    assert [r["wiped"] for r in results] == [0, 0, 1, 0]
    version = newest(Storage(str(tmp_path)), exclude=[r.path for r in list_versions(Storage(str(tmp_path)))[:1]])
    manifest = version.require()
    assert manifest.step == 5
    read = [
        {p for p in r["paths"] if f"chunks/{manifest.version}/" in p and p.endswith(".safetensors")} for r in results
    ]
    assert [len(files) for files in read] == [0, 0, len(results[2]["mine"]), 0]
    assert {Path(p).name.split("-")[0] for p in read[2]} == {"r2"}


def omitting(rank: int, world: int, folder: str) -> dict[str, str]:
    """Rank 1 forgets table b, as a bug in listing shards would make it."""
    cpr = CPRCallback(f"{folder}/root", save_every_n_steps=5, timeout_s=30, max_failed_saves=1)
    whole = Job.owned.fget  # type: ignore[attr-defined]
    forget = {"on": False}

    class Forget(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            forget["on"] = rank == 1 and step_of(trainer) >= 3

    found: dict[str, str] = {}
    Job.owned = property(  # type: ignore[assignment,method-assign]
        lambda job: [s for s in whole(job) if not (forget["on"] and s.spec.table.endswith(".b"))]
    )
    trainer = make_trainer(
        world, TorchRecStrategy(plan={"a": "row_wise", "b": "row_wise", "c": "table_wise"}),
        callbacks=[Forget(), Settled(cpr), cpr],
    )  # fmt: skip
    try:
        trainer.fit(Tiny(), stateful_loader(rank))
    except CommitError as error:
        found["background"] = str(error)
    trainer.state.status = "finished"  # type: ignore[assignment]
    try:
        trainer.save_checkpoint(f"{folder}/x.ckpt")
    except ManifestError as error:
        found["own"] = str(error)
    return found


def test_d09_rows_that_are_missing_are_found_before_the_commit(tmp_path: Path) -> None:
    for found in run_ranks(omitting, 2, str(tmp_path), timeout=120):
        for text in (found["background"], found["own"]):
            assert "embedding_bags.b" in text
            assert "was not committed" in text
    assert not (tmp_path / "x.ckpt").exists()
    assert [ref.step for ref in list_versions(Storage(str(tmp_path / "root")))] == [0]
