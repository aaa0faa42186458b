"""A running Trainer seen as what saves and restores need of it: ranks, tables, shards, a key-value store.

One process is the same code as many: every job has a process group, and a store that background work synchronises
through. Collectives run on the training thread only.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from copy import copy
from functools import cached_property
from typing import Any, TypeVar, cast

import torch.distributed as dist

from lightning_cpr._lightning import pl
from lightning_cpr.errors import CPRError
from lightning_cpr.saving.update_counts import CountBoard
from lightning_cpr.spec import Shard, ShardSpec, TableSpec
from lightning_cpr.store.kv import KeyValue
from lightning_cpr.tables import shards as tables

T = TypeVar("T")


class Job:
    """What the ranks of one fit share. Made after the strategy has sharded the model, on all ranks together."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self.trainer = trainer
        self.rank = trainer.global_rank
        self.world_size = trainer.world_size
        self.incarnation: str = self.broadcast(secrets.token_hex(4))
        self._scope = ""
        self.kv: KeyValue = self._key_value("0")

    def _key_value(self, part: str) -> KeyValue:
        # Keys of an earlier fit or an earlier incarnation may still be in the agent's store: never share their prefix.
        store = dist.distributed_c10d._get_default_store()
        prefixed = dist.PrefixStore(f"lightning_cpr/{self.incarnation}/{part}", store)
        return dist.PrefixStore(self._scope, prefixed) if self._scope else prefixed

    @property
    def alone(self) -> bool:
        """Whether this process is a replacement that has not joined the others yet: it runs no collective."""
        live = self.trainer.strategy.live  # type: ignore[attr-defined]
        return live is not None and live.apart

    def rejoin(self, incarnation: str, epoch: int) -> None:
        """After a live recovery, on every rank: the new group's store, and what was derived from the old model."""
        self.incarnation = incarnation
        self.kv = self._key_value(str(epoch))
        for name in ("shards", "specs", "plan"):
            self.__dict__.pop(name, None)

    def scoped(self, name: str) -> Job:
        """The same job with keys of its own: for one of several callbacks, whose saves must not meet."""
        scoped = copy(self)
        scoped._scope = name
        scoped.kv = scoped._key_value("0")
        return scoped

    @property
    def counts(self) -> CountBoard:
        """What the ranks tell of their row updates, in the agent's store, where there is live recovery."""
        live = self.trainer.strategy.live  # type: ignore[attr-defined]
        return CountBoard(None if live is None else live.store, f"{self.incarnation}/{self._scope}")

    @property
    def lost_peer(self) -> bool:
        """Whether a peer is known to be gone; collectives find that out by themselves."""
        live = self.trainer.strategy.live  # type: ignore[attr-defined]
        return live is not None and live.broken

    @property
    def module(self) -> pl.LightningModule:
        return self.trainer.lightning_module

    @cached_property
    def shards(self) -> list[Shard]:
        """The shards that this rank holds, replicas included."""
        return tables.local_shards(self.module, self.trainer.optimizers)

    @cached_property
    def specs(self) -> dict[str, TableSpec]:
        """All tables of the model by name; the same on every rank."""
        return tables.table_specs(self.module, self.trainer.optimizers)

    @cached_property
    def plan(self) -> list[ShardSpec]:
        """All shards of all ranks; the same on every rank."""
        return tables.global_shards(self.module)

    def refresh(self) -> None:
        """Look at the model again: a reshard has moved its tables."""
        for name in ("shards", "plan"):
            self.__dict__.pop(name, None)

    @property
    def owned(self) -> list[Shard]:
        """The shards that this rank saves."""
        return [s for s in self.shards if s.spec.owner == self.rank]

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank. A collective: training thread only."""
        return self.trainer.strategy.broadcast(value)

    def from_rank_0(self, work: Callable[[], T]) -> T:
        """Do ``work`` on rank 0; its result, or its CPRError, on every rank. A collective: training thread only."""
        outcome: tuple[T | None, CPRError | None] = (None, None)
        if self.rank == 0 or self.alone:
            try:
                outcome = (work(), None)
            except CPRError as e:
                outcome = (None, e)
        result, error = self.broadcast(outcome)
        if error is not None:
            raise error
        return cast(T, result)

    def together(self, work: Callable[[], T]) -> T:
        """Do local work on every rank; if it failed anywhere, raise the lowest rank's error everywhere.

        A collective: training thread only. Without it one rank's error would leave the others waiting for it.
        """
        if self.alone:
            return work()
        result: Any = None
        error: Exception | None = None
        try:
            result = work()
        except Exception as e:
            error = e
        errors: list[Exception | None] = [None] * self.world_size
        dist.all_gather_object(errors, error if error is None or isinstance(error, CPRError) else CPRError(repr(error)))
        first = next(((rank, e) for rank, e in enumerate(errors) if e is not None), None)
        if first is None:
            return result
        if first[0] == self.rank and error is not None:
            raise error
        # Of one kind everywhere, since the ranks decide by it what they do next.
        raise type(first[1])(f"rank {first[0]}: {first[1]}") from (error or first[1])
