from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_cpr.errors import ConfigError
from lightning_cpr.policy.baseline import POLICIES, chain_cost, delta_since, next_kind, read_size


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_save_is_a_base(policy: str) -> None:
    assert next_kind(policy, None) == "base"


def test_full_never_writes_a_delta_and_the_chains_never_another_base() -> None:
    assert next_kind("full", []) == "base"
    for policy in ("one_shot", "consecutive"):
        assert next_kind(policy, [0.9] * 50) == "delta"


@pytest.mark.parametrize(
    ("increments", "kind"),
    [
        ([], "delta"),
        ([0.99], "delta"),  # F = 1.99 > I = 1.98
        ([1.0], "base"),  # F = 2 <= I = 2
        ([0.25, 0.5], "delta"),  # F = 1.75 > I = 1.5
        ([0.25, 0.625], "base"),  # F = 1.875 <= I = 1.875
        ([0.1, 0.2, 0.3, 0.4], "base"),  # F = 2.0 <= I = 2.0
    ],
)
def test_intermittent_takes_a_base_when_the_chain_has_cost_what_the_next_would(
    increments: list[float], kind: str
) -> None:
    assert next_kind("intermittent", increments) == kind


def test_a_restore_reads_the_chain_or_its_newest_delta() -> None:
    assert read_size("consecutive", [0.25, 0.5]) == 1.75
    assert read_size("one_shot", [0.25, 0.5]) == 1.5
    assert read_size("intermittent", []) == 1.0
    assert (delta_since("consecutive"), delta_since("intermittent"), delta_since("one_shot")) == (
        "last",
        "base",
        "base",
    )


def test_unknown_policies_and_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="consecutive, full, intermittent, one_shot"):
        next_kind("sometimes", [])
    with pytest.raises(ConfigError, match="increment"):
        next_kind("one_shot", [-0.1])


@pytest.mark.parametrize("policy", POLICIES)
@given(first=st.floats(0.01, 1.0), growth=st.floats(0.1, 1.0), saves=st.integers(1, 30))
def test_a_forecast_walks_the_same_chain_as_the_saves(policy: str, first: float, growth: float, saves: int) -> None:
    def touched(intervals: int) -> float:
        return min(1.0, first * intervals**growth)

    write = read = 0.0
    increments: list[float] | None = None
    for _ in range(saves):
        if increments is None or next_kind(policy, increments) == "base":
            increments, size = [], 1.0
        else:
            size = touched(1 if delta_since(policy) == "last" else len(increments) + 1)
            increments.append(size)
        write += size
        read += read_size(policy, increments)
    found = chain_cost(policy, saves, touched)
    assert (found.write * saves, found.read * saves) == (pytest.approx(write), pytest.approx(read))


@given(st.floats(0.01, 1.0), st.floats(0.1, 1.0), st.integers(1, 60))
def test_intermittent_writes_no_more_than_one_shot_or_full_over_whole_runs(
    first: float, growth: float, saves: int
) -> None:
    def touched(intervals: int) -> float:
        return min(1.0, first * intervals**growth)

    full, one_shot, mixed = (chain_cost(p, saves, touched) for p in ("full", "one_shot", "intermittent"))
    assert full.write == full.read == 1.0
    assert mixed.write <= full.write + 1e-12
    # A base costs at most one save more than the delta in its place.
    assert mixed.write <= one_shot.write + 1.0 / saves + 1e-12
