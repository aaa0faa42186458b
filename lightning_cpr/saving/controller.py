"""CPR's controller in a running job: feeds the planner what is measured, and says when to save and how to recover.

Rank 0 alone has one; what it decides is announced (`SavePlan`) or broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_cpr.policy import planner
from lightning_cpr.policy.bits import choose_bits, revise_bits
from lightning_cpr.policy.due import Schedule
from lightning_cpr.policy.planner import Failed, Measurement, Plan, PlannerState, Recovered, Saved, Upkept
from lightning_cpr.policy.planner import Progress as Trained
from lightning_cpr.policy.setting import Setting
from lightning_cpr.recovery.plan import Mode

RecoveryChoice = Literal["auto", "partial", "full"]
Bits = Literal[2, 3, 4, 8, "auto"]


@dataclass(frozen=True)
class Fixed:
    """What the user decided. schedule None: the planner's. bits None: raw."""

    schedule: Schedule | None
    recovery: RecoveryChoice
    bits: Bits | None
    max_pls: float | None


class Controller:
    """Plans anew with each measurement. Each plan is an event, but those that mere progress hardly changes.

    setting: what is known of the job. emit: writes an event. restores: of this run before now. upkeep: seconds that
    parity has made training longer so far.
    """

    def __init__(
        self,
        fixed: Fixed,
        setting: Setting,
        emit: Callable[..., Any],
        restores: int = 0,
        upkeep: Callable[[], float] | None = None,
    ) -> None:
        self._fixed = fixed
        self._emit = emit
        self._restores = restores
        self._upkeep = upkeep
        self._upkept = 0.0
        self._seconds = self._stall = 0.0
        self._samples: int | None = None  # at the last report of progress
        self._bits: tuple[int, float] | None = None
        self.state = PlannerState(setting)
        self.plan: Plan = planner.plan(self.state)
        self._told = 0.0

    def restore(self, state: Any) -> None:
        """Go on with what an earlier incarnation of this run had measured (`PlannerState.to_json`)."""
        if state:
            self.state = PlannerState.from_json(self.state.setting, state)
            self.plan = planner.plan(self.state)

    @property
    def schedule(self) -> Schedule:
        """When to save: the user's schedule, or the plan's."""
        return self._fixed.schedule or Schedule(seconds=self.plan.interval, ratio=self.plan.ratio)

    @property
    def speed(self) -> float:
        """Samples a useful second, 0 while unknown."""
        return self.state.samples / self.state.exposure if self.state.exposure else 0.0

    def trained(self, samples: int, seconds: float, total_samples: int | None) -> None:
        """Progress: ``samples`` of the run so far, ``seconds`` since it began. total_samples: of the whole run."""
        if self._samples is None:
            self._samples = samples
            self._seconds = seconds
            return
        fresh = Trained(max(0, samples - self._samples), max(0.0, seconds - self._seconds - self._stall))
        self._samples, self._seconds, self._stall = samples, seconds, 0.0
        if self._upkeep is not None and fresh.seconds:
            upkept = self._upkeep()  # begins anew with each encoding
            self._observe(Upkept(max(0.0, upkept - self._upkept), fresh.seconds))
            self._upkept = upkept
        setting = self.state.setting
        if total_samples is not None and total_samples != setting.total_samples:
            self.state = PlannerState(
                **{**vars(self.state), "setting": Setting(**{**vars(setting), "total_samples": total_samples})}
            )
        self._observe(fresh)

    def report(self, samples: int, seconds: float, total_samples: int | None) -> None:
        """`trained`, as often as a plan can use it."""
        if self._samples is None or seconds - self._seconds >= max(1.0, 0.01 * self.plan.interval):
            self.trained(samples, seconds, total_samples)

    def stood_still(self, seconds: float) -> None:
        """Time that no batch was trained in, for a save or a recovery."""
        self._stall += seconds

    def saved(self, stall: float) -> None:
        """A cycle's saves are committed; training waited ``stall`` seconds for all of them."""
        self._observe(Saved(stall))

    def failed(self, owners: Sequence[int], share: float | None = None) -> None:
        """These owners have failed together. share: of all elements, where they are owners of another plan."""
        self._observe(Failed(tuple(owners), share))

    def choose(self, failed: Sequence[int], pls_after: float, lost_samples: int, replays: bool) -> tuple[Mode, str]:
        """How to recover these owners. lost_samples: done since the newest exact version. replays: whether the loader
        can go back to that version's batch.
        """
        if self._fixed.recovery == "full":
            return "full", "recovery='full'"
        if self._fixed.recovery == "partial":
            if self._fixed.max_pls is not None and pls_after > self._fixed.max_pls:
                return "full", f"PLS would be {pls_after:.3g}, above max_pls {self._fixed.max_pls:.3g}"
            return "partial", "recovery='partial'"
        lost_seconds = lost_samples / self.speed if self.speed else 0.0
        mode, reason = planner.choose_recovery(self.state, self.plan, pls_after, lost_seconds, replays)
        return ("full" if mode == "full" else "partial"), reason

    def recovered(self, mode: planner.Mode, seconds: float, samples: int, pls: float) -> None:
        """A recovery took ``seconds``; training goes on from ``samples``."""
        self._restores += 1
        self._samples = samples
        self.stood_still(seconds)
        self._observe(Recovered(mode, seconds, 0.0, pls))

    def bits(self, base: bool) -> int | None:
        """Of the next save. ``auto``: from the restores that a row may expect, chosen anew with each base; 8 as soon
        as more of them happen than were forecast, and while the end of the run is not known.
        """
        if self._fixed.bits != "auto":
            return self._fixed.bits
        if base or self._bits is None:
            expected = self._expected_restores()
            self._bits = (8 if expected is None else choose_bits(expected), expected or 0.0)
            self._emit("bits", bits=self._bits[0], expected_restores=expected)
        bits, expected = self._bits
        return revise_bits(bits, self._restores, expected)

    def _expected_restores(self) -> float | None:
        total = self.state.total_seconds
        if total is None:
            return None
        share = self.state.share_per_failure if self.plan.mode == "partial" else 1.0
        return self._restores + max(0.0, total - self.state.exposure) / self.state.mtbf * share

    def _observe(self, measurement: Measurement) -> None:
        self.state, self.plan = planner.observe(self.state, measurement)
        if isinstance(measurement, Trained | Upkept) and abs(self.plan.interval - self._told) <= 0.1 * self._told:
            return
        self._told = self.plan.interval
        self._emit(
            "replan", because=type(measurement).__name__.lower(), mode=self.plan.mode, interval=self.schedule.length,
            ratio=self.schedule.ratio, planned_interval=self.plan.interval, mtbf=self.state.mtbf,
            reasons=list(self.plan.reasons),
        )  # fmt: skip
