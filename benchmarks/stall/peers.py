"""The other ways to save the same state, each timed until training may go on, and then waited for."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed.checkpoint as dcp
from lightning_fabric.plugins import TorchCheckpointIO
from pytorch_lightning.plugins.io import AsyncCheckpointIO
from torch import Tensor
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from lightning_cpr.spec import Shard


class KeptBuffers(BlockingAsyncStager):
    """Copies plain tensors into buffers that are kept: torch's own stagers pin them, which needs an accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self._buffers: dict[str, Tensor] = {}

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        for name, value in state_dict.items():
            if name not in self._buffers:
                self._buffers[name] = torch.zeros_like(value)
            self._buffers[name].copy_(value)
        return dict(self._buffers)


class Peers:
    """Saves of one sharded model to a folder. Each returns seconds until training goes on, and the CPU seconds of the
    training thread in them.
    """

    def __init__(self, trainer: pl.Trainer, shards: list[Shard], folder: str) -> None:
        self._trainer, self._shards, self._folder = trainer, shards, folder
        # dcp.async_save raises on the sharded tensors of TorchRec; it takes the plain ones that they are made of, into
        # buffers that are kept.
        self._stager = KeptBuffers()
        self._io = AsyncCheckpointIO(TorchCheckpointIO())
        self.ways: dict[str, Callable[[], tuple[float, float]]] = {
            "dcp.save": self._dcp,
            "dcp.async_save": self._dcp_async,
            "torch.save": self._torch,
            "AsyncCheckpointIO": self._lightning,
        }

    def _sharded(self) -> dict[str, Any]:
        model = self._trainer.strategy.model
        return {"model": model.state_dict(), "tables": self._trainer.strategy.fused_optimizer.state_dict()}

    def _plain(self) -> dict[str, Tensor]:
        state = {f"{s.spec.table}.{name}": t for s in self._shards for name, t in s.states.items()}
        state |= {s.spec.table: s.weight for s in self._shards}
        mlp = self._trainer.lightning_module.mlp.state_dict()
        return state | {f"mlp.{name}": value for name, value in mlp.items()}

    def _timed(self, start: Callable[[], Callable[[], object]]) -> tuple[float, float]:
        shutil.rmtree(f"{self._folder}/peer", ignore_errors=True)
        before, cpu = time.perf_counter(), time.thread_time()
        finish = start()
        stalled = time.perf_counter() - before, time.thread_time() - cpu
        finish()
        return stalled

    def _dcp(self) -> tuple[float, float]:
        def start() -> Callable[[], object]:
            dcp.save(self._sharded(), checkpoint_id=f"{self._folder}/peer")
            return lambda: None

        return self._timed(start)

    def _dcp_async(self) -> tuple[float, float]:
        def start() -> Callable[[], object]:
            future = dcp.async_save(self._plain(), checkpoint_id=f"{self._folder}/peer", async_stager=self._stager)
            return future.result  # type: ignore[union-attr]

        return self._timed(start)

    def _torch(self) -> tuple[float, float]:
        def start() -> Callable[[], object]:
            torch.save(self._plain(), f"{self._folder}/peer.pt")
            return lambda: None

        return self._timed(start)

    def _lightning(self) -> tuple[float, float]:
        def start() -> Callable[[], object]:
            self._io.save_checkpoint(self._plain(), f"{self._folder}/peer.ckpt")
            return self._io.teardown

        return self._timed(start)
