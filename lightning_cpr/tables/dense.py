"""Everything of a model that is not a table row: dense parameters, buffers, extra state, under canonical names.

The plain, the sharded and the wrapped model give the same keys, all plain tensors: a dense state saved under one plan
loads under any other and into the unsharded model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torchrec.distributed import DistributedModelParallel

from lightning_cpr.errors import IncompatiblePlanError
from lightning_cpr.tables._modules import PLAIN, SHARDED, unwrap, walk

_STOPS = (*SHARDED, *PLAIN, DistributedModelParallel, DistributedDataParallel)


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """(canonical name, module, whole): ``whole`` subtrees hold no table and no wrapper; of others, the module alone.

    A whole subtree is saved and loaded by its own ``state_dict``, hooks and overrides included.
    """

    def visit(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module, bool]]:
        module = unwrap(module)
        if isinstance(module, SHARDED + PLAIN):
            return
        if not any(isinstance(child, _STOPS) for child in module.modules()):
            yield name, module, True
            return
        yield name, module, False
        for child_name, child in module.named_children():
            yield from visit(child, f"{name}.{child_name}" if name else child_name)

    yield from visit(model, "")


def dense_state(model: nn.Module) -> dict[str, Any]:
    """The dense state dict, without tables. The tensors are the live ones: copy them before training goes on."""
    state: dict[str, Any] = {}
    for name, module, whole in _parts(model):
        prefix = f"{name}." if name else ""
        if whole:
            module.state_dict(destination=state, prefix=prefix)
        else:
            module._save_to_state_dict(state, prefix, keep_vars=False)
    return state


def dense_buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """(module, name in it, buffer) of every buffer that is no table's, the non-persistent ones included."""
    for _, module in walk(model):
        if not isinstance(module, SHARDED + PLAIN):
            yield from ((module, name, value) for name, value in module._buffers.items() if value is not None)


def load_dense_state(model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
    """Copies ``state`` into the model's dense tensors. Returns (missing keys, unexpected keys), sorted.

    Raises:
        IncompatiblePlanError: with ``strict``, if any key is missing or unexpected; always, if a shape differs. Names
            all of them. No tensor was changed.
    """
    current = dense_state(model)
    missing, unexpected = sorted(current.keys() - state.keys()), sorted(state.keys() - current.keys())
    shapes = [
        f"{key}: saved {tuple(state[key].shape)}, here {tuple(current[key].shape)}"
        for key in sorted(current.keys() & state.keys())
        if hasattr(current[key], "shape") and getattr(state[key], "shape", None) != current[key].shape
    ]
    problems = [f"wrong shape {item}" for item in shapes]
    if strict:
        problems += [f"missing {key}" for key in missing] + [f"unexpected {key}" for key in unexpected]
    if problems:
        raise IncompatiblePlanError(f"the dense state does not fit the model: {'; '.join(problems)}.")
    known = {key: value for key, value in state.items() if key in current}
    for name, module, whole in _parts(model):
        prefix = f"{name}." if name else ""
        own = {key[len(prefix) :]: value for key, value in known.items() if key.startswith(prefix)}
        if whole:
            module.load_state_dict(own, strict=False)
        else:
            module._load_from_state_dict(own, "", {}, False, [], [], [])
    return missing, unexpected


def _parameter_names(model: nn.Module) -> dict[int, str]:
    """Canonical name of each dense parameter, by id."""
    return {
        id(parameter): f"{name}.{own}" if name else own
        for name, module in walk(model)
        if not isinstance(module, SHARDED + PLAIN)
        for own, parameter in module._parameters.items()
        if parameter is not None
    }


def dense_optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The state dict of an ordinary optimizer with canonical parameter names for indices, without tables.

    Rows of tables that it updates are listed with their table (`local_shards`), their step counter by `fused_scalars`.
    """
    names = _parameter_names(model)
    state = optimizer.state_dict()
    by_index: dict[int, str] = {}
    groups = []
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        pairs = [(i, names.get(id(p))) for i, p in zip(saved["params"], group["params"], strict=True)]
        by_index |= {index: name for index, name in pairs if name is not None}
        groups.append({**saved, "params": [name for _, name in pairs if name is not None]})
    named = {by_index[index]: value for index, value in state["state"].items() if index in by_index}
    return {**state, "state": named, "param_groups": groups}


def load_dense_optimizer_state(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Loads what `dense_optimizer_state` gave; states of tables that the optimizer updates are left alone.

    Raises:
        IncompatiblePlanError: a group has other parameters here than when saved, or another optimizer's settings (names
            them). Nothing was loaded.
    """
    names = _parameter_names(model)
    if len(optimizer.param_groups) != len(state["param_groups"]):
        raise IncompatiblePlanError(
            f"{type(optimizer).__name__} has {len(optimizer.param_groups)} param groups, {len(state['param_groups'])} "
            f"were saved."
        )
    index = 0
    indices: dict[str, int] = {}
    groups = []
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        here = {names[id(p)] for p in group["params"] if id(p) in names}
        if here != set(saved["params"]):
            raise IncompatiblePlanError(
                f"{type(optimizer).__name__} was saved with other parameters: only saved "
                f"{sorted(set(saved['params']) - here)}, only here {sorted(here - set(saved['params']))}."
            )
        missing, foreign = set(optimizer.defaults) - set(saved), set(saved) - set(group) - {"initial_lr"}
        if missing and foreign:  # one of them alone is another version of the same optimizer
            raise IncompatiblePlanError(
                f"the state was not saved by {type(optimizer).__name__}: it has {sorted(foreign)} and lacks "
                f"{sorted(missing)}. Go on with the optimizer that saved it, or begin a new run with warm_start."
            )
        params = list(range(index, index + len(group["params"])))
        indices |= {names[id(p)]: i for i, p in zip(params, group["params"], strict=True) if id(p) in names}
        groups.append({**saved, "params": params})
        index += len(params)
    kept = {p: s for p, s in optimizer.state.items() if id(p) not in names}
    loaded = {indices[name]: value for name, value in state["state"].items()}
    optimizer.load_state_dict({**state, "state": loaded, "param_groups": groups})
    optimizer.state.update(kept)
