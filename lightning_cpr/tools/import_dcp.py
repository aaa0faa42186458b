"""``lightning-cpr import``: a DCP checkpoint of a TorchRec model becomes a base."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_cpr.errors import ConfigError, ManifestError, UnsupportedError
from lightning_cpr.spec import RowBlock, ShardSpec, StateSpec, TableSpec
from lightning_cpr.store.blob import JOB_BLOB, encode_blob, rank_blob
from lightning_cpr.store.commit import save
from lightning_cpr.store.kv import LocalKeyValue
from lightning_cpr.store.manifest import ShardRecord, new_version_id
from lightning_cpr.store.save import RankPart, SaveIO, SaveSpec
from lightning_cpr.store.storage import Storage
from lightning_cpr.store.versions import list_versions
from lightning_cpr.tools.dcp import Piece, SavedTensor, read_metadata, read_piece, read_whole
from lightning_cpr.tools.show import show

_TABLE = re.compile(r"(?:^|\.)(?:embedding_bags|embeddings)\.[^.]+\.weight$")
_STATE = re.compile(r"(?:^|\.)state\.(?P<weight>.+\.weight)\.(?P<table>[^.]+)\.(?P<state>[^.]+)$")
_OPTIMIZERS = {
    (): "none",
    (("sum", "row"),): "rowwise_adagrad",
    (("sum", "element"),): "adagrad",
    (("exp_avg", "element"), ("exp_avg_sq", "element")): "adam",
    (("exp_avg", "element"), ("exp_avg_sq", "row")): "partial_rowwise_adam",
}


@dataclass(frozen=True)
class _Table:
    spec: TableSpec
    weight: SavedTensor
    states: Mapping[str, SavedTensor]


def import_command(
    dcp_dir: str,
    root: str,
    prefix: str | None = None,
    step: int = 0,
    storage_options: dict[str, Any] | None = None,
) -> int:
    """Make a base of a DCP checkpoint of a TorchRec model.

    As written by dcp.save({"model": dmp.state_dict(), "optim": dmp.fused_optimizer.state_dict()}, ...) on any number of
    ranks. Tables and their optimizer states become rows, other tensors of the model the dense part. The base serves
    load_model, warm starts and the tools; what DCP does not hold (loops, random streams, the optimizers' step counters)
    starts anew.

    Args:
        dcp_dir: The folder of the checkpoint.
        root: A root without versions.
        prefix: What the model's keys begin with, e.g. "model."; left out: as the optimizer's keys tell, else "model."
            where all keys have it.
        step: The training step that the base is of.
        storage_options: Options of the filesystem for fsspec, e.g. credentials; for both.
    """
    source, storage = Storage(dcp_dir, storage_options), Storage(root, storage_options)
    if list_versions(storage):
        raise ConfigError(f"{storage.root}: holds versions of another run already; choose a new root")
    tensors = read_metadata(source)
    prefix = _prefix(tensors) if prefix is None else prefix
    tables = [_table(tensors, key, prefix) for key in sorted(tensors) if _is_table(key, prefix)]
    if not tables:
        raise ManifestError(
            f"{source.root}: no key like {prefix}<module>.embedding_bags.<table>.weight among "
            f"{', '.join(sorted(tensors)[:5]) or 'none'}; give --prefix"
        )
    dense = {
        key.removeprefix(prefix): read_whole(source, tensor)
        for key, tensor in tensors.items()
        if key.startswith(prefix) and not _is_table(key, prefix) and not _STATE.search(key)
    }
    version = new_version_id(f"imported-{secrets.token_hex(4)}", 0, step, "dcp")
    spec = SaveSpec(version, 0, "base", "exact", 1, tuple(table.spec for table in tables))
    shards = tuple(ShardRecord(shard, step) for table in tables for shard in _shards(table))
    blobs = {
        JOB_BLOB: encode_blob({"state_dict": dense}),
        rank_blob(0): encode_blob({"loops": None, "rng": None, "scalars": {}}),
    }
    part = RankPart(0, _blocks(source, tables), shards, blobs)
    report = save(SaveIO(storage, LocalKeyValue(), epoch=lambda: 0), spec, part)
    show(f"{storage.root}@{version}: {len(tables)} tables, {report.part.rows} rows, {len(dense)} dense tensors")
    return 0


def _prefix(tensors: Mapping[str, SavedTensor]) -> str:
    """What stands before the model's keys, from those of the optimizer: they hold the plain names of the weights."""
    states = [match for key in tensors if (match := _STATE.search(key))]
    others = [key for key in tensors if not _STATE.search(key)]
    for match in states:
        for key in others:
            if key.endswith(match["weight"]) and _TABLE.search(key):
                return key.removesuffix(match["weight"])
    return "model." if others and all(key.startswith("model.") for key in others) else ""


def _is_table(key: str, prefix: str) -> bool:
    return key.startswith(prefix) and not _STATE.search(key) and bool(_TABLE.search(key))


def _table(tensors: Mapping[str, SavedTensor], key: str, prefix: str) -> _Table:
    weight, name = tensors[key], key.removeprefix(prefix)
    if len(weight.shape) != 2 or not weight.pieces:
        raise ManifestError(f"{key}: a table of shape {list(weight.shape)} in {len(weight.pieces)} pieces")
    found = {
        match["state"]: tensor
        for other, tensor in tensors.items()
        if (match := _STATE.search(other)) and match["weight"] == name
    }
    # TorchRec's fused optimizers call the first state momentum1, whatever it is.
    first = "exp_avg" if "exp_avg_sq" in found else "sum"
    states = {first if state == "momentum1" else state: tensor for state, tensor in sorted(found.items())}
    specs = tuple(StateSpec(state, _kind(weight, t), t.dtype) for state, t in sorted(states.items()))
    optimizer = _OPTIMIZERS.get(tuple((s.name, s.kind) for s in specs), "unknown")
    fqn = name.removesuffix(".weight")
    return _Table(TableSpec(fqn, *weight.shape, weight.dtype, optimizer, specs), weight, states)


def _kind(weight: SavedTensor, state: SavedTensor) -> Any:
    """Element-wise states are cut as the weight is; row-wise ones have a value a row for each column block of it."""
    if state.shape == weight.shape and [p.offsets for p in state.pieces] == [p.offsets for p in weight.pieces]:
        return "element"
    columns = {piece.offsets[1] for piece in weight.pieces}
    rows = {piece.offsets[0] for piece in weight.pieces}
    fits = len(state.shape) == 1 and state.shape[0] == weight.shape[0] * len(columns)
    if fits and (len(columns) == 1 or len(rows) == 1) and len(state.pieces) == len(weight.pieces):
        return "row"
    raise UnsupportedError(
        f"{state.key}: shape {list(state.shape)} in {len(state.pieces)} pieces for a table {list(weight.shape)} in "
        f"{len(weight.pieces)}; row- and column-wise at once cannot be imported: load it and save a version"
    )


def _shards(table: _Table) -> Sequence[ShardSpec]:
    return [
        ShardSpec(table.spec.fqn, piece.offsets[0], piece.sizes[0], piece.offsets[1], piece.sizes[1], owner=0)
        for piece in table.weight.pieces
    ]


def _blocks(source: Storage, tables: Sequence[_Table]) -> Iterator[RowBlock]:
    """The rows, one saved piece at a time."""
    for table in tables:
        for number, piece in enumerate(table.weight.pieces):
            rows = torch.arange(piece.offsets[0], piece.offsets[0] + piece.sizes[0])
            states = {
                state.name: _state(source, table.states[state.name], number, piece) for state in table.spec.states
            }
            yield RowBlock(table.spec.fqn, rows, piece.offsets[1], read_piece(source, table.weight, piece), states)


def _state(source: Storage, state: SavedTensor, number: int, piece: Piece) -> Tensor:
    """The state of a weight's piece. Both are in one order: of rows, or of columns for a column-wise table."""
    own = state.pieces[number]
    if own.sizes[0] != piece.sizes[0]:
        raise UnsupportedError(f"{state.key}: piece {number} has {own.sizes[0]} rows, its weight {piece.sizes[0]}")
    return read_piece(source, state, own)
