"""The rows of data-parallel tables, which every rank holds: a replacement takes them from a survivor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cpr.errors import IncompatiblePlanError
from lightning_cpr.spec import Shard
from lightning_cpr.tables.shards import local_shards

Replicas = dict[str, dict[str, Tensor]]


def replicated_state(model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> Replicas:
    """``{fqn: {"weight": [rows, cols], state name: ...}}`` of the replicated tables, as live views."""
    return {shard.spec.table: _tensors(shard) for shard in local_shards(model, optimizers) if shard.spec.replicated}


@torch.no_grad()
def load_replicated_state(
    model: nn.Module, saved: Mapping[str, Mapping[str, Tensor]], optimizers: Sequence[Optimizer] = ()
) -> None:
    """Copies what `replicated_state` gave into this model's replicated tables.

    Raises:
        IncompatiblePlanError: the two models replicate different tables or states. No tensor was changed.
    """
    live = replicated_state(model, optimizers)
    here, there = ({fqn: sorted(tensors) for fqn, tensors in side.items()} for side in (live, saved))
    if here != there:
        raise IncompatiblePlanError(f"replicated tables differ: here {here}, in the saved state {there}")
    for fqn, tensors in live.items():
        for name, tensor in tensors.items():
            tensor.copy_(saved[fqn][name])


def _tensors(shard: Shard) -> dict[str, Tensor]:
    return {"weight": shard.weight, **shard.states}
