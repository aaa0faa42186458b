"""``lightning-cpr export``: a version, or what changed since one, as files that need nothing of this package."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_cpr.errors import ConfigError, ManifestError, StorageError
from lightning_cpr.spec import RowBlock, TableSpec
from lightning_cpr.store.blob import JOB_BLOB
from lightning_cpr.store.compare import changed_rows
from lightning_cpr.store.find import Version, find_version
from lightning_cpr.store.stream import TableReader
from lightning_cpr.tools.show import show, size
from lightning_cpr.tools.tensorfile import TensorFile

Format = Literal["safetensors", "torch", "dcp"]


def export_command(
    version: str,
    out: str,
    to: Format = "safetensors",
    table: str | None = None,
    since: str | None = None,
    states: bool = True,
    storage_options: dict[str, Any] | None = None,
) -> int:
    """Write a version as plain tensors: tables, optimizer states and the dense model.

    safetensors, torch: a folder with a file a table, named by the table: tensors "weight" and, by name, optimizer
    states; "dense" has the rest of the model's state dict. dcp: a folder that torch.distributed.checkpoint loads, with
    the keys of {"model": dmp.state_dict(), "optim": dmp.fused_optimizer.state_dict()}. With --since, only rows that
    changed, with their row numbers as "rows".

    Args:
        version: ROOT@VERSION (by id or step), a root (its newest exact version), or a checkpoint file.
        out: A new or empty local folder.
        to: The format.
        table: Only this table; the last part of its name is enough.
        since: An older version of the same root, by id or step: only rows whose bits differ from it.
        states: Whether to write optimizer states.
        storage_options: Options of the filesystem for fsspec, e.g. credentials.
    """
    found = find_version(version, storage_options)
    if since is not None and to == "dcp":
        raise ConfigError("--since and --to dcp: a DCP checkpoint holds whole tables; use safetensors or torch")
    older = None if since is None else find_version(f"{found.storage.root}@{since}", storage_options)
    specs = _chosen(found, table)
    dense = {} if table is not None else _dense(found)
    folder = _new_folder(out)
    if to == "dcp":
        _write_dcp(found, specs, dense, folder, states)
    else:
        rows = {spec.fqn: _write_table(found, older, spec, folder, to, states) for spec in specs}
        if dense:
            _write(folder, "dense", dense, to)
        before = older.name if older else None
        about = {"version": found.name, "since": before, "step": found.manifest.step, "rows": rows}
        (folder / "export.json").write_text(json.dumps(about, indent=1) + "\n")
    total = sum(path.stat().st_size for path in folder.iterdir())
    show(f"{found.name}: {len(specs)} tables and {len(dense)} dense tensors, {size(total)}, in {folder}")
    return 0


def _chosen(found: Version, table: str | None) -> Sequence[TableSpec]:
    specs = found.manifest.tables
    if table is None:
        return specs
    chosen = [spec for spec in specs if spec.fqn == table] or [s for s in specs if s.fqn.endswith(f".{table}")]
    if len(chosen) != 1:
        names = ", ".join(spec.fqn for spec in chosen or specs)
        raise ManifestError(f"{found.name}: {len(chosen)} tables are named {table!r}; choose one of {names}")
    return chosen


def _dense(found: Version) -> dict[str, Tensor]:
    """The tensors of the dense part, if the version has one."""
    if all(blob.name != JOB_BLOB for blob in found.manifest.blobs):
        return {}
    state = found.blob(JOB_BLOB).get("state_dict", {})
    return {name: value.contiguous() for name, value in state.items() if isinstance(value, Tensor)}


def _new_folder(out: str) -> Path:
    if "://" in out:
        raise ConfigError(f"{out}: exports go to a local folder; copy it from there")
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{out}: is not empty; choose a new folder")
    except OSError as error:
        raise StorageError(error.errno, f"cannot make the folder: {error.strerror}", out) from error
    return folder


def _write_table(found: Version, older: Version | None, spec: TableSpec, folder: Path, to: Format, states: bool) -> int:
    """One table as one file; the number of rows in it."""
    with TableReader(found.storage, found.manifest, spec.fqn, with_states=states) as reader:
        if older is None:
            file = _stream(reader, folder / f"{spec.fqn}.safetensors", states)
            count = spec.rows
        else:
            with TableReader(older.storage, older.manifest, spec.fqn, with_states=states) as before:
                blocks = [after for _, after in changed_rows(before, reader)]
            count = sum(len(block.rows) for block in blocks)
            file = _gather(spec, folder / f"{spec.fqn}.safetensors", blocks, count, states)
    if to == "torch":
        torch.save(file.mapped(), folder / f"{spec.fqn}.pt")
        (folder / f"{spec.fqn}.safetensors").unlink()
    return count


def _stream(reader: TableReader, path: Path, states: bool) -> TensorFile:
    file = TensorFile(path, _shapes(reader.spec, reader.spec.rows, states))
    with file:
        for block in reader.slabs():
            _put(file, block, int(block.rows[0]))
    return file


def _gather(spec: TableSpec, path: Path, blocks: list[RowBlock], count: int, states: bool) -> TensorFile:
    file = TensorFile(path, {"rows": (torch.int64, (count,)), **_shapes(spec, count, states)})
    with file:
        start = 0
        for block in blocks:
            file.write("rows", start, block.rows)
            _put(file, block, start)
            start += len(block.rows)
    return file


def _put(file: TensorFile, block: RowBlock, start: int) -> None:
    for name, values in {"weight": block.weight, **block.states}.items():
        file.write(name, start, values)


def _shapes(spec: TableSpec, count: int, states: bool) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {"weight": (spec.dtype, (count, spec.cols))}
    for state in spec.states if states else ():
        shapes[state.name] = (state.dtype, (count, spec.cols) if state.kind == "element" else (count,))
    return shapes


def _write(folder: Path, name: str, tensors: dict[str, Tensor], to: Format) -> None:
    if to == "torch":
        torch.save(tensors, folder / f"{name}.pt")
        return
    with TensorFile(folder / f"{name}.safetensors", {k: (t.dtype, tuple(t.shape)) for k, t in tensors.items()}) as file:
        for key, tensor in tensors.items():
            file.write(key, 0, tensor)


def _write_dcp(
    found: Version, specs: Sequence[TableSpec], dense: dict[str, Tensor], folder: Path, states: bool
) -> None:
    """Tables pass through files beside it, so that DCP, which wants whole tensors, finds them in the page cache."""
    from torch.distributed import checkpoint

    model, optim, files = dict(dense), {}, []
    for number, spec in enumerate(specs):
        path = folder / f"table-{number}.tmp"
        with TableReader(found.storage, found.manifest, spec.fqn, with_states=states) as reader:
            tensors = _stream(reader, path, states).mapped()
        files.append(path)
        model[f"{spec.fqn}.weight"] = tensors.pop("weight")
        short = spec.fqn.rpartition(".")[2]
        # TorchRec's fused optimizers call the first state momentum1, whatever it is.
        names = ["momentum1", *(state.name for state in spec.states[1:])]
        named = {
            f"{short}.{new}": tensors[s.name] for new, s in zip(names, spec.states, strict=False) if s.name in tensors
        }
        if named:
            optim[f"{spec.fqn}.weight"] = named
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            checkpoint.save({"model": model, "optim": {"state": optim}}, checkpoint_id=folder, no_dist=True)
    finally:
        for path in files:
            path.unlink()
