"""Small tables, layouts of them over ranks, and whole saves by threads that stand for ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_cpr.spec import RowBlock, Shard, ShardSpec, StateSpec, TableSpec
from lightning_cpr.store import (
    LocalKeyValue,
    Manifest,
    RankPart,
    SaveIO,
    SaveReport,
    SaveSpec,
    ShardRecord,
    Storage,
    load_manifest,
    new_version_id,
    save,
)
from lightning_cpr.store.save import Compacted

ROW = StateSpec("sum", "row", torch.float32)
ELEMENT = StateSpec("exp_avg", "element", torch.float32)
_nonce = count()


@dataclass
class Table:
    """A table in plain memory: the model that the store is compared with."""

    spec: TableSpec
    weight: Tensor
    states: dict[str, Tensor] = field(default_factory=dict)

    def block(self, rows: Tensor, col_start: int = 0, cols: int | None = None) -> RowBlock:
        """Copies of rows and a column range, row-wise states whole."""
        end = self.spec.cols if cols is None else col_start + cols
        states = {
            name: state[rows].clone() if state.dim() == 1 else state[rows, col_start:end].clone()
            for name, state in self.states.items()
        }
        return RowBlock(self.spec.fqn, rows, col_start, self.weight[rows, col_start:end].clone(), states)

    def shard(self, row_start: int, rows: int, col_start: int, cols: int, fill: float = float("nan")) -> Shard:
        """An empty target of this shape."""
        states = {}
        for state in self.spec.states:
            shape = (rows, cols) if state.kind == "element" else (rows,)
            states[state.name] = torch.full(shape, fill, dtype=state.dtype)
        spec = ShardSpec(self.spec.fqn, row_start, rows, col_start, cols, owner=0)
        return Shard(spec, torch.full((rows, cols), fill, dtype=self.spec.dtype), states)


def table(
    fqn: str,
    rows: int,
    cols: int,
    states: Sequence[StateSpec] = (ROW,),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Table:
    g = torch.Generator().manual_seed(seed)
    spec = TableSpec(fqn, rows, cols, dtype, "rowwise_adagrad", tuple(states), row_sparse=True)
    made = {
        s.name: torch.rand((rows, cols) if s.kind == "element" else (rows,), generator=g).to(s.dtype) for s in states
    }
    return Table(spec, torch.randn(rows, cols, generator=g).to(dtype), made)


def version(step: int, epoch: int = 0, run: str = "run") -> str:
    return new_version_id(run, epoch, step, f"n{next(_nonce)}")


def save_spec(tables: Sequence[Table], step: int, world_size: int = 1, **changes: Any) -> SaveSpec:
    epoch, run = changes.pop("epoch", 0), changes.pop("run", "run")
    given: dict[str, Any] = {
        "version": version(step, epoch, run),
        "samples": step * 10,
        "kind": "delta" if changes.get("parent") else "base",
        "consistency": "exact",
        "world_size": world_size,
        "tables": tuple(table.spec for table in tables),
    }
    return SaveSpec(**{**given, **changes})


def whole(tables: Sequence[Table]) -> list[RowBlock]:
    return [table.block(torch.arange(table.spec.rows)) for table in tables]


def save_ranks(
    ios: Sequence[SaveIO], spec: SaveSpec, parts: Sequence[RankPart], run: Callable[..., SaveReport] = save
) -> list[SaveReport | BaseException]:
    """All ranks of a save, each in a thread; what each returned or raised."""

    def one(rank: int) -> SaveReport | BaseException:
        try:
            return run(ios[rank], spec, parts[rank])
        except BaseException as error:
            return error

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(one, range(len(parts))))


def save_one(
    storage: Storage,
    tables: Sequence[Table],
    step: int,
    *,
    rows: Mapping[str, Tensor] | None = None,
    blobs: Mapping[str, bytes] | None = None,
    codecs: Mapping[str, str] | None = None,
    points: Callable[[str, int], None] | None = None,
    chunk_bytes: int = 64 << 20,
    compacted: Compacted | None = None,
    **changes: Any,
) -> Manifest:
    """A save by one rank: a base of everything, or a delta of ``rows`` by table on ``parent``."""
    spec = save_spec(tables, step, **changes)
    blocks = whole(tables) if rows is None else [t.block(rows[t.spec.fqn]) for t in tables if t.spec.fqn in rows]
    shards = tuple(ShardRecord(ShardSpec(t.spec.fqn, 0, t.spec.rows, 0, t.spec.cols, 0), step) for t in tables)
    io = SaveIO(storage, LocalKeyValue(), partial(int, spec.epoch), timeout_s=20, chunk_bytes=chunk_bytes)
    if points:
        io = SaveIO(storage, io.kv, io.epoch, points, timeout_s=20, chunk_bytes=chunk_bytes)
    report = save(io, spec, RankPart(0, blocks, shards, blobs or {}, codecs or {}), compacted=compacted)
    return load_manifest(storage, report.path)


def files_of(root: str | Path) -> dict[str, int]:
    """Every file below a folder, by relative path, with its size."""
    return {str(path.relative_to(root)): path.stat().st_size for path in Path(root).rglob("*") if path.is_file()}


def threads() -> set[str]:
    """Names of the store's threads that are alive."""
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("cpr-")}
