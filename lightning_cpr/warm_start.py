"""Begin a new job with tables of another one: some of them, under other names, or grown.

    warm_start(model, "s3://bucket/job41", tables={"items_v2": "items"}, grow=True)

Call it on every rank once the model is sharded and before the first batch (in ``on_fit_start`` of a LightningModule
under `TorchRecStrategy`); each rank reads what it holds, whatever the plan of the other job was. An unsharded model in
one process works too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_cpr.errors import IncompatiblePlanError
from lightning_cpr.spec import Shard, TableSpec
from lightning_cpr.store.blob import JOB_BLOB
from lightning_cpr.store.find import Version, find_version
from lightning_cpr.store.reader import read_into
from lightning_cpr.tables.dense import load_dense_state
from lightning_cpr.tables.scalars import load_fused_scalars
from lightning_cpr.tables.shards import local_shards, table_specs

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WarmStart:
    """What was taken. tables: the saved table by the model's. new_rows: rows of grown tables that keep their start."""

    version: str
    tables: dict[str, str]
    new_rows: dict[str, int]
    bytes_read: int


def warm_start(
    model: nn.Module,
    path: str,
    *,
    tables: Mapping[str, str] | Sequence[str] | None = None,
    grow: bool = False,
    states: bool = True,
    dense: bool = False,
    optimizers: Sequence[Optimizer] = (),
    storage_options: Mapping[str, Any] | None = None,
) -> WarmStart:
    """Copy rows of a version into the model's tables.

    Args:
        model: sharded or not; tables that are not taken are left alone.
        path: a root (its newest exact version), ``ROOT@VERSION``, or a checkpoint file.
        tables: the model's table -> the version's, or names that are the same in both; full names or their last parts.
            Left out: every table that both have under one name.
        grow: a table may have more rows than were saved. The others keep the values that they have now.
        states: take optimizer states as well, and Adam's step counter; the learning rate stays the model's own.
        dense: take dense weights of the same name too; a shape that differs is an error.
        optimizers: ordinary optimizers that hold states of tables, where no strategy has told.

    Raises:
        IncompatiblePlanError: names, shapes or states do not fit; lists all. No tensor was changed.
        CorruptShardError, ManifestError: the version is damaged or missing. No tensor was changed.
    """
    version = find_version(path, storage_options)
    here = table_specs(model, optimizers)
    there = {spec.fqn: spec for spec in version.manifest.tables}
    pairs = _pairs(version, here, there, tables)
    _check_rows(version, here, there, pairs, grow)
    shards = [
        _renamed(shard, there[pairs[shard.spec.table]])
        for shard in local_shards(model, optimizers)
        if shard.spec.table in pairs
    ]
    report = read_into(version.storage, version.manifest, shards, with_states=states)
    if states:
        saved = version.scalars()
        counters = {new: {"iter": saved[old]["iter"]} for new, old in pairs.items() if "iter" in saved.get(old, {})}
        load_fused_scalars(model, counters, optimizers)
    if dense:
        missing, extra = load_dense_state(model, version.blob(JOB_BLOB)["state_dict"], strict=False)
        log.info("dense weights of %s: %d here were not there, %d there are not here", path, len(missing), len(extra))
    new_rows = {new: n for new, old in pairs.items() if (n := here[new].rows - there[old].rows)}
    log.info("warm start from %s: %s", version.name, pairs)
    return WarmStart(version.name, pairs, new_rows, report.bytes_read)


def _pairs(
    version: Version,
    here: Mapping[str, TableSpec],
    there: Mapping[str, TableSpec],
    tables: Mapping[str, str] | Sequence[str] | None,
) -> dict[str, str]:
    if tables is None:
        pairs = {fqn: fqn for fqn in here if fqn in there}
        if not pairs:
            raise IncompatiblePlanError(
                f"{version.name} and the model share no table: there are {', '.join(there)} and {', '.join(here)}; "
                "say which is which with tables={new: old}"
            )
        return pairs
    wanted = tables if isinstance(tables, Mapping) else {name: name for name in tables}
    pairs, problems = {}, []
    for new, old in wanted.items():
        found = [_full(new, here, "the model"), _full(old, there, version.name)]
        problems += [text for name, text in found if name is None]
        if found[0][0] is not None and found[1][0] is not None:
            pairs[found[0][0]] = found[1][0]
    if problems:
        raise IncompatiblePlanError("; ".join(problems))
    return pairs


def _full(name: str, tables: Mapping[str, TableSpec], where: str) -> tuple[str | None, str]:
    """(the full name or None, what is wrong)."""
    matches = [name] if name in tables else [fqn for fqn in tables if fqn.endswith(f".{name}")]
    if len(matches) == 1:
        return matches[0], ""
    return None, f"{len(matches)} tables of {where} are named {name!r}; it has {', '.join(tables)}"


def _check_rows(
    version: Version,
    here: Mapping[str, TableSpec],
    there: Mapping[str, TableSpec],
    pairs: Mapping[str, str],
    grow: bool,
) -> None:
    problems = []
    for new, old in pairs.items():
        rows, saved = here[new].rows, there[old].rows
        if rows < saved or here[new].cols != there[old].cols:
            problems.append(f"{new} is {rows} x {here[new].cols}, saved {old} {saved} x {there[old].cols}")
        elif rows > saved and not grow:
            problems.append(f"{new} has {rows - saved} rows more than saved {old}; pass grow=True to keep their start")
    if problems:
        raise IncompatiblePlanError(f"{version.name} does not fit, nothing was changed: {'; '.join(problems)}")


def _renamed(shard: Shard, saved: TableSpec) -> Shard:
    """The part of a live shard that was saved, under the name that it was saved by."""
    rows = max(0, min(shard.spec.row_end, saved.rows) - shard.spec.row_start)
    start = min(shard.spec.row_start, saved.rows)
    states = {name: state[:rows] for name, state in shard.states.items()}
    return Shard(replace(shard.spec, table=saved.fqn, row_start=start, rows=rows), shard.weight[:rows], states)
