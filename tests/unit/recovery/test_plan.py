"""The freshest source wins, full recovery takes exact versions only, and no source is a named error."""

from __future__ import annotations

import pytest

from lightning_cpr.errors import RecoveryError
from lightning_cpr.recovery.plan import Source, plan_recovery

OLD = Source("store", "v1", 10, 100, exact=True)
MIXED = Source("store", "v2", 15, 150, exact=False)
PARITY = Source("parity", "e20", 15, 150, exact=True)
LIVE = Source("live", "rank 3", 15, 150, exact=True)


def test_partial_takes_the_freshest_and_the_cheapest_at_equal_age() -> None:
    plan = plan_recovery({1: [OLD, MIXED], 2: [OLD, MIXED, PARITY], 3: [PARITY, LIVE]}, "partial")
    assert plan.sources == {1: MIXED, 2: PARITY, 3: LIVE}
    assert plan.mode == "partial"


def test_full_takes_the_newest_exact_version_only() -> None:
    assert plan_recovery({1: [OLD, MIXED, PARITY]}, "full").sources == {1: OLD}
    with pytest.raises(RecoveryError, match="rank 1's shards are lost and there is no exact version"):
        plan_recovery({1: [MIXED]}, "full")


def test_too_high_a_pls_falls_back_to_full_and_says_so() -> None:
    plan = plan_recovery({1: [OLD, MIXED]}, "partial", pls_after=0.2, max_pls=0.1)
    assert (plan.mode, plan.sources) == ("full", {1: OLD})
    assert "0.2000, above 0.1000" in plan.reason
    assert plan_recovery({1: [OLD, MIXED]}, "partial", pls_after=0.1, max_pls=0.1).mode == "partial"


def test_no_source_is_refused() -> None:
    with pytest.raises(RecoveryError, match="no version and no parity"):
        plan_recovery({0: []}, "partial")
