"""``lightning-cpr inspect``: what a root holds."""

from __future__ import annotations

import json as jsonlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from lightning_cpr.errors import CorruptShardError, ManifestError
from lightning_cpr.store.compact import chain_length
from lightning_cpr.store.find import find_root, find_version
from lightning_cpr.store.manifest import Manifest
from lightning_cpr.store.versions import list_versions, load_manifest, newest, torn_versions
from lightning_cpr.tools.show import add, age, show, size, table


@dataclass(frozen=True)
class Contents:
    """What a root holds, newest first. problems: manifests that cannot be used; torn: saves without a manifest."""

    root: str
    manifests: tuple[Manifest, ...]
    problems: tuple[str, ...]
    torn: tuple[str, ...]


def inspect_command(root: str, json: bool = False, storage_options: dict[str, Any] | None = None) -> int:
    """List the versions of a root, and the tables of the newest.

    Status 1 if a manifest is damaged.

    Args:
        root: A root, ROOT@VERSION for one version (by id or step), or a checkpoint file.
        json: Print JSON instead of tables.
        storage_options: Options of the filesystem for fsspec, e.g. credentials.
    """
    contents = read_contents(root, storage_options)
    if json:
        print(as_json(contents))
    else:
        show(versions_table(contents, time.time()))
        if contents.manifests:
            show(tables_table(contents.manifests[0]))
        for line in (*contents.problems, *(f"{version}: not committed; it is ignored" for version in contents.torn)):
            show(f"! {line}")
    return 1 if contents.problems else 0


def read_contents(root: str, storage_options: dict[str, Any] | None = None) -> Contents:
    """Read the manifests of a root, or the one that the path names.

    Raises:
        ManifestError: there is no version; says what is there instead.
    """
    storage = find_root(root, storage_options)
    if storage is None:
        version = find_version(root, storage_options)
        return Contents(version.storage.root, (version.manifest,), (), ())
    found, problems = [], []
    for ref in list_versions(storage):
        try:
            found.append(load_manifest(storage, ref))
        except (ManifestError, CorruptShardError) as error:
            problems.append(str(error))
    if not found:
        newest(storage, None).require()
    needed = {stored.path.split("/")[1] for manifest in found for stored in manifest.stored}
    torn = tuple(ref.version for ref in torn_versions(storage) if ref.version not in needed)
    return Contents(storage.root, tuple(found), tuple(problems), torn)


def versions_table(contents: Contents, now: float) -> Table:
    """One line a version. saved: bytes that its own save wrote; restore: all bytes that restore it; chain: how many
    saves these come from.
    """
    made = table(contents.root, ["version", "kind", "rows"], ["step", "saved", "restore", "chain", "age"])
    for m in contents.manifests:
        total = size(sum(s.bytes for s in m.stored))
        since = age(now - m.wall_time)
        add(made, m.version, m.kind, m.consistency, f"{m.step}", size(own_bytes(m)), total, f"{chain_length(m)}", since)
    return made


def tables_table(manifest: Manifest) -> Table:
    """One line a table of a version."""
    made = table(f"tables of {manifest.version}", ["table", "optimizer", "codec"], ["rows", "cols", "dtype", "bytes"])
    for spec in manifest.tables:
        files = [entry for entry in manifest.files if entry.table == spec.fqn]
        states = ", ".join(f"{s.name} a {s.kind}" for s in spec.states)
        codecs = ", ".join(sorted({entry.codec for entry in files}))
        total = size(sum(entry.bytes for entry in files))
        optimizer = f"{spec.optimizer} ({states})" if states else spec.optimizer
        dtype = str(spec.dtype).removeprefix("torch.")
        add(made, spec.fqn, optimizer, codecs, f"{spec.rows}", f"{spec.cols}", dtype, total)
    return made


def as_json(contents: Contents) -> str:
    """The same for programs."""
    versions = [
        {
            "version": m.version, "manifest": m.path, "run_id": m.run_id, "epoch": m.epoch, "step": m.step,
            "samples": m.samples, "kind": m.kind, "consistency": m.consistency, "world_size": m.world_size,
            "wall_time": m.wall_time, "parent": m.parent, "saved_bytes": own_bytes(m),
            "restore_bytes": sum(s.bytes for s in m.stored), "files": len(m.files), "chain": chain_length(m),
            "tables": [_table_json(m, spec.fqn) for spec in m.tables],
        }
        for m in contents.manifests
    ]  # fmt: skip
    body = {"root": contents.root, "versions": versions, "problems": contents.problems, "torn": contents.torn}
    return jsonlib.dumps(body, indent=1)


def own_bytes(manifest: Manifest) -> int:
    """Bytes of the files that the version's own save wrote."""
    return sum(stored.bytes for stored in manifest.stored if f"/{manifest.version}/" in stored.path)


def _table_json(manifest: Manifest, fqn: str) -> dict[str, Any]:
    spec = manifest.table(fqn)
    files = [entry for entry in manifest.files if entry.table == fqn]
    codecs: Sequence[str] = sorted({entry.codec for entry in files})
    return {
        "table": fqn, "rows": spec.rows, "cols": spec.cols, "dtype": str(spec.dtype).removeprefix("torch."),
        "optimizer": spec.optimizer, "codecs": codecs, "bytes": sum(entry.bytes for entry in files),
        "states": [{"name": s.name, "kind": s.kind, "dtype": str(s.dtype).removeprefix("torch.")} for s in spec.states],
    }  # fmt: skip
