"""What a failure is charged, by where the lost shards come back from."""

from __future__ import annotations

import pytest

from lightning_cpr.live.losses import Failure, all_stand_at, charge_exchange, charge_version, source_of
from lightning_cpr.policy.ledger import Charge, Ledger, Loss
from lightning_cpr.recovery.plan import Source
from lightning_cpr.saving.saver import Progress
from lightning_cpr.spec import ShardSpec
from lightning_cpr.store.manifest import Manifest, ShardRecord

TOP, BOTTOM = ShardSpec("t", 0, 50, 0, 8, owner=0), ShardSpec("t", 50, 50, 0, 8, owner=1)
OTHER, COPIED = ShardSpec("u", 0, 10, 0, 8, owner=1), ShardSpec("v", 0, 3, 0, 4, owner=1, replicated=True)
PLAN = [TOP, BOTTOM, OTHER, COPIED]
FAILURE = Failure([1], Progress(23, 230), Ledger(880), {0: 220})
LEFT_OUT = Loss(0, 400, 220, kept=True)


def version(*shards: ShardRecord) -> Manifest:
    """Of step 20, 200 samples, mixed since the exact step 16, 150 samples."""
    return Manifest(
        "run", "v", 1, 20, 200, "delta", "mixed", 2, 0.0, "", "", (), shards, (), (), {"chain": {"exact": [16, 150]}}
    )


def test_an_owner_is_as_old_as_the_oldest_of_its_shards_in_the_version() -> None:
    # The replicated table is older still: that is no loss, every rank holds it.
    found = version(ShardRecord(BOTTOM, 16), ShardRecord(OTHER, 20), ShardRecord(COPIED, 0))
    ledger, event = charge_version(FAILURE, PLAN, found)
    assert event == Charge(230, (Loss(1, 480, 150), LEFT_OUT))
    assert ledger == Ledger(880, (event,))
    assert source_of(found) == Source("store", "v", 0, 0, False)


def test_shards_that_a_version_of_another_plan_does_not_name_are_of_its_step() -> None:
    assert charge_version(FAILURE, PLAN, version())[1] == Charge(230, (Loss(1, 480, 200), LEFT_OUT))
    assert source_of(version()) == Source("store", "v", 20, 200, False)


@pytest.mark.parametrize(
    ("step", "samples", "whole", "event"),
    [
        (22, 220, False, Charge(230, (Loss(1, 480, 220), LEFT_OUT))),
        (23, 230, True, Charge(230, (Loss(1, 480, 230), LEFT_OUT))),
        (24, 240, True, Charge(240, (Loss(1, 480, 240), LEFT_OUT))),
    ],
)
def test_an_exchange_costs_nothing_where_everybody_stands_at_it(
    step: int, samples: int, whole: bool, event: Charge
) -> None:
    exchange = Source("parity", "exchange", step, samples, True)
    assert all_stand_at(exchange, FAILURE) is whole
    assert charge_exchange(FAILURE, PLAN, exchange) == (Ledger(880, (event,)), event)
