"""Durations and sizes as people write them: ``"28h"``, ``"1h30m"``, ``"4TB"``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from lightning_cpr.errors import ConfigError

_SECONDS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "y": 365.25 * 86400.0}
_BYTES = {
    "b": 1.0,
    **{p + "b": 10.0 ** (3 * i) for i, p in enumerate("kmgtp", 1)},
    **{p + "ib": 2.0 ** (10 * i) for i, p in enumerate("kmgtp", 1)},
}
_PART = re.compile(r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+)\s*([a-z]*)\s*")


def seconds(value: float | str) -> float:
    """Seconds of a number (already seconds) or of a text such as ``"28h"``, ``"5.6min"``, ``"1h30m"``.

    Raises ConfigError on any other text, on negative and on non-finite values.
    """
    return _parse(value, _SECONDS, "s", "a duration such as 90, '28h', '5.6min' or '1h30m'")


def size(value: float | str) -> float:
    """Bytes of a number (already bytes) or of a text such as ``"4TB"`` or ``"64MiB"``. Raises as `seconds`."""
    return _parse(value, _BYTES, "b", "a size such as 1024, '64MiB' or '4TB'")


def _parse(value: float | str, scale: Mapping[str, float], bare: str, allowed: str) -> float:
    total = _of_text(value, scale, bare) if isinstance(value, str) else float(value)
    if not (math.isfinite(total) and total >= 0):
        raise ConfigError(f"{value!r} is not {allowed}")
    return total


def _of_text(text: str, scale: Mapping[str, float], bare: str) -> float:
    rest, total = text.strip().lower(), 0.0
    while match := _PART.match(rest):
        total += float(match[1]) * scale.get(match[2] or bare, math.nan)
        rest = rest[match.end() :]
        if not rest:
            return total
    return math.nan


def human(value: float) -> str:
    """A duration in seconds, in the unit that suits it: three digits."""
    for unit, length in (("d", 5 * 86400.0), ("h", 3600.0), ("min", 60.0)):
        if value >= length:
            return f"{value / _SECONDS[unit]:.3g} {unit}"
    return f"{value:.3g} s"


def counted(count: int, noun: str) -> str:
    """``"1 version"``, ``"2 versions"``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
