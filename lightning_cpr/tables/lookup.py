"""Tells which rows a training forward looked up, per shard and exactly.

Hooks sit on the lookup modules themselves, not in ``ShardedModule.register_post_lookup_tracker_fn``: that holds one
function, which a later registration (TorchRec's own delta tracker) replaces, does not say which lookup ran, and names
features, not tables. What can still take a lookup hook away is a reshard, which makes new lookups: see `still_ours`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_cpr.spec import ShardSpec
from lightning_cpr.tables._modules import lookups, sharded_collections, table_container
from lightning_cpr.tables.shards import global_shards

LookupFn = Callable[[ShardSpec, Tensor], None]
"""``fn(shard, ids)``; ids: int64 ``[n]``, row numbers within the shard, duplicates kept; nobody changes them later."""


@dataclass(frozen=True)
class _Part:
    """One table shard of a lookup and how many of the lookup's features, next in order, go to it."""

    shard: ShardSpec
    features: int


@dataclass(frozen=True)
class Looked:
    """The ids of one batch in one lookup, as the kernel got them: int64, those of each part in turn, then others."""

    parts: Sequence[_Part]
    values: Tensor
    ends: Sequence[int]

    @property
    def total(self) -> int:
        """Ids of sharded tables."""
        return self.ends[-1] if self.parts and not self.parts[0].shard.replicated else 0


Then = Callable[[], None]


class LookupHook:
    """Calls ``fn`` with each batch's ids in each lookup of a model, right after it. What ``fn`` returns is called when
    the backward has reached that lookup, however much earlier a pipeline looked up.
    """

    def __init__(self, model: nn.Module, fn: Callable[[Looked], Then | None]) -> None:
        self._model = model
        self._fn = fn
        self._hooked: dict[int, tuple[Any, RemovableHandle]] = {}
        self._collections: list[Any] = []
        self.rechain()

    def still_ours(self) -> list[str]:
        """Tables whose lookups are no longer hooked, sorted; empty if all are. Their rows may have changed unseen."""
        return sorted(
            part.shard.table
            for lookup, parts in _lookup_parts(self._model)
            if not self._is_hooked(lookup)
            for part in parts
        )

    def intact(self) -> bool:
        """`still_ours` without the names, fast enough for every step; collections are those of the last `rechain`."""
        return all(self._is_hooked(lookup) for module in self._collections for lookup in lookups(module))

    def rechain(self) -> None:
        """Hooks every lookup that is not hooked."""
        self._collections = [module for _, module in sharded_collections(self._model)]
        current = _lookup_parts(self._model)
        for lookup, parts in current:
            if not self._is_hooked(lookup):
                self._hooked[id(lookup)] = (lookup, lookup.register_forward_hook(self._hook(parts)))
        alive = {id(lookup) for lookup, _ in current}
        for key in self._hooked.keys() - alive:
            self._hooked.pop(key)[1].remove()

    def remove(self) -> None:
        """Takes every hook away."""
        for _, handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()

    def _is_hooked(self, lookup: nn.Module) -> bool:
        known = self._hooked.get(id(lookup))
        return known is not None and known[1].id in lookup._forward_hooks

    def _hook(self, parts: list[_Part]) -> Callable[..., None]:
        def on_lookup(lookup: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            self._on_lookup(parts, inputs[0], output)

        return on_lookup

    def _on_lookup(self, parts: list[_Part], features: Any, output: Any) -> None:
        # Without a gradient no row can change: validation, prediction, a warm-up forward.
        if not torch.is_grad_enabled() or not output.requires_grad:
            return
        then = self._fn(_looked(parts, features))
        if then is not None:
            # The graph keeps it, and so the ids: a batch whose backward never runs takes them along.
            output.register_hook(lambda gradient: then())


def _looked(parts: list[_Part], features: Any) -> Looked:
    lengths = iter(features.length_per_key())
    ends = list(accumulate(sum(islice(lengths, part.features)) for part in parts))
    # A copy: who is told may keep them, and a pipeline may write the next batch where this one lies.
    return Looked(parts, features.values().to(torch.int64, copy=True), ends)


def before_lookups(model: nn.Module, fn: LookupFn) -> list[RemovableHandle]:
    """Calls ``fn`` as `register_lookup_hook` does, but before the rows are read, and in every forward: that of a
    validation reads them too."""

    def hook(parts: list[_Part]) -> Callable[..., None]:
        def on_lookup(lookup: nn.Module, inputs: tuple[Any, ...]) -> None:
            for shard, ids, _ in by_shard([_looked(parts, inputs[0])]):
                fn(shard, ids)

        return on_lookup

    return [lookup.register_forward_pre_hook(hook(parts)) for lookup, parts in _lookup_parts(model)]


def register_lookup_hook(model: nn.Module, fn: LookupFn) -> LookupHook:
    """Calls ``fn(shard, local_row_ids)`` for each training lookup, once per table shard that got ids, right after the
    lookup: before the backward that will change the rows.

    Several features of a table arrive together; a feature that feeds several tables arrives at each. An id that the
    kernel clamps to row 0 (negative, or beyond the shard) is told as 0. For a data-parallel table the ids are those of
    this rank's batch alone, though the gradients of all ranks reach its rows.
    """

    def tell(looked: Looked) -> None:
        for shard, ids, _ in by_shard([looked]):
            if len(ids):
                fn(shard, ids)

    return LookupHook(model, tell)


def by_shard(batches: Sequence[Looked]) -> Iterator[tuple[ShardSpec, Tensor, Sequence[int]]]:
    """Each shard with rows; its ids, int64 ``[n]``, row numbers within the shard with duplicates, batch after batch;
    and how many are of each batch.
    """
    of_lookup: dict[int, list[Looked]] = {}
    for looked in batches:
        of_lookup.setdefault(id(looked.parts), []).append(looked)
    for same in of_lookup.values():
        starts = [0] * len(same)
        for index, part in enumerate(same[0].parts):
            ends = [looked.ends[index] for looked in same]
            if part.shard.rows:
                ids = [looked.values[at:end] for looked, at, end in zip(same, starts, ends, strict=True)]
                counts = [end - at for at, end in zip(starts, ends, strict=True)]
                yield part.shard, _clamped(torch.cat(ids), part.shard.rows), counts
            starts = ends


def _clamped(ids: Tensor, rows: int) -> Tensor:
    """Ids as the kernel takes them: those that have no row are row 0. Looked at first where that is cheap: on a CPU."""
    # A negative id is larger than any row.
    if not len(ids) or (ids.is_cpu and int(ids.numpy().view(np.uint64).max()) < rows):
        return ids
    return torch.where((ids < 0) | (ids >= rows), 0, ids)


def _lookup_parts(model: nn.Module) -> list[tuple[nn.Module, list[_Part]]]:
    """Each lookup of this rank with its table shards in the order of its input features."""
    specs = {(s.table, s.row_start, s.col_start, s.rows): s for s in global_shards(model)}
    found = []
    for name, module in sharded_collections(model):
        prefix = ".".join(filter(None, (name, table_container(module))))
        for lookup in lookups(module):
            parts = []
            for kernel in lookup._emb_modules:
                for table in kernel.config.embedding_tables:
                    offsets = (0, 0) if table.local_metadata is None else table.local_metadata.shard_offsets
                    key = (f"{prefix}.{table.name}", offsets[0], offsets[1], table.local_rows)
                    parts.append(_Part(specs[key], table.num_features()))
            found.append((lookup, parts))
    return found
