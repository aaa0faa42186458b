"""CPR's controller (section 4.1): how often to save, and whether a failure is recovered partially or in full.

Pure: `observe` folds a measurement into the state and plans anew; the caller logs the plan's reasons and acts.
Times in seconds of useful training, overheads as shares of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from lightning_cpr.errors import ConfigError
from lightning_cpr.policy import check
from lightning_cpr.policy.cost import (
    Costs,
    Overhead,
    Parity,
    Recovery,
    expected_pls,
    interval_full,
    interval_partial,
    overhead_full,
    overhead_parity,
    overhead_partial,
)
from lightning_cpr.policy.priority import choose_variant
from lightning_cpr.policy.setting import Setting
from lightning_cpr.units import human

Mode = Literal["full", "partial", "parity"]

# A measured mean follows drift: a new value weighs at least 1 / _MEMORY.
_MEMORY = 16
# The setting's share of rows a failure weighs as much as this many failures seen.
_PRIOR = 2.0


@dataclass(frozen=True)
class Progress:
    """``samples`` trained since the last report, in ``seconds`` of useful time."""

    samples: int
    seconds: float


@dataclass(frozen=True)
class Saved:
    """One whole interval was saved, priority saves and closing delta together, for ``seconds`` of standstill."""

    seconds: float


@dataclass(frozen=True)
class Failed:
    """These owners died together. ``share``: of all elements, for owners of another plan than the setting's."""

    owners: tuple[int, ...]
    share: float | None = None


@dataclass(frozen=True)
class Recovered:
    """A recovery is done. ``pls``: the ledger's value now."""

    mode: Mode
    load: float
    restart: float
    pls: float


@dataclass(frozen=True)
class Upkept:
    """Parity made training ``seconds`` longer, of ``of`` useful seconds."""

    seconds: float
    of: float


Measurement = Progress | Saved | Failed | Recovered | Upkept


@dataclass(frozen=True)
class Mean:
    """A running mean of ``count`` values."""

    count: int = 0
    value: float = 0.0

    def add(self, value: float) -> Mean:
        count = self.count + 1
        return Mean(count, self.value + (value - self.value) / min(count, _MEMORY))


@dataclass(frozen=True)
class PlannerState:
    """What was measured so far. ``measured``: by name (``save``, ``full.load``, ...), in place of the setting's
    default.
    """

    setting: Setting
    exposure: float = 0.0
    samples: int = 0
    failures: int = 0
    lost_share: float = 0.0
    pls: float = 0.0
    measured: Mapping[str, Mean] = field(default_factory=dict)

    @property
    def mtbf(self) -> float:
        return self.setting.mtbf.estimate(self.exposure, self.failures)

    @property
    def share_per_failure(self) -> float:
        """``E[sum of w per failure]``: that of the setting, weighted as ``_PRIOR`` failures, with those seen."""
        return (_PRIOR * self.setting.expected_share() + self.lost_share) / (_PRIOR + self.failures)

    @property
    def total_seconds(self) -> float | None:
        """Useful seconds of the whole run: by the measured speed if there is one, None for an endless stream."""
        if self.setting.total_samples is not None and self.samples:
            return max(self.setting.total_samples * self.exposure / self.samples, 1e-9)
        return self.setting.total_seconds

    @property
    def costs(self) -> Costs:
        base = self.setting.costs
        parity = base.parity
        if parity is not None:
            parity = replace(
                parity,
                upkeep=self._measured("parity.upkeep", parity.upkeep),
                recovery=self._recovery("parity", parity.recovery),
                uncovered=self._uncovered(parity.uncovered),
            )
        return Costs(
            self._measured("save", base.save),
            self._recovery("full", base.full),
            self._recovery("partial", base.partial),
            parity,
        )

    def _uncovered(self, expected: float) -> float:
        """Share of failures that parity does not cover: the expected one as ``_PRIOR`` failures, with those seen."""
        seen = self.measured.get("parity.uncovered", Mean())
        return (_PRIOR * expected + seen.count * seen.value) / (_PRIOR + seen.count)

    def _recovery(self, mode: str, base: Recovery) -> Recovery:
        return Recovery(self._measured(f"{mode}.load", base.load), self._measured(f"{mode}.restart", base.restart))

    def _measured(self, name: str, default: float) -> float:
        return self.measured[name].value if name in self.measured else default

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, without the setting: that comes from the configuration of the job that resumes."""
        data = {name: value for name, value in vars(self).items() if name not in ("setting", "measured")}
        return data | {"measured": {name: asdict(mean) for name, mean in self.measured.items()}}

    @staticmethod
    def from_json(setting: Setting, data: Mapping[str, Any]) -> PlannerState:
        measured = {name: Mean(**mean) for name, mean in data["measured"].items()}
        return PlannerState(setting, **{**data, "measured": measured})


@dataclass(frozen=True)
class Option:
    """One way to run the job. ``allowed``: its PLS keeps to the target; ``reason``: how the interval came about."""

    mode: Mode
    interval: float
    overhead: Overhead
    pls: float
    allowed: bool
    reason: str


@dataclass(frozen=True)
class Plan:
    """mode and interval (``T_save``, seconds) to use, ratio and variant of the priority saves, all options with their
    cost, and why. Where no valid version exists yet a base is due at once (`due.due`), so there always is one.
    """

    mode: Mode
    interval: float
    ratio: float
    variant: str
    options: tuple[Option, ...]
    reasons: tuple[str, ...]

    def option(self, mode: Mode) -> Option:
        """Raises ConfigError if that mode was not compared."""
        for option in self.options:
            if option.mode == mode:
                return option
        raise ConfigError(f"mode={mode!r}: must be one of {', '.join(o.mode for o in self.options)}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def observe(state: PlannerState, measurement: Measurement) -> tuple[PlannerState, Plan]:
    """The state after a measurement, and the plan from there on. Raises ConfigError on values that cannot be."""
    state = _fold(state, measurement)
    return state, plan(state)


def _fold(state: PlannerState, seen: Measurement) -> PlannerState:
    if isinstance(seen, Progress):
        check.not_negative("samples", seen.samples)
        check.not_negative("seconds", seen.seconds)
        return replace(state, samples=state.samples + seen.samples, exposure=state.exposure + seen.seconds)
    if isinstance(seen, Saved):
        check.not_negative("seconds", seen.seconds)
        return replace(state, measured=_add(state.measured, {"save": seen.seconds}))
    if isinstance(seen, Failed):
        if seen.share is not None:
            check.share("share", seen.share, zero=True)
            return replace(state, failures=state.failures + 1, lost_share=state.lost_share + seen.share)
        count = len(state.setting.owners)
        if not seen.owners or not all(0 <= o < count for o in seen.owners):
            raise ConfigError(f"failed owners {seen.owners}: must be some of 0..{count - 1}")
        lost = state.lost_share + state.setting.share_of(seen.owners)
        return replace(state, failures=state.failures + 1, lost_share=lost)
    if isinstance(seen, Upkept):
        check.not_negative("seconds", seen.seconds)
        check.positive("of", seen.of)
        return replace(state, measured=_add(state.measured, {"parity.upkeep": seen.seconds / seen.of}))
    check.one_of("mode", seen.mode, ("full", "partial", "parity"))
    for name in ("load", "restart", "pls"):
        check.not_negative(name, getattr(seen, name))
    values = {f"{seen.mode}.load": seen.load, f"{seen.mode}.restart": seen.restart}
    if state.setting.costs.parity is not None:
        values["parity.uncovered"] = float(seen.mode != "parity")
    return replace(state, pls=seen.pls, measured=_add(state.measured, values))


def _add(measured: Mapping[str, Mean], values: Mapping[str, float]) -> dict[str, Mean]:
    return {**measured, **{name: measured.get(name, Mean()).add(value) for name, value in values.items()}}


def plan(state: PlannerState) -> Plan:
    """The cheapest option that keeps to the target PLS; full recovery always does."""
    setting, total = state.setting, state.total_seconds
    options = _options(state)
    reasons = [_estimates(state), *(f"{o.mode}: {o.reason}" for o in options)]
    if total is None:
        reasons.append("no end of the run is known: PLS is counted over the samples so far")
    best = min((o for o in options if o.allowed), key=lambda o: o.overhead.total)
    if state.pls >= setting.pls_limit and best.mode == "partial":
        best = options[0]
        reasons.append(f"PLS {state.pls:.3g} has reached its limit {setting.pls_limit:.3g}: full recovery from here on")
    reasons.append(
        f"{best.mode} recovery, a save every {human(best.interval)}: {100 * best.overhead.total:.3g} % overhead"
    )
    ratio = 1.0
    if best.mode == "partial":
        ratio = min(1.0, max(setting.ratio, setting.min_interval / best.interval))
    variant = choose_variant(setting.row_bytes) if ratio < 1 else "vanilla"
    return Plan(best.mode, best.interval, ratio, variant, options, tuple(reasons))


def _options(state: PlannerState) -> tuple[Option, ...]:
    setting, costs, mtbf, total = state.setting, state.costs, state.mtbf, state.total_seconds
    share = state.share_per_failure
    target = setting.target_pls
    full, why = _clamp(state, interval_full(costs.save, mtbf), "sqrt(2 O_save T_fail)")
    options = [Option("full", full, overhead_full(costs, full, mtbf, total), 0.0, True, why)]

    interval, why = _clamp(state, interval_partial(target, mtbf, share), f"2 PLS T_fail / {share:.4g}")
    pls = expected_pls(interval, mtbf, total, share)
    allowed = pls <= target * (1 + 1e-9)
    if not allowed:
        why += f"; PLS {pls:.3g} there is above the target {target:.3g}"
    options.append(Option("partial", interval, overhead_partial(costs, interval, mtbf), pls, allowed, why))

    if costs.parity is not None:
        options.append(_parity_option(state, costs, costs.parity))
    return tuple(options)


def _parity_option(state: PlannerState, costs: Costs, parity: Parity) -> Option:
    share, mtbf, target = state.share_per_failure * parity.uncovered, state.mtbf, state.setting.target_pls
    interval, why = _clamp(state, interval_partial(target, mtbf, share), f"2 PLS T_fail / {share:.4g}, uncovered only")
    pls = expected_pls(interval, mtbf, state.total_seconds, share)
    overhead = overhead_parity(costs, parity, interval, mtbf)
    return Option("parity", interval, overhead, pls, pls <= target * (1 + 1e-9), why)


def _clamp(state: PlannerState, interval: float, formula: str) -> tuple[float, str]:
    """Not below the shortest interval, not beyond the run; a stream may go on for as long as it has, or as full
    would.
    """
    low, total = state.setting.min_interval, state.total_seconds
    high = total if total is not None else max(state.exposure, interval_full(state.costs.save, state.mtbf), low)
    if interval > high:
        end = "the run" if total is not None else "the stream so far"
        return high, f"{formula} = {human(interval)}, cut to {end}, {human(high)}"
    if interval < low:
        return min(low, high), f"{formula} = {human(interval)}, raised to {human(min(low, high))}"
    return interval, f"{formula} = {human(interval)}"


def _estimates(state: PlannerState) -> str:
    how = "given" if state.setting.mtbf.strength is None else f"from {state.failures} failures and the prior"
    seen = ", ".join(sorted(state.measured)) or "nothing"
    return f"MTBF {human(state.mtbf)} ({how}); measured: {seen}; {state.share_per_failure:.4g} of the rows a failure"


def choose_recovery(
    state: PlannerState, now: Plan, pls_after: float, lost_seconds: float, replays: bool = True
) -> tuple[Mode, str]:
    """How to recover from the failure at hand. ``pls_after``: the ledger's value if its loss is charged;
    ``lost_seconds``: training time since the newest exact version, what a rewind would do again. replays: whether a
    rewind trains on the same batches again; it costs other samples' updates where it does not. Parity is the recovery
    layer's to try first.
    """
    check.not_negative("pls_after", pls_after)
    check.not_negative("lost_seconds", lost_seconds)
    limit = state.setting.pls_limit
    if pls_after > limit:
        return "full", f"PLS would be {pls_after:.3g}, above its limit {limit:.3g}"
    if now.mode == "full":
        return "full", "the plan is full recovery"
    full, partial = state.costs.full, state.costs.partial
    if replays and full.load + full.restart + lost_seconds <= partial.load + partial.restart:
        return "full", f"a rewind of {human(lost_seconds)} is no dearer and loses nothing"
    return "partial", f"PLS will be {pls_after:.3g}, limit {limit:.3g}; a rewind would redo {human(lost_seconds)}"
