"""T13 (torchrec#2773, FBGEMM#3750), T15 (torchrec#3751): odd batches, batches in flight, and a plan in every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch

from lightning_cpr import CPRCallback, FaultInjector
from lightning_cpr._lightning import Callback
from lightning_cpr.policy.ledger import Ledger
from lightning_cpr.strategy import TorchRecStrategy
from tests._ranks import run_ranks
from tests._tiny import Tiny, make_batch, make_trainer
from tests.dist.test_main_job import PLAN, assert_equal, rows_of, stateful_loader
from tests.dist.test_training_equality import Pipelined
from tests.regress.jobs import SaveAt, Settled, batch_number

KEYS = ["f_a", "f_b", "f_c"]


class NotingPipelined(Pipelined):
    def __init__(self, rank: int) -> None:
        super().__init__("adam")
        self.rank = rank
        self.ids: list[int] = []
        self.filled = True

    def on_fit_start(self) -> None:
        if self.filled:
            super().on_fit_start()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ids.append(batch_number(batch, self.rank))


def pipelined(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Twelve batches an epoch, two epochs, evaluation every four batches; saves in either epoch."""
    found: dict[str, Any] = {}
    for name, path in (("whole", None), ("quiet", None), ("at10", "10"), ("at15", "15")):
        model = NotingPipelined(rank)
        model.filled = path is None
        saves = SaveAt({step: f"{folder}/{step}.ckpt" for step in (10, 15)} if name == "whole" else {})
        trainer = make_trainer(
            world, TorchRecStrategy(plan=PLAN), max_epochs=2, callbacks=[saves], val_check_interval=4
        )
        validation = None if name == "quiet" else stateful_loader(rank, 2)
        trainer.fit(model, stateful_loader(rank, 12), validation, ckpt_path=path and f"{folder}/{path}.ckpt")
        found[name] = (model.ids, model.losses, rows_of(model), max(model.flying))
    return found


def test_t15_batches_in_flight_come_again_exactly_once(tmp_path: Path) -> None:
    for found in run_ranks(pipelined, 2, str(tmp_path), timeout=180):
        ids, losses, rows, flying = found["whole"]
        assert ids == [*range(12), *range(12)]
        assert flying > 0
        # evaluation in between changes nothing
        assert found["quiet"][:2] == (ids, losses)
        assert_equal(found["quiet"][2], rows)
        for step in (10, 15):
            again = found[f"at{step}"]
            assert again[:2] == (ids[step:], losses[step:])
            assert_equal(again[2], rows)


def odd_batches(rank: int) -> Any:
    """Batch 5: keys and no values on both ranks; 6: on rank 1 only; the last one: a single sample."""
    loader = stateful_loader(rank, 10)
    batches = loader.dataset.batches  # type: ignore[attr-defined]
    for index in (5, 6):
        if index == 5 or rank == 1:
            none = KeyedJaggedTensor(keys=KEYS, values=torch.zeros(0, dtype=torch.long), lengths=torch.zeros(12).long())
            batches[index] = Batch(batches[index].dense_features, none, batches[index].labels)
    batches[9] = make_batch(9, rank, size=1)
    return loader


class Rows(Callback):
    """This rank's rows after each batch."""

    def __init__(self) -> None:
        self.taken: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.taken.append(rows_of(pl_module))


def odd(rank: int, world: int, folder: str) -> dict[str, Any]:
    cpr = CPRCallback(f"{folder}/root", save_every_n_steps=2, recovery="partial", timeout_s=30)
    rows, injector = Rows(), FaultInjector().wipe(rank=1, step=9)
    saves = SaveAt({6: f"{folder}/6.ckpt"})
    trainer = make_trainer(world, TorchRecStrategy(plan=PLAN), callbacks=[rows, saves, Settled(cpr), cpr, injector])
    model = Tiny(dense="adam")
    trainer.fit(model, odd_batches(rank))
    plain, rest = Tiny(dense="adam"), Tiny(dense="adam", filled=False)
    make_trainer(world, TorchRecStrategy(plan=PLAN)).fit(plain, odd_batches(rank))
    make_trainer(world, TorchRecStrategy(plan=PLAN)).fit(rest, odd_batches(rank), ckpt_path=f"{folder}/6.ckpt")
    return {
        "rows": rows.taken, "losses": (plain.losses, rest.losses), "ends": (rows_of(plain), rows_of(rest)),
        "pls": cpr.pls, "wiped": injector.count("wipe"), "commits": cpr.counts["commits"],
    }  # fmt: skip


def test_t13_batches_without_ids_and_of_one_sample(tmp_path: Path) -> None:
    for found in run_ranks(odd, 2, str(tmp_path), timeout=180):
        assert_equal(found["rows"][4], found["rows"][5])  # after batches 4 and 5: nothing was looked up
        assert found["losses"][1] == found["losses"][0][6:]
        assert_equal(found["ends"][0], found["ends"][1])
        assert 0 < found["pls"] < 1
        assert found["commits"] >= 5
    assert Ledger(0).pls(0) == 0.0


def stages(rank: int, world: int) -> dict[str, list[float]]:
    """One Trainer through all stages, with a plan by table names."""
    found = {}
    for name, plan in (("names", PLAN), ("fqns", {f"net.ebc.embedding_bags.{k}": v for k, v in PLAN.items()})):
        model = Tiny()
        trainer = make_trainer(world, TorchRecStrategy(plan=plan), max_steps=3)
        trainer.fit(model, stateful_loader(rank), stateful_loader(rank, 2))
        before = rows_of(model)
        tested = trainer.test(model, stateful_loader(rank, 2), verbose=False)[0]["test_loss"]
        validated = trainer.validate(model, stateful_loader(rank, 2), verbose=False)[0]["val_loss"]
        predicted = trainer.predict(model, stateful_loader(rank, 2))
        assert_equal(rows_of(model), before)
        with torch.no_grad():
            logits = [model(b).sigmoid() for b in stateful_loader(rank, 2)]
        assert all(torch.equal(p, q) for p, q in zip(predicted, logits, strict=True))
        found[name] = [tested, validated]
    return found


def test_a_plan_by_table_serves_every_stage_of_one_trainer() -> None:
    """It said "plan= names [...], which the model does not have" after fit: the tables were sharded by then."""
    for found in run_ranks(stages, 2, timeout=180):
        assert found["names"] == found["fqns"]
        assert found["names"][0] == found["names"][1]
