"""Processes of a job with parity are killed for real, at every point of an exchange: nothing is lost, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_cpr import CPRCallback, FaultInjector, ParityConfig, TorchRecStrategy
from lightning_cpr._lightning import Callback
from lightning_cpr.report.events import read_events
from lightning_cpr.store.reader import read_table
from lightning_cpr.store.storage import Storage
from lightning_cpr.store.versions import list_versions, load_manifest
from lightning_cpr.tables.replicas import replicated_state
from tests._guarded import run_guarded
from tests._tiny import Tiny, make_loader, make_trainer
from tests.dist.test_main_job import assert_equal, rows_of
from tests.parity_job import come_back_slowly

BATCHES, EPOCHS = 12, 2
LAST = BATCHES * EPOCHS
# rank, step, point; each leaves time to encode what the one before has cost. Batch 12 is the last of an epoch.
KILLS = {
    2: [(1, 4, "exchange_closed"), (0, 8, "exchange_applied"), (1, 12, "exchange_received"), (0, 16, "backward"),
        (1, 20, "optimizer")],
    4: [(3, 4, "exchange_packed"), (0, 8, "exchange_acknowledged"), (2, 12, "exchange_closed"), (1, 16, "forward"),
        (2, 20, "batch_end")],
}  # fmt: skip


class Scheduled(Tiny):
    """Tiny with a rate that moves with each step: a batch that is run again must be run at its own."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.net.mlp.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Record(Callback):
    """The loss and the rows after each batch that this process trained, by step."""

    def __init__(self, wait: Callable[[], None] | None) -> None:
        self.wait = wait
        self.losses: dict[int, float | None] = {}
        self.rows: dict[int, dict[str, torch.Tensor]] = {}
        self.validated: dict[int, float] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        if self.wait is not None:
            self.wait()
        self.losses[trainer.global_step] = outputs["loss"].item() if outputs else None
        self.rows[trainer.global_step] = rows_of(module)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.validated[trainer.global_step] = trainer.callback_metrics["val_loss"].item()


class Ema(Callback):
    """A running mean of the dense weights, as callbacks keep that average a model."""

    def __init__(self) -> None:
        self.mean: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        for name, weight in module.net.mlp.state_dict().items():
            self.mean[name] = torch.lerp(self.mean.get(name, weight), weight, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.mean)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.mean = dict(state_dict)


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
    rank: int, world: int, root: str, parity: ParityConfig | None, kills: list[tuple[int, int, Any]], corrupt: int = 0,
    slowly: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """slowly: lost rows come back a few a step, and every second batch is validated."""
    more: dict[str, Any] = {}
    if slowly:
        come_back_slowly()
        more = {"val_check_interval": 2}
    injector = FaultInjector()
    for kill in kills:
        injector.kill(*kill)
    cpr = CPRCallback(root, save_every_n_steps=10, recovery="partial", timeout_s=60, parity=parity)
    record, ema, model = Record(None if slowly else cpr.wait_for_rows), Ema(), Scheduled()
    trainer = make_trainer(
        world, TorchRecStrategy(plan={"a": "row_wise", "b": "table_wise", "c": "data_parallel"}),
        callbacks=[cpr, record, ema, Corrupt(cpr, corrupt), injector], max_epochs=EPOCHS, **more,
    )  # fmt: skip
    trainer.fit(model, make_loader(rank, BATCHES), make_loader(rank, 2) if slowly else None)
    (optimizer,) = trainer.optimizers
    moments = {f"{i}.{n}": t.clone() for i, held in enumerate(optimizer.state.values()) for n, t in held.items()}
    replicas = {f"{f}.{n}": t.clone() for f, held in replicated_state(model).items() for n, t in held.items()}
    return {
        "losses": record.losses,
        "validated": record.validated,
        "rows": record.rows,
        "dense": {**model.net.mlp.state_dict(), **moments, **replicas},
        "ema": ema.mean,
        "lr": optimizer.param_groups[0]["lr"],
        "told": (trainer.global_step, trainer.current_epoch, cpr.samples),
        "pls": cpr.pls,
        "counts": cpr.counts,
    }


def plain(world: int, root: Path, slowly: bool = False) -> list[dict[str, Any]]:
    """The run that nothing happens to."""
    values, deaths = run_guarded(job, world, str(root), None, [], 0, slowly)
    assert deaths == [0] * world
    return values


@pytest.mark.parametrize(("world", "behind_mb"), [(2, 1024), (4, 1024), (4, 0)])
def test_kills_at_every_point_change_no_bit(world: int, behind_mb: int, tmp_path: Path) -> None:
    """With 0 all rows come back behind the training."""
    reference = plain(world, tmp_path / "plain")
    kills = KILLS[world]
    results, deaths = run_guarded(job, world, str(tmp_path / "killed"), ParityConfig(k=3, behind_mb=behind_mb), kills)
    assert deaths == [sum(kill[0] == rank for kill in kills) for rank in range(world)]
    for rank, (ours, expected) in enumerate(zip(results, reference, strict=True)):
        first = max((step for r, step, _ in kills if r == rank), default=0) + 2
        assert set(ours["losses"]) >= set(range(first, LAST + 1))
        for step, loss in ours["losses"].items():
            assert loss in (expected["losses"][step], None), step
            assert_equal(ours["rows"][step], expected["rows"][step])
        # a replacement that joins after its batch has no loss of that one
        assert sum(loss is None for loss in ours["losses"].values()) <= bool(deaths[rank])
        assert_equal(ours["dense"], expected["dense"])
        assert_equal(ours["ema"], expected["ema"])
        assert (ours["lr"], ours["told"], ours["pls"]) == (expected["lr"], expected["told"], 0.0)
    events = read_events(Storage(str(tmp_path / "killed")))
    recoveries = [e for e in events if e["event"] == "recovery"]
    assert [(e["failed"], e["source"]) for e in recoveries] == [([rank], "parity") for rank, _, _ in kills]


def test_a_replacement_trains_validates_and_saves_while_its_rows_come_back(tmp_path: Path) -> None:
    """And dies again before they are all back, and once more together with another rank."""
    reference = plain(4, tmp_path / "plain", slowly=True)
    kills = [(1, 8, "forward"), (1, 9, "backward"), (1, 17, "forward"), (2, 17, "forward")]
    parity = ParityConfig(k=2, m=2, behind_mb=0)
    results, deaths = run_guarded(job, 4, str(tmp_path / "killed"), parity, kills, 0, True)
    assert deaths == [0, 3, 1, 0]
    for ours, expected in zip(results, reference, strict=True):
        assert_equal(ours["rows"][LAST], expected["rows"][LAST])
        assert_equal(ours["dense"], expected["dense"])
        assert (ours["told"], ours["pls"]) == (expected["told"], 0.0)
        assert ours["validated"].items() <= expected["validated"].items()
    assert results[0]["validated"] == reference[0]["validated"]
    storages = [Storage(str(tmp_path / name)) for name in ("plain", "killed")]
    for step in (10, 20, LAST):
        saved, expected_rows = [version_rows(storage, step) for storage in storages]
        assert_equal(saved, expected_rows)
    events = read_events(storages[1])
    assert [e["event"] for e in events if e["event"] in ("rows_come_back", "rows_are_back")] == [
        "rows_come_back", "rows_come_back", "rows_are_back", "rows_come_back", "rows_are_back",
    ]  # fmt: skip
    came = [e["step"] for e in events if e["event"] == "rows_come_back"]
    back = [e for e in events if e["event"] == "rows_are_back"]
    assert all(e["step"] - c > 1 for e, c in zip(back, came[1:], strict=True))
    assert all(e["blocks"] > 0 and e["waited_s"] > 0 for e in back)


def version_rows(storage: Storage, step: int) -> dict[str, torch.Tensor]:
    """All rows of the version of a step."""
    (manifest,) = [m for m in (load_manifest(storage, ref) for ref in list_versions(storage)) if m.step == step]
    return {table.fqn: read_table(storage, manifest, table.fqn)[0] for table in manifest.tables}


def test_two_lost_ranks_come_back_by_two_parities(tmp_path: Path) -> None:
    reference = plain(4, tmp_path / "plain")
    kills = [(1, 8, "forward"), (2, 8, "forward")]
    results, deaths = run_guarded(job, 4, str(tmp_path / "killed"), ParityConfig(k=2, m=2), kills)
    assert deaths == [0, 1, 1, 0]
    for ours, expected in zip(results, reference, strict=True):
        assert_equal(ours["rows"][LAST], expected["rows"][LAST])
        assert_equal(ours["dense"], expected["dense"])
        assert (ours["told"], ours["pls"]) == (expected["told"], 0.0)


def test_what_parity_cannot_or_may_not_bring_back_comes_from_the_store(tmp_path: Path) -> None:
    """Two lost of a group with one parity, then parity that was damaged."""
    kills = [(1, 14, "forward"), (2, 14, "forward"), (3, 20, "forward")]
    results, deaths = run_guarded(job, 4, str(tmp_path), ParityConfig(k=3, scrub_every=0), kills, 19)
    assert deaths == [0, 1, 1, 1]
    events = read_events(Storage(str(tmp_path)))
    recoveries = [e for e in events if e["event"] == "recovery"]
    assert [(e["failed"], e["source"]) for e in recoveries] == [([1, 2], "store"), ([3], "store")]
    refused = [e["error"] for e in events if e["event"] == "parity_refused"]
    assert len(refused) == 2
    assert "with ranks [1, 2] lost" in refused[0]
    assert "did not decode to what their owners published" in refused[1]
    assert all(r["counts"]["parity_refused"] == 2 for r in results)
    assert results[0]["pls"] > 0.0
    assert len({r["pls"] for r in results}) == 1
    for recovery in recoveries:
        assert recovery["ledger"]["event"] == "charge"
    # the rows that came back are trained on, with parity again
    assert [e["event"] for e in events if e["event"] in ("parity_on", "parity_off")][-1] == "parity_on"


def test_rows_that_are_refused_behind_the_training_are_counted_and_end_the_job(tmp_path: Path) -> None:
    """Under ``lightning-cpr run`` it starts again, from the store."""
    parity = ParityConfig(k=3, scrub_every=0, behind_mb=0)
    with pytest.raises(AssertionError, match="did not decode to what their owner had published, and were refused"):
        run_guarded(job, 4, str(tmp_path), parity, [(3, 16, "forward")], 15)
    events = read_events(Storage(str(tmp_path)))
    (refused,) = [e for e in events if e["event"] == "parity_refused"]
    assert "were refused" in refused["error"]


def test_with_several_steps_an_exchange_only_the_lost_shard_goes_back(tmp_path: Path) -> None:
    results, deaths = run_guarded(job, 2, str(tmp_path), ParityConfig(k=1, every_n_steps=4), [(1, 17, "forward")])
    assert deaths == [0, 1]
    events = read_events(Storage(str(tmp_path)))
    (recovery,) = [e for e in events if e["event"] == "recovery"]
    assert (recovery["source"], recovery["step"]) == ("parity", 16)
    (loss,) = recovery["ledger"]["losses"]
    assert loss["held"] == 14 * 8  # exchanges end at 1 and 2, which encode, then at 6, 10, 14
    lost_steps = 2
    elements = {0: 50 * 8, 1: 50 * 8}
    owner = 0 if "net.ebc.embedding_bags.b[0:7,0]" in results[0]["rows"][LAST] else 1
    elements[owner] += 7 * 8
    assert results[0]["pls"] == pytest.approx(elements[1] / sum(elements.values()) * lost_steps / LAST, rel=1e-9)
    assert results[0]["losses"].keys() == set(range(1, LAST + 1))
