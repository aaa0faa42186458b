from __future__ import annotations

import pytest

from lightning_cpr.errors import ConfigError
from lightning_cpr.units import seconds, size


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("28h", 100800),
        ("5.6min", 336),
        ("1h30m", 5400),
        ("2 d", 172800),
        ("90", 90),
        (7, 7),
        ("250ms", 0.25),
        ("1e3s", 1000),
    ],
)
def test_durations(text: str | float, value: float) -> None:
    assert seconds(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(("text", "value"), [("4TB", 4e12), ("64MiB", 2**26), ("1.5 gb", 1.5e9), (10, 10), ("3", 3)])
def test_sizes(text: str | float, value: float) -> None:
    assert size(text) == value


@pytest.mark.parametrize("text", ["", "h", "28 hours", "4TB", "-1h", -1, "nan", float("inf"), "1h x"])
def test_other_durations_are_refused(text: str | float) -> None:
    with pytest.raises(ConfigError, match="'28h'"):
        seconds(text)
