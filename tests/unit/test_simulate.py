from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cpr.errors import ConfigError
from lightning_cpr.simulate import Outcome, simulate, terms
from lightning_cpr.simulate.montecarlo import run
from lightning_cpr.simulate.scenario import Failures, Job, Scenario, SimulatedCosts, Strategy, load_scenario

H, MIN = 3600.0, 60.0
RECIPES = Path(__file__).parents[2] / "recipes" / "simulate"
COSTS = SimulatedCosts(save=5.6 * MIN, load=1 * MIN, restart=4 * MIN)
FULL, PARTIAL = Strategy("full"), Strategy("partial", mode="partial")
PUBLISHED = Scenario(Job(56 * H), Failures(28 * H), COSTS, (FULL, PARTIAL), runs=10_000)


def by_name(outcomes: list[Outcome]) -> dict[str, Outcome]:
    return {o.strategy: o for o in outcomes}


def test_the_published_setting() -> None:
    found = by_name(simulate(PUBLISHED))
    full, partial = found["full"], found["partial"]
    assert (full.interval / H, partial.interval / H) == (pytest.approx(2.286, abs=1e-3), pytest.approx(44.8))
    assert full.closed.total == pytest.approx(0.0846, abs=5e-5)
    assert partial.closed.total == pytest.approx(0.00506, abs=5e-6)
    assert full.overhead.total == pytest.approx(0.0842, abs=4 * full.error)  # the exact mean of a run of 24.5 intervals
    assert partial.overhead.total == pytest.approx(0.00506, abs=4 * partial.error)
    # The closed form, 0.085, knows no owner that fails twice between two saves.
    assert 0.078 < partial.pls < 0.085
    assert partial.closed_pls == pytest.approx(0.085, abs=5e-5)
    assert not partial.holds


@pytest.mark.parametrize("host_share", [0.0, 0.4])
@pytest.mark.parametrize("owners", [16, 18])  # 18: the last host is smaller
def test_within_two_percent_of_the_closed_forms_where_they_hold(host_share: float, owners: int) -> None:
    scenario = Scenario(
        Job(40 * 28 * H, owners=owners, owners_per_host=4),
        Failures(28 * H, host_share=host_share),
        COSTS,
        (replace(FULL, interval=1.4 * H), replace(PARTIAL, interval=1.4 * H)),
        runs=4000,
    )
    for outcome in simulate(scenario):
        assert outcome.holds
        for part in ("save", "load", "lost", "restart"):
            assert getattr(outcome.overhead, part) == pytest.approx(getattr(outcome.closed, part), rel=0.02)
        assert outcome.overhead.total == pytest.approx(outcome.closed.total, rel=0.02)
        assert outcome.pls == pytest.approx(outcome.closed_pls, rel=0.02)
        assert outcome.failures == pytest.approx(40, rel=0.02)


def by_trace(
    tmp_path: Path, gap: float, total: float, strategy: Strategy, clock: str = "useful", costs: SimulatedCosts = COSTS
) -> dict[str, float]:
    """One run of one owner with a failure every ``gap`` hours; all results in hours."""
    (tmp_path / "trace.txt").write_text(f"# hours between failures\n{gap}h\n")
    job = Job(total * H, owners=1)
    failures = Failures(gap * H, kind="trace", trace=str(tmp_path / "trace.txt"), clock=clock)
    tally = run(job, strategy, failures, [terms(job, failures, costs, strategy, {})], np.random.default_rng(0), 1)
    hours = {name: float(values[0]) / H for name, values in tally.items()}
    return hours | {name: float(tally[name][0]) for name in ("pls", "updates", "failures")}


@pytest.mark.parametrize(("interval", "lost"), [(4, 2 + 0 + 2), (7, 3 + 6 + 2), (25, 10 + 10 + 5)])
def test_a_traced_run_by_hand(tmp_path: Path, interval: float, lost: float) -> None:
    full = by_trace(tmp_path, 10, 35, Strategy("f", interval=interval * H))
    partial = by_trace(tmp_path, 10, 35, Strategy("p", mode="partial", interval=interval * H))
    assert full["failures"] == partial["failures"] == 3
    assert partial["pls"] == pytest.approx(lost / 35)
    # A rewind does again all since the save, also what an earlier recovery brought.
    assert full["lost"] == pytest.approx(lost if interval < 25 else 10 + 20 + 5)
    assert full["load"] == pytest.approx(3 / 60)
    assert full["save"] == pytest.approx(35 / interval * 5.6 / 60)


def test_a_traced_run_on_the_wall_clock_by_hand(tmp_path: Path) -> None:
    hour = SimulatedCosts(save=H, load=H, restart=H)
    found = by_trace(tmp_path, 9.5, 12, Strategy("f", interval=4 * H), "wall", hour)
    # Cut off in its 2nd save at 8 h; from 4 h to 10.5 h, one save; from 8 h to the end.
    assert found["failures"] == 2
    assert found["lost"] == pytest.approx(4 + 2.5)
    assert found["save"] == pytest.approx(1.5 + 1 + 1)
    assert (found["load"], found["restart"]) == (pytest.approx(2), pytest.approx(2))


def test_on_the_wall_clock_failures_come_during_restarts_too(tmp_path: Path) -> None:
    costs = SimulatedCosts(save=0.0, load=1 * H, restart=3 * H)
    found = by_trace(tmp_path, 5, 7, Strategy("p", mode="partial", interval=1 * H), "wall", costs)
    assert (found["failures"], found["load"], found["restart"]) == (2, pytest.approx(2), pytest.approx(6))
    with pytest.raises(ConfigError, match="may never end"):
        by_trace(tmp_path, 4, 6, Strategy("p", mode="partial", interval=1 * H), "wall", costs)


def test_priority_saves_lower_the_lost_updates_and_not_the_pls(tmp_path: Path) -> None:
    strategy = Strategy("p", mode="partial", interval=8 * H, priority="mfu", ratio=0.125, hot_share=0.75)
    found = by_trace(tmp_path, 13.5, 20, strategy)
    assert found["pls"] == pytest.approx(5.5 / 20)
    assert found["updates"] == pytest.approx((0.75 * 0.5 + 0.25 * 5.5) / 20)
    kinds = [replace(PARTIAL, name=v, priority=v) for v in ("vanilla", "ssu", "mfu")]
    vanilla, ssu, mfu = simulate(replace(PUBLISHED, strategies=tuple(kinds), runs=500))
    assert vanilla.pls == ssu.pls == mfu.pls
    assert mfu.lost_updates < ssu.lost_updates < vanilla.lost_updates == vanilla.pls


def test_scaling_in_both_cases() -> None:
    scenario = replace(load_scenario(RECIPES / "scaling.yaml"), runs=300)
    outcomes = simulate(scenario)
    bounded, constant = scenario.cases

    def slope(case: str, strategy: str) -> float:
        line = [o.overhead.total for o in outcomes if (o.case, o.strategy) == (case, strategy)]
        return math.log(line[-1] / line[0]) / math.log(scenario.owners[-1] / scenario.owners[0])

    assert slope(bounded, "full") == pytest.approx(0.5, abs=0.07)
    assert slope(bounded, "partial") == pytest.approx(0.0, abs=0.02)
    assert slope(constant, "partial") == pytest.approx(0.88, abs=0.03)


def test_the_overhead_of_the_production_study() -> None:
    scenario = load_scenario(RECIPES / "production.yaml")
    every_30_min = simulate(replace(scenario, strategies=scenario.strategies[:1]))[0]
    assert every_30_min.overhead.total == pytest.approx(0.12, abs=0.006)
    assert every_30_min.worst == pytest.approx(0.43, abs=0.03)
    assert every_30_min.machine_years > 0


def test_ten_thousand_owners_take_seconds() -> None:
    scenario = load_scenario(RECIPES / "large.yaml")
    start = time.process_time()
    found = by_name(simulate(scenario))
    assert time.process_time() - start < 30  # about 1 s on one core
    assert found["full"].runs == 1000
    assert found["full"].owners == 10_000
    full, delta, decoupled = (found[n].overhead.total for n in ("full", "full, 8 bit deltas", "decoupled deltas"))
    assert full > delta > decoupled > found["parity"].overhead.total > found["partial"].overhead.total
    assert found["partial"].pls == pytest.approx(found["partial"].closed_pls, rel=0.1)


def test_costs_from_size_and_bandwidths() -> None:
    job = Job(56 * H, owners=100, model=4e12)
    wide = SimulatedCosts(store_bandwidth=20e9, node_bandwidth=1e9, restart=0.0)
    costs = terms(job, Failures(28 * H), wide, PARTIAL, {}).costs
    assert (costs.save, costs.full.load, costs.partial.load) == (200.0, 200.0, 40.0)
    half = terms(job, Failures(28 * H), wide, replace(PARTIAL, compression=0.5), {}).costs
    assert (half.save, half.partial.load) == (100.0, 20.0)
    staged = terms(job, Failures(1 * H), wide, Strategy("f", stall=0.01), {})
    assert (staged.costs.save, staged.interval) == (0.01, 200.0)  # not before the last one is written


@pytest.mark.parametrize("kind", ["exponential", "gamma", "weibull"])
def test_all_failure_models_have_the_mean_asked_for(kind: str) -> None:
    scenario = replace(PUBLISHED, job=Job(2000 * H), failures=Failures(10 * H, kind=kind, shape=0.7), runs=500)
    assert simulate(scenario)[0].failures == pytest.approx(200, rel=0.02)


def test_runs_are_reproducible_by_their_seed() -> None:
    scenario = replace(PUBLISHED, runs=50)
    assert simulate(scenario) == simulate(scenario)
    assert simulate(scenario) != simulate(replace(scenario, seed=1))


strategies = st.builds(
    Strategy,
    name=st.just("s"),
    mode=st.sampled_from(["full", "partial", "parity"]),
    interval=st.one_of(st.none(), st.floats(60.0, 12 * H)),
    target_pls=st.floats(0.001, 1.0),
    priority=st.sampled_from(["vanilla", "ssu", "mfu"]),
    baseline=st.sampled_from(["full", "one_shot", "consecutive", "intermittent"]),
    stall=st.one_of(st.none(), st.floats(0.0, 100.0)),
    upkeep=st.floats(0.0, 0.2),
    uncovered=st.floats(0.0, 1.0),
)


@settings(deadline=None, max_examples=40)
@given(strategies, st.sampled_from(["useful", "wall"]), st.integers(1, 20), st.integers(1, 8), st.integers(0, 9))
def test_every_run_keeps_its_bounds(strategy: Strategy, clock: str, owners: int, width: int, seed: int) -> None:
    job = Job(50 * H, owners=owners, owners_per_host=width)
    failures = Failures(10 * H, clock=clock, host_share=0.5)
    outcome = simulate(Scenario(job, failures, COSTS, (strategy,), runs=20, seed=seed))[0]
    assert all(value >= 0 for value in vars(outcome.overhead).values())
    assert 0 <= outcome.lost_updates <= outcome.pls + 1e-12
    assert outcome.pls <= 1.0 + 1e-12  # no sample of an owner is lost twice
    assert outcome.overhead.lost == 0.0 or strategy.mode == "full"
    assert outcome.pls == 0.0 or strategy.mode != "full"


GOOD = """
job: {total: 56h}
failures: {mtbf: 28h}
costs: {save: 5min, load: 1min}
strategies: [{name: full}]
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("mtbf: 28h", "mtbf: 0", "mtbf=0.0: must be"),
        ("mtbf: 28h", "mtbf: often", "is not a duration"),
        ("mtbf: 28h", "mtbf: 28h, kind: normal", "must be one of exponential, gamma, trace, weibull"),
        ("mtbf: 28h", "mtbf: 28h, kind: trace", "where a file is named"),
        ("mtbf: 28h", "mtbf: 28h, clock: sun", "useful, wall"),
        ("total: 56h", "totals: 56h", r"scenario.job key='totals': must be one of .*total"),
        ("total: 56h", "owners: 8", "total"),
        ("total: 56h", "total: 56h, owners: 2.5", "a whole number"),
        ("total: 56h", "total: 56h, spread: {luck: 1}", "must be one of load, mtbf"),
        ("save: 5min, ", "", "store_bandwidth"),
        ("{name: full}", "{name: full}, {name: full}", "a name of its own"),
        ("{name: full}", "{name: p, mode: some}", "full, parity, partial"),
        ("{name: full}", "{name: p, target_pls: 0}", r"\(0, 1\]"),
        ("{name: full}", "{name: p, ratio: 1.5}", r"\(0, 1\]"),
        ("{name: full}", "{name: p, priority: lru}", "mfu, scar, ssu, vanilla"),
        ("[{name: full}]", "[{name: full}]\ncases: {a: {saves: 1}}", "key='saves'"),
        ("[{name: full}]", "none", "a list"),
        ("job:", "job: [", "not a readable YAML"),
    ],
)
def test_bad_scenarios_are_refused_with_what_is_allowed(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(GOOD)
    load_scenario(path)
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(ConfigError, match=message) as caught:
        load_scenario(path)
    assert "scenario.yaml" in str(caught.value)


@pytest.mark.parametrize(("text", "message"), [("", "no gap"), ("3h\nsoon\n", "duration"), ("3h\n0\n", "line 2")])
def test_bad_traces_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "trace.txt").write_text(text)
    failures = Failures(28 * H, kind="trace", trace=str(tmp_path / "trace.txt"))
    with pytest.raises(ConfigError, match=message):
        simulate(replace(PUBLISHED, failures=failures))
