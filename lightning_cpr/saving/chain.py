"""What the next save builds on, and what it is then: a base or a delta, of which rows, upon which version.

Rank 0 keeps the `Chain` and decides; the others take its `SavePlan`. All here is pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_cpr.policy.baseline import delta_since, next_kind
from lightning_cpr.policy.due import Due
from lightning_cpr.store.manifest import Consistency, Kind, Manifest, is_compaction, same_rows
from lightning_cpr.store.save import Inherit
from lightning_cpr.store.since import base_of, folder_of
from lightning_cpr.tables.tracker import Rows


@dataclass(frozen=True)
class Chain:
    """The newest committed version and what led to it. Empty: the next save is a base.

    version: the save that wrote its rows, of which ``path`` may be a compaction. increments: sizes of the exact deltas
    since the base, as shares of it. exact_step, exact_samples: of the newest exact version.
    """

    version: str = ""
    path: str = ""
    base_bytes: int = 0
    increments: tuple[float, ...] = ()
    exact_step: int = 0
    exact_samples: int = 0

    @staticmethod
    def of(manifest: Manifest) -> Chain:
        """The chain that ends with this version."""
        base = base_of(manifest)
        base_bytes = sum(entry.bytes for entry in manifest.files if folder_of(entry) == base)
        increments: tuple[float, ...] = ()
        if manifest.kind == "delta" and base_bytes:
            increments = tuple(_state(manifest).get("increments", ()))
            if manifest.consistency == "exact" and not is_compaction(manifest.version):
                own = sum(entry.bytes for entry in manifest.files if folder_of(entry) == manifest.version)
                increments = (*increments, own / base_bytes)
        step, samples = exact_point(manifest)
        return Chain(same_rows(manifest.version), manifest.path, base_bytes, increments, step, samples)

    def to_json(self) -> dict[str, Any]:
        """What a version that is built upon this one carries in its manifest, for `of`."""
        return {"increments": list(self.increments), "exact": [self.exact_step, self.exact_samples]}


def exact_point(manifest: Manifest) -> tuple[int, int]:
    """(step, samples) of the newest exact version up to this one: where its least complete shards stand."""
    if manifest.consistency == "exact":
        return manifest.step, manifest.samples
    step, samples = _state(manifest).get("exact", (0, 0))
    return step, samples


def samples_at(manifest: Manifest, step: int) -> int:
    """Samples done at a step of the version's run: exactly at its own and at its newest exact one."""
    exact_step, exact_samples = exact_point(manifest)
    known = {exact_step: exact_samples, manifest.step: manifest.samples}
    return known[step] if step in known else manifest.samples * step // max(1, manifest.step)


def _state(manifest: Manifest) -> Mapping[str, Any]:
    planner = manifest.planner
    return planner.get("chain", {}) if isinstance(planner, dict) else {}


@dataclass(frozen=True)
class Content:
    """What a save holds, and which files of its parent it inherits."""

    kind: Kind = "base"
    consistency: Consistency = "exact"
    rows: Rows = "all"
    parent: str | None = None
    inherit: Inherit = "all"


def next_content(chain: Chain, due: Due, policy: str, exact_close: bool = True, rebase: bool = False) -> Content:
    """The save that is due. policy: of Check-N-Run (`policy.baseline`). exact_close False: cycles of priority saves
    are not closed, as in CPR's paper. rebase: a base, whatever the policy.
    """
    if rebase or not chain.version or not chain.base_bytes:
        return Content()
    if due == "priority" or not exact_close:
        return Content("delta", "mixed", "priority", chain.path)
    if next_kind(policy, chain.increments) == "base":
        return Content()
    if delta_since(policy) == "last":
        return Content("delta", "exact", "since_last", chain.path)
    return Content("delta", "exact", "since_base", chain.path, "base")
