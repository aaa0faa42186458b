"""What one callback knows of its run: who it is, how far it is, and what saves and failures have come to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning_cpr._lightning import pl
from lightning_cpr.job.samples import SampleCounter, expected_samples
from lightning_cpr.policy.ledger import Ledger
from lightning_cpr.saving.saver import RunId

COUNTS = (
    "commits", "skipped", "failed", "recoveries", "hooks_lost", "compactions", "compactions_failed",
    "parity_mismatches", "parity_refused", "parity_broken",
)  # fmt: skip
"""What is counted over a whole run."""


@dataclass
class Run:
    """One rank's. Saves and recoveries write to it as they happen, and it travels in each version.

    id: without a name until the first fit. epoch: one more for each start and each recovery; writers of an earlier
    one are fenced off. owner: names this job among those that went on with the run. planner: what the planner had
    measured when the state was loaded, for a controller to come.
    """

    id: RunId = field(default_factory=lambda: RunId("", "", ""))
    epoch: int = 0
    owner: str = ""
    ledger: Ledger = field(default_factory=lambda: Ledger(0))
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    counter: SampleCounter = field(default_factory=SampleCounter)
    planner: Any = None

    @property
    def samples(self) -> int:
        """Trained so far, over all ranks."""
        return self.counter.samples

    def named(self, run_id: str) -> RunId:
        """This job under the name of a run."""
        return RunId(run_id, self.id.config_fingerprint, self.id.plan_fingerprint)

    def total_samples(self, trainer: pl.Trainer | None) -> int:
        """Of the whole run, as the Trainer expects it; None: of what has been trained so far."""
        return self.samples if trainer is None else expected_samples(trainer, self.samples)

    def pls(self, trainer: pl.Trainer | None) -> float:
        """The portion of lost samples so far (CPR, section 4)."""
        return self.ledger.pls(self.total_samples(trainer))

    def state_dict(self, planner: Any) -> dict[str, Any]:
        """planner: what it has measured, as JSON."""
        return {
            "samples": self.samples,
            "ledger": self.ledger.to_json(),
            "counts": dict(self.counts),
            "planner": planner,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counter.samples = state["samples"]
        self.ledger = Ledger.from_json(state["ledger"])
        # A rewind brings back the state of an earlier step, which does not undo what has happened since. In place: what
        # counts holds this very dict.
        self.counts |= {name: max(count, self.counts.get(name, 0)) for name, count in state["counts"].items()}
        self.planner = state.get("planner")
