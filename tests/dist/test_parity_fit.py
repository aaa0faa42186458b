"""Parity in a Trainer: a wiped shard comes back as it was, and the run is the uninterrupted one bit for bit."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_cpr import CPRCallback, FaultInjector, ParityConfig
from lightning_cpr._lightning import pl
from lightning_cpr.report.events import read_events
from lightning_cpr.store.storage import Storage
from lightning_cpr.strategy import TorchRecStrategy
from tests._ranks import run_ranks
from tests._tiny import Tiny, make_trainer
from tests.dist.test_main_job import assert_equal, rows_of, stateful_loader

PLAN = {"a": "row_wise", "b": "table_wise", "c": "data_parallel"}
STEPS = 24


def fit(rank: int, world: int, root: str, parity: ParityConfig | None, wipes: dict[int, list[int]]) -> dict[str, Any]:
    torch.set_num_threads(1)
    injector = FaultInjector()
    for step, ranks in wipes.items():
        for one in ranks:
            injector.wipe(one, step)
    model = Tiny(dense="adam")
    callback = CPRCallback(root, save_every_n_steps=10, recovery="partial", timeout_s=30, parity=parity)
    trainer = make_trainer(world, TorchRecStrategy(plan=PLAN), callbacks=[callback, injector], log_every_n_steps=5)
    trainer.fit(model, stateful_loader(rank, count=STEPS))
    return {
        "losses": model.losses,
        "rows": rows_of(model),
        "dense": {name: value.clone() for name, value in model.net.mlp.state_dict().items()},
        "fired": injector.count("wipe"),
        "pls": callback.pls,
        "counts": callback.counts,
    }


def both(rank: int, world: int, root: str, parity: ParityConfig, wipes: dict[int, list[int]]) -> list[dict[str, Any]]:
    return [fit(rank, world, f"{root}/plain", None, {}), fit(rank, world, f"{root}/wiped", parity, wipes)]


@pytest.mark.parametrize("world", [2, 4])
def test_wiped_shards_come_back_with_nothing_lost(world: int, tmp_path: Path) -> None:
    wipes = {9: [1], 15: [0]}
    results = run_ranks(both, world, str(tmp_path), ParityConfig(k=3), wipes)
    assert sum(wiped["fired"] for _, wiped in results) == 2
    for plain, wiped in results:
        assert wiped["losses"] == plain["losses"]
        assert_equal(wiped["rows"], plain["rows"])
        assert_equal(wiped["dense"], plain["dense"])
        assert wiped["pls"] == 0.0
    events = read_events(Storage(str(tmp_path / "wiped")))
    recoveries = [e for e in events if e["event"] == "recovery"]
    assert [(e["source"], e["failed"], e["step"], e["lost_row_updates"]) for e in recoveries] == [
        ("parity", [1], 9, 0),
        ("parity", [0], 15, 0),
    ]
    protection = [e["event"] for e in events if e["event"] in ("parity_on", "parity_off")]
    assert protection == ["parity_on", "parity_off"] * 2 + ["parity_on"]


def logged(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    callback = CPRCallback(f"{folder}/root", save_every_n_steps=10, timeout_s=30, parity=ParityConfig(k=3))
    logger = pl.loggers.CSVLogger(folder, name="", version="") if rank == 0 else False
    trainer = make_trainer(world, TorchRecStrategy(plan=PLAN), callbacks=[callback], log_every_n_steps=5, logger=logger)
    trainer.fit(Tiny(), stateful_loader(rank, count=STEPS))


def test_what_parity_costs_is_logged(tmp_path: Path) -> None:
    run_ranks(logged, 2, str(tmp_path))
    with (tmp_path / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("cpr/parity_protected")]
    assert [int(row["step"]) for row in rows] == [4, 9, 14, 19]  # as Lightning counts
    last = {name.removeprefix("cpr/parity_"): float(row) for name, row in rows[-1].items() if row and "parity_" in name}
    assert last["protected"] == 1.0
    assert last["mismatches"] == 0.0
    assert last["lag_steps"] in (0.0, 1.0)
    # one peer: each rank holds the parity of the other one's fp32 rows and states, in words of 8 bytes
    assert 100 * 9 * 4 / 2 <= last["parity_bytes"] <= 2 * 100 * 9 * 4
    assert last["memory_bytes"] >= last["parity_bytes"]
    sent = [float(row["cpr/parity_bytes_sent"]) for row in rows]
    assert sent == sorted(sent)
    assert sent[0] > 0
