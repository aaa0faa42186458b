"""Finds the embedding collections of a model, sharded or not, and reads from TorchRec what is known of each table.

Names are canonical: wrappers (DistributedModelParallel, DistributedDataParallel) leave no trace in them, so that the
plain, the sharded and the wrapped model agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightning_cpr.tables import _deps

_deps.check()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torchrec import EmbeddingBagCollection, EmbeddingCollection  # noqa: E402
from torchrec.distributed import DistributedModelParallel  # noqa: E402
from torchrec.distributed.embedding import ShardedEmbeddingCollection  # noqa: E402
from torchrec.distributed.embedding_types import EmbeddingComputeKernel  # noqa: E402
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection  # noqa: E402
from torchrec.distributed.types import ShardedModule, ShardingType  # noqa: E402
from torchrec.modules.embedding_configs import data_type_to_dtype  # noqa: E402

from lightning_cpr.errors import UnsupportedError  # noqa: E402

SHARDED = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)
PLAIN = (EmbeddingBagCollection, EmbeddingCollection)


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside any DistributedModelParallel and DistributedDataParallel wrappers."""
    while isinstance(module, DistributedModelParallel | DistributedDataParallel):
        module = module._dmp_wrapped_module if isinstance(module, DistributedModelParallel) else module.module
    return module


def walk(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module under its canonical name, parents first; does not descend into embedding collections.

    A module reachable under two names appears under the first.
    """
    seen: set[int] = set()

    def visit(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        module = unwrap(module)
        if id(module) in seen:
            return
        seen.add(id(module))
        yield name, module
        if isinstance(module, SHARDED + PLAIN):
            return
        for child_name, child in module.named_children():
            yield from visit(child, f"{name}.{child_name}" if name else child_name)

    yield from visit(model, prefix)


def collections(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All embedding collections, sharded or plain, by canonical name, sorted.

    Raises:
        UnsupportedError: a sharded module that is no EmbeddingBagCollection or EmbeddingCollection.
    """
    found = []
    for name, module in walk(model):
        if isinstance(module, SHARDED + PLAIN):
            found.append((name, module))
        elif isinstance(module, ShardedModule):
            raise UnsupportedError(
                f"{name or 'the model'} is a {type(module).__name__}, which lightning_cpr cannot protect."
            )
    return sorted(found, key=lambda item: item[0])


def sharded_collections(model: nn.Module) -> list[tuple[str, Any]]:
    """The sharded ones among `collections`."""
    return [(name, module) for name, module in collections(model) if isinstance(module, SHARDED)]


def table_container(module: nn.Module) -> str:
    """``embedding_bags`` or ``embeddings``: the attribute that holds a collection's tables."""
    return (
        "embedding_bags"
        if isinstance(module, (EmbeddingBagCollection, ShardedEmbeddingBagCollection))
        else "embeddings"
    )


@dataclass(frozen=True)
class Rect:
    """One shard of a table and the rank that holds it."""

    row_start: int
    rows: int
    col_start: int
    cols: int
    owner: int


@dataclass(frozen=True)
class TableInfo:
    """What TorchRec knows of one table, the same on every rank. ``kernel`` is None for a plain (unsharded) table.

    ``replicated``: every process holds all of it (data-parallel and plain tables); ``rects`` is then empty.
    ``fused_params``: the arguments of the fused kernel, its optimizer included; for a plain table, of the optimizer
    that ``apply_optimizer_in_backward`` declared.
    """

    fqn: str
    name: str
    module: Any
    rows: int
    cols: int
    dtype: torch.dtype
    kernel: EmbeddingComputeKernel | None
    replicated: bool
    fused_params: dict[str, Any]
    rects: tuple[Rect, ...]

    @property
    def fused(self) -> bool:
        return self.kernel is EmbeddingComputeKernel.FUSED

    @property
    def parameter(self) -> nn.Parameter:
        """The table as a module parameter: the local slice, or an empty placeholder on a rank that holds none of it."""
        return getattr(self.module, table_container(self.module))[self.name].weight


def tables(model: nn.Module) -> list[TableInfo]:
    """Every table of the model, sorted by name."""
    found = [
        info
        for name, module in collections(model)
        for info in (_sharded_tables(name, module) if isinstance(module, SHARDED) else _plain_tables(name, module))
    ]
    return sorted(found, key=lambda info: info.fqn)


def table_configs(module: Any) -> list[Any]:
    """The EmbeddingBagConfigs or EmbeddingConfigs of a collection, sharded or plain."""
    if isinstance(module, EmbeddingBagCollection):
        return module.embedding_bag_configs()
    if isinstance(module, EmbeddingCollection):
        return module.embedding_configs()
    return list(module._table_name_to_config.values())


def _plain_tables(module_name: str, module: Any) -> Iterator[TableInfo]:
    container = table_container(module)
    for config in table_configs(module):
        parameter = getattr(module, container)[config.name].weight
        yield TableInfo(
            fqn=".".join(filter(None, (module_name, container, config.name))),
            name=config.name,
            module=module,
            rows=config.num_embeddings,
            cols=config.embedding_dim,
            dtype=parameter.dtype,
            kernel=None,
            replicated=True,
            fused_params=declared_optimizer(parameter),
            rects=(),
        )


def declared_optimizer(parameter: nn.Parameter) -> dict[str, Any]:
    """``{"optimizer": class, **arguments}`` as ``apply_optimizer_in_backward`` left it on a parameter, or ``{}``."""
    classes = getattr(parameter, "_optimizer_classes", None)
    if not classes:
        return {}
    return {**parameter._optimizer_kwargs[0], "optimizer": classes[0]}  # type: ignore[attr-defined]


def shardings(module: Any) -> list[Any]:
    """The EmbeddingSharding objects of a sharded collection, in the order of its lookups."""
    if isinstance(module, ShardedEmbeddingBagCollection):
        return list(module._embedding_shardings)
    return list(module._sharding_type_to_sharding.values())


def _sharded_tables(module_name: str, module: Any) -> Iterator[TableInfo]:
    container = table_container(module)
    shards = {
        table.name: table
        for sharding in shardings(module)
        for groups in sharding._grouped_embedding_configs_per_rank
        for group in groups
        for table in group.embedding_tables
    }
    for config in table_configs(module):
        plan = module.module_sharding_plan[config.name]
        table = shards[config.name]
        spec = plan.sharding_spec
        yield TableInfo(
            fqn=".".join(filter(None, (module_name, container, config.name))),
            name=config.name,
            module=module,
            rows=config.num_embeddings,
            cols=config.embedding_dim,
            dtype=data_type_to_dtype(config.data_type),
            kernel=table.compute_kernel,
            replicated=plan.sharding_type == ShardingType.DATA_PARALLEL.value,
            fused_params=dict(table.fused_params or {}),
            rects=() if spec is None else tuple(_rect(shard) for shard in spec.shards),
        )


def _rect(shard: Any) -> Rect:
    return Rect(
        row_start=shard.shard_offsets[0],
        rows=shard.shard_sizes[0],
        col_start=shard.shard_offsets[1],
        cols=shard.shard_sizes[1],
        owner=shard.placement.rank(),
    )


def lookups(module: Any) -> list[Any]:
    """The lookup modules of a sharded collection, out of their DDP wrappers."""
    return [lookup.module if isinstance(lookup, DistributedDataParallel) else lookup for lookup in module._lookups]


def kernels(module: Any) -> Iterator[Any]:
    """The batched embedding kernels of a sharded collection on this rank. ``modules()`` does not reach them."""
    for lookup in lookups(module):
        yield from lookup._emb_modules


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the world size; (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def sync_training_mode(model: nn.Module, module: nn.Module) -> None:
    """Gives wrappers around ``module``, and the lookups inside its collections, the modes that ``module`` has.

    Lightning restores the modes after an evaluation module by module: it sees neither.
    """
    while model is not module and isinstance(model, DistributedModelParallel | DistributedDataParallel):
        model.training = module.training
        model = model._dmp_wrapped_module if isinstance(model, DistributedModelParallel) else model.module
    for _, collection in sharded_collections(module):
        for lookup in collection._lookups:
            lookup.train(collection.training)
