"""Which optimizer updates which table, and at what learning rate.

A fused table is updated in backward by its kernel. A table in a dense kernel or data-parallel is not, even if its
optimizer was declared with ``apply_optimizer_in_backward`` or fused params: TorchRec drops that declaration. Here such
a table belongs to the user's optimizer if that has its parameter, and else gets an ordinary optimizer with the declared
rule, so that a change of plan never leaves a table untrained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from lightning_cpr.errors import ConfigError, UnsupportedError
from lightning_cpr.tables import _optim
from lightning_cpr.tables._modules import TableInfo, sharded_collections, tables
from lightning_cpr.tables.scalars import fused_kernels
from lightning_cpr.tables.shards import global_shards

FUSED_GROUP = "fused"
"""``name`` of the param groups that `FusedRates.attach` adds to an optimizer."""

_DEFAULT_LR = 0.01
_DEFAULT_EPS = 1e-8


def has_fused_updates(model: nn.Module) -> bool:
    """Whether some table is updated in backward, out of reach of loss scaling, clipping and gradient accumulation."""
    return any(info.fused for info in tables(model))


def sharded_dense_tables(model: nn.Module) -> list[str]:
    """Tables in dense kernels that are split over ranks: updated by an ordinary optimizer, not in backward."""
    replicated = {spec.table for spec in global_shards(model) if spec.replicated}
    return sorted(i.fqn for i in tables(model) if i.kernel is not None and not i.fused and i.fqn not in replicated)


def undeclared_fused_tables(model: nn.Module) -> list[str]:
    """Fused tables for which nobody chose an optimizer: fbgemm trains them with SGD at a rate of 0.01."""
    return [info.fqn for info in tables(model) if info.fused and "optimizer" not in info.fused_params]


def drop_fused(optimizer: Optimizer) -> int:
    """Takes parameters that are updated in backward out of an optimizer. Returns how many.

    Raises:
        ConfigError: nothing else was in it.
    """
    dropped = 0
    for group in optimizer.param_groups:
        kept = [p for p in group["params"] if not hasattr(p, "_in_backward_optimizers")]
        for parameter in group["params"]:
            if hasattr(parameter, "_in_backward_optimizers"):
                optimizer.state.pop(parameter, None)
        dropped += len(group["params"]) - len(kept)
        group["params"] = kept
    if dropped and not any(group["params"] for group in optimizer.param_groups):
        raise ConfigError(
            f"{type(optimizer).__name__} holds fused tables only. Those are updated in backward: leave them out of "
            f"configure_optimizers, and see TorchRecStrategy.add_fused_groups to schedule their learning rate."
        )
    return dropped


def claim_tables(model: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[list[Optimizer], list[str]]:
    """Settles who updates each table that no fused kernel holds, so that its states are found from the model alone.

    Returns:
        Optimizers for the tables that ``optimizers`` do not have but that declared one, kept from an earlier call where
        it made them already; and the tables that nothing updates.

    Raises:
        UnsupportedError: the declared optimizer has no ordinary form, by table.
    """
    made: list[Optimizer] = []
    untrained = []
    for info in tables(model):
        if info.kernel is None or info.fused:
            continue
        earlier = _optim.claimed(info)
        _optim.claim(info, None)
        if (held := _optim.held_by(info, optimizers)) is not None:
            _optim.claim(info, held.optimizer)
        elif "optimizer" not in info.fused_params:
            untrained.append(info.fqn)
        elif info.parameter.numel():
            kind, arguments = _declared(info)
            ours = earlier[0] if earlier is not None and earlier[1] else kind([info.parameter], **arguments)
            _optim.claim(info, ours, ours=True)
            made.append(ours)
    return made, untrained


def _declared(info: TableInfo) -> tuple[type[Optimizer], dict[str, Any]]:
    """The ordinary optimizer with the rule and arguments that a table declared for its fused kernel."""
    kind = _optim.fused_type(info)
    if kind not in _optim.DENSE_CLASSES:
        raise UnsupportedError(
            f"table {info.fqn} is in no fused kernel under this plan, and its optimizer {kind} exists only there: "
            f"shard it table_wise, row_wise or column_wise."
        )
    params = info.fused_params
    arguments: dict[str, Any] = {"lr": float(params.get("learning_rate", _DEFAULT_LR))}
    if params.get("weight_decay"):
        arguments["weight_decay"] = params["weight_decay"]
    name = _optim.fused_optimizer(info)[0]
    if name != "sgd":
        arguments["eps"] = params.get("eps", _DEFAULT_EPS)
    if name == "adam":
        arguments["betas"] = (params.get("beta1", 0.9), params.get("beta2", 0.999))
    return _optim.DENSE_CLASSES[kind], arguments


@dataclass
class _Unit:
    """Tables that were declared with one learning rate. The same units, in the same order, on every rank."""

    declared: float
    name: str
    fqns: frozenset[str]
    optimizer: Optimizer | None = None

    @property
    def group(self) -> dict[str, Any] | None:
        """The param group that drives it. Looked up each time: loading an optimizer's state replaces its groups."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return next((group for group in groups if group.get("name") == self.name), None)


class FusedRates:
    """Lets schedulers drive the learning rates of tables: they act on param groups, kernels hold a tensor."""

    def __init__(self, model: nn.Module) -> None:
        by_rate: dict[float, list[str]] = {}
        for info in tables(model):
            if info.kernel is not None and (info.fused or "optimizer" in info.fused_params):
                by_rate.setdefault(float(info.fused_params.get("learning_rate", _DEFAULT_LR)), []).append(info.fqn)
        names = [FUSED_GROUP] if len(by_rate) == 1 else [f"{FUSED_GROUP}-{rate:g}" for rate in sorted(by_rate)]
        self._units = [
            _Unit(rate, name, frozenset(by_rate[rate])) for rate, name in zip(sorted(by_rate), names, strict=True)
        ]
        self._kernels = [(frozenset(fqns), kernel) for fqns, kernel in fused_kernels(model)]
        self._ordinary: list[tuple[frozenset[str], dict[str, Any]]] = []
        self.restored()

    def restored(self) -> None:
        """The kernels and their param groups agree on a rate: they were made, or loaded, just now."""
        self._applied = {id(kernel): kernel.fused_optimizer.param_groups[0]["lr"] for _, kernel in self._kernels}

    def follow(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Includes the ordinary optimizers that `claim_tables` made."""
        for info in tables(model):
            held = None if info.fused or info.kernel is None else _optim.held_by(info, optimizers)
            if held is not None:
                self._ordinary.append((frozenset([info.fqn]), held.group))

    def attach(self, optimizer: Optimizer) -> None:
        """Adds one param group without parameters per learning rate; `push` makes the tables follow it."""
        for unit in self._units:
            optimizer.add_param_group({"params": [], "lr": unit.declared, "name": unit.name})
            unit.optimizer = optimizer
        for index, group in enumerate(optimizer.param_groups):
            group.setdefault("name", f"pg{index + 1}")

    def push(self) -> None:
        """Hands changed rates to the kernels. Call it before the backward that is to use them."""
        for unit in self._units:
            if (driver := unit.group) is not None:
                for fqns, group in (*self._kernel_groups(), *self._ordinary):
                    if fqns <= unit.fqns:
                        group["lr"] = driver["lr"]
        for _, kernel in self._kernels:
            rate = kernel.fused_optimizer.param_groups[0]["lr"]
            # A rate that was set on the kernel itself stands until the group changes.
            if rate != self._applied[id(kernel)]:
                kernel.emb_module.set_learning_rate(float(rate))
                self._applied[id(kernel)] = rate

    def _kernel_groups(self) -> list[tuple[frozenset[str], dict[str, Any]]]:
        return [(fqns, kernel.fused_optimizer.param_groups[0]) for fqns, kernel in self._kernels]


def tables_optimizer(model: nn.Module) -> CombinedOptimizer:
    """TorchRec's CombinedOptimizer over this rank's tables, except those that are in an optimizer of the user's.

    Without param groups on a rank that has no such table.
    """
    parts: list[Any] = [(name, module.fused_optimizer) for name, module in sharded_collections(model)]
    for info in tables(model):
        claim = _optim.claimed(info)
        if claim is not None and claim[1]:
            parts.append(_keyed(f"{info.fqn}.weight", info.parameter, claim[0]))
    return CombinedOptimizer(parts)


def _keyed(name: str, parameter: nn.Parameter, optimizer: Optimizer) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper({name: parameter}, lambda _: optimizer)
