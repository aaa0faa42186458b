"""Moves a sharded model from a dead process group to a new one, in place: no table is copied. Collective
where the model has a DDP, which broadcasts the order of its buckets.

TorchRec's objects keep the group in plain attributes (sharding env, shardings, input and output dists, lookups, fused
optimizers, ShardedTensors), some of which ``modules()`` does not reach: so the object graph is walked. DDP's reducer
keeps the group in C++ and may be in the middle of a reduction: it is made anew, with the DDP object kept. DDP's
constructor is not run, for it would overwrite the parameters with rank 0's.

The group left behind may be the stand-in of `stand_in_group`, with which a replacement builds its model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

from lightning_cpr.tables import _deps

_deps.check()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torchrec.distributed.collective_utils as collective_utils  # noqa: E402
import torchrec.distributed.comm as comm  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed._shard.sharded_tensor import ShardedTensor, TensorProperties  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbedding, BaseBatchedEmbeddingBag  # noqa: E402
from torchrec.distributed.embedding import ShardedEmbeddingCollection  # noqa: E402
from torchrec.distributed.embedding_types import EmbeddingComputeKernel  # noqa: E402
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection  # noqa: E402
from torchrec.distributed.types import ShardingType  # noqa: E402
from torchrec.modules.embedding_configs import data_type_to_dtype  # noqa: E402

from lightning_cpr.errors import RecoveryError  # noqa: E402
from lightning_cpr.tables.buckets import fix_buckets  # noqa: E402

STAND_IN = "cpr_stand_in"
_WALKED = ("torchrec.", "fbgemm_gpu.", "torch.distributed.")


def stand_in_group(rank: int, world_size: int) -> None:
    """Make the default process group one that does nothing: every collective returns at once with its input.

    A replacement builds its model with it, so that it runs no collective that the survivors do not run.
    """
    from torch._C._distributed_c10d import FakeProcessGroup

    def create(common: Any, options: Any) -> Any:
        make: Any = FakeProcessGroup._create_internal  # its stub knows two arguments only
        return make(common.group_rank, common.group_size, options)

    # Not under torch's own name "fake": TorchRec leaves half of a module out where it sees that.
    if not hasattr(dist.Backend, STAND_IN.upper()):
        dist.Backend.register_backend(STAND_IN, create, extended_api=True, devices=["cpu", "cuda"])
    collective_utils._INITIALIZED = True  # else the model's constructor broadcasts an object, once per process
    dist.init_process_group(STAND_IN, store=dist.HashStore(), rank=rank, world_size=world_size)


@contextmanager
def tables_uninitialised() -> Iterator[None]:
    """Inside, sharding a model leaves its tables as allocated: TorchRec draws their random values twice."""
    owners: list[tuple[type, str]] = [
        (BaseBatchedEmbeddingBag, "init_parameters"),
        (BaseBatchedEmbedding, "init_parameters"),
        (ShardedEmbeddingBagCollection, "reset_parameters"),
        (ShardedEmbeddingCollection, "reset_parameters"),
    ]
    kept = [getattr(owner, name) for owner, name in owners]
    for owner, name in owners:
        setattr(owner, name, lambda self: None)
    try:
        yield
    finally:
        for (owner, name), method in zip(owners, kept, strict=True):
            setattr(owner, name, method)


@contextmanager
def built_apart() -> Iterator[None]:
    """Inside, a replacement shards its model on the `stand_in_group`: no table is drawn, and the ShardedTensors of an
    EmbeddingCollection take what other ranks hold from the plan, where TorchRec asks the ranks, as it does not for an
    EmbeddingBagCollection.
    """
    original = ShardedEmbeddingCollection._initialize_torch_state

    def from_plan(collection: Any, *args: Any, **kwargs: Any) -> None:
        # those that TorchRec makes a ShardedTensor of, in its order
        names = iter(
            name
            for name, sharding in collection.module_sharding_plan.items()
            if sharding.sharding_type != ShardingType.DATA_PARALLEL.value
            and sharding.compute_kernel != EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value
        )

        def sharded(local: list[Any], size: Any, process_group: Any) -> ShardedTensor:
            name = next(names)
            dtype = data_type_to_dtype(collection._table_name_to_config[name].data_type)
            spec = collection.module_sharding_plan[name].sharding_spec
            metadata = spec.build_metadata(tensor_sizes=torch.Size(size), tensor_properties=TensorProperties(dtype))
            return ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata, process_group)

        with patch.object(ShardedTensor, "_init_from_local_shards", sharded):
            original(collection, *args, **kwargs)

    with tables_uninitialised(), patch.object(ShardedEmbeddingCollection, "_initialize_torch_state", from_plan):
        yield


def rebind(model: nn.Module, group: dist.ProcessGroup) -> int:
    """Put ``group`` in the place of every other process group that ``model`` holds. Returns how many places there were.

    Gradients are dropped: those of DDP are views of the old reducer's buckets.

    Raises:
        RecoveryError: the model uses a group of some of the ranks only (e.g. table-row-wise or 2D sharding), or a DDP
            communication hook.
    """
    walk = _Walk(group)
    walk.visit(model)
    for parameter in model.parameters():
        parameter.grad = None
    for ddp in walk.ddps:
        _new_reducer(ddp, group)
    comm._INTRA_PG = comm._CROSS_PG = None
    return walk.replaced


def check_rebindable(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Raises what `rebind` of a model that lives on ``group`` would raise; changes nothing."""
    _Walk(group, dry=True).visit(model)


class _Walk:
    """Visits what a model reaches through TorchRec's own objects, and swaps groups and meshes on the way.

    ``dry``: finds out only whether that would work.
    """

    def __init__(self, group: dist.ProcessGroup, dry: bool = False) -> None:
        self.group = group
        self.dry = dry
        self.replaced = 0
        self.ddps: list[DistributedDataParallel] = []
        self._seen: dict[int, Any] = {}  # keeps what it has seen alive: an id is not used twice
        self._meshes: dict[int, DeviceMesh] = {}

    def visit(self, root: Any) -> None:
        stack = [root]
        while stack:
            item = stack.pop()
            if id(item) in self._seen:
                continue
            self._seen[id(item)] = item
            if isinstance(item, DistributedDataParallel):
                if item.__dict__.get("_comm_hooks"):
                    raise RecoveryError("a DDP communication hook keeps the old group; the job restarts in full")
                self.ddps.append(item)
            for value, put in _children(item):
                new = self._swap(value)
                if new is not value:
                    put(new)
                    self.replaced += 1
                elif _is_walked(value):
                    stack.append(value)

    def _swap(self, value: Any) -> Any:
        if isinstance(value, dist.ProcessGroup) and value is not self.group:
            if value.size() != self.group.size():
                raise RecoveryError(
                    f"the model uses a process group of {value.size()} of {self.group.size()} ranks; live recovery"
                    " knows shardings over all ranks only (not table-row-wise, grid or 2D). The job restarts in full."
                )
            return self.group
        if isinstance(value, DeviceMesh):
            return self._mesh(value)
        if isinstance(value, tuple) and any(isinstance(v, dist.ProcessGroup | DeviceMesh) for v in value):
            swapped = tuple(self._swap(v) for v in value)
            return swapped if any(a is not b for a, b in zip(swapped, value, strict=True)) else value
        return value

    def _mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        if mesh.ndim != 1 or mesh.size() != self.group.size():
            raise RecoveryError(
                f"the model uses a device mesh of shape {tuple(mesh.shape)}; live recovery knows 1D only"
            )
        if self.dry or any(mesh is new for new in self._meshes.values()):
            return mesh
        if id(mesh) not in self._meshes:
            self._seen[id(mesh)] = mesh
            self._meshes[id(mesh)] = init_device_mesh(
                mesh.device_type, tuple(mesh.shape), mesh_dim_names=mesh.mesh_dim_names
            )
        return self._meshes[id(mesh)]


def _is_walked(value: Any) -> bool:
    if isinstance(value, nn.Module | list | dict | tuple | set | functools.partial):
        return True
    return type(value).__module__.startswith(_WALKED) or dataclasses.is_dataclass(value)


def _children(item: Any) -> Iterable[tuple[Any, Callable[[Any], None]]]:
    """What an object holds, each with the way to put something else in its place."""
    if isinstance(item, dict):
        yield from ((key, _fixed) for key in list(item))
        yield from ((value, functools.partial(item.__setitem__, key)) for key, value in list(item.items()))
    elif isinstance(item, list):
        yield from ((value, functools.partial(item.__setitem__, i)) for i, value in enumerate(item))
    elif isinstance(item, tuple | set | frozenset):
        yield from ((value, _fixed) for value in item)
    elif isinstance(item, functools.partial):
        yield from ((value, _fixed) for value in (*item.args, *item.keywords.values()))
    else:
        for name, value in list(getattr(item, "__dict__", {}).items()):
            yield value, functools.partial(item.__dict__.__setitem__, name)


def _fixed(value: Any) -> None:
    raise RecoveryError(f"a {type(value).__name__} lies where it cannot be replaced; the job restarts in full")


def _new_reducer(ddp: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    """What `DistributedDataParallel.__setstate__` does for a copied module."""
    ddp.process_group = group
    del ddp.reducer, ddp.logger
    parameters, expect_sparse = ddp._build_params_for_reducer()
    ddp._ddp_init_helper(
        parameters, expect_sparse, ddp._build_debug_param_to_name_mapping(parameters), ddp.static_graph
    )
    fix_buckets(ddp)
    ddp._lazy_init_ran = False
    ddp._static_graph_delay_allreduce_enqueued = False
    if ddp.static_graph and ddp.logger is not None:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()


def drop_traces(error: BaseException) -> None:
    """Clear the frames of a failed step: their locals and the graph they hold keep the old group's connections open."""
    seen: BaseException | None = error
    while seen is not None:
        traceback, seen.__traceback__ = seen.__traceback__, None
        while traceback is not None:
            with suppress(RuntimeError):  # the frame still runs
                traceback.tb_frame.clear()
            traceback = traceback.tb_next
        seen = seen.__context__
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
