"""FBGEMM#3597: a fused optimizer's state_dict holds moments only; a rate of 0.05 set mid-run came back as 0.1."""

from __future__ import annotations

import logging
from typing import Any

from lightning_cpr._lightning import Callback
from lightning_cpr.strategy import TorchRecStrategy
from lightning_cpr.tables.scalars import fused_scalars, load_fused_scalars
from tests._ranks import run_ranks
from tests._tiny import Tiny, make_loader, make_trainer


class SetRate(Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        for group in trainer.strategy.fused_optimizer.param_groups:
            group["lr"] = 0.05


class Restore(Callback):
    def __init__(self, scalars: dict[str, Any]) -> None:
        self.scalars = scalars

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        assert all(abs(values["lr"] - 0.1) < 1e-6 for values in fused_scalars(pl_module).values())
        load_fused_scalars(pl_module, self.scalars)


def _run(rank: int, world: int) -> tuple[dict[str, Any], dict[str, Any], list[float]]:
    logging.disable(logging.WARNING)
    plan = {"net.ebc": "row_wise", "c": "table_wise"}
    first, second = Tiny(), Tiny()
    make_trainer(world, TorchRecStrategy(plan=plan), max_steps=3, callbacks=[SetRate()]).fit(first, make_loader(rank))
    saved = fused_scalars(first)
    trainer = make_trainer(world, TorchRecStrategy(plan=plan), max_steps=2, callbacks=[Restore(saved)])
    groups: list[float] = []
    trainer.fit(second, make_loader(rank))
    for _, module in second.named_modules():
        if hasattr(module, "fused_optimizer"):
            groups += [group["lr"] for group in module.fused_optimizer.param_groups]
    return saved, fused_scalars(second), groups


def test_a_rate_set_mid_run_is_saved_and_restored() -> None:
    for saved, restored, groups in run_ranks(_run, 2):
        assert saved
        assert {round(values["lr"], 6) for values in saved.values()} == {0.05}
        assert {round(values["lr"], 6) for values in restored.values()} == {0.05}
        assert {round(rate, 6) for rate in groups} == {0.05}
        assert {values["iter"] for values in saved.values()} == {3}
        assert {values["iter"] for values in restored.values()} == {5}
