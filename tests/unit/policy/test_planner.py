from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_cpr.errors import ConfigError
from lightning_cpr.policy.cost import Costs, Parity, Recovery, expected_pls, holds, interval_partial, mean_loss
from lightning_cpr.policy.planner import (
    Failed,
    Measurement,
    PlannerState,
    Progress,
    Recovered,
    Saved,
    Upkept,
    choose_recovery,
    observe,
    plan,
)
from lightning_cpr.policy.setting import Mtbf, Setting

H, MIN = 3600.0, 60.0
PUBLISHED = Setting(
    owners=(1.0,) * 8,
    target_pls=0.1,
    mtbf=Mtbf(28 * H, None),
    costs=Costs(5.6 * MIN, Recovery(1 * MIN, 4 * MIN), Recovery(1 * MIN, 4 * MIN)),
    total_seconds=56 * H,
)


def test_the_published_setting_by_value() -> None:
    found = plan(PlannerState(PUBLISHED))
    full, partial = found.option("full"), found.option("partial")
    assert full.interval / H == pytest.approx(2.286, abs=1e-3)
    assert full.overhead.total == pytest.approx(0.0846, abs=5e-5)
    assert partial.interval / H == pytest.approx(44.8, rel=1e-12)
    assert partial.overhead.total == pytest.approx(0.00506, abs=5e-6)
    assert partial.pls == pytest.approx(0.085, abs=5e-5)  # the finite run: below the target of 0.1
    assert (found.mode, found.interval, found.ratio) == ("partial", partial.interval, 0.125)
    assert any("44.8" in r or "161280" in r for r in found.reasons)


def test_full_is_chosen_where_partial_would_save_too_often() -> None:
    found = plan(PlannerState(replace(PUBLISHED, owners=(1.0, 1.0), target_pls=0.001)))
    assert found.mode == "full"
    assert found.option("partial").overhead.total > found.option("full").overhead.total
    assert (found.ratio, found.variant) == (1.0, "vanilla")


def test_an_interval_raised_above_what_the_target_allows_is_not_partial() -> None:
    costs = replace(PUBLISHED.costs, save=0.0)
    found = plan(PlannerState(replace(PUBLISHED, target_pls=1e-6, costs=costs)))
    assert not found.option("partial").allowed
    assert "above the target" in found.option("partial").reason
    assert (found.mode, found.interval) == ("full", PUBLISHED.min_interval)


def test_an_interval_beyond_the_run_is_cut_to_it() -> None:
    found = plan(PlannerState(replace(PUBLISHED, target_pls=0.5)))
    assert found.interval == 56 * H
    assert "cut to the run" in found.option("partial").reason


def test_mean_loss_of_a_finite_run() -> None:
    assert mean_loss(44.8, 56) == pytest.approx((44.8**2 + 11.2**2) / 112)
    assert mean_loss(100, 56) == 28
    assert mean_loss(1, 20) == mean_loss(1, None) == 0.5
    assert expected_pls(1.0, 100.0, None, 1 / 8) == 0.5 * 1 / (100 * 8)
    assert holds(1, 20, 20)
    assert not holds(1, 20, 19)
    assert not holds(1, 19, 20)


def test_ranks_of_a_host_lose_their_shares_together() -> None:
    hosts = ((0, 1, 2, 3), (4, 5, 6, 7))
    together = replace(PUBLISHED, hosts=hosts)
    assert together.expected_share() == 0.5
    assert replace(together, host_share=0.25).expected_share() == pytest.approx(0.25 * 0.5 + 0.75 / 8)
    assert plan(PlannerState(together)).option("partial").interval == pytest.approx(44.8 * H / 4)


def test_shares_weigh_by_elements() -> None:
    uneven = replace(PUBLISHED, owners=(10.0, 30.0, 0.0, 60.0))
    assert uneven.share_of((1, 3)) == 0.9
    assert uneven.expected_share() == 0.25
    assert replace(uneven, owners=(0.0, 0.0)).expected_share() == 0.0


def test_without_sharded_rows_partial_saves_once_and_loses_nothing() -> None:
    found = plan(PlannerState(replace(PUBLISHED, owners=(0.0, 0.0))))
    assert (found.mode, found.interval, found.option("partial").pls) == ("partial", 56 * H, 0.0)


def test_mtbf_is_estimated_from_the_failures_seen_and_the_prior() -> None:
    prior = Mtbf(20 * H, 2.0)
    assert prior.estimate(0.0, 0) == 20 * H
    assert prior.estimate(60 * H, 3) == 20 * H  # (2 * 20 + 60) / (2 + 3)
    assert prior.estimate(10 * H, 8) == 5 * H
    assert Mtbf(20 * H, None).estimate(10 * H, 8) == 20 * H


def test_measurements_replace_the_defaults_and_the_plan_follows() -> None:
    setting = replace(PUBLISHED, mtbf=Mtbf(28 * H, 1.0), target_pls=0.05, total_samples=1000, total_seconds=None)
    state = PlannerState(setting)
    assert state.total_seconds is None
    state, found = observe(state, Progress(100, 2 * H))
    assert state.total_seconds == 20 * H
    state, found = observe(state, Saved(2.0))
    state, found = observe(state, Saved(4.0))
    assert state.costs.save == 3.0
    state, found = observe(state, Failed((2,)))
    assert state.mtbf == 15 * H  # (28 + 2) / 2
    assert found.option("partial").interval == pytest.approx(2 * 0.05 * 15 * H * 8, rel=1e-12)
    state, found = observe(state, Recovered("partial", 7.0, 11.0, pls=0.05))
    assert (state.costs.partial, state.costs.full) == (Recovery(7.0, 11.0), PUBLISHED.costs.full)
    state, found = observe(state, Recovered("partial", 7.0, 11.0, pls=0.1))
    assert found.mode == "full"
    assert any("has reached its limit 0.1" in reason for reason in found.reasons)


def test_failures_wider_than_expected_shorten_the_interval() -> None:
    state = PlannerState(PUBLISHED)
    before = plan(state).interval
    state, after = observe(state, Failed((0, 1, 2, 3)))
    assert state.share_per_failure == pytest.approx((2 / 8 + 4 / 8) / 3)
    assert after.interval == pytest.approx(before / 2)
    assert observe(PlannerState(PUBLISHED), Failed((8, 9), 4 / 8)) == (state, after)  # owners of a plan before


def test_a_stream_says_so_and_saves_within_what_it_has_done() -> None:
    state = PlannerState(replace(PUBLISHED, total_seconds=None))
    found = plan(state)
    assert found.interval == found.option("full").interval
    assert any("samples so far" in r for r in found.reasons)
    _, later = observe(state, Progress(10**6, 10 * H))
    assert later.interval == 10 * H
    _, late = observe(state, Progress(10**6, 1000 * H))
    assert late.interval == pytest.approx(44.8 * H)


def test_parity_is_compared_by_cost() -> None:
    def with_parity(upkeep: float, uncovered: float) -> str:
        costs = replace(PUBLISHED.costs, parity=Parity(upkeep, Recovery(5.0, 20.0), uncovered))
        return plan(PlannerState(replace(PUBLISHED, costs=costs))).mode

    assert with_parity(0.0005, 0.1) == "parity"
    assert with_parity(0.05, 0.1) == "partial"


def test_a_failure_is_recovered_in_full_above_the_limit_or_where_that_is_no_dearer() -> None:
    state = PlannerState(replace(PUBLISHED, costs=replace(PUBLISHED.costs, full=Recovery(1.0, 2.0))))
    now = plan(state)
    assert now.mode == "partial"
    assert choose_recovery(state, now, 0.1, 5 * H)[0] == "partial"
    assert choose_recovery(state, now, 0.21, 5 * H)[0] == "full"
    assert choose_recovery(state, now, 0.1, 30.0)[0] == "full"
    assert choose_recovery(state, now, 0.1, 30.0, replays=False)[0] == "partial"
    assert choose_recovery(state, now, 0.21, 30.0, replays=False)[0] == "full"
    assert choose_recovery(state, replace(now, mode="full"), 0.0, 5 * H)[0] == "full"


@pytest.mark.parametrize(
    "options",
    [
        {"target_pls": 0.0},
        {"target_pls": 1.5},
        {"target_pls": float("nan")},
        {"ratio": 0.0},
        {"ratio": 1.01},
        {"owners": ()},
        {"owners": (1.0, -1.0)},
        {"hosts": ((0, 1), (1, 2, 3, 4, 5, 6, 7))},
        {"hosts": ((0, 1, 2, 3, 4, 5, 6, 7), ())},
        {"host_share": -0.1},
        {"total_seconds": 0.0},
        {"total_samples": -1},
        {"min_interval": -1.0},
        {"max_pls": 0.05},
    ],
)
def test_bad_settings_are_refused_with_what_is_allowed(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"must|name"):
        replace(PUBLISHED, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf")])
def test_bad_mtbf_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="mtbf"):
        Mtbf(seconds)


@pytest.mark.parametrize(
    "seen",
    [Progress(-1, 1.0), Saved(-1.0), Failed((8,)), Failed(()), Failed((8,), 1.1), Recovered("full", -1.0, 0.0, 0.0)],
)
def test_measurements_that_cannot_be_are_refused(seen: Measurement) -> None:
    with pytest.raises(ConfigError):
        observe(PlannerState(PUBLISHED), seen)


seconds = st.floats(0.0, 1e7)
measurements = st.one_of(
    st.builds(Progress, st.integers(0, 10**9), seconds),
    st.builds(Saved, seconds),
    st.builds(Failed, st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple)),
    st.builds(Recovered, st.sampled_from(["full", "partial", "parity"]), seconds, seconds, st.floats(0.0, 2.0)),
)
settings_ = st.builds(
    Setting,
    owners=st.just((1.0, 2.0, 3.0, 0.0)),
    target_pls=st.floats(1e-6, 0.4),
    hosts=st.sampled_from([(), ((0, 1), (2, 3))]),
    mtbf=st.builds(Mtbf, st.floats(1.0, 1e9), st.one_of(st.none(), st.floats(0.1, 100))),
    costs=st.builds(Costs, save=seconds, parity=st.one_of(st.none(), st.builds(Parity, st.floats(0.0, 1.0)))),
    total_samples=st.one_of(st.none(), st.integers(1, 10**12)),
    total_seconds=st.one_of(st.none(), st.floats(1.0, 1e9)),
    min_interval=st.floats(0.1, 1e4),
)


@given(settings_, st.lists(measurements, max_size=8))
def test_every_plan_is_valid_and_the_state_survives_json(setting: Setting, seen: list[Measurement]) -> None:
    state = PlannerState(setting)
    found = plan(state)
    for measurement in seen:
        state, found = observe(state, measurement)
        chosen = found.option(found.mode)
        total = state.total_seconds
        assert chosen.allowed
        assert 0 < found.interval <= (total if total is not None else float("inf"))
        assert found.interval >= min(setting.min_interval, total or float("inf"))
        assert 0 < found.ratio <= 1
        assert chosen.pls <= setting.target_pls * (1 + 1e-9)
        if found.ratio < 1:
            assert found.ratio * found.interval >= setting.min_interval * (1 - 1e-9)
    assert PlannerState.from_json(setting, json.loads(json.dumps(state.to_json()))) == state
    json.dumps(found.to_json())


@given(st.floats(1e-4, 1.0), st.floats(1.0, 1e7), st.integers(1, 1000))
def test_the_partial_interval_meets_its_target_exactly(target: float, mtbf: float, owners: int) -> None:
    interval = interval_partial(target, mtbf, 1 / owners)
    assert expected_pls(interval, mtbf, None, 1 / owners) == pytest.approx(target)


def test_parity_is_planned_with_what_it_costs_and_covers() -> None:
    """Dear upkeep, or failures that it does not cover, take it out of the plan."""
    parity = Parity(upkeep=0.001, recovery=Recovery(1.0, 0.0), uncovered=0.1)
    setting = Setting(
        owners=(1.0,) * 8, mtbf=Mtbf(10 * 3600.0, None), costs=Costs(save=60.0, parity=parity),
        total_seconds=100 * 3600.0,
    )  # fmt: skip
    state = PlannerState(setting)
    assert plan(state).mode == "parity"
    dear, found = observe(state, Upkept(50.0, 100.0))
    assert dear.costs.parity is not None
    assert dear.costs.parity.upkeep == 0.5
    assert found.mode == "partial"
    cheap, found = observe(dear, Upkept(0.0, 100.0))
    assert cheap.costs.parity is not None
    assert cheap.costs.parity.upkeep == 0.25  # a running mean
    covered, _ = observe(state, Recovered("parity", 3.0, 0.0, 0.0))
    missed, _ = observe(state, Recovered("partial", 3.0, 0.0, 0.0))
    assert covered.costs.parity is not None
    assert missed.costs.parity is not None
    assert covered.costs.parity.recovery.load == 3.0
    assert covered.costs.parity.uncovered == pytest.approx(0.2 / 3)
    assert missed.costs.parity.uncovered == pytest.approx(1.2 / 3)
    assert observe(state, Upkept(1.0, 50.0))[0].to_json()["measured"]["parity.upkeep"] == {"count": 1, "value": 0.02}


def test_no_parity_no_share_of_it() -> None:
    state, _ = observe(PlannerState(Setting(owners=(1.0, 1.0))), Recovered("partial", 3.0, 0.0, 0.0))
    assert "parity.uncovered" not in state.measured
