"""``lightning-cpr diff``: what training changed between two versions."""

from __future__ import annotations

import dataclasses
import json as jsonlib
from typing import Any

from lightning_cpr.store.compare import TableDiff, diff_table
from lightning_cpr.store.find import Version, find_version
from lightning_cpr.store.stream import TableReader
from lightning_cpr.tools.show import add, show, table


def diff_command(old: str, new: str, json: bool = False, storage_options: dict[str, Any] | None = None) -> int:
    """Compare the tables of two versions: rows changed, and the norm of the change.

    Args:
        old: ROOT@VERSION, a root (its newest version), or a checkpoint file.
        new: The same, for the later one.
        json: Print JSON instead of a table.
        storage_options: Options of the filesystem for fsspec, e.g. credentials.
    """
    before, after = find_version(old, storage_options), find_version(new, storage_options)
    names = [[spec.fqn for spec in version.manifest.tables] for version in (before, after)]
    found = [_diff(before, after, fqn) for fqn in names[1] if fqn in names[0]]
    gone = [fqn for fqn in names[0] if fqn not in names[1]]
    added = [fqn for fqn in names[1] if fqn not in names[0]]
    if json:
        body = {
            "old": before.name, "new": after.name, "tables": [dataclasses.asdict(d) for d in found],
            "only_old": gone, "only_new": added,
        }  # fmt: skip
        print(jsonlib.dumps(body, indent=1))
        return 0
    made = table(
        f"{before.name} -> {after.name}", ["table"],
        ["rows", "changed", "%", "states only", "norm of change", "largest"],
    )  # fmt: skip
    for d in found:
        share = f"{100 * d.changed / max(1, d.rows):.3g}"
        add(made, d.table, f"{d.rows}", f"{d.changed}", share, f"{d.states}", f"{d.norm:.4g}", f"{d.largest:.4g}")
    for fqn, which in [*((fqn, "old") for fqn in gone), *((fqn, "new") for fqn in added)]:
        add(made, fqn, f"only in the {which} one", *[""] * 5)
    show(made)
    return 0


def _diff(before: Version, after: Version, fqn: str) -> TableDiff:
    with (
        TableReader(before.storage, before.manifest, fqn) as one,
        TableReader(after.storage, after.manifest, fqn) as two,
    ):
        return diff_table(one, two)
