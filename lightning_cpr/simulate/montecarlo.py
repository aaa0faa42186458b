"""The engine of the job simulator.

Event-driven: each turn of the loop is the next failure of every run at once, so that the cost is that of the failures
of one run. Owners are kept one by one: one that fails twice between two saves loses only what it did since its
recovery.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_cpr.errors import ConfigError
from lightning_cpr.policy.cost import Costs, Parity, Recovery
from lightning_cpr.simulate.scenario import Failures, Job, Strategy, load_trace

Array = NDArray[np.float64]
PARTS = ("save", "load", "lost", "restart", "upkeep")
# Runs x owners that are simulated at once.
_BATCH = 10_000_000


@dataclass(frozen=True)
class Terms:
    """One job: all that its run depends on. Times in seconds. ``costs``: as the planner sees them."""

    total: float
    mtbf: float
    interval: float
    costs: Costs


def run(
    job: Job, strategy: Strategy, failures: Failures, jobs: list[Terms], rng: np.random.Generator, runs: int
) -> dict[str, Array]:
    """Simulates ``runs`` runs of the one job, or of a job each. Returns by name ``[runs]``: seconds of each part of the
    overhead, ``pls``, ``updates`` (lost updates, as PLS) and ``failures``.
    """
    step = max(1, _BATCH // job.owners)
    parts = []
    for start in range(0, runs, step):
        count = min(step, runs - start)
        parts.append(
            _Batch(job, strategy, failures, (jobs * runs if len(jobs) == 1 else jobs)[start:][:count], rng).run()
        )
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class _Batch:
    """Runs side by side: ``done``, the useful progress of each, ``saved``, its progress at the last complete save."""

    def __init__(
        self, job: Job, strategy: Strategy, failures: Failures, jobs: list[Terms], rng: np.random.Generator
    ) -> None:
        self.job, self.strategy, self.failures, self.rng = job, strategy, failures, rng
        self.runs = len(jobs)
        self.total = np.array([t.total for t in jobs])
        self.interval = np.array([t.interval for t in jobs])
        self.save = np.array([t.costs.save for t in jobs])
        modes = ("full", "full") if strategy.mode == "full" else ("partial", strategy.mode)
        # What a failure costs: where the mode falls back, and where it does not.
        self.stops = [[_recovery(t.costs, mode) for t in jobs] for mode in modes]
        self.load = np.array([[r.load for r in stop] for stop in self.stops])
        self.restart = np.array([[r.restart for r in stop] for stop in self.stops])
        mtbf = np.array([t.mtbf for t in jobs])
        self.draw = _gaps(failures, mtbf, rng)
        # On the wall clock a job can fail faster than it gets on.
        self.patience = 100 * (10 + math.ceil(float((self.total / mtbf).max())))
        self.done, self.saved = np.zeros(self.runs), np.zeros(self.runs)
        self.waiting = np.zeros((2, self.runs))
        hosts = math.ceil(job.owners / job.owners_per_host)
        held = hosts * job.owners_per_host if strategy.mode != "full" else 0
        self.recovered = np.zeros((self.runs, held))
        self.hot = _hot_share(job, strategy)
        self.tally = {name: np.zeros(self.runs) for name in (*PARTS, "pls", "updates", "failures")}

    def run(self) -> dict[str, Array]:
        active = np.arange(self.runs)
        for _ in range(self.patience):
            failed = self._work(active, self.draw(active))
            active = active[failed]
            if not active.size:
                return self.tally
            self._fail(active)
        done = float(np.min(self.done[active] / self.total[active]))
        raise ConfigError(
            f"strategy {self.strategy.name!r}: after {self.patience} failures a run has done {100 * done:.3g} % of its "
            "work and may never end; raise the mtbf or lower the costs and the interval"
        )

    def _work(self, i: NDArray[np.intp], gap: Array) -> NDArray[np.bool_]:
        """Trains for ``gap`` of the failure clock. Returns which runs then failed; the others are at their end."""
        done, saved, interval = self.done[i], self.saved[i], self.interval[i]
        if self.failures.clock == "wall":
            gap = self._wait(i, gap)
            pace = 1 + self.strategy.upkeep
            spent = (done - saved) * pace + gap
            cycle = interval * pace + self.save[i]
            whole = np.floor(spent / cycle)
            rest = spent - whole * cycle
            reached = saved + whole * interval + np.minimum(rest / pace, interval)
            # A save that the failure cuts off has cost its time all the same.
            cut = np.maximum(rest - interval * pace, 0.0)
        else:
            reached = done + gap
            whole = np.floor(reached / interval) - np.round(saved / interval)
            cut = np.zeros(i.size)
        failed = reached < self.total[i]
        reached = np.minimum(reached, self.total[i])
        # The interval that the end of the run cuts off counts by its share, so that the mean is that of the rate.
        saves = np.where(failed, whole, (self.total[i] - saved) / interval)
        self.tally["save"][i] += saves * self.save[i] + np.where(failed, cut, 0.0)
        self.tally["upkeep"][i] += self.strategy.upkeep * (reached - done)
        self.done[i] = reached
        self.saved[i] = np.where(failed, saved + whole * interval, saved)
        return failed

    def _wait(self, i: NDArray[np.intp], gap: Array) -> Array:
        """Spends the recovery that is still to do; a failure within it cuts it short. Returns what is left of the
        gap.
        """
        waiting = self.waiting[:, i]
        total = waiting.sum(axis=0)
        part = np.minimum(1.0, gap / np.maximum(total, 1e-300))
        self.tally["load"][i] += waiting[0] * part
        self.tally["restart"][i] += waiting[1] * part
        self.waiting[:, i] = 0.0
        return gap - np.minimum(gap, total)

    def _fail(self, i: NDArray[np.intp]) -> None:
        self.tally["failures"][i] += 1
        covered = np.zeros(i.size, dtype=np.intp)
        if self.strategy.mode == "parity":
            covered = (self.rng.random(i.size) >= self.strategy.uncovered).astype(np.intp)
        load, restart = self.load[covered, i], self.restart[covered, i]
        if self.failures.clock == "wall":
            self.waiting[:, i] = load, restart
        else:
            self.tally["load"][i] += load
            self.tally["restart"][i] += restart
        if self.strategy.mode == "full":
            self.tally["lost"][i] += self.done[i] - self.saved[i]
            if self.failures.clock == "wall":
                self.done[i] = self.saved[i]
        else:
            self._charge(i, covered == 0)

    def _charge(self, i: NDArray[np.intp], lossy: NDArray[np.bool_]) -> None:
        """The ledger's rule, owner by owner."""
        width, owners = self.job.owners_per_host, self.job.owners
        victim = self.rng.integers(owners, size=i.size)
        host = self.rng.random(i.size) < self.failures.host_share
        who = (victim // width * width)[:, None] + np.arange(width)
        dead = (who < owners) & (host[:, None] | (who == victim[:, None]))
        run, done, saved = i[:, None], self.done[i][:, None], self.saved[i][:, None]
        before = self.recovered[run, who]
        lost = np.where(dead & lossy[:, None], done - np.maximum(before, saved), 0.0)
        samples = owners * self.total[i]
        self.tally["pls"][i] += lost.sum(axis=1) / samples
        part = (self.strategy.ratio * self.interval[i])[:, None]
        newest = np.maximum(before, saved + np.floor((done - saved) / part) * part)
        hot = np.where(dead & lossy[:, None], done - newest, 0.0)
        self.tally["updates"][i] += (self.hot * hot + (1 - self.hot) * lost).sum(axis=1) / samples
        self.recovered[run, who] = np.where(dead, done, before)


def _recovery(costs: Costs, mode: str) -> Recovery:
    if mode == "parity":
        return (costs.parity or Parity(0.0)).recovery
    return costs.full if mode == "full" else costs.partial


def _gaps(failures: Failures, mean: Array, rng: np.random.Generator) -> Callable[[NDArray[np.intp]], Array]:
    """Draws the next time between failures of the given runs."""
    if failures.kind == "exponential":
        return lambda i: rng.exponential(mean[i])
    if failures.kind == "gamma":
        return lambda i: rng.gamma(failures.shape, mean[i] / failures.shape)
    if failures.kind == "weibull":
        scale = math.gamma(1 + 1 / failures.shape)
        return lambda i: rng.weibull(failures.shape, i.size) * mean[i] / scale
    trace = np.array(load_trace(failures.trace or ""))
    trace /= trace.mean()
    place = rng.integers(trace.size, size=mean.size)

    def follow(i: NDArray[np.intp]) -> Array:
        place[i] = (place[i] + 1) % trace.size
        return trace[place[i]] * mean[i]

    return follow


def _hot_share(job: Job, strategy: Strategy) -> float:
    """Share of the row updates that fall on rows of every priority save, rows being looked up as ``rank ** -zipf``.

    MFU and SCAR: the share of the r*N hottest rows. SSU: the hit ratio of a set of r*N with random eviction, where a
    row of rate x is a member with probability ``x / (x + e)``.
    """
    if strategy.priority == "vanilla":
        return 0.0
    if strategy.hot_share is not None:
        return strategy.hot_share
    edges = np.unique(np.geomspace(1, job.rows + 1, 4000).astype(np.int64)).astype(np.float64)
    count, rate = np.diff(edges), np.sqrt(edges[:-1] * (edges[1:] - 1)) ** -job.zipf
    weight = count * rate / (count * rate).sum()
    target = strategy.ratio * job.rows
    if strategy.priority != "ssu":
        before = np.cumsum(count) - count
        return float((weight * np.clip((target - before) / count, 0, 1)).sum())
    low, high = -60.0, 60.0
    for _ in range(100):
        middle = (low + high) / 2
        member = rate / (rate + math.exp(middle))
        low, high = (middle, high) if (count * member).sum() > target else (low, middle)
    return float((weight * member).sum())
