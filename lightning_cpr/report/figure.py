"""Figures of the commands: matplotlib without a display, imported when one is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lightning_cpr.errors import ConfigError, DependencyError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches.

    Raises:
        DependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DependencyError("figures need matplotlib: pip install 'lightning-cpr[report]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: str) -> None:
    """Write a figure; ConfigError if the name says no format that matplotlib knows."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(path, dpi=130)
    except ValueError as error:
        raise ConfigError(f"{path}: a figure must be named .png, .svg or .pdf") from error
