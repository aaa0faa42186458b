"""A user's script, for tests of launchers: TINY on two ranks with CPRCallback.

Arguments: package, folder, steps, tag.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

PACKAGE, FOLDER, STEPS, TAG = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if PACKAGE == "lightning":
    import lightning as pl
else:
    import pytorch_lightning as pl  # type: ignore[no-redef]

import torch  # noqa: E402

from lightning_cpr import CPRCallback, FaultInjector, TorchRecStrategy  # noqa: E402
from lightning_cpr._lightning import PACKAGE as BUILT_ON  # noqa: E402
from tests._tiny import Tiny  # noqa: E402
from tests.dist.test_main_job import stateful_loader  # noqa: E402
from tests.regress.jobs import Settled, batch_number  # noqa: E402


class Note(pl.Callback):
    """Appends what was trained on to a file of this process's own, so that it outlives a kill."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        with (FOLDER / f"{TAG}-{attempt}-{trainer.global_rank}").open("a") as file:
            file.write(f"{batch_number(batch, trainer.global_rank)} {pl_module.losses[-1]!r}\n")


def main() -> None:
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
    assert BUILT_ON.startswith(PACKAGE)
    # recovery="full": a restart is exact, where hand-over would keep the survivor's rows as they are
    cpr = CPRCallback(str(FOLDER / "root"), save_every_n_steps=5, timeout_s=60, recovery="full")
    injector = FaultInjector()
    if TAG == "killed":
        injector.kill(rank=1, step=13, point="forward")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=TorchRecStrategy(plan={"a": "row_wise", "b": "table_wise", "c": "table_wise"}),
        max_steps=STEPS,
        callbacks=[Note(), Settled(cpr), cpr, injector],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Tiny(dense="adam", filled=not (FOLDER / "root").exists()), stateful_loader(rank))


if __name__ == "__main__":
    main()
