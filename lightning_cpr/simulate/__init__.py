"""The job simulator: what each strategy costs in a scenario, by Monte-Carlo, with the closed forms beside it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from lightning_cpr.policy import cost
from lightning_cpr.policy.baseline import chain_cost
from lightning_cpr.policy.cost import Costs, Overhead, Parity, Recovery
from lightning_cpr.simulate.montecarlo import PARTS, Array, Terms, run
from lightning_cpr.simulate.scenario import Failures, Job, Scenario, SimulatedCosts, Strategy


@dataclass(frozen=True)
class Outcome:
    """A strategy at one point. Overheads are shares of useful time: mean, quantiles and mean of the worst 5 % of the
    runs.

    closed, closed_pls: by the closed forms, good to about 2 % where ``holds`` (failures exponential, on useful time).
    lost_updates: PLS weighted by the row updates that are really gone: priority saves lower it, not the PLS. error:
    standard error of the mean overhead. machine_years: of all runs together.
    """

    strategy: str
    mode: str
    case: str
    owners: int
    runs: int
    interval: float
    mtbf: float
    overhead: Overhead
    error: float
    median: float
    p95: float
    worst: float
    closed: Overhead
    pls: float
    pls_error: float
    closed_pls: float
    lost_updates: float
    failures: float
    machine_years: float
    holds: bool

    def to_json(self) -> dict[str, Any]:
        totals = {"overhead_total": self.overhead.total, "closed_total": self.closed.total}
        return asdict(self) | totals


def simulate(scenario: Scenario) -> list[Outcome]:
    """One outcome by case, number of owners and strategy, in this order. All strategies start from the same seed."""
    outcomes = []
    for case, job, costs in scenario.points():
        for strategy in scenario.strategies:
            rng = np.random.default_rng(scenario.seed)
            jobs = _population(scenario, job, costs, strategy, rng)
            outcomes.append(_outcome(case, job, strategy, scenario.failures, jobs, rng, scenario.runs))
    return outcomes


def _population(
    scenario: Scenario, job: Job, costs: SimulatedCosts, strategy: Strategy, rng: np.random.Generator
) -> list[Terms]:
    """The job, or with a spread one for each run."""
    if not job.spread:
        return [terms(job, scenario.failures, costs, strategy, {})]
    factors = {name: rng.lognormal(0.0, sigma, scenario.runs) for name, sigma in sorted(job.spread.items())}
    each = [{name: float(f[i]) for name, f in factors.items()} for i in range(scenario.runs)]
    return [terms(job, scenario.failures, costs, strategy, factor) for factor in each]


def terms(job: Job, failures: Failures, costs: SimulatedCosts, strategy: Strategy, factor: dict[str, float]) -> Terms:
    """What a strategy costs in a job whose quantities are scaled by ``factor``, and its interval."""
    total, mtbf = job.total * factor.get("total", 1.0), failures.of(job.owners) * factor.get("mtbf", 1.0)
    scale = (failures.reference_owners or job.owners) / job.owners
    save, load, partial_load = _raw_costs(job, costs, scale)
    restart = costs.partial_restart if costs.partial_restart is not None else costs.restart
    whole = Costs(
        save * factor.get("save", 1.0),
        Recovery(load * factor.get("load", 1.0), costs.restart * factor.get("restart", 1.0)),
        Recovery(
            partial_load * factor.get("load", 1.0),
            restart * scale**costs.restart_exponent * factor.get("restart", 1.0),
        ),
        Parity(strategy.upkeep, Recovery(strategy.rebuild, strategy.rebuild_restart), strategy.uncovered),
    )
    # The share of a delta depends on the interval and the interval on what a delta costs: a few rounds settle it.
    # A save in the background is done before the next.
    shortest = max(1.0, whole.save * strategy.compression if strategy.stall is not None else 0.0)
    interval, found = 0.0, whole
    for _ in range(20):
        before = interval
        interval = min(max(_interval(job, failures, strategy, found, mtbf), shortest), total)
        found = _incremental(strategy, whole, interval, total)
        if math.isclose(before, interval, rel_tol=1e-6):
            break
    return Terms(total, mtbf, interval, found)


def _raw_costs(job: Job, costs: SimulatedCosts, scale: float) -> tuple[float, float, float]:
    """Seconds of a full save, a full load and a partial load, uncompressed."""
    size, store = job.model or 0.0, costs.store_bandwidth or math.inf
    node = costs.node_bandwidth or math.inf
    together = size / min(store, node * job.owners)
    save = costs.save if costs.save is not None else together
    load = costs.load if costs.load is not None else together
    if costs.partial_load is not None or costs.load is not None:
        own = costs.partial_load if costs.partial_load is not None else load
        return save, load, own * scale**costs.load_exponent
    return save, load, size / job.owners / min(store, node)


def _incremental(strategy: Strategy, whole: Costs, interval: float, total: float) -> Costs:
    """Costs of incremental, compressed, decoupled saves of this interval."""
    step = interval / 1800.0

    def touched(intervals: int) -> float:
        return min(1.0, strategy.touched * (step * intervals) ** strategy.touched_exponent)

    chain = chain_cost(strategy.baseline, max(1, min(1000, round(total / interval))), touched)
    write, read = chain.write * strategy.compression, chain.read * strategy.compression
    save = strategy.stall if strategy.stall is not None else whole.save * write
    full, partial = (
        replace(whole.full, load=whole.full.load * read),
        replace(whole.partial, load=whole.partial.load * read),
    )
    return Costs(save, full, partial, whole.parity)


def _interval(job: Job, failures: Failures, strategy: Strategy, costs: Costs, mtbf: float) -> float:
    if strategy.interval is not None:
        return strategy.interval
    share = _share(job, failures) * (strategy.uncovered if strategy.mode == "parity" else 1.0)
    if strategy.mode == "full":
        return cost.interval_full(costs.save, mtbf)
    return cost.interval_partial(strategy.target_pls, mtbf, share)


def _share(job: Job, failures: Failures) -> float:
    """``E[sum of w per failure]`` of equal owners."""
    return (1 + failures.host_share * (_together(job) - 1)) / job.owners


def _together(job: Job) -> float:
    """Mean number of owners on the host of a random owner; the last host may be smaller."""
    hosts, rest = divmod(job.owners, job.owners_per_host)
    return (hosts * job.owners_per_host**2 + rest**2) / job.owners


def _outcome(
    case: str,
    job: Job,
    strategy: Strategy,
    failures: Failures,
    jobs: list[Terms],
    rng: np.random.Generator,
    runs: int,
) -> Outcome:
    tally = run(job, strategy, failures, jobs, rng, runs)
    totals = np.array([t.total for t in jobs])
    shares = {name: tally[name] / totals for name in PARTS}
    overhead = sum(shares.values(), start=np.zeros(runs))
    worst = np.sort(overhead)[-max(1, runs // 20) :]
    share = _share(job, failures)
    closed = [_closed(strategy, t, share) for t in jobs]
    memoryless = failures.kind == "exponential" and failures.clock == "useful"
    return Outcome(
        strategy=strategy.name,
        mode=strategy.mode,
        case=case,
        owners=job.owners,
        runs=runs,
        interval=float(np.mean([t.interval for t in jobs])),
        mtbf=float(np.mean([t.mtbf for t in jobs])),
        overhead=Overhead(**{name: float(shares[name].mean()) for name in PARTS}),
        error=_error(overhead),
        median=float(np.median(overhead)),
        p95=float(np.quantile(overhead, 0.95)),
        worst=float(worst.mean()),
        closed=Overhead(**{name: float(np.mean([getattr(c, name) for c, _ in closed])) for name in PARTS}),
        pls=float(tally["pls"].mean()),
        pls_error=_error(tally["pls"]),
        closed_pls=float(np.mean([pls for _, pls in closed])),
        lost_updates=float(tally["updates"].mean()),
        failures=float(tally["failures"].mean()),
        machine_years=float((overhead * totals).sum() * job.owners / job.owners_per_host / (365.25 * 86400)),
        holds=memoryless and all(cost.holds(t.interval, t.mtbf, t.total) for t in jobs),
    )


def _error(values: Array) -> float:
    return float(values.std() / math.sqrt(values.size))


def _closed(strategy: Strategy, t: Terms, share: float) -> tuple[Overhead, float]:
    if strategy.mode == "full":
        return cost.overhead_full(t.costs, t.interval, t.mtbf, t.total), 0.0
    pls = cost.expected_pls(t.interval, t.mtbf, t.total, share)
    if strategy.mode == "partial":
        return cost.overhead_partial(t.costs, t.interval, t.mtbf), pls
    parity = t.costs.parity or Parity(0.0)
    return cost.overhead_parity(t.costs, parity, t.interval, t.mtbf), pls * strategy.uncovered
