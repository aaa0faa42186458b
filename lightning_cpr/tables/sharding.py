"""From a plain module to a sharded one: refusals, the sharding plan, DistributedModelParallel.

Decide (`build_plan`), then act (`shard`). `wrap_dense` is apart from both, since a recovery makes it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from lightning_cpr.tables import _deps

_deps.check()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torchrec.distributed import DistributedModelParallel  # noqa: E402
from torchrec.distributed import sharding_plan as generators  # noqa: E402
from torchrec.distributed.embedding import EmbeddingCollectionSharder  # noqa: E402
from torchrec.distributed.embedding_types import EmbeddingComputeKernel  # noqa: E402
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder  # noqa: E402
from torchrec.distributed.model_parallel import DataParallelWrapper, DMPCollection  # noqa: E402
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology  # noqa: E402
from torchrec.distributed.types import (  # noqa: E402
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ParameterSharding,
    ShardedModule,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)

from lightning_cpr.errors import ConfigError, UnsupportedError  # noqa: E402
from lightning_cpr.tables._modules import (  # noqa: E402
    PLAIN,
    SHARDED,
    collections,
    declared_optimizer,
    sharded_collections,
    sync_training_mode,
    table_configs,
    table_container,
    tables,
    walk,
)
from lightning_cpr.tables.buckets import DenseDDP, fix_buckets  # noqa: E402
from lightning_cpr.tables.rebind import STAND_IN  # noqa: E402

Generator: TypeAlias = Callable[..., ParameterSharding]
PlanLike: TypeAlias = "ShardingPlan | Mapping[str, str | Generator] | str | None"

KERNELS = (EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value)
"""The compute kernels whose rows lightning_cpr can read and write."""

_REFUSED_WORDS = {
    "ManagedCollision": "managed-collision (ZCH) modules remap ids",
    "HashZch": "managed-collision (ZCH) modules remap ids",
    "FeatureProcessed": "feature processors train inside the sharded module",
    "FusedEmbedding": "its tables bring their own optimizer",
    "EmbeddingTower": "towers shard whole submodules",
    "Quant": "quantized tables cannot train",
    "ITEP": "in-training pruning remaps ids",
    "PECEmbedding": "it remaps ids",
}


def refuse_unsupported(model: nn.Module) -> None:
    """Raises `UnsupportedError`, naming the module, for what lightning_cpr cannot protect yet."""
    for name, module in model.named_modules():
        if isinstance(module, DMPCollection):
            raise UnsupportedError(f"{name or 'the model'} is a DMPCollection: 2D parallelism is not supported yet.")
        if isinstance(module, SHARDED + PLAIN) or type(module).__module__.split(".")[0] != "torchrec":
            continue
        for word, reason in _REFUSED_WORDS.items():
            if word in type(module).__name__:
                raise UnsupportedError(
                    f"{name or 'the model'} is a {type(module).__name__}, not supported yet: {reason}. "
                    f"Use EmbeddingBagCollection or EmbeddingCollection."
                )
    for name, module in sharded_collections(model):
        for table, parameter in module.module_sharding_plan.items():
            _check_kernel(f"{name}.{table_container(module)}.{table}", parameter)


def _check_kernel(fqn: str, parameter: ParameterSharding) -> None:
    kernel = parameter.compute_kernel
    if kernel not in KERNELS:
        what = "an SSD or key-value table" if "virtual" in kernel or "key_value" in kernel else "not supported yet"
        what = "a UVM (cached) table" if "uvm" in kernel else what
        raise UnsupportedError(
            f"table {fqn}: compute kernel {kernel} is {what}; lightning_cpr supports {', '.join(KERNELS)}."
        )
    if parameter.sharding_type == ShardingType.DATA_PARALLEL.value and kernel != EmbeddingComputeKernel.DENSE.value:
        raise UnsupportedError(f"table {fqn}: data-parallel needs the dense kernel, the plan says {kernel}.")


@dataclass(frozen=True)
class World:
    """What a plan depends on besides the model."""

    size: int
    local_size: int
    device: torch.device


def default_sharders() -> list[ModuleSharder[nn.Module]]:
    """Sharders for the two supported collections."""
    return [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]  # type: ignore[list-item]


def build_plan(
    model: nn.Module,
    world: World,
    plan: PlanLike = None,
    *,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    sharders: Sequence[ModuleSharder[nn.Module]] | None = None,
    topology: Topology | None = None,
) -> ShardingPlan:
    """The sharding plan of every plain collection in ``model``; the same on each rank.

    plan: a ShardingPlan; or one sharding for all tables; or shardings by table name, table fqn or module fqn (the most
    specific wins). A sharding is ``"table_wise"`` (spread by size), ``"row_wise"``, ``"column_wise"``,
    ``"data_parallel"`` or a generator of ``torchrec.distributed.sharding_plan``. None asks TorchRec's planner, which
    never offers row-wise on a CPU; it is a collective then.

    Raises:
        ConfigError: an unknown table or sharding, a table without one, a kernel that ends rowless, an unknown rank.
        UnsupportedError: a kernel that lightning_cpr cannot read.
    """
    sharders = list(sharders) if sharders is not None else default_sharders()
    plain = [(name, module) for name, module in collections(model) if isinstance(module, PLAIN)]
    if isinstance(plan, ShardingPlan):
        built = plan
    elif plan is not None:
        _check_keys(model, plan)
        built = _hand_made(plain, plan, world, sharders)
    elif plain:
        built = _planned(model, plain, world, constraints or {}, sharders, topology)
    else:
        built = ShardingPlan({})
    for name, module in plain:
        _check_module_plan(name, module, built, world)
    return built


def _planned(
    model: nn.Module,
    plain: list[tuple[str, nn.Module]],
    world: World,
    constraints: Mapping[str, ParameterConstraints],
    sharders: list[ModuleSharder[nn.Module]],
    topology: Topology | None,
) -> ShardingPlan:
    topology = topology or Topology(
        world_size=world.size, local_world_size=world.local_size, compute_device=world.device.type
    )
    limits = dict(constraints)
    for _, module in plain:
        for table in _table_names(module):
            # Without this a planner short of memory picks kernels that `_check_kernel` refuses.
            limits.setdefault(table, ParameterConstraints(compute_kernels=list(KERNELS)))
    planner = EmbeddingShardingPlanner(topology=topology, constraints=limits)
    if dist.get_backend() == STAND_IN:
        return planner.plan(model, sharders)  # a replacement is on its own; its plan is compared when it joins
    return planner.collective_plan(model, sharders, dist.GroupMember.WORLD)


def _table_names(module: Any) -> list[str]:
    return list(getattr(module, table_container(module)).keys())


def _check_keys(model: nn.Module, plan: Mapping[str, str | Generator] | str) -> None:
    if isinstance(plan, str):
        return
    known = {name for name, _ in collections(model)} | {key for t in tables(model) for key in (t.fqn, t.name)}
    if unknown := set(plan) - known:
        raise ConfigError(f"plan= names {sorted(unknown)}, which the model does not have (it has {sorted(known)}).")


def _hand_made(
    plain: list[tuple[str, nn.Module]],
    plan: Mapping[str, str | Generator] | str,
    world: World,
    sharders: list[ModuleSharder[nn.Module]],
) -> ShardingPlan:
    by_type = {sharder.module_type: sharder for sharder in sharders}
    chosen: dict[tuple[str, str], str | Generator] = {}
    for name, module in plain:
        for table in _table_names(module):
            fqn = ".".join(filter(None, (name, table_container(module), table)))
            key = next((k for k in (fqn, table, name) if not isinstance(plan, str) and k in plan), None)
            if key is None and not isinstance(plan, str):
                raise ConfigError(f"plan= has no sharding for table {fqn} (keys: {sorted(plan)}).")
            chosen[name, table] = plan if isinstance(plan, str) else plan[key]  # type: ignore[index]
    ranks = _spread({key for key, how in chosen.items() if how == ShardingType.TABLE_WISE.value}, dict(plain), world)
    built = {}
    for name, module in plain:
        sharder = by_type.get(type(module))
        if sharder is None:
            raise ConfigError(f"sharders= has none for {name}, a {type(module).__name__}.")
        built[name] = EmbeddingModuleShardingPlan()
        for table, parameter in sharder.shardable_parameters(module).items():
            how = chosen[name, table]
            if isinstance(how, str):
                how = _generator(how, f"{name}: {table}", parameter, ranks.get((name, table), 0), world, sharder)
            built[name][table] = how(parameter, world.local_size, world.size, world.device.type, sharder)
    return ShardingPlan(built)  # type: ignore[arg-type]


def _spread(keys: set[tuple[str, str]], modules: dict[str, Any], world: World) -> dict[tuple[str, str], int]:
    """A rank for each table-wise table: largest first, to the rank with the fewest elements so far."""
    sizes = {}
    for name, table in keys:
        weight = getattr(modules[name], table_container(modules[name]))[table].weight
        sizes[name, table] = weight.numel()
    load = [0] * world.size
    ranks = {}
    for key in sorted(keys, key=lambda k: (-sizes[k], k)):
        ranks[key] = load.index(min(load))
        load[ranks[key]] += sizes[key]
    return ranks


def _generator(
    how: str, table: str, parameter: nn.Parameter, rank: int, world: World, sharder: ModuleSharder[nn.Module]
) -> Generator:
    fused = hasattr(parameter, "_in_backward_optimizers") or "optimizer" in (sharder.fused_params or {})  # type: ignore[attr-defined]
    kernel = EmbeddingComputeKernel.FUSED.value if fused else EmbeddingComputeKernel.DENSE.value
    if how == ShardingType.TABLE_WISE.value:
        return generators.table_wise(rank=rank, compute_kernel=kernel)
    if how == ShardingType.ROW_WISE.value:
        return generators.row_wise(compute_kernel=kernel)
    if how == ShardingType.DATA_PARALLEL.value:
        return generators.data_parallel()
    if how == ShardingType.COLUMN_WISE.value:
        cols = parameter.shape[1]
        parts = max(n for n in range(1, world.size + 1) if n == 1 or cols % (4 * n) == 0)
        return generators.column_wise(ranks=list(range(parts)), compute_kernel=kernel)
    raise ConfigError(
        f"plan= wants {how!r} for {table}: use table_wise, row_wise, column_wise, data_parallel, or a generator of "
        f"torchrec.distributed.sharding_plan."
    )


def _check_module_plan(name: str, module: Any, plan: ShardingPlan, world: World) -> None:
    module_plan = plan.get_plan_for_module(name)
    if module_plan is None:
        raise ConfigError(f"the sharding plan has no entry for {name or 'the model'}, a {type(module).__name__}.")
    for table in _table_names(module):
        fqn = ".".join(filter(None, (name, table_container(module), table)))
        parameter = module_plan.get(table)  # type: ignore[attr-defined]
        if parameter is None:
            raise ConfigError(f"the sharding plan has no entry for table {fqn}.")
        _check_kernel(fqn, parameter)
        spec = parameter.sharding_spec
        for shard in spec.shards if spec is not None else ():
            rank = shard.placement.rank()
            if rank >= world.size:
                raise ConfigError(
                    f"table {fqn}: the plan puts a shard on rank {rank}, the world has {world.size} ranks."
                )
    _check_rowless_kernels(name, module, module_plan, world)


def _check_rowless_kernels(name: str, module: Any, module_plan: Any, world: World) -> None:
    """Refuses a plan in which the last table of a fused kernel has no row on some rank.

    fbgemm's CPU backward then reads past the end of an array: it dies with "more than 2B rows", or does not. A shard
    without rows is fine before one that has some. TorchRec puts tables of one sharding type, dtype, pooling and
    optimizer into one kernel, in the order of their configs.
    """
    groups: dict[tuple[Any, ...], list[tuple[str, int]]] = {}
    for config in table_configs(module):
        parameter = module_plan[config.name]
        if parameter.sharding_spec is None or parameter.compute_kernel != EmbeddingComputeKernel.FUSED.value:
            continue
        weight = getattr(module, table_container(module))[config.name].weight
        declared = sorted((key, str(value)) for key, value in declared_optimizer(weight).items())
        kind = (parameter.sharding_type, config.data_type, getattr(config, "pooling", None), tuple(declared))
        for shard in parameter.sharding_spec.shards:
            groups.setdefault((*kind, shard.placement.rank()), []).append((config.name, shard.shard_sizes[0]))
    for (sharding_type, *_, rank), shards in groups.items():
        table, rows = shards[-1]
        if rows == 0:
            fqn = ".".join(filter(None, (name, table_container(module), table)))
            raise ConfigError(
                f"table {fqn}: {sharding_type} over {world.size} ranks leaves rank {rank} without a row of it, which "
                f"fbgemm's fused kernels do not take here. Shard it table_wise or column_wise."
            )


class _DenseWrapper(DataParallelWrapper):
    """Hands the dense part to `wrap_dense` where DistributedModelParallel would make its own DDP."""

    def __init__(self, ddp_kwargs: Mapping[str, Any]) -> None:
        self._ddp_kwargs = dict(ddp_kwargs)

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        dmp._dmp_wrapped_module = wrap_dense(dmp._dmp_wrapped_module, device, env.process_group, **self._ddp_kwargs)


def shard(
    model: nn.Module,
    plan: ShardingPlan,
    device: torch.device,
    *,
    sharders: Sequence[ModuleSharder[nn.Module]] | None = None,
    **ddp_kwargs: Any,
) -> DistributedModelParallel:
    """Shards the collections of ``model`` in place and wraps it; parameters on meta are made and initialised.

    Collections that are sharded already (the user's own DistributedModelParallel, or an earlier stage of this Trainer)
    are taken as they are. The dense part is wrapped in DDP exactly once.

    Raises:
        UnsupportedError: a module has meta parameters or buffers and no ``reset_parameters`` to give them values.
    """
    _refuse_uninitialised(model)
    known = dict(plan.plan)
    known |= {name: module.module_sharding_plan for name, module in sharded_collections(model)}
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.GroupMember.WORLD),
        device=device,
        plan=ShardingPlan(known),
        sharders=list(sharders) if sharders is not None else default_sharders(),
        data_parallel_wrapper=_DenseWrapper(ddp_kwargs),
    )
    for part in sharded.modules():
        if isinstance(part, DistributedDataParallel):
            fix_buckets(part)
    return sharded


def _refuse_uninitialised(model: nn.Module) -> None:
    for name, module in walk(model):
        if isinstance(module, SHARDED + PLAIN) or hasattr(module, "reset_parameters"):
            continue
        own = (*module._parameters.items(), *module._buffers.items())
        if meta := [n for n, tensor in own if tensor is not None and tensor.is_meta]:
            raise UnsupportedError(
                f"{name or 'the model'} ({type(module).__name__}) has {', '.join(meta)} on meta and no "
                f"reset_parameters: build it on a device, or give it one."
            )


def wrap_dense(module: nn.Module, device: torch.device, group: Any, **ddp_kwargs: Any) -> nn.Module:
    """``module`` in DDP over its dense parameters; itself, made equal on all ranks, if none of them trains.

    Left out: tables, and whatever lies inside a wrapper of the user's. DDP's constructor copies rank 0's parameters and
    buffers over everybody's.
    """
    module = module.to(device)
    ignored = _reduced_elsewhere(module)
    if not any(p.requires_grad for name, p in module.named_parameters() if name not in ignored):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name not in ignored:
                dist.broadcast(tensor.detach(), src=0, group=group)
        return module
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
    defaults: dict[str, Any] = {"gradient_as_bucket_view": True, "forward_sync_buffers": False}
    return DenseDDP(
        module, device_ids=None if device.type == "cpu" else [device], process_group=group, **(defaults | ddp_kwargs)
    )


def _reduced_elsewhere(module: nn.Module) -> list[str]:
    """Names of parameters and buffers that this DDP must not touch, in every spelling that DDP may see them under."""
    names: set[str] = set()
    for prefix, child in module.named_modules():
        if prefix and isinstance(child, ShardedModule | DistributedDataParallel | DistributedModelParallel):
            # DistributedModelParallel lists its parameters without wrappers, nn.Module with them.
            members = (*child.named_parameters(), *child.named_buffers(), *nn.Module.named_parameters(child))
            names |= {f"{prefix}.{name}" for name, _ in (*members, *nn.Module.named_buffers(child))}
    return sorted(names)


def dense_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP that `shard` made around the dense part of ``model``, if any."""
    inner = model._dmp_wrapped_module if isinstance(model, DistributedModelParallel) else model
    return inner if isinstance(inner, DistributedDataParallel) else None


__all__ = [
    "World",
    "build_plan",
    "default_sharders",
    "dense_ddp",
    "refuse_unsupported",
    "shard",
    "sync_training_mode",
    "wrap_dense",
]
