"""Everything of a model that is not a table row: dense parameters, buffers, extra state, under canonical names.

The plain, the sharded and the wrapped model give the same keys, all plain tensors: a dense state saved under one plan
loads under any other and into the unsharded model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel

from lightning_cpr.errors import IncompatiblePlanError
from lightning_cpr.tables._modules import PLAIN, SHARDED, unwrap

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
