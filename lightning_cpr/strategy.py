"""TorchRecStrategy: shards the embedding collections of a plain LightningModule and trains it in a Lightning Trainer.

trainer = pl.Trainer(strategy="torchrec", accelerator="cpu", devices=2)
trainer = pl.Trainer(strategy=TorchRecStrategy(plan={"big": "row_wise", "small": "table_wise"}))
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_cpr._lightning import (
    DDPStrategy,
    ForwardRedirection,
    TrainerFn,
    check_trainer,
    optimizers_to_device,
    pl,
    prepare_for_backward,
)
from lightning_cpr.tables import sharding
from lightning_cpr.tables.dense import dense_state, load_dense_state
from lightning_cpr.tables.sharding import PlanLike, World

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT = timedelta(minutes=5)
"""How long a collective may wait. A rank whose peers wait for a dead one is released by this alone, so it is finite."""


class TorchRecStrategy(DDPStrategy):
    """Shards with TorchRec's DistributedModelParallel where DDP would wrap, in every stage; one process a device.

    Collections on the meta device are allocated shard by shard. Modules that the user wrapped in
    DistributedModelParallel are taken as they are. All ranks save, and a checkpoint is restored after set-up.

    plan, constraints, sharders, topology: see `lightning_cpr.tables.sharding.build_plan`. ``kwargs``: DDPStrategy's own
    (``timeout``, ``process_group_backend``, ``start_method``, ...) and arguments of DDP for the dense part.

    Raises at set-up:
        UnsupportedError: a module, kernel, precision or Trainer option that would train or save wrongly, by name.
        ConfigError: a plan that does not fit the model or the world.
    """

    def __init__(
        self,
        plan: PlanLike = None,
        constraints: Mapping[str, Any] | None = None,
        sharders: Sequence[Any] | None = None,
        topology: Any | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        **kwargs: Any,
    ) -> None:
        super().__init__(timeout=timeout, **kwargs)
        self._plan = plan
        self._constraints = constraints
        self._sharders = sharders
        self._topology = topology
        self._forward_redirection = _DenseRedirection()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def setup_distributed(self) -> None:
        # torchrec reads the ranks of a node from here; torchrun sets it, Lightning's launcher does not.
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(self.num_processes))
        super().setup_distributed()

    def setup(self, trainer: pl.Trainer) -> None:
        check_trainer(trainer)
        assert self.accelerator is not None
        assert self.lightning_module is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.accelerator.setup(trainer)
        sharding.refuse_unsupported(self.lightning_module)
        module: nn.Module = self.lightning_module
        if fitting and self._layer_sync:
            module = self._layer_sync.apply(module)
        self.model = self._setup_model(self.precision_plugin.convert_module(module))
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            optimizers_to_device(self.optimizers, self.root_device)

    def model_to_device(self) -> None:
        """Nothing: tables may be on meta; sharding puts every tensor where it belongs."""

    def _setup_model(self, model: nn.Module) -> nn.Module:  # type: ignore[override]
        world = World(self.world_size, self.num_processes, self.root_device)
        plan = sharding.build_plan(
            model,
            world,
            self._plan,
            constraints=self._constraints,
            sharders=self._sharders,
            topology=self._topology,
        )
        return sharding.shard(model, plan, self.root_device, sharders=self._sharders, **self._ddp_kwargs)

    @property
    def _ddp(self) -> DistributedDataParallel | None:
        return None if self.model is None else sharding.dense_ddp(self.model)

    # Gradient synchronisation of the dense part. Lightning's versions look for DDP at the top, where ours is not.

    def pre_backward(self, closure_loss: Tensor) -> None:
        ddp = self._ddp
        if ddp is not None and self.lightning_module is not None and not self.lightning_module.automatic_optimization:
            prepare_for_backward(ddp, closure_loss)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        with nullcontext() if self._ddp is None else self._ddp.no_sync():
            yield

    # Checkpoints.

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Every rank saves its own shards."""
        self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The dense state; tables are saved by rows (`lightning_cpr.tables.shards`)."""
        assert self.lightning_module is not None
        return dense_state(self.lightning_module)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        load_dense_state(self.lightning_module, checkpoint["state_dict"], strict=strict)

    def teardown(self) -> None:
        """Leaves tables where they are, and an error that is on its way up visible."""
        first = sys.exc_info()[1]
        steps = [self._unwrap, self.precision_plugin.teardown, self.checkpoint_io.teardown]
        if self.accelerator is not None:
            steps.append(self.accelerator.teardown)
        if self.cluster_environment is not None:
            steps.append(self.cluster_environment.teardown)
        failed: Exception | None = None
        for step in steps:
            try:
                step()
            except Exception as error:
                log.error("tear-down of %s failed: %s", step, error)
                failed = failed or error
        if failed is not None and first is None:
            raise failed

    def _unwrap(self) -> None:
        self.model = self.lightning_module
        if self._layer_sync is not None and self.lightning_module is not None:
            self._layer_sync.revert(self.lightning_module)


class _DenseRedirection(ForwardRedirection):
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
