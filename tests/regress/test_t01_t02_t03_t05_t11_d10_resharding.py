"""T01 (torchrec#2394), T02 (#2534), T03 (pytorch#79016), T05 (pytorch#91205), T11 (torchrec#1591), D10
(torchtitan#811): a checkpoint under another plan or world size: weights and optimizer states row by row, never zeros.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.distributed import sharding_plan as generators

from lightning_cpr import CPRCheckpointIO
from lightning_cpr._lightning import Callback
from lightning_cpr.strategy import TorchRecStrategy
from tests._ranks import run_ranks
from tests._tiny import TABLES, Tiny, make_batch, make_trainer
from tests.dist.test_main_job import rows_of, stateful_loader
from tests.regress.jobs import assert_same, whole

UNEVEN = {"c": (1, 4), "a": (4091, 8)}
SHAPES = {"tiny": TABLES, "uneven": UNEVEN}


def plan_of(name: str) -> Any:
    """Plans by name: a plan with generators cannot be sent to a process."""
    tw = {"a": "table_wise", "b": "table_wise", "c": "table_wise"}
    last = generators.table_wise(rank=1, compute_kernel="fused")
    return {
        "tw": tw,
        "rw": tw | {"a": "row_wise", "b": "row_wise"},
        "cw": tw | {"a": "column_wise"},
        "b dp": tw | {"b": "data_parallel"},
        "rank 1": {"a": last, "b": "data_parallel", "c": last},
        "mixed": {"a": "row_wise", "b": "data_parallel", "c": "table_wise"},
        "all rw": "row_wise",
        "a rw": {"a": "row_wise", "c": "table_wise"},
    }[name]


def make(tables: str, filled: bool) -> Tiny:
    return Tiny(dense="adam", tables=SHAPES[tables]) if filled else Tiny("adam", tables=SHAPES[tables], filled=False)


def loader(rank: int, tables: str) -> Any:
    batches = stateful_loader(rank, 16)
    if tables != "tiny":
        batches.dataset.batches = [make_batch(i, rank, tables=SHAPES[tables]) for i in range(16)]
    return batches


def saved(rank: int, world: int, folder: str, jobs: list[tuple[str, str]]) -> list[dict[str, Tensor]]:
    """Ten steps, then a save, under each of the plans."""
    rows = []
    for tables, plan in jobs:
        model = make(tables, filled=tables == "tiny")
        trainer = make_trainer(world, TorchRecStrategy(plan=plan_of(plan)), max_steps=10)
        trainer.fit(model, loader(rank, tables))
        trainer.save_checkpoint(f"{folder}/{world} {plan}.ckpt")
        rows.append(rows_of(model))
    return rows


class Look(Callback):
    """Takes what was restored, before any step."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.rows = rows_of(pl_module)
        trainer.should_stop = True


def restored(rank: int, world: int, jobs: list[tuple[str, str, str]]) -> list[dict[str, Tensor]]:
    rows = []
    for tables, plan, path in jobs:
        look = Look()
        trainer = make_trainer(world, TorchRecStrategy(plan=plan_of(plan)), max_epochs=2, callbacks=[look])
        trainer.fit(make(tables, filled=False), loader(rank, tables), ckpt_path=path)
        rows.append(look.rows)
    return rows


Saved = dict[str, dict[str, Tensor]]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Saved]:
    folder = tmp_path_factory.mktemp("versions")
    found: Saved = {}
    for world, jobs in (
        (4, [("tiny", "rw")]),
        (2, [("tiny", plan) for plan in ("tw", "cw", "rank 1")]),
        (3, [("uneven", "all rw")]),
    ):
        runs = run_ranks(saved, world, str(folder), jobs, timeout=180)
        for at, (tables, plan) in enumerate(jobs):
            found[f"{world} {plan}"] = whole([run[at] for run in runs], SHAPES[tables])
    return folder, found


def check(versions: tuple[Path, Saved], world: int, wanted: list[tuple[str, str]], tables: str = "tiny") -> None:
    folder, found = versions
    runs = run_ranks(restored, world, [(tables, plan, f"{folder}/{name}.ckpt") for plan, name in wanted], timeout=180)
    for at, (plan, name) in enumerate(wanted):
        got = whole([run[at] for run in runs], SHAPES[tables])
        if plan == "cw":
            # One scalar a row and column block: on a split each block gets a copy.
            for column in range(0, 8, 8 // world):
                assert torch.equal(got.pop(f"a.sum@{column}"), found[name]["a.sum@0"])
            assert_same(got, {k: v for k, v in found[name].items() if k != "a.sum@0"})
        elif name.endswith("cw"):
            # On a merge the width-weighted mean, here of blocks of one width.
            blocks = [state for key, state in found[name].items() if key.startswith("a.sum@")]
            assert len(blocks) == 2
            assert not torch.equal(*blocks)
            assert torch.equal(got.pop("a.sum@0"), torch.stack(blocks).double().mean(0).float())
            assert_same(got, {k: v for k, v in found[name].items() if not k.startswith("a.sum@")})
        else:
            assert_same(got, found[name])


def test_the_states_saved_are_not_trivial(versions: tuple[Path, Saved]) -> None:
    for name, tables in versions[1].items():
        assert {key.split(".")[0] for key in tables if ".sum@" in key} == {key for key in tables if "." not in key}
        for key, state in tables.items():
            assert ".sum" not in key or state.count_nonzero() > 0, (name, key)


def test_t01_t05_another_plan_of_the_same_world(versions: tuple[Path, Saved]) -> None:
    check(versions, 2, [("b dp", "2 tw"), ("cw", "2 tw"), ("tw", "2 cw"), ("tw", "2 rank 1"), ("mixed", "4 rw")])


def test_t02_t03_fewer_ranks(versions: tuple[Path, Saved]) -> None:
    check(versions, 1, [("tw", "4 rw"), ("rw", "2 rank 1"), ("tw", "2 cw")])
    check(versions, 3, [("rw", "4 rw")])


def test_d10_more_ranks(versions: tuple[Path, Saved]) -> None:
    check(versions, 4, [("rw", "2 tw"), ("mixed", "2 rank 1")])


def test_t03_an_unsharded_model(versions: tuple[Path, Saved]) -> None:
    folder, found = versions
    for name in ("4 rw", "2 cw", "2 rank 1"):
        model = CPRCheckpointIO.load_model(Tiny(device="cpu", sparse=None), f"{folder}/{name}.ckpt")
        for table, bag in model.net.ebc.embedding_bags.items():  # type: ignore[union-attr]
            assert torch.equal(bag.weight, found[name][table]), (name, table)


def test_t11_shards_without_rows_and_of_uneven_sizes(versions: tuple[Path, Saved]) -> None:
    check(versions, 3, [("all rw", "3 all rw")], "uneven")
    check(versions, 2, [("a rw", "3 all rw")], "uneven")
