"""Lists every table row that is in memory: weights and optimizer states, as live views, under canonical names.

Works on a sharded model (the LightningModule, or its DistributedModelParallel wrapper) and, so that a version can be
read into an unsharded model, on plain collections, where each table is one replicated shard.

Where states live: fused kernels hold them; tables in dense kernels and data-parallel tables have theirs in an ordinary
optimizer. Inside a Trainer the strategy has told which; elsewhere pass those optimizers, or such tables have no states.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cpr.errors import UnsupportedError
from lightning_cpr.spec import Shard, ShardSpec, StateSpec, TableSpec
from lightning_cpr.tables import _optim
from lightning_cpr.tables._modules import TableInfo, kernels, rank_and_world, sharded_collections, tables
from lightning_cpr.tables.dense import dense_state, load_dense_state
from lightning_cpr.tables.scalars import fused_scalars, load_fused_scalars

__all__ = [
    "dense_state",
    "fused_scalars",
    "global_shards",
    "load_dense_state",
    "load_fused_scalars",
    "local_shards",
    "plan_fingerprint",
    "table_specs",
]


def table_specs(model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> dict[str, TableSpec]:
    """Every table by canonical name, sorted; the same on each rank, whatever the sharding plan.

    Names and shapes agree with the unsharded module's; ``row_sparse`` is a property of the kernel and may not.

    Raises:
        UnsupportedError: a collection or fused optimizer that is not supported, by name.
    """
    return {info.fqn: _table_spec(info, optimizers) for info in tables(model)}


def _table_spec(info: TableInfo, optimizers: Sequence[Optimizer]) -> TableSpec:
    name, row_sparse = "none", False
    states: tuple[StateSpec, ...] = ()
    if info.fused:
        name, states, row_sparse = _optim.fused_optimizer(info)
    elif (held := _optim.held_by(info, optimizers)) is not None:
        name, states = _optim.optimizer_name(held.optimizer), _optim.dense_states(held)[0]
    elif info.kernel is not None and "optimizer" in info.fused_params:
        # A rank that holds no row of it has no optimizer for it either, but must give the same answer.
        name, states, _ = _optim.fused_optimizer(info)
    return TableSpec(info.fqn, info.rows, info.cols, info.dtype, name, states, row_sparse)


def global_shards(model: nn.Module) -> list[ShardSpec]:
    """All shards of all ranks, sorted; the same list on each rank, from the plan alone (no communication).

    A data-parallel table is one replicated shard; its owner, the rank that saves it, is its position among the tables
    modulo the world size.
    """
    _, world = rank_and_world()
    specs = []
    for index, info in enumerate(tables(model)):
        if info.replicated:
            specs.append(ShardSpec(info.fqn, 0, info.rows, 0, info.cols, index % world, replicated=True))
        specs.extend(ShardSpec(info.fqn, r.row_start, r.rows, r.col_start, r.cols, r.owner) for r in info.rects)
    return sorted(specs, key=_order)


def _order(spec: ShardSpec) -> tuple[str, int, int, int]:
    return spec.table, spec.row_start, spec.col_start, spec.owner


def local_shards(model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> list[Shard]:
    """The shards that this rank holds, sorted as in `global_shards`, replicated and 0-row ones included.

    ``weight`` and ``states`` are views of the memory that training updates: write to them and the row is restored.
    States of ordinary optimizers are made here if their first step has not come yet.

    Raises:
        UnsupportedError: memory and plan disagree (names table and rank).
    """
    rank, _ = rank_and_world()
    infos = {info.fqn: info for info in tables(model)}
    planned = {_key(spec): spec for spec in global_shards(model) if spec.replicated or spec.owner == rank}
    by_module = {(id(info.module), info.name): info for info in infos.values()}
    shards = []
    for _, module in sharded_collections(model):
        for kernel in kernels(module):
            for info, key, weight, states in _kernel_shards(kernel, module, by_module, optimizers):
                shards.append(_shard(info, key, planned, weight, states, rank))
    for info in infos.values():
        if info.kernel is None:
            held = _optim.held_by(info, optimizers)
            states = {} if held is None else _dense_views(info, held, 0, info.rows)
            shards.append(_shard(info, (info.fqn, 0, 0, info.rows), planned, info.parameter.detach(), states, rank))
    if missing := planned.keys() - {_key(shard.spec) for shard in shards}:
        raise UnsupportedError(f"rank {rank} should hold {sorted(missing)} by the plan, but no kernel has it.")
    return sorted(shards, key=lambda shard: _order(shard.spec))


_Key = tuple[str, int, int, int]


def _key(spec: ShardSpec) -> _Key:
    return spec.table, spec.row_start, spec.col_start, spec.rows


def _kernel_shards(
    kernel: object, module: nn.Module, by_module: dict[tuple[int, str], TableInfo], optimizers: Sequence[Optimizer]
) -> Iterator[tuple[TableInfo, _Key, Tensor, dict[str, Tensor]]]:
    """(table, key of the shard, weight, states) for each table shard of one batched kernel."""
    config = kernel.config  # type: ignore[attr-defined]
    weights = kernel.split_embedding_weights()  # type: ignore[attr-defined]
    rows_seen: dict[str, int] = {}
    fused_states = _fused_states(kernel)
    for index, (table, weight) in enumerate(zip(config.embedding_tables, weights, strict=True)):
        info = by_module[id(module), table.name]
        first = rows_seen.get(table.name, 0)
        rows_seen[table.name] = first + table.local_rows
        row_start, col_start = table.local_metadata.shard_offsets if table.local_metadata is not None else (0, 0)
        if info.fused:
            states = fused_states[index] if fused_states else {}
        elif (held := _optim.held_by(info, optimizers)) is not None:
            states = _dense_views(info, held, first, table.local_rows)
        else:
            states = {}
        yield info, (info.fqn, row_start, col_start, table.local_rows), weight.detach(), states


def _fused_states(kernel: object) -> list[dict[str, Tensor]]:
    """Row states by shard of a fused kernel; ``iter`` is a scalar of the kernel and no row state."""
    module = kernel.emb_module  # type: ignore[attr-defined]
    if not hasattr(module, "get_optimizer_state"):
        return []
    return [{k: v for k, v in states.items() if k != "iter"} for states in module.get_optimizer_state()]


def _dense_views(info: TableInfo, held: _optim.Held, first: int, rows: int) -> dict[str, Tensor]:
    """Views of an ordinary optimizer's states for ``rows`` rows from row ``first`` of the local parameter."""
    state = _optim.live_state(held)
    views = {}
    for spec in _optim.dense_states(held)[0]:
        part = state[spec.name].detach()[first : first + rows]
        views[spec.name] = part.view(rows) if spec.kind == "row" else part
    return views


def _shard(
    info: TableInfo, key: _Key, planned: dict[_Key, ShardSpec], weight: Tensor, states: dict[str, Tensor], rank: int
) -> Shard:
    if key not in planned or weight.shape != (planned[key].rows, planned[key].cols):
        raise UnsupportedError(
            f"table {info.fqn}, rank {rank}: a kernel holds {tuple(weight.shape)} at row {key[1]}, column {key[2]}, "
            f"which the sharding plan does not have."
        )
    return Shard(planned[key], weight, states)


def plan_fingerprint(model: nn.Module) -> str:
    """A hash of the tables' shapes and of who holds which rows and columns. Equal on every rank of one plan."""
    lines = [f"{info.fqn} {info.rows}x{info.cols} {info.dtype} {info.kernel}" for info in tables(model)]
    lines += [repr(spec) for spec in global_shards(model)]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
