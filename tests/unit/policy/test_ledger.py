from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_cpr.errors import ConfigError
from lightning_cpr.policy.ledger import (
    Charge,
    Event,
    Ledger,
    Loss,
    apply,
    charge,
    event_from_json,
    event_to_json,
    replay,
    rewind,
)

ELEMENTS = (10, 20, 30, 40)


def test_one_owner_of_eight_loses_its_share_of_the_samples_since_the_save() -> None:
    ledger, event = charge(Ledger(8000), 500, {3: (1000, [200, 300])})
    assert event == Charge(500, (Loss(3, 1000, 200),))  # as old as its oldest shard
    assert ledger.pls(1000) == 300 / 1000 / 8


def test_owners_that_fail_together_are_charged_each_by_its_weight() -> None:
    ledger, _ = charge(Ledger(100), 500, {0: (10, [400]), 1: (20, [300])})
    assert ledger.pls(1000) == (0.1 * 100 + 0.2 * 200) / 1000


def test_a_second_failure_before_the_next_save_is_charged_from_the_recovery_only() -> None:
    ledger, _ = charge(Ledger(4), 500, {1: (1, [100])})
    ledger, event = charge(ledger, 800, {1: (1, [100]), 2: (1, [100])})
    assert event.losses == (Loss(1, 1, 500), Loss(2, 1, 100))
    assert ledger.pls(1000) == (400 + 300 + 700) / 1000 / 4


def test_a_rewind_voids_the_charges_after_it_and_only_those() -> None:
    ledger, _ = charge(Ledger(1), 300, {0: (1, [200])})
    ledger, _ = charge(ledger, 500, {0: (1, [400])})
    kept, _ = rewind(ledger, 300)
    assert [c.samples for c in kept.charges] == [300]
    assert kept.last_recovery(0) == 300  # that of 500 never happened
    assert rewind(ledger, 299)[0].charges == ()


def test_recovery_with_nothing_lost_costs_nothing_but_counts_as_a_recovery() -> None:
    ledger, _ = charge(Ledger(1), 300, {0: (1, [300])})
    assert ledger.pls(1000) == 0.0
    assert ledger.last_recovery(0) == 300


def test_a_job_without_sharded_rows_loses_none() -> None:
    ledger, _ = charge(Ledger(0), 300, {0: (0, [])})
    assert ledger.pls(1000) == 0.0


@pytest.mark.parametrize(
    "failed",
    [{0: (1, [600])}, {0: (101, [0])}, {0: (-1, [0])}, {0: (1, [-5])}, {0: (1, [])}, {0: (60, [0]), 1: (60, [0])}],
)
def test_charges_that_cannot_be_are_refused(failed: dict[int, tuple[int, list[int]]]) -> None:
    with pytest.raises(ConfigError):
        charge(Ledger(100), 500, failed)


def test_foreign_events_are_refused() -> None:
    with pytest.raises(ConfigError, match="charge, rewind"):
        event_from_json({"event": "reset"})
    with pytest.raises(ConfigError, match="once"):
        apply(Ledger(9), Charge(5, (Loss(0, 1, 0), Loss(0, 1, 0))))


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, dict[int, tuple[int, list[int]]]]]:
    now, steps = 0, []
    for _ in range(draw(st.integers(0, 12))):
        if draw(st.booleans()) or now == 0:
            now += draw(st.integers(1, 1000))
            owners = draw(st.sets(st.integers(0, 3), min_size=1))
            held = st.lists(st.integers(0, now), min_size=1, max_size=3)
            steps.append(("charge", now, {o: (ELEMENTS[o], draw(held)) for o in owners}))
        else:
            now = draw(st.integers(0, now))
            steps.append(("rewind", now, {}))
    return steps


@given(histories(), st.integers(1, 20000))
def test_replaying_the_event_log_gives_the_live_value(
    history: list[tuple[str, int, dict[int, tuple[int, list[int]]]]], total: int
) -> None:
    live, log = Ledger(100), []
    standing: list[tuple[int, float]] = []  # the plain model: (samples, lost share) of each charge
    recovered: list[tuple[int, int]] = []
    for kind, samples, failed in history:
        event: Event
        if kind == "rewind":
            live, event = rewind(live, samples)
            standing = [x for x in standing if x[0] <= samples]
            recovered = [x for x in recovered if x[0] <= samples]
        else:
            live, event = charge(live, samples, failed)
            for owner, (elements, complete) in failed.items():
                held = max([min(complete), *(s for s, o in recovered if o == owner)])
                standing.append((samples, elements / 100 * (samples - held)))
                recovered.append((samples, owner))
        log.append(json.dumps(event_to_json(event)))
    replayed = replay(100, [event_from_json(json.loads(line)) for line in log])
    assert replayed == live
    assert replayed.pls(total) == live.pls(total)
    assert live.pls(total) == pytest.approx(sum(lost for _, lost in standing) / total, abs=1e-12)
    assert Ledger.from_json(json.loads(json.dumps(live.to_json()))) == live


def test_samples_that_an_owner_left_out_are_charged_and_are_no_recovery() -> None:
    ledger, event = charge(Ledger(100), 40, {1: (50, [20])}, left_out={0: (50, 36)})
    assert event.losses == (Loss(1, 50, 20), Loss(0, 50, 36, kept=True))
    assert ledger.lost == 50 * 20 + 50 * 4
    assert (ledger.last_recovery(1), ledger.last_recovery(0)) == (40, 0)
    # rank 0 dies later: all that it held since the version is lost, not only what came after the batch it left out
    later, _ = charge(ledger, 60, {0: (50, [20])})
    assert later.lost == ledger.lost + 50 * 40
    assert Ledger.from_json(later.to_json()) == later
