"""Turns off the random initialisation of table rows that a restore will overwrite anyway."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_cpr.tables import _deps

_deps.check()

from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbedding, BaseBatchedEmbeddingBag  # noqa: E402
from torchrec.distributed.embedding import ShardedEmbeddingCollection  # noqa: E402
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection  # noqa: E402

_INITIALISERS: tuple[tuple[type[Any], str], ...] = (
    (BaseBatchedEmbeddingBag, "init_parameters"),
    (BaseBatchedEmbedding, "init_parameters"),
    (ShardedEmbeddingBagCollection, "reset_parameters"),
    (ShardedEmbeddingCollection, "reset_parameters"),
)


@contextmanager
def without_table_init() -> Iterator[None]:
    """Inside, sharding leaves table memory as it was allocated, twice saved: TorchRec draws every row two times.

    For all ranks or none: the second draw broadcasts data-parallel tables. Every row must be restored afterwards.
    """
    saved = [(owner, name, getattr(owner, name)) for owner, name in _INITIALISERS]
    try:
        for owner, name, _ in saved:
            setattr(owner, name, _leave)
        yield
    finally:
        for owner, name, original in saved:
            setattr(owner, name, original)


def _leave(module: Any) -> None:
    """The initialisers' replacement."""
