"""The order of a job's waits: what follows from the user's values, and what is refused."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_cpr.callback import CPRCallback
from lightning_cpr.errors import ConfigError
from lightning_cpr.policy.ladder import ANNOUNCE_S, FREE_S, JOIN_S, START_S, check_order, waits_for
from lightning_cpr.recovery.guardian import GRACE_S
from lightning_cpr.recovery.membership import Timeouts
from lightning_cpr.strategy import DEFAULT_TIMEOUT

TORCHRUN_GRACE_S = 30.0


def test_the_defaults_are_in_order() -> None:
    commit = inspect.signature(CPRCallback).parameters["timeout_s"].default
    for detection in (30.0, None):
        assert check_order(waits_for(DEFAULT_TIMEOUT.total_seconds(), detection, commit)) == []
    assert GRACE_S < TORCHRUN_GRACE_S  # a guardian has ended its trainer before torchrun ends the guardian
    waits = waits_for(300.0, 30.0)
    assert (waits.announce, waits.join, waits.free) == (ANNOUNCE_S, JOIN_S, FREE_S)
    timeouts = Timeouts()
    assert (timeouts.announce, timeouts.join, timeouts.free) == (ANNOUNCE_S, JOIN_S, FREE_S)


@given(st.floats(1, 10_000))
def test_a_long_detection_lengthens_the_waits_that_build_on_it(detection: float) -> None:
    waits = waits_for(detection + 1, detection)
    assert waits.announce >= detection + START_S
    assert waits.join >= waits.announce + waits.free
    check_order(waits)
    with pytest.raises(ConfigError, match=f"--hang-timeout={detection:g} s, so that it ends the job"):
        check_order(replace(waits, collective=detection))


def test_what_is_doubtful_is_told_and_what_contradicts_itself_is_refused() -> None:
    (doubt,) = check_order(waits_for(300.0, 30.0, commit=600.0))
    assert "timeout_s=600" in doubt
    assert "300 s" in doubt
    (doubt,) = check_order(waits_for(300.0, 0.0))
    assert "--hang-timeout=0" in doubt
    with pytest.raises(ConfigError, match="above 0"):
        check_order(waits_for(0.0, None))
    with pytest.raises(ConfigError, match="noticed only after"):
        check_order(replace(waits_for(300.0, 60.0), announce=50.0))
    with pytest.raises(ConfigError, match="for one alone to start"):
        check_order(replace(waits_for(300.0, 30.0), join=20.0))
