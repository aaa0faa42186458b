"""What a survivor hands over in a live recovery, beside table rows: the dense part, and where it stands in the run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from lightning_cpr._lightning import pl
from lightning_cpr.checkpoint_io import VERSION_KEY
from lightning_cpr.errors import CPRError, RecoveryError
from lightning_cpr.job.state import set_rng_state, to_plain
from lightning_cpr.live.batch import load_schedulers_state, schedulers_state
from lightning_cpr.pipeline import PipelinedModule
from lightning_cpr.saving.settings import Settings
from lightning_cpr.store.blob import decode_blob, encode_blob
from lightning_cpr.tables.rebind import check_rebindable
from lightning_cpr.tables.replicas import load_replicated_state, replicated_state
from lightning_cpr.tables.scalars import fused_scalars, load_fused_scalars
from lightning_cpr.tables.table_optim import sharded_dense_tables

if TYPE_CHECKING:
    from lightning_cpr.strategy import TorchRecStrategy


def why_not(trainer: pl.Trainer, model: nn.Module, hooks: Sequence[object]) -> str:
    """Why a process of this fit cannot be replaced in place; empty if it can. hooks: callbacks that restore rows."""
    module = trainer.lightning_module
    if not hooks:
        return "no callback of the Trainer can restore rows"
    settings = [getattr(hook, "settings", None) for hook in hooks]
    roots = [each.root for each in settings if isinstance(each, Settings)]
    if len(roots) > 1:
        return f"several callbacks restore rows, each from versions of its own: {', '.join(roots)}"
    if trainer.accumulate_grad_batches != 1:
        return "accumulate_grad_batches"
    if not isinstance(module, PipelinedModule) and "dataloader_iter" in signature(module.training_step).parameters:
        return "training_step(dataloader_iter) of a module that is no PipelinedModule: nobody knows what it holds"
    if not module.automatic_optimization and (dense := sharded_dense_tables(model)):
        return f"manual optimization with tables in dense kernels ({', '.join(dense)}), too large to copy each batch"
    assert dist.group.WORLD is not None
    try:
        check_rebindable(model, dist.group.WORLD)
    except RecoveryError as e:
        return str(e)
    return ""


def tell_position(trainer: Any, fit: int) -> str:
    """Where this rank's loops stand, for a replacement. fit: the number of this fit in its process."""
    state = trainer.fit_loop.state_dict()
    state["state_dict"] = {k: v for k, v in state["state_dict"].items() if k != "combined_loader"}  # of this rank
    dirpaths = [getattr(checkpoint, "dirpath", None) for checkpoint in trainer.checkpoint_callbacks]
    return json.dumps({"fit": fit, "fit_loop": to_plain(state), "dirpaths": dirpaths})


def take_position(trainer: Any, told: str, fit: int) -> None:
    """Stand where `tell_position` says.

    Raises:
        RecoveryError: the job is in another fit than this process is, or in none yet.
    """
    if not told:
        raise RecoveryError("the others had not begun to train; the job restarts in full")
    position = json.loads(told)
    if position["fit"] != fit:
        raise RecoveryError(f"the job is in its fit number {position['fit']}, this replacement in number {fit}")
    trainer.fit_loop.load_state_dict(position["fit_loop"])
    trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = False  # not yet known of the batch to come
    for checkpoint, dirpath in zip(trainer.checkpoint_callbacks, position["dirpaths"], strict=True):
        if hasattr(checkpoint, "dirpath"):
            checkpoint.dirpath = dirpath


def manual_progress(trainer: Any) -> Any:
    """Lightning's count of optimizer steps in manual optimization."""
    return trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress


def stepped_state(strategy: TorchRecStrategy, trainer: Any) -> dict[str, Any]:
    """What a manual ``training_step`` has just left: rates, schedulers, optimizer steps. A rank that leaves the step
    out takes these, and not what the hooks after it made of them, since its own hooks run yet.
    """
    groups = [strategy.optimizer_state(optimizer)["param_groups"] for optimizer in strategy.optimizers]
    progress = manual_progress(trainer).state_dict()
    return {"groups": groups, "schedulers": schedulers_state(trainer), "progress": progress}


def capture(
    strategy: TorchRecStrategy, trainer: Any, rng: Mapping[str, Any], stepped: Mapping[str, Any], groups: Any = None
) -> bytes:
    """Everything but sharded rows and loops. rng, stepped: of the start of the batch that broke; groups: its rates.

    Raises:
        RecoveryError: an object has no plain form.
    """
    assert strategy.model is not None
    module = trainer.lightning_module
    try:
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        for key in ("loops", module.CHECKPOINT_HYPER_PARAMS_KEY, module.CHECKPOINT_HYPER_PARAMS_TYPE):
            checkpoint.pop(key, None)
        replicas, scalars = replicated_state(strategy.model), fused_scalars(strategy.model)
        told = {"checkpoint": checkpoint, "replicas": replicas, "scalars": scalars, "rng": rng, "stepped": stepped}
        return encode_blob(to_plain(told | {"groups": groups}))
    except CPRError as e:
        raise RecoveryError(f"the dense state cannot be handed over: {e}") from e


def adopt_all(strategy: TorchRecStrategy, trainer: Any, data: bytes) -> Any:
    """A replacement takes what `capture` gave. Returns the ``groups``."""
    assert strategy.model is not None
    told = decode_blob(data, "the state of a survivor")
    load_replicated_state(strategy.model, told["replicas"])
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = told["checkpoint"] | {VERSION_KEY: None}
    connector.restore_datamodule()
    connector.restore_model()
    connector.restore_callbacks()
    connector.restore_precision_plugin_state()
    connector.restore_optimizers_and_schedulers()
    connector._loaded_checkpoint = {}
    load_fused_scalars(strategy.model, told["scalars"])
    set_rng_state(told["rng"])
    return told["groups"]


def adopt_dense(strategy: TorchRecStrategy, trainer: Any, data: bytes) -> None:
    """A survivor that is a step behind takes the dense part. Its callbacks and loops step by themselves when it leaves
    the batch; its schedulers too, but in manual optimization.
    """
    assert strategy.model is not None
    told = decode_blob(data, "the state of a survivor")
    load_replicated_state(strategy.model, told["replicas"])
    strategy.load_model_state_dict(told["checkpoint"] | {VERSION_KEY: None})
    states = zip(strategy.optimizers, told["checkpoint"]["optimizer_states"], strict=True)
    own = [dict(strategy.optimizer_state(o)) | {"state": theirs["state"]} for o, theirs in states]
    if stepped := told["stepped"]:
        own = [o | {"param_groups": groups} for o, groups in zip(own, stepped["groups"], strict=True)]
        load_schedulers_state(trainer, stepped["schedulers"])
        manual_progress(trainer).load_state_dict(stepped["progress"])
    strategy.load_optimizer_state_dict({"optimizer_states": own})
