"""A progress bar for saves and restores that take long, on the terminal of whoever waits for them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

DELAY_S = 1.0
"""Shorter work shows no bar."""

Report = Callable[[int, int], None]
"""``report(bytes done, bytes in all)``."""


@contextmanager
def progress_bar(what: str, shown: bool = True, console: Console | None = None) -> Iterator[Report]:
    """Gives a `Report` that draws a bar on stderr once the work has taken `DELAY_S`, where stderr is a terminal.

    shown: False on ranks that keep quiet.
    """
    console = console or Console(file=sys.stderr)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task(what, total=None)
    started = time.monotonic()

    def report(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if shown and console.is_terminal and not bar.live.is_started and time.monotonic() - started > DELAY_S:
            bar.start()

    try:
        yield report
    finally:
        if bar.live.is_started:
            bar.stop()
