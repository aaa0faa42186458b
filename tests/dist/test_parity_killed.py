"""Processes of a job with parity are killed for real, at every point of an exchange: nothing is lost, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_cpr import CPRCallback, FaultInjector, ParityConfig, TorchRecStrategy
from lightning_cpr._lightning import Callback
from lightning_cpr.report.events import read_events
from lightning_cpr.store.storage import Storage
from lightning_cpr.tables.replicas import replicated_state
from tests._guarded import run_guarded
from tests._tiny import Tiny, make_loader, make_trainer
from tests.dist.test_main_job import assert_equal, rows_of

BATCHES, EPOCHS = 20, 2
# rank, step, point; each leaves time to encode what the one before has cost. Batch 20 is the last of an epoch.
KILLS = {
    2: [(1, 6, "exchange_closed"), (0, 12, "exchange_applied"), (1, 20, "exchange_received"), (0, 27, "backward"),
        (1, 34, "optimizer")],
    4: [(3, 6, "exchange_packed"), (0, 12, "exchange_acknowledged"), (2, 20, "exchange_closed"), (1, 27, "forward"),
        (2, 34, "batch_end")],
}  # fmt: skip


class Scheduled(Tiny):
    """Tiny with a rate that moves with each step: a batch that is run again must be run at its own."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.net.mlp.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Record(Callback):
    """The loss and the rows after each batch that this process trained, by step."""

    def __init__(self) -> None:
        self.losses: dict[int, float | None] = {}
        self.rows: dict[int, dict[str, torch.Tensor]] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.losses[trainer.global_step] = outputs["loss"].item() if outputs else None
        self.rows[trainer.global_step] = rows_of(module)


class Corrupt(Callback):
    """Damages the parity that this rank holds, right before a batch."""

    def __init__(self, cpr: CPRCallback, step: int) -> None:
        self.cpr, self.step = cpr, step

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step + 1 == self.step:
            assert self.cpr._parity is not None
            assert self.cpr._parity._keeper is not None
            self.cpr._parity._keeper._holder._parity ^= 1


def job(
    rank: int, world: int, root: str, parity: ParityConfig | None, kills: list[tuple[int, int, Any]], corrupt: int = 0
) -> dict[str, Any]:
    injector = FaultInjector()
    for kill in kills:
        injector.kill(*kill)
    cpr = CPRCallback(root, save_every_n_steps=10, recovery="partial", timeout_s=60, parity=parity)
    record, model = Record(), Scheduled()
    trainer = make_trainer(
        world, TorchRecStrategy(plan={"a": "row_wise", "b": "table_wise", "c": "data_parallel"}),
        callbacks=[cpr, record, Corrupt(cpr, corrupt), injector], max_epochs=EPOCHS,
    )  # fmt: skip
    trainer.fit(model, make_loader(rank, BATCHES))
    (optimizer,) = trainer.optimizers
    moments = {f"{i}.{n}": t.clone() for i, held in enumerate(optimizer.state.values()) for n, t in held.items()}
    replicas = {f"{f}.{n}": t.clone() for f, held in replicated_state(model).items() for n, t in held.items()}
    return {
        "losses": record.losses,
        "rows": record.rows,
        "dense": {**model.net.mlp.state_dict(), **moments, **replicas},
        "lr": optimizer.param_groups[0]["lr"],
        "told": (trainer.global_step, trainer.current_epoch, cpr.samples),
        "pls": cpr.pls,
        "counts": cpr.counts,
    }


def plain(world: int, root: Path) -> list[dict[str, Any]]:
    """The run that nothing happens to."""
    values, deaths = run_guarded(job, world, str(root), None, [])
    assert deaths == [0] * world
    return values


@pytest.mark.parametrize("world", [2, 4])
def test_kills_at_every_point_change_no_bit(world: int, tmp_path: Path) -> None:
    reference = plain(world, tmp_path / "plain")
    kills = KILLS[world]
    results, deaths = run_guarded(job, world, str(tmp_path / "killed"), ParityConfig(k=3), kills)
    assert deaths == [sum(kill[0] == rank for kill in kills) for rank in range(world)]
    for rank, (ours, expected) in enumerate(zip(results, reference, strict=True)):
        first = max((step for r, step, _ in kills if r == rank), default=0) + 2
        assert set(ours["losses"]) >= set(range(first, BATCHES * EPOCHS + 1))
        for step, loss in ours["losses"].items():
            assert loss in (expected["losses"][step], None), step
            assert_equal(ours["rows"][step], expected["rows"][step])
        # a replacement that joins after its batch has no loss of that one
        assert sum(loss is None for loss in ours["losses"].values()) <= bool(deaths[rank])
        assert_equal(ours["dense"], expected["dense"])
        assert (ours["lr"], ours["told"], ours["pls"]) == (expected["lr"], expected["told"], 0.0)
    events = read_events(Storage(str(tmp_path / "killed")))
    recoveries = [e for e in events if e["event"] == "recovery"]
    assert [(e["failed"], e["source"]) for e in recoveries] == [([rank], "parity") for rank, _, _ in kills]
