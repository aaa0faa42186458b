"""What each rank has counted of its row updates, told where it outlives the rank.

A process that is killed takes its counters along. From what it told last, and how many batches it did since, the row
updates that are lost with it are estimated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from lightning_cpr.store.kv import KeyValue
from lightning_cpr.store.manifest import Manifest


@dataclass(frozen=True)
class UpdateCounts:
    """Of one rank. per_batch: row updates a batch. lacking: by version, of its newest two, how many row updates that
    were done by then it does not hold (priority saves leave some out).
    """

    per_batch: float
    lacking: Mapping[str, int] = field(default_factory=dict)

    def with_version(self, version: str, lacking: int) -> UpdateCounts:
        newest = list(self.lacking.items())[-1:]
        return UpdateCounts(self.per_batch, {**dict(newest), version: lacking})

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> UpdateCounts:
        return UpdateCounts(**json.loads(text))


@dataclass(frozen=True)
class Lost:
    """A failed owner. recovered: samples of the run at its last recovery before, 0 if there was none."""

    owner: int
    recovered: int


class CountBoard:
    """Where the ranks of a job tell their counts. kv: outlives them; None: nothing is told, nothing known."""

    def __init__(self, kv: KeyValue | None, name: str) -> None:
        self._kv, self._name = kv, name

    def tell(self, rank: int, counts: UpdateCounts) -> None:
        if self._kv is not None:
            self._kv.set(self._key(rank), counts.to_json())

    def of(self, rank: int) -> UpdateCounts | None:
        if self._kv is None or not self._kv.check([self._key(rank)]):
            return None
        return UpdateCounts.from_json(self._kv.get(self._key(rank)))

    def estimate(self, failed: Sequence[Lost], manifest: Manifest, step: int, samples: int) -> int | None:
        """Row updates that are lost if these owners take this version after ``step`` batches of ``samples`` samples in
        all; None where one of them has told nothing.
        """
        total = 0.0
        for lost in failed:
            counts = self.of(lost.owner)
            if counts is None:
                return None
            since = max(manifest.samples, lost.recovered)
            lacking = counts.lacking.get(manifest.version, 0) if lost.recovered <= manifest.samples else 0
            total += lacking + counts.per_batch * step * (samples - since) / max(1, samples)
        return round(total)

    def _key(self, rank: int) -> str:
        return f"lightning_cpr/updates/{self._name}/{rank}"
