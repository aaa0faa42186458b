"""The planner of parity groups."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cpr.errors import ConfigError
from lightning_cpr.recovery.parity.config import ParityConfig
from lightning_cpr.recovery.parity.groups import ParityPlan, plan_parity, unrecoverable
from lightning_cpr.recovery.parity.records import record_of
from lightning_cpr.spec import ShardSpec
from tests.parity_job import random_layout, table


def covered(plan: ParityPlan) -> Counter[tuple[ShardSpec, int]]:
    return Counter(
        (part.spec, row)
        for piece in plan.pieces
        for member in piece.members
        for part in member.parts
        for row in range(part.row_lo, part.row_hi)
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 9), st.sampled_from([1, 2, 4, 8]), st.integers(1, 2), st.integers(1, 4))
def test_every_row_is_protected_once_and_apart(seed: int, world: int, k: int, m: int, per_host: int) -> None:
    if world <= m:
        return
    tables, specs = random_layout(seed, world)
    hosts = [f"h{rank // per_host}" for rank in range(world)]
    plan = plan_parity(ParityConfig(k=k, m=m), specs, tables, hosts)
    protected = {(s, row) for s in specs if not s.replicated for row in range(s.rows)}
    assert covered(plan) == Counter(protected)
    for piece in plan.pieces:
        ranks = [member.rank for member in piece.members] + list(piece.holders)
        assert len(set(ranks)) == len(ranks)
        assert 1 <= len(piece.members) <= k
        assert len(piece.holders) == m
        assert piece.words == max(member.words for member in piece.members)
        assert len({member.column for member in piece.members}) == len(piece.members)
        if plan.host_safe:
            assert len({hosts[rank] for rank in ranks}) == len(ranks)
        for member in piece.members:
            assert all(part.spec.owner == member.rank for part in member.parts)
    assert plan.host_safe == (len(set(hosts)) >= plan.k + m)
    assert plan.host_safe or any("hosts" in warning for warning in plan.warnings)
    for rank in range(world):
        assert not (m >= 1 and unrecoverable(plan, frozenset([rank])))
    if plan.host_safe:
        for host in set(hosts):
            assert not unrecoverable(plan, frozenset(r for r in range(world) if hosts[r] == host))


@pytest.mark.parametrize(("world", "k", "m"), [(4, 2, 1), (5, 4, 1), (8, 4, 1), (16, 8, 1), (8, 4, 2), (9, 8, 1)])
def test_memory_is_one_kth_and_even(world: int, k: int, m: int) -> None:
    big = table("big", 64_000, 64)
    rows = 64_000 // world
    specs = [ShardSpec("big", r * rows, rows + r % 3 * 100, 0, 64, r) for r in range(world)]
    plan = plan_parity(ParityConfig(k=k, m=m), specs, {"big": big}, [f"h{r}" for r in range(world)])
    assert plan.overhead == pytest.approx(m / k, rel=0.02)
    held = [plan.parity_words(rank) for rank in range(world)]
    assert max(held) < 1.2 * sum(held) / world
    assert min(held) > 0.8 * sum(held) / world


def test_a_large_rank_costs_memory_and_says_so() -> None:
    big = table("big", 10_000, 64)
    specs = [ShardSpec("big", 0, 7000, 0, 64, 0)] + [
        ShardSpec("big", 6000 + 1000 * r, 1000, 0, 64, r) for r in (1, 2, 3)
    ]
    plan = plan_parity(ParityConfig(k=2), specs, {"big": big}, ["a", "b", "c", "d"])
    assert plan.overhead == pytest.approx(0.7, rel=0.05)
    assert "70%" in plan.warnings[0]


def test_two_losses_in_a_group_of_one_parity_are_named() -> None:
    big = table("big", 4000, 8)
    specs = [ShardSpec("big", r * 1000, 1000, 0, 8, r) for r in range(4)]
    hosts = ["a", "b", "c", "d"]
    one, two = (plan_parity(ParityConfig(k=2, m=m), specs, {"big": big}, hosts) for m in (1, 2))
    assert unrecoverable(one, frozenset([0, 1])) == {specs[0], specs[1]}
    assert not unrecoverable(two, frozenset([0, 1]))
    assert unrecoverable(two, frozenset([0, 1, 2]))


def test_records_are_padded_to_words() -> None:
    t = table("t", 10, 3, "adagrad", torch.float16)
    record = record_of(t, ShardSpec("t", 0, 10, 0, 3, 0))
    assert record.fields == ((None, 0, 6), ("sum", 8, 12))
    assert record.words == 3


@pytest.mark.parametrize("bad", [{"k": 0}, {"k": 17}, {"m": 3}, {"every_n_steps": 0}, {"scrub_every": -1}, {"k": 2.0}])
def test_bad_values_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"allowed are whole numbers from \d+ to \d+"):
        ParityConfig(**bad)


def test_one_rank_has_nobody_to_hold_its_parity() -> None:
    with pytest.raises(ConfigError, match="at least 2 ranks"):
        plan_parity(ParityConfig(), [], {}, ["a"])
