"""T06 (torchrec PR2474, FBGEMM PR3228): the step counter of Adam-like fused optimizers was neither row-wise nor
point-wise, so it was not saved, and the bias correction began anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import PartialRowWiseAdam

from lightning_cpr.strategy import TorchRecStrategy
from lightning_cpr.tables.shards import fused_scalars
from tests._ranks import run_ranks
from tests._tiny import Tiny, make_trainer
from tests.dist.test_main_job import assert_equal, rows_of, stateful_loader
from tests.regress.jobs import SaveAt


class Adamant(Tiny):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(dense="adam", sparse=None, **kwargs)
        apply_optimizer_in_backward(PartialRowWiseAdam, self.net.ebc.parameters(), {"lr": 0.05})


def trained(rank: int, world: int, path: str) -> dict[str, Any]:
    found = {}
    for name in ("whole", "resumed"):
        model = Adamant(filled=name == "whole")
        trainer = make_trainer(
            world, TorchRecStrategy(plan="table_wise"), accelerator="gpu", max_steps=12,
            callbacks=[SaveAt({10: path} if name == "whole" else {})],
        )  # fmt: skip
        trainer.fit(model, stateful_loader(rank), ckpt_path=None if name == "whole" else path)
        rows = {key: value.cpu() for key, value in rows_of(model).items()}
        found[name] = {"losses": model.losses, "rows": rows, "scalars": fused_scalars(model)}
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="fbgemm has partial row-wise Adam for CUDA only (T18)")
def test_t06_the_bias_correction_goes_on(tmp_path: Path) -> None:
    (found,) = run_ranks(trained, 1, str(tmp_path / "x.ckpt"), timeout=200)
    assert found["resumed"]["losses"] == found["whole"]["losses"][10:]
    assert_equal(found["resumed"]["rows"], found["whole"]["rows"])
    assert found["resumed"]["scalars"] == found["whole"]["scalars"]
    assert all(values["iter"] == 12 for values in found["whole"]["scalars"].values())
