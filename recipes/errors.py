"""The error of the recipes' readers."""

from __future__ import annotations

from lightning_cpr.errors import CPRError


class DataError(CPRError, ValueError):
    """Input data cannot be read as declared; names the file, the line or row, the feature and the remedy."""
