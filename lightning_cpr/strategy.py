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
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_cpr._lightning import (
    DDPStrategy,
    TrainerFn,
    check_trainer,
    optimizers_to_device,
    pl,
    prepare_for_backward,
)
from lightning_cpr.checkpoint_io import CPRCheckpointIO, Version
from lightning_cpr.errors import CommitError, ConfigError
from lightning_cpr.job.dense_sync import DenseRedirection
from lightning_cpr.job.job import Job
from lightning_cpr.job.loader import tracked, warn_of_a_restart
from lightning_cpr.job.rendezvous import join_afresh
from lightning_cpr.job.resume import Resumption
from lightning_cpr.job.table_updates import TableUpdates
from lightning_cpr.job.training_checks import check_training
from lightning_cpr.live.recovery import LiveRecovery, under_guardian
from lightning_cpr.pipeline import PipelinedModule
from lightning_cpr.tables import sharding
from lightning_cpr.tables.dense import dense_optimizer_state, dense_state, load_dense_optimizer_state
from lightning_cpr.tables.rebind import built_apart
from lightning_cpr.tables.sharding import PlanLike, World
from lightning_cpr.tables.table_optim import tables_optimizer

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT = timedelta(minutes=5)
"""How long a collective may wait. A rank whose peers wait for a dead one is released by this alone, so it is finite."""


class TorchRecStrategy(DDPStrategy):
    """Shards with TorchRec's DistributedModelParallel where DDP would wrap, in every stage; one process a device.

    Collections on the meta device are allocated shard by shard. Modules that the user wrapped in
    DistributedModelParallel are taken as they are. All ranks save, and a checkpoint is restored after set-up.

    plan, constraints, sharders, topology: see `lightning_cpr.tables.sharding.build_plan`. ddp: arguments of
    DistributedDataParallel for the dense part, e.g. ``{"find_unused_parameters": True}``. The rest is DDPStrategy's.

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
        ddp: Mapping[str, Any] | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        accelerator: Any | None = None,
        parallel_devices: Any | None = None,
        cluster_environment: Any | None = None,
        checkpoint_io: Any | None = None,
        precision_plugin: Any | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            timeout=timeout,
            process_group_backend=process_group_backend,
            start_method=start_method,
            **(ddp or {}),
        )
        self._plan = plan
        self._constraints = constraints
        self._sharders = sharders
        self._topology = topology
        self._forward_redirection = DenseRedirection()
        self._resumption: Resumption | None = None
        self._table_updates: TableUpdates | None = None
        self.live = LiveRecovery(self) if under_guardian() else None
        self.group_ports: tuple[frozenset[int], frozenset[int]] | None = None  # under torchrun: see `join_afresh`

    @property  # type: ignore[override]
    def checkpoint_io(self) -> CPRCheckpointIO:
        """Lightning's checkpoints as versions; made here unless the user brought one."""
        if self._checkpoint_io is None:
            self._checkpoint_io = CPRCheckpointIO()
        assert isinstance(self._checkpoint_io, CPRCheckpointIO)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        if io is not None and not isinstance(io, CPRCheckpointIO):
            raise ConfigError(
                f"{type(io).__name__} cannot save the tables of all ranks: leave it out (TorchRecStrategy brings"
                " CPRCheckpointIO), and use CPRCallback to save in the background."
            )
        self._checkpoint_io = io

    @property
    def collective_timeout(self) -> float:
        """Seconds that a collective may wait."""
        assert self._timeout is not None
        return self._timeout.total_seconds()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def setup_distributed(self) -> None:
        # torchrec reads the ranks of a node from here; torchrun sets it, Lightning's launcher does not.
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(self.num_processes))
        if self.live is not None:
            assert self._timeout is not None
            self.live.setup_group(self._get_process_group_backend(), self._timeout.total_seconds())
        elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not dist.is_initialized():
            assert self._timeout is not None
            self.set_world_ranks()
            device = None if self.root_device.type == "cpu" else self.root_device
            self.group_ports = join_afresh(
                self._get_process_group_backend(), self.global_rank, self.world_size, self._timeout, device_id=device
            )
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
        self._table_updates = TableUpdates(self.model)
        if fitting:
            self.setup_optimizers(trainer)
            check_training(trainer, self.model, self._table_updates.ordinary)
        self.setup_precision_plugin()
        if fitting:
            optimizers_to_device(self.optimizers, self.root_device)
        self.job = Job(trainer)
        self._resumption = Resumption(self.job, self._table_updates.rates)
        self.checkpoint_io.attach(self.job)
        if self.live is not None:
            self.live.setup(trainer)

    def rejoin(self, donor: int, epoch: int) -> None:
        """After a live recovery, on every rank: the job, and what saves through it, on the new group. A collective."""
        told = [self.job.incarnation]  # a replacement's was its own until now
        dist.broadcast_object_list(told, src=donor)
        self.job.rejoin(told[0], epoch)
        self.checkpoint_io.attach(self.job)

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
        with built_apart() if self.live is not None and self.live.apart else nullcontext():
            return sharding.shard(model, plan, self.root_device, sharders=self._sharders, **self._ddp_kwargs)

    # Optimizers.

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        assert self._table_updates is not None
        self._table_updates.claim(self.optimizers)

    @property
    def fused_optimizer(self) -> Any:
        """TorchRec's optimizer over this rank's tables. A rate set in a param group holds from the next batch."""
        assert self.model is not None
        return tables_optimizer(self.model)

    def add_fused_groups(self, optimizer: Optimizer) -> Optimizer:
        """Lets ``optimizer``'s learning-rate schedulers drive the tables too; returns it. In ``configure_optimizers``::

            optimizer = self.trainer.strategy.add_fused_groups(torch.optim.Adam(self.mlp.parameters(), lr=0.001))
            return {"optimizer": optimizer, "lr_scheduler": LinearLR(optimizer, ...)}

        Adds one param group named ``fused`` (one per distinct rate, ``fused-<rate>``), with the tables' declared rate
        and no parameters. LearningRateMonitor shows it, and checkpoints hold it as part of the optimizer.
        """
        assert self._table_updates is not None, "add_fused_groups belongs into configure_optimizers, after sharding"
        self._table_updates.rates.attach(optimizer)
        return optimizer

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            return self._training_step(*args, **kwargs)

        return run() if self.live is None else self.live.training_step(run, *args, **kwargs)

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._table_updates is not None
        assert self.model is not None
        assert self.lightning_module is not None
        self._table_updates.rates.push()
        if self.model.training != self.lightning_module.training:
            sharding.sync_training_mode(self.model, self.lightning_module)
        if isinstance(self.lightning_module, PipelinedModule):
            # Its pipeline calls the wrapped model itself, once per batch.
            with self.precision_plugin.train_step_context():
                self.lightning_module.training_step(*args, **kwargs)
            return None
        return super().training_step(*args, **kwargs)

    def on_validation_start(self) -> None:
        if isinstance(self.lightning_module, PipelinedModule):
            self.lightning_module.pause_pipeline()

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any | None = None, **kwargs: Any) -> Any:
        def run() -> Any:
            return self._optimizer_step(optimizer, closure, model, **kwargs)

        return run() if self.live is None else self.live.optimizer_step(run, closure)

    def _optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any | None, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        assert self._table_updates is not None
        self._table_updates.step()
        return output

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """By canonical parameter names, without tables: their rows are saved as rows."""
        assert self.lightning_module is not None
        return dense_optimizer_state(self.lightning_module, getattr(optimizer, "_optimizer", optimizer))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.lightning_module is not None
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_dense_optimizer_state(self.lightning_module, optimizer, state)
        optimizers_to_device(self.optimizers, self.root_device)

    @property
    def _ddp(self) -> DistributedDataParallel | None:
        return None if self.model is None else sharding.dense_ddp(self.model)

    # Gradient synchronisation of the dense part. Lightning's versions look for DDP at the top, where ours is not.

    def pre_backward(self, closure_loss: Tensor) -> None:
        if self._ddp is not None and self._backward_inside_forward():
            prepare_for_backward(self._ddp, closure_loss)

    def _backward_inside_forward(self) -> bool:
        module = self.lightning_module
        return module is not None and not module.automatic_optimization and not isinstance(module, PipelinedModule)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        with nullcontext() if self._ddp is None else self._ddp.no_sync():
            yield

    # Collectives. None while this rank is alone: a replacement that has not joined the others yet (see `LiveRecovery`),
    # or a rank on which an error ends the Trainer: the others may be anywhere, so nothing waits for them.

    @property
    def _failing(self) -> bool:
        return self.lightning_module is not None and self.lightning_module.trainer.interrupted

    @property
    def _alone(self) -> bool:
        return self._failing or (self.live is not None and self.live.apart)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not self._alone:
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._alone else super().broadcast(obj, src)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor if self._alone else super().reduce(tensor, *args, **kwargs)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision if self._alone else super().reduce_boolean_decision(decision, all)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return tensor.unsqueeze(0) if self._alone else super().all_gather(tensor, group, sync_grads)

    # Checkpoints.

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Every rank saves its own shards.

        Not after an error has ended the run: rows, states and dense part may be of different steps then, and the other
        ranks are not here. While the error is handled (``save_on_exception``) that is logged, so that it comes first.

        Raises:
            CommitError: an error has ended the run, or a rank failed; every rank gets the first cause.
        """
        if self._failing:
            text = (
                f"{filepath} is not saved: an error ended the run inside a batch, where tables and dense parameters are"
                " of different steps. Resume from the newest version instead (CPRCallback saves them as training goes)."
            )
            if sys.exc_info()[1] is None:
                raise CommitError(text)
            log.error(text)
            return
        self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The dense state; tables are saved by rows (`lightning_cpr.tables.shards`), all of which are here then."""
        assert self.lightning_module is not None
        if self.live is not None and self.live.guard is not None:
            self.live.guard.wait_for_rows()
        return dense_state(self.lightning_module)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """The dense state of a checkpoint, and the rows of the version that it came with.

        Raises:
            IncompatiblePlanError: on every rank, if they fit the model on none. No tensor was changed.
            CorruptShardError: on every rank, if the version was asked for by name; else the one before it is used.
        """
        assert self.lightning_module is not None
        assert self._resumption is not None
        self._resumption.load(checkpoint, self.lightning_module, self.optimizers, strict)

    @property
    def loaded_version(self) -> Version | None:
        """The version that the rows were read from."""
        return None if self._resumption is None else self._resumption.version

    def on_train_start(self) -> None:
        assert self.lightning_module is not None
        assert self._resumption is not None
        trainer = self.lightning_module.trainer
        if self.loaded_version is not None and self.is_global_zero:
            warn_of_a_restart(trainer)
        if self.live is not None:
            self.live.on_train_start()
        self._resumption.restore_rng(trainer.fit_loop)

    def process_dataloader(self, dataloader: Any) -> Any:
        """A stateful training loader is tracked, so that a resume repeats and skips nothing."""
        trainer = None if self.lightning_module is None else self.lightning_module.trainer
        return tracked(dataloader, trainer) if trainer is not None and trainer.training else dataloader

    def teardown(self) -> None:
        """Leaves tables where they are, and an error that is on its way up visible."""
        first = sys.exc_info()[1]
        steps = [self._close_pipeline, self._unwrap, self.precision_plugin.teardown, self.checkpoint_io.teardown]
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

    def _close_pipeline(self) -> None:
        if isinstance(self.lightning_module, PipelinedModule):
            self.lightning_module.close_pipeline()

    def _unwrap(self) -> None:
        self.model = self.lightning_module
        if self._layer_sync is not None and self.lightning_module is not None:
            self._layer_sync.revert(self.lightning_module)
