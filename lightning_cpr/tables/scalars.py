"""The scalars of a table's optimizer: step counter, learning rate, hyper-parameters, as plain values by table fqn.

TorchRec's fused optimizer saves moments only; without these a resumed run takes the wrong step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cpr.errors import IncompatiblePlanError
from lightning_cpr.tables import _optim
from lightning_cpr.tables._modules import TableInfo, kernels, rank_and_world, sharded_collections, tables

Scalars = dict[str, dict[str, Any]]

_HYPER = ("eps", "beta1", "beta2", "weight_decay")


def fused_kernels(model: nn.Module) -> Iterator[tuple[list[str], Any]]:
    """(fqns of its tables, kernel) for each fused kernel on this rank. Its tables share one learning rate."""
    fqns = {(id(info.module), info.name): info.fqn for info in tables(model) if info.fused}
    for _, module in sharded_collections(model):
        for kernel in kernels(module):
            names = [fqns.get((id(module), table.name)) for table in kernel.config.embedding_tables]
            if names and None not in names:
                yield list(dict.fromkeys(names)), kernel  # type: ignore[arg-type]


def fused_scalars(model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> Scalars:
    """``{fqn: {"iter": int, "lr": float, ...}}`` of the tables that this rank holds.

    Fused tables: step counter, learning rate, eps, betas, weight decay. Tables in an ordinary optimizer: its step
    counter and other states that are not rows; their learning rate only if the optimizer is none of the user's.
    """
    scalars: Scalars = {}
    for fqns, kernel in fused_kernels(model):
        module = kernel.emb_module
        values = {"iter": int(module.iter.item()), "lr": _rate(kernel)}
        values |= {name: float(getattr(module.optimizer_args, name)) for name in _HYPER}
        scalars |= {fqn: dict(values) for fqn in fqns}
    for info, held in _held(model, optimizers):
        template = _optim.dense_states(held)[1]
        state = _optim.live_state(held)
        scalars[info.fqn] = {_canonical(name): _plain(name, state[name]) for name in template}
        if held.ours:
            scalars[info.fqn]["lr"] = float(held.group["lr"])
    return scalars


def _rate(kernel: Any) -> float:
    """The learning rate as it was set; the kernel keeps it in float32."""
    told, used = kernel.fused_optimizer.param_groups[0]["lr"], float(kernel.emb_module.get_learning_rate())
    return float(told) if np.float32(told) == np.float32(used) else used


def _canonical(name: str) -> str:
    return "iter" if name == "step" else name


def _plain(name: str, value: Any) -> Any:
    value = value.item() if isinstance(value, Tensor) else value
    return int(value) if name == "step" else value


def _held(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[tuple[TableInfo, _optim.Held]]:
    """Tables with local rows whose state sits in an ordinary optimizer."""
    infos = [info for info in tables(model) if not info.fused and info.parameter.numel()]
    return [(info, held) for info in infos if (held := _optim.held_by(info, optimizers)) is not None]


def load_fused_scalars(
    model: nn.Module, scalars: Mapping[str, Mapping[str, Any]], optimizers: Sequence[Optimizer] = ()
) -> None:
    """Writes what `fused_scalars` gave, for the tables of this rank; tables that ``scalars`` lacks keep theirs.

    Tables that share a kernel here may come from several: the step counter is then the largest of theirs.

    Raises:
        IncompatiblePlanError: such tables disagree in another value (names both). Nothing was changed.
    """
    updates = [(kernel, _merged(fqns, scalars)) for fqns, kernel in fused_kernels(model)]
    for kernel, values in updates:
        if "iter" in values:
            kernel.emb_module.set_optimizer_step(values["iter"])
            kernel.emb_module.iter_cpu.fill_(values["iter"])
        if "lr" in values:
            kernel.emb_module.set_learning_rate(values["lr"])
            for group in kernel.fused_optimizer.param_groups:
                group["lr"] = values["lr"]
        kernel.emb_module.update_hyper_parameters({name: values[name] for name in _HYPER if name in values})
    for info, held in _held(model, optimizers):
        state = _optim.live_state(held)
        saved = scalars.get(info.fqn, {})
        if held.ours and "lr" in saved:
            held.group["lr"] = saved["lr"]
        for name in _optim.dense_states(held)[1]:
            if _canonical(name) not in saved:
                continue
            value = saved[_canonical(name)]
            state[name] = state[name].new_tensor(value) if isinstance(state[name], Tensor) else value


def _merged(fqns: Sequence[str], scalars: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    source: dict[str, str] = {}
    for fqn in fqns:
        for name, value in scalars.get(fqn, {}).items():
            if name == "iter":
                merged[name] = max(value, merged.get(name, 0))
            elif name in merged and np.float32(merged[name]) != np.float32(value):
                raise IncompatiblePlanError(
                    f"rank {rank_and_world()[0]}: tables {source[name]} and {fqn} share one fused kernel, but were "
                    f"saved with {name} {merged[name]} and {value}."
                )
            else:
                merged[name], source[name] = value, fqn
    return merged
