"""Refusals shared by the policies: each names the argument and what it may be."""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Integral, Real

from lightning_cpr.errors import ConfigError


def positive(name: str, value: float) -> None:
    if not (_is_number(value) and math.isfinite(value) and value > 0):
        raise ConfigError(f"{name}={value!r}: must be a finite number above 0")


def count(name: str, value: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r}: must be a whole number, 1 or more")


def not_negative(name: str, value: float) -> None:
    if not (_is_number(value) and math.isfinite(value) and value >= 0):
        raise ConfigError(f"{name}={value!r}: must be a finite number, 0 or above")


def share(name: str, value: float, zero: bool = False) -> None:
    """A share in (0, 1], or in [0, 1] where ``zero`` makes sense."""
    if not (_is_number(value) and (0 <= value <= 1 if zero else 0 < value <= 1)):
        raise ConfigError(f"{name}={value!r}: must lie in {'[0, 1]' if zero else '(0, 1]'}")


def one_of(name: str, value: str, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r}: must be one of {', '.join(sorted(allowed))}")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
