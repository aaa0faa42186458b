"""What a version holds beyond its base: the rows that the next delta since that base has to hold too."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_cpr.spec import ShardSpec
from lightning_cpr.store.fetch import Fetcher
from lightning_cpr.store.manifest import FileEntry, Manifest
from lightning_cpr.store.resolve import near_shard
from lightning_cpr.store.storage import Storage


def folder_of(entry: FileEntry) -> str:
    """The version that wrote a file."""
    return entry.path.split("/")[1]


def base_of(manifest: Manifest) -> str:
    """The base of a version: the version that wrote the first file to apply."""
    return folder_of(manifest.files[0]) if manifest.files else manifest.version


def rows_since_base(storage: Storage, manifest: Manifest, shard: ShardSpec) -> Tensor:
    """Rows of a shard, local, int64 and increasing, that a version holds in files other than its base's.

    Raises:
        CorruptShardError: the head of a file does not match its hash.
    """
    base = base_of(manifest)
    fetcher = Fetcher(storage, {spec.fqn: spec for spec in manifest.tables})
    held = torch.zeros(shard.rows, dtype=torch.bool)
    for entry in manifest.files:
        if near_shard(entry, shard) and folder_of(entry) != base:
            rows = fetcher.index(entry).rows() - shard.row_start
            held[rows[(rows >= 0) & (rows < shard.rows)]] = True
    return held.nonzero().flatten()
