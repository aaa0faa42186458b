"""``lightning-cpr report``: what a run's event log tells, as one HTML page and as a figure."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lightning_cpr.errors import ConfigError
from lightning_cpr.report.events import read_events
from lightning_cpr.report.figure import new_figure, save_figure
from lightning_cpr.store.storage import Storage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Event = Mapping[str, Any]

_COLORS = {"base": "#4c72b0", "delta": "#55a868", "priority": "#dd8452", "compaction": "#8172b3"}
_BAD = "#c44e52"
_TROUBLE = (
    "recovery", "rejoined", "stepped_down", "save_failed", "save_skipped", "save_aborted", "version_refused",
    "hooks_lost", "compaction_failed",
)  # fmt: skip
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}"
    "img{width:100%}table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em .9em .25em 0;text-align:left;"
    "border-bottom:1px solid #ddd;vertical-align:top}th{font-weight:600}.n{text-align:right}"
)


@dataclass(frozen=True)
class Summary:
    """A run's events in numbers. seconds: from the first event to the last. stall: of all saves together. Of all
    recoveries together: restore_seconds brought rows back; replaced_seconds passed from the end of a process that was
    replaced until all trained again.
    """

    run_ids: tuple[str, ...]
    start: float
    seconds: float
    step: int
    samples: int
    saves: Mapping[str, int]
    written: Mapping[str, int]
    stall: float
    failed: int
    skipped: int
    recoveries: int
    restore_seconds: float
    replaced_seconds: float
    pls: float


def report_command(
    root: str, out: str = "report.html", plot: str | None = None, storage_options: dict[str, Any] | None = None
) -> Summary:
    """Draw a run's saves, recoveries and PLS from its event log, as one HTML page.

    Args:
        root: The root.
        out: Where the page goes. It needs no other file.
        plot: Where the figure goes by itself, as .png, .svg or .pdf.
        storage_options: Options of the filesystem for fsspec, e.g. credentials.
    """
    storage = Storage(root, storage_options)
    events = read_events(storage)
    if not events:
        raise ConfigError(f"{storage.root} has no events.jsonl: it is no root of a run, or training never began there")
    found = summarize(events)
    figure = timeline(events, found)
    if plot is not None:
        save_figure(figure, plot)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(page(storage.root, events, found, figure), encoding="utf-8")
    console = Console(highlight=False)
    for name, value in rows(found):
        console.print(f"{name:<22} {value}", markup=False, soft_wrap=True)
    console.print(f"written to {out}", markup=False, soft_wrap=True)
    return found


def summarize(events: Sequence[Event]) -> Summary:
    """The numbers of a run, all its starts together."""
    saves: dict[str, int] = {}
    written: dict[str, int] = {}
    for event in events:
        what = _what(event)
        if what is not None:
            saves[what] = saves.get(what, 0) + 1
            written[what] = written.get(what, 0) + int(event.get("bytes", 0))
    return Summary(
        run_ids=tuple(dict.fromkeys(e["run_id"] for e in events if "run_id" in e)),
        start=events[0]["time"],
        seconds=events[-1]["time"] - events[0]["time"],
        step=max((int(e.get("step", 0)) for e in events), default=0),
        samples=max((int(e.get("samples", 0)) for e in events), default=0),
        saves=saves,
        written=written,
        stall=sum(e.get("stall_s", 0.0) for e in events if e["event"] == "save_started"),
        failed=sum(e["event"] == "save_failed" for e in events),
        skipped=sum(e["event"] == "save_skipped" for e in events),
        recoveries=sum(e["event"] == "recovery" for e in events),
        restore_seconds=sum(e.get("seconds", 0.0) for e in events if e["event"] == "recovery"),
        replaced_seconds=sum(e.get("total_s", 0.0) for e in events if e["event"] == "rejoined"),
        pls=next((e["pls"] for e in reversed(events) if "pls" in e), 0.0),
    )


def _what(event: Event) -> str | None:
    """What an event wrote, None if nothing."""
    if event["event"] == "compacted":
        return "compaction"
    if event["event"] != "save_committed":
        return None
    return "priority" if event.get("consistency") == "mixed" else str(event.get("kind"))


def rows(found: Summary) -> list[tuple[str, str]]:
    """The summary as (name, value) texts."""
    kinds = ", ".join(f"{count} {what}" for what, count in found.saves.items() if what != "compaction") or "none"
    share = found.stall / found.seconds if found.seconds else 0.0
    listed = [
        ("run", ", ".join(found.run_ids) or "unknown"),
        ("began", datetime.fromtimestamp(found.start, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")),
        ("lasted", f"{found.seconds:.1f} s, to step {found.step}, {found.samples} samples"),
        ("saves", f"{kinds}; {found.skipped} skipped, {found.failed} failed"),
        ("written", ", ".join(f"{size(bytes_)} {what}" for what, bytes_ in found.written.items()) or "nothing"),
        ("training stood still", f"{found.stall:.3f} s for saves, {share:.3%} of the time"),
        ("recoveries", f"{found.recoveries}, {_recovery_seconds(found)}"),
        ("PLS", f"{found.pls:.4g}"),
    ]
    if "compaction" in found.saves:
        listed.insert(5, ("compactions", str(found.saves["compaction"])))
    return listed


def _recovery_seconds(found: Summary) -> str:
    restored = f"{found.restore_seconds:.2f} s to bring rows back"
    if not found.replaced_seconds:
        return restored
    return f"{found.replaced_seconds:.2f} s from a process's end until all trained again, {restored}"


def size(count: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def timeline(events: Sequence[Event], found: Summary) -> Figure:
    """Bytes of each save, how long each stopped training, and the PLS, over the time of the run."""
    unit, length = next(((u, n) for u, n in (("h", 3600.0), ("min", 60.0)) if found.seconds > 2 * n), ("s", 1.0))
    figure = new_figure(10, 8)
    panels: list[Axes] = list(figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 2)))

    def at(event: Event) -> float:
        return (event["time"] - found.start) / length

    _draw_bytes(panels[0], [(at(e), e) for e in events])
    _draw_stalls(panels[1], [(at(e), e) for e in events])
    _draw_pls(panels[2], [(at(e), e) for e in events])
    for panel in panels:
        for event in events:
            if event["event"] == "recovery":
                panel.axvline(at(event), color=_BAD, lw=1, ls="--", zorder=0)
            elif event["event"] == "rejoined":
                panel.axvspan(at(event) - event["total_s"] / length, at(event), color=_BAD, alpha=0.15, lw=0, zorder=0)
        panel.grid(alpha=0.3)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel(f"time since the run began ({unit})")
    panels[0].set_title(f"run {', '.join(found.run_ids) or 'unknown'}: saves, stalls and lost samples", loc="left")
    return figure


def _draw_bytes(axes: Axes, events: Sequence[tuple[float, Event]]) -> None:
    for what, color in _COLORS.items():
        mine = [(x, e["bytes"] / 1e6) for x, e in events if _what(e) == what]
        if mine:
            axes.vlines([x for x, _ in mine], 0, [y for _, y in mine], color=color, lw=1, alpha=0.6)
            axes.plot(*zip(*mine, strict=True), "o", color=color, ms=5, label=what)
    _mark(axes, events, "save_failed", "x", "failed save")
    _mark(axes, events, "save_skipped", "|", "skipped save")
    axes.plot([], [], color=_BAD, ls="--", lw=1, label="recovery")
    axes.set_ylabel("written (MB)")
    axes.set_ylim(bottom=0)
    axes.margins(y=0.12)
    axes.legend(ncols=4, fontsize=9, frameon=False, loc="lower left", bbox_to_anchor=(0.45, 1.0))


def _mark(axes: Axes, events: Sequence[tuple[float, Event]], event: str, marker: str, label: str) -> None:
    places = [x for x, e in events if e["event"] == event]
    if places:
        axes.plot(places, [0.0] * len(places), marker, color=_BAD, ms=9, label=label, clip_on=False, ls="")


def _draw_stalls(axes: Axes, events: Sequence[tuple[float, Event]]) -> None:
    for x, event in events:
        if event["event"] == "save_started":
            what = "priority" if event.get("consistency") == "mixed" else str(event.get("kind"))
            axes.plot(x, 1e3 * event["stall_s"], "o", color=_COLORS.get(what, "grey"), ms=5)
    axes.set_ylabel("training waited\nfor a save (ms)")
    axes.set_ylim(bottom=0)


def _draw_pls(axes: Axes, events: Sequence[tuple[float, Event]]) -> None:
    known = [(x, e["pls"]) for x, e in events if "pls" in e]
    steps = [(events[0][0], 0.0), *known, (events[-1][0], known[-1][1] if known else 0.0)]
    axes.step(*zip(*steps, strict=True), where="post", color=_BAD)
    axes.set_ylabel("PLS")
    axes.set_ylim(bottom=0)


def page(root: str, events: Sequence[Event], found: Summary, figure: Figure) -> str:
    """One HTML page with the figure inside."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    data = base64.b64encode(picture.getvalue()).decode()
    summary = "".join(f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in rows(found))
    trouble = [event for event in events if event["event"] in _TROUBLE]
    listed = "".join(
        f"<tr><td class=n>{event['time'] - found.start:.1f}</td><td>{_text(event['event'])}</td>"
        f"<td>{_text(_detail(event))}</td></tr>"
        for event in trouble
    )
    heading = "<tr><th class=n>s</th><th>event</th><th></th></tr>"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>lightning-cpr: {_text(root)}</title>"
        f"<style>{_STYLE}</style><h1>{_text(root)}</h1><table>{summary}</table>"
        f'<img alt="saves, stalls and PLS over time" src="data:image/png;base64,{data}">'
        f"<h2>Failures and what was done</h2>"
        + (f"<table>{heading}{listed}</table>" if trouble else "<p>None.</p>")
        + "</html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _detail(event: Event) -> str:
    hidden = ("time", "rank", "event", "ledger")
    return ", ".join(f"{name} {value}" for name, value in event.items() if name not in hidden)
