"""How many bits a saved weight gets, from how often a save will be restored (Check-N-Run, section 5.2).

The widths are wider than the paper's, which gives 2, 3 and 4 bits to at most 1, 3 and 20 restores: those lost 0.016,
0.022 and 0.045 % of AUC in `benchmarks/restored_accuracy`, and these stay within its 0.01 %.
"""

from __future__ import annotations

import math

from lightning_cpr.errors import ConfigError

# (most restores that this width is good for, bits)
_WIDTHS = ((1, 3), (3, 4))
SAFE_BITS = 8


def choose_bits(expected_restores: float) -> int:
    """Bits per weight for a run that expects to restore this often: <= 1 -> 3, <= 3 -> 4, else 8.

    The error enters the live model at restores only, and adds up over them.

    Raises:
        ConfigError: ``expected_restores`` is negative or NaN.
    """
    if math.isnan(expected_restores) or expected_restores < 0:
        raise ConfigError(f"expected_restores is {expected_restores}: it must be a number >= 0")
    return next((bits for most, bits in _WIDTHS if expected_restores <= most), SAFE_BITS)


def revise_bits(bits: int, restores: int, expected_restores: float) -> int:
    """``bits``, or 8 (if that is more) once more restores happened than the forecast, rounded up, that chose it."""
    return max(bits, SAFE_BITS) if restores - 1 >= expected_restores else bits
