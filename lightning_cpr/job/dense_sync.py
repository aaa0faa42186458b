"""Gradient synchronisation of the dense part, whose DDP is not at the top of the model where Lightning looks for it."""

from __future__ import annotations

from torch import nn

from lightning_cpr._lightning import ForwardRedirection, pl
from lightning_cpr.tables import sharding


class DenseRedirection(ForwardRedirection):
    """In manual optimization the backward runs inside DDP's forward, whose own preparation for it must not run."""

    def on_after_inner_forward(self, wrapper_module: nn.Module, original_module: pl.LightningModule) -> None:
        self._sync(wrapper_module, original_module, False)

    def on_after_outer_forward(self, wrapper_module: nn.Module, original_module: pl.LightningModule) -> None:
        self._sync(wrapper_module, original_module, True)

    @staticmethod
    def _sync(wrapper_module: nn.Module, original_module: pl.LightningModule, on: bool) -> None:
        ddp = sharding.dense_ddp(wrapper_module)
        if ddp is not None and not original_module.automatic_optimization:
            ddp.require_backward_grad_sync = on
