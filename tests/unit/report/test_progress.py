"""The bar appears for long work on a terminal only."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lightning_cpr.report import progress
from lightning_cpr.report.progress import progress_bar


def drawn(shown: bool, terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    with progress_bar("restoring tables", shown, console) as report:
        for done in range(0, 101, 25):
            report(done * 10**6, 100 * 10**6)
    return out.getvalue()


def test_long_work_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY_S", -1.0)
    text = drawn(shown=True, terminal=True)
    assert "restoring tables" in text
    assert "100.0/100.0 MB" in text
    assert drawn(shown=False, terminal=True) == ""
    assert drawn(shown=True, terminal=False) == ""


def test_short_work_shows_nothing() -> None:
    assert drawn(shown=True, terminal=True) == ""
