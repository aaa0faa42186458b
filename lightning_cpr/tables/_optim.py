"""The optimizer states of a table: their canonical names and kinds, wherever the optimizer lives.

Fused kernels hold the states themselves. For dense kernels and data-parallel tables they sit in an ordinary optimizer,
which makes them at its first step; here they are made before, so that a restore writes into live tensors.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from lightning_cpr.tables import _deps

_deps.check()

import torch  # noqa: E402
from fbgemm_gpu.split_embedding_configs import EmbOptimType  # noqa: E402
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.optim import Optimizer  # noqa: E402
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad  # noqa: E402

from lightning_cpr.errors import UnsupportedError  # noqa: E402
from lightning_cpr.spec import StateSpec  # noqa: E402
from lightning_cpr.tables._modules import TableInfo  # noqa: E402

Kind = Literal["row", "element"]

_ADAM = (("exp_avg", "element"), ("exp_avg_sq", "element"))
_PARTIAL_ADAM = (("exp_avg", "element"), ("exp_avg_sq", "row"))
_FUSED: dict[EmbOptimType, tuple[str, tuple[tuple[str, Kind], ...]]] = {
    EmbOptimType.SGD: ("sgd", ()),
    EmbOptimType.EXACT_SGD: ("sgd", ()),
    EmbOptimType.EXACT_ADAGRAD: ("adagrad", (("sum", "element"),)),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: ("rowwise_adagrad", (("sum", "row"),)),
    EmbOptimType.ADAM: ("adam", _ADAM),  # type: ignore[dict-item]
    EmbOptimType.PARTIAL_ROWWISE_ADAM: ("partial_rowwise_adam", _PARTIAL_ADAM),  # type: ignore[dict-item]
    EmbOptimType.LAMB: ("lamb", _ADAM),  # type: ignore[dict-item]
    EmbOptimType.PARTIAL_ROWWISE_LAMB: ("partial_rowwise_lamb", _PARTIAL_ADAM),  # type: ignore[dict-item]
}
_ROW_SPARSE = ("sgd", "adagrad", "rowwise_adagrad")
_DENSE_NAMES = {"RowWiseAdagrad": "rowwise_adagrad"}

DENSE_CLASSES: dict[EmbOptimType, type[Optimizer]] = {
    EmbOptimType.SGD: torch.optim.SGD,
    EmbOptimType.EXACT_SGD: torch.optim.SGD,
    EmbOptimType.EXACT_ADAGRAD: torch.optim.Adagrad,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: RowWiseAdagrad,
    EmbOptimType.ADAM: torch.optim.Adam,
}
"""The ordinary optimizer with the update rule of a fused one, for tables that a fused kernel does not hold."""


class Held(NamedTuple):
    """A table parameter, and the ordinary optimizer and param group that update it. ``ours``: it is not the user's."""

    optimizer: Optimizer
    group: dict[str, Any]
    parameter: nn.Parameter
    ours: bool


def fused_type(info: TableInfo) -> EmbOptimType:
    """The update rule of a fused table; fbgemm's default is plain SGD."""
    return info.fused_params.get("optimizer") or EmbOptimType.EXACT_SGD


def fused_optimizer(info: TableInfo) -> tuple[str, tuple[StateSpec, ...], bool]:
    """Canonical name, states and row-sparsity of a fused table's optimizer.

    Raises:
        UnsupportedError: the optimizer's states are not known here.
    """
    kind = fused_type(info)
    if kind not in _FUSED:
        raise UnsupportedError(f"table {info.fqn}: the fused optimizer {kind} is not supported.")
    name, states = _FUSED[kind]
    params = info.fused_params
    mode = params.get("weight_decay_mode", WeightDecayMode.NONE)
    if name == "rowwise_adagrad" and mode in (WeightDecayMode.COUNTER, WeightDecayMode.COWCLIP):
        states = (*states, ("prev_iter", "row"), ("row_counter", "row"))
    elif name == "rowwise_adagrad" and mode == WeightDecayMode.DECOUPLE_GLOBAL:
        states = (*states, ("prev_iter", "row"))
    decays = bool(params.get("weight_decay", 0.0)) or mode != WeightDecayMode.NONE
    dtypes = params.get("optimizer_state_dtypes") or {}
    specs = tuple(
        StateSpec(state, state_kind, _state_dtype(dtypes, index)) for index, (state, state_kind) in enumerate(states)
    )
    return name, specs, name in _ROW_SPARSE and not decays


def _state_dtype(dtypes: Mapping[str, Any], index: int) -> torch.dtype:
    name = f"momentum{index + 1}"
    return dtypes[name].as_dtype() if name in dtypes else torch.float32


def claim(info: TableInfo, optimizer: Optimizer | None, ours: bool = False) -> None:
    """Remembers on the table's parameter which ordinary optimizer updates it; None forgets it."""
    info.parameter._cpr_claim = None if optimizer is None else (optimizer, ours)  # type: ignore[attr-defined]


def claimed(info: TableInfo) -> tuple[Optimizer, bool] | None:
    """The optimizer that claimed the table, and whether it is ours."""
    return getattr(info.parameter, "_cpr_claim", None)


def held_by(info: TableInfo, optimizers: Iterable[Optimizer]) -> Held | None:
    """The ordinary optimizer that has this table's parameter, if any: one of ``optimizers``, or its claimant.

    For a plain table also the one that ``apply_optimizer_in_backward`` attached to the parameter.
    """
    parameter = info.parameter
    attached = [] if info.kernel is not None else getattr(parameter, "_in_backward_optimizers", [])
    claim = claimed(info)
    candidates = [(o, False) for o in optimizers] + ([claim] if claim else []) + [(o, False) for o in attached]
    for optimizer, ours in candidates:
        for group in optimizer.param_groups:
            if any(p is parameter for p in group["params"]):
                return Held(optimizer, group, parameter, ours)
    return None


def optimizer_name(optimizer: Optimizer) -> str:
    """``adagrad``, ``rowwise_adagrad``, ...: the same word as for the fused optimizer with that rule."""
    name = type(optimizer).__name__
    return _DENSE_NAMES.get(name, name.lower())


def dense_states(held: Held) -> tuple[tuple[StateSpec, ...], dict[str, Any]]:
    """The row states of an ordinary optimizer, and its other states as a step-0 template (e.g. ``step``).

    Found by one step with a zero gradient on a 2x3 dummy, so that it is the same on ranks that hold nothing.
    """
    kind = type(held.optimizer)
    accepted = inspect.signature(kind).parameters
    arguments = {key: held.group[key] for key in held.optimizer.defaults if key in accepted and key in held.group}
    dummy = nn.Parameter(torch.zeros(2, 3, dtype=held.parameter.dtype))
    dummy.grad = torch.zeros_like(dummy)
    probe = kind([dummy], **arguments)
    probe.step()
    specs, scalars = [], {}
    for name, value in probe.state[dummy].items():
        if isinstance(value, Tensor) and value.numel() == dummy.numel():
            specs.append(StateSpec(name, "element", value.dtype))
        elif isinstance(value, Tensor) and value.numel() == dummy.shape[0]:
            specs.append(StateSpec(name, "row", value.dtype))
        else:
            scalars[name] = torch.zeros_like(value) if isinstance(value, Tensor) else type(value)()
    return tuple(specs), scalars


def live_state(held: Held) -> dict[str, Any]:
    """The optimizer's state of the table's parameter, made now if the optimizer has not stepped yet.

    Until its first step an optimizer would make the very same zeros, so training is not changed by this.
    """
    state = held.optimizer.state[held.parameter]
    specs, scalars = dense_states(held)
    parameter = held.parameter
    for spec in specs:
        if spec.name not in state:
            shape = parameter.shape if spec.kind == "element" else (parameter.shape[0], 1)
            state[spec.name] = torch.zeros(shape, dtype=spec.dtype, device=parameter.device)
    for name, value in scalars.items():
        if name not in state:
            state[name] = copy.deepcopy(value)
    return state
