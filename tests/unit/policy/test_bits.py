from __future__ import annotations

import pytest

from lightning_cpr.errors import ConfigError
from lightning_cpr.policy.bits import choose_bits, revise_bits


@pytest.mark.parametrize(
    ("expected", "bits"), [(0, 3), (0.4, 3), (1, 3), (1.01, 4), (3, 4), (3.5, 8), (20, 8), (float("inf"), 8)]
)
def test_bits_by_expected_restores(expected: float, bits: int) -> None:
    assert choose_bits(expected) == bits


@pytest.mark.parametrize("expected", [-1, float("nan")])
def test_no_forecast_is_refused(expected: float) -> None:
    with pytest.raises(ConfigError, match="expected_restores"):
        choose_bits(expected)


@pytest.mark.parametrize(
    ("bits", "restores", "expected", "now"),
    [
        (2, 1, 1, 2),
        (2, 2, 1, 8),
        (2, 1, 0.3, 2),
        (3, 3, 2.5, 3),
        (3, 4, 2.5, 8),
        (4, 20, 20, 4),
        (4, 21, 20, 8),
        (8, 50, 30, 8),
        (16, 50, 30, 16),
    ],
)
def test_more_restores_than_forecast_switch_to_8(bits: int, restores: int, expected: float, now: int) -> None:
    assert revise_bits(bits, restores, expected) == now
