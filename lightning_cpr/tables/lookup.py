"""Tells which rows a training forward looked up, per shard and exactly.

Hooks sit on the lookup modules themselves, not in ``ShardedModule.register_post_lookup_tracker_fn``: that holds one
function, which a later registration (TorchRec's own delta tracker) replaces, does not say which lookup ran, and names
features, not tables. What can still take a lookup hook away is a reshard, which makes new lookups: see `still_ours`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_cpr.spec import ShardSpec
from lightning_cpr.tables._modules import lookups, sharded_collections, table_container
from lightning_cpr.tables.shards import global_shards

LookupFn = Callable[[ShardSpec, Tensor], None]
"""``fn(shard, ids)``; ids: int64 ``[n]``, row numbers within the shard, duplicates kept; nobody changes them later."""

When = Literal["lookup", "backward"]


@dataclass(frozen=True)
class _Part:
    """One table shard of a lookup and how many of the lookup's features, next in order, go to it."""

    shard: ShardSpec
    features: int


class LookupHook:
    """The registered hooks of one model. Made by `register_lookup_hook`."""

    def __init__(self, model: nn.Module, fn: LookupFn, when: When) -> None:
        self._model = model
        self._fn = fn
        self._when = when
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
            # Without a gradient no row can change: validation, prediction, a warm-up forward.
            if not torch.is_grad_enabled():
                return
            seen = _ids(parts, inputs[0])
            if self._when == "lookup":
                self._tell([(shard, ids) for shard, ids in seen if len(ids)])
            elif output.requires_grad:
                # The graph keeps the ids: a batch whose backward never runs takes them along.
                output.register_hook(lambda gradient: self._tell(seen))

        return on_lookup

    def _tell(self, seen: list[tuple[ShardSpec, Tensor]]) -> None:
        for shard, ids in seen:
            self._fn(shard, ids)


def register_lookup_hook(model: nn.Module, fn: LookupFn, when: When = "lookup") -> LookupHook:
    """Calls ``fn(shard, local_row_ids)`` for each training lookup, once per table shard that got ids.

    Several features of a table arrive together; a feature that feeds several tables arrives at each. An id that the
    kernel clamps to row 0 (negative, or beyond the shard) is told as 0. For a data-parallel table the ids are those of
    this rank's batch alone, though the gradients of all ranks reach its rows.

    when: ``"lookup"``: right after the lookup, before the backward that will change the rows. ``"backward"``: when that
    backward has reached the lookup, however much earlier a pipeline looked up; then each shard is told of every batch,
    also with no ids.
    """
    return LookupHook(model, fn, when)


def _ids(parts: list[_Part], features: Any) -> list[tuple[ShardSpec, Tensor]]:
    lengths = iter(features.length_per_key())
    counts = [sum(islice(lengths, part.features)) for part in parts]
    # A copy: who is told may keep them, and a pipeline may write the next batch where this one lies.
    values = features.values()[: sum(counts)].to(torch.int64, copy=True)
    found = [(p.shard, ids) for p, ids in zip(parts, values.split(counts), strict=True) if p.shard.rows]
    if values.is_cpu and _all_inside(values, [part.shard.rows for part in parts], counts):
        return found
    return [(shard, torch.where((ids < 0) | (ids >= shard.rows), 0, ids)) for shard, ids in found]


def _all_inside(values: Tensor, rows: list[int], counts: list[int]) -> bool:
    """Whether each id has a row, in one pass over all shards. On a GPU the answer would wait for the device."""
    told = np.array(counts)
    held = told > 0
    if not held.any():
        return True
    starts = (told.cumsum() - told)[held]
    most = np.maximum.reduceat(values.numpy().view(np.uint64), starts)  # a negative id is larger than any row
    return bool((most < np.array(rows, np.uint64)[held]).all())


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
