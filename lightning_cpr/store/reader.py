"""Reading versions back: ranged, verified, resharding reads into live tensors.

A read runs in two passes. The first fetches every block that the targets need and checks its hash, keeping what fits
into ``cache_bytes``; only when all is sound does the second write to the targets, fetching again (and checking again)
what was not kept. So damage is found while the targets are untouched, and memory stays bounded: with 2 GiB most shards
are read once, larger ones are read twice rather than staged as a whole. Targets whose content is lost anyway are
written in one pass, each block once it is checked; raw rows are read straight into them, and checked where they lie.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightning_cpr.errors import (
    ConfigError,
    CorruptShardError,
    CPRError,
    IncompatiblePlanError,
    ManifestError,
    RecoveryError,
)
from lightning_cpr.spec import Shard, ShardSpec, StateSpec, TableSpec
from lightning_cpr.store.codec import get_codec
from lightning_cpr.store.fetch import Fetcher, Piece, ahead, fetch
from lightning_cpr.store.manifest import Manifest, digest
from lightning_cpr.store.resolve import Ids, Need, as_index, near_shard, resolve, select
from lightning_cpr.store.storage import Storage

CACHE_BYTES = 2 << 30
THREADS = 4

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ReadReport:
    """What a read cost. bytes_read counts everything fetched, rows the rows of the targets."""

    bytes_read: int
    files_opened: int
    rows: int
    seconds: float


def read_into(
    storage: Storage,
    manifest: Manifest,
    shards: Sequence[Shard],
    *,
    with_states: bool = True,
    threads: int = THREADS,
    cache_bytes: int = CACHE_BYTES,
    progress: Progress | None = None,
    undefined: bool = False,
) -> ReadReport:
    """Overwrite live shards, of any plan, with the rows of a version; the weights alone if not ``with_states``.

    Row-wise optimizer state: where a target spans several saved column blocks, the mean of theirs weighted by width
    (exact for row-wise Adagrad, a mean of squares over the block); where it is part of one block, a copy.
    progress: called with (bytes checked, bytes in all). undefined: the targets hold nothing worth keeping, so that
    one pass does, and an error leaves them undefined.

    Raises:
        IncompatiblePlanError: tables, shapes, dtypes or states differ; lists all. No target was changed.
        CorruptShardError, ManifestError, StorageError: the version is damaged or out of reach. No target was changed.
        RecoveryError: storage failed between the passes. The targets hold a mix and must be restored again.
    """
    started = time.monotonic()
    fetcher = Fetcher(storage, _compatible(manifest, shards, with_states), with_states)
    specs = [shard.spec for shard in shards]
    with torch.no_grad(), ThreadPoolExecutor(threads, thread_name_prefix="cpr-get") as pool:
        sparse = [
            entry for entry in manifest.files if not entry.dense and any(near_shard(entry, spec) for spec in specs)
        ]
        list(pool.map(fetcher.index, sparse))
        needs = resolve(manifest.files, specs, lambda entry: fetcher.index(entry).rows())
        used = [(manifest.files[at], mine) for at, mine in sorted(needs.items())]
        list(pool.map(fetcher.index, [entry for entry, _ in used]))
        pieces = [piece for entry, mine in used for piece in fetcher.pieces(entry, mine)]
        kept = {} if undefined else _check_all(pool, fetcher, pieces, 2 * threads, cache_bytes, progress)
        try:
            landings = [_landing(fetcher, piece, shards) if undefined else None for piece in pieces]
            _write_all(pool, fetcher, pieces, kept, landings, shards, 2 * threads)
        except CPRError as error:
            if undefined:
                raise
            text = "storage failed after everything was checked; the targets hold a mix, restore them again"
            raise RecoveryError(f"{text}: {error}") from error
    rows = sum(spec.rows for spec in specs)
    return ReadReport(fetcher.bytes_read, len(fetcher.opened), rows, time.monotonic() - started)


def read_table(storage: Storage, manifest: Manifest, fqn: str) -> tuple[Tensor, dict[str, Tensor]]:
    """A whole table ``[rows, cols]`` and its optimizer states by name, in host memory. Raises as `read_into` does."""
    spec = manifest.table(fqn)
    weight = torch.empty(spec.rows, spec.cols, dtype=spec.dtype)
    states = {s.name: torch.empty(_state_shape(s, spec.rows, spec.cols), dtype=s.dtype) for s in spec.states}
    whole = Shard(ShardSpec(fqn, 0, spec.rows, 0, spec.cols, owner=0), weight, states)
    read_into(storage, manifest, [whole], undefined=True)
    return weight, states


def read_blob(storage: Storage, manifest: Manifest, name: str) -> bytes:
    """The checked bytes of a blob.

    Raises:
        ManifestError: the version has none of that name.
        CorruptShardError: it is missing, or its bytes are not those that were written.
    """
    for blob in manifest.blobs:
        if blob.name == name:
            raw = fetch(storage, blob.path, 0, None, blob.name)
            if len(raw) != blob.bytes or digest(raw) != blob.blake2b:
                raise CorruptShardError(f"{blob.path} ({name}): does not match its hash; use an older version")
            return bytes(raw)
    known = ", ".join(blob.name for blob in manifest.blobs) or "none"
    raise ManifestError(f"{manifest.path}: no blob {name!r}; it has {known}")


def _check_all(
    pool: ThreadPoolExecutor,
    fetcher: Fetcher,
    pieces: Sequence[Piece],
    depth: int,
    cache_bytes: int,
    progress: Progress | None,
) -> dict[int, dict[str, Tensor]]:
    """The first pass. Returns the pieces that fitted into memory, by number."""
    sizes = [fetcher.bytes_of(piece) for piece in pieces]
    kept: dict[int, dict[str, Tensor]] = {}
    done, total, free = 0, sum(sizes), cache_bytes
    for at, tensors in enumerate(ahead(pool, [partial(fetcher.checked, piece) for piece in pieces], depth)):
        if sizes[at] <= free:
            free -= sizes[at]
            kept[at] = tensors
        done += sizes[at]
        if progress:
            progress(done, total)
    return kept


def _write_all(
    pool: ThreadPoolExecutor,
    fetcher: Fetcher,
    pieces: Sequence[Piece],
    kept: dict[int, dict[str, Tensor]],
    landings: Sequence[dict[str, Tensor] | None],
    shards: Sequence[Shard],
    depth: int,
) -> None:
    """The second pass, or the only one: the targets are written, by this thread alone but for ``landings``."""
    means = {
        (need.shard, name): torch.zeros(len(state), dtype=torch.float64)
        for piece in pieces
        for need in piece.needs
        if not need.whole
        for name, state in shards[need.shard].states.items()
        if state.dim() == 1
    }
    tasks = [partial(_again, fetcher, piece, kept, landings[at], at) for at, piece in enumerate(pieces)]
    for piece, landed, tensors in zip(pieces, landings, ahead(pool, tasks, depth), strict=True):
        if landed is None:
            write_piece(fetcher, piece, tensors, shards, means)
    for (number, name), mean in means.items():
        shards[number].states[name].copy_(mean / shards[number].spec.cols)


def write_piece(
    fetcher: Fetcher,
    piece: Piece,
    tensors: dict[str, Tensor],
    shards: Sequence[Shard],
    means: dict[tuple[int, str], Tensor],
) -> None:
    """Decode the rows of a checked piece into the targets that need them.

    ``means``: by target and row-wise state, the sum over column blocks so far, for targets that span several.
    """
    for need in piece.needs:
        positions, rows = select(need, *piece.row_span)
        if len(positions):
            picked = {name: tensor[as_index(positions)] for name, tensor in tensors.items()}
            weight, states = fetcher.decode(piece.index, picked)
            _write(shards[need.shard], need, piece.index.entry.col_start, rows, weight, states, means)


def _again(
    fetcher: Fetcher, piece: Piece, kept: dict[int, dict[str, Tensor]], landing: dict[str, Tensor] | None, at: int
) -> dict[str, Tensor]:
    if landing is not None:
        fetcher.land(piece, landing)
        return {}
    tensors = kept.pop(at, None)
    return fetcher.checked(piece) if tensors is None else tensors


def _landing(fetcher: Fetcher, piece: Piece, shards: Sequence[Shard]) -> dict[str, Tensor] | None:
    """Where each part of a piece belongs, if its bytes are those of whole rows of one target; else None."""
    entry = piece.index.entry
    if len(piece.needs) > 1 or {entry.codec, *entry.state_codecs.values()} != {"raw"}:
        return None
    (need,) = piece.needs
    start, end = piece.row_span
    positions, rows = select(need, start, end)
    if not isinstance(rows, range) or len(positions) < end - start:
        return None
    if not need.whole or (need.low, need.high) != (entry.col_start, entry.col_end):
        return None
    shard = shards[need.shard]
    live = {"weight.values": shard.weight, **{f"state.{name}.values": state for name, state in shard.states.items()}}
    landing = {}
    for part in fetcher.parts(piece.index):
        target = live[part.name][rows.start : rows.stop].detach() if part.name in live else None
        if target is None or target.device.type != "cpu" or target.dtype != part.dtype:
            return None
        if not target.is_contiguous() or target.stride(-1) != 1:  # a single element counts as contiguous
            return None
        landing[part.name] = target
    return landing


def _write(
    shard: Shard,
    need: Need,
    col_start: int,
    rows: Ids,
    weight: Tensor,
    states: dict[str, Tensor],
    means: dict[tuple[int, str], Tensor],
) -> None:
    source = slice(need.low - col_start, need.high - col_start)
    columns = slice(need.low - shard.spec.col_start, need.high - shard.spec.col_start)
    _put(shard.weight[:, columns], rows, weight[:, source])
    for name, values in states.items():
        if values.dim() == 2:
            _put(shard.states[name][:, columns], rows, values[:, source])
        elif (mean := means.get((need.shard, name))) is None:
            _put(shard.states[name], rows, values)
        else:
            # Exact in float64 for fp32 and narrower, so that equal blocks give exactly their value.
            mean[as_index(rows)] += values.double() * (need.high - need.low)


def _put(target: Tensor, rows: Ids, values: Tensor) -> None:
    if isinstance(rows, range):
        target[rows.start : rows.stop].copy_(values)
    else:
        target[rows.to(target.device)] = values.to(target.device)


def _state_shape(state: StateSpec, rows: int, cols: int) -> tuple[int, ...]:
    return (rows, cols) if state.kind == "element" else (rows,)


def _compatible(manifest: Manifest, shards: Sequence[Shard], with_states: bool) -> dict[str, TableSpec]:
    """The version's tables; IncompatiblePlanError listing everything in which the targets differ from them."""
    tables = {spec.fqn: spec for spec in manifest.tables}
    problems = []
    for shard in shards:
        if (spec := tables.get(shard.spec.table)) is None:
            problems.append(f"table {shard.spec.table} is not in the version")
        else:
            problems += _differences(shard, spec, with_states)
    names = {shard.spec.table for shard in shards}
    used = [entry for entry in manifest.files if entry.table in names]
    for codec in {codec for entry in used for codec in (entry.codec, *entry.state_codecs.values())}:
        try:
            get_codec(codec)
        except ConfigError as error:
            problems.append(f"{error}: upgrade lightning_cpr")
    if problems:
        listed = "\n  ".join(dict.fromkeys(problems))
        raise IncompatiblePlanError(f"version {manifest.version} does not fit, nothing was changed:\n  {listed}")
    return tables


def _differences(shard: Shard, spec: TableSpec, with_states: bool) -> list[str]:
    target = shard.spec
    rows, columns = f"[{target.row_start}, {target.row_end})", f"[{target.col_start}, {target.col_end})"
    where = f"table {spec.fqn} rows {rows} columns {columns}"
    problems = []
    inside = 0 <= target.row_start <= target.row_end <= spec.rows
    if not inside or not 0 <= target.col_start <= target.col_end <= spec.cols:
        problems.append(f"{where}: the saved table is {spec.rows} x {spec.cols}")
    wanted = {"weight": _text((target.rows, target.cols), spec.dtype)}
    found = {"weight": _text(tuple(shard.weight.shape), shard.weight.dtype)}
    if with_states:
        wanted |= {s.name: _text(_state_shape(s, target.rows, target.cols), s.dtype) for s in spec.states}
        found |= {name: _text(tuple(state.shape), state.dtype) for name, state in shard.states.items()}
    for name in sorted({*wanted, *found}):
        here, there = found.get(name, "absent"), wanted.get(name, "absent")
        if here != there:
            problems.append(f"{where}: {name} is {here} here and {there} in the version (optimizer {spec.optimizer})")
    return problems


def _text(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
