"""How the tools show things: tables, sizes, ages, progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text


def table(title: str, left: list[str], right: list[str]) -> Table:
    """An empty table; ``left`` columns are texts, ``right`` ones numbers."""
    made = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left")
    for name in left:
        made.add_column(name, overflow="fold")
    for name in right:
        made.add_column(name, justify="right", no_wrap=True)
    return made


def show(what: object) -> None:
    """Print on stdout. What is no terminal gets lines as wide as they need."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    console.print(clean(what) if isinstance(what, str) else what, markup=False)


def add(made: Table, *cells: str) -> None:
    """Add a row to a table."""
    made.add_row(*(Text(clean(cell)) for cell in cells))


def clean(text: str) -> str:
    """The text with characters escaped that a terminal would obey: names come from files."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


def size(count: float) -> str:
    """Bytes for people."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.0f} B" if units[0] == "B" else f"{count:.3g} {units[0]}"


def age(seconds: float) -> str:
    """A duration for people, in its largest unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr; yields what to call with (bytes done, bytes in all). Nothing where stderr is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
