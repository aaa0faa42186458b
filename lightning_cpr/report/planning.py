"""``lightning-cpr plan`` and ``lightning-cpr simulate``: the tables, figures and JSON of planner and simulator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_cpr.policy import check
from lightning_cpr.policy.cost import Costs, Parity, Recovery, overhead_full, overhead_partial
from lightning_cpr.policy.planner import Plan, PlannerState, plan
from lightning_cpr.policy.setting import Mtbf, Setting
from lightning_cpr.report.figure import new_figure, save_figure
from lightning_cpr.simulate import Outcome, simulate
from lightning_cpr.simulate.montecarlo import PARTS
from lightning_cpr.simulate.scenario import load_scenario
from lightning_cpr.units import human, seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {"save": "#4c72b0", "load": "#dd8452", "lost": "#c44e52", "restart": "#8172b3", "upkeep": "#937860"}


def plan_command(
    target_pls: float = 0.1,
    mtbf: str = "28h",
    total: str | None = None,
    owners: int = 8,
    owners_per_host: int = 1,
    save: str = "10s",
    load: str = "1min",
    restart: str = "4min",
    partial_load: str | None = None,
    partial_restart: str | None = None,
    parity_upkeep: float | None = None,
    plot: str | None = None,
    json_out: str | None = None,
) -> Plan:
    """Compare full and partial recovery for a job and print the table.

    Args:
        target_pls: Share of the samples' updates that the run may be expected to lose, in (0, 1].
        mtbf: Mean time between failures of the whole job.
        total: Useful training time of the run; left out: a stream without an end.
        owners: Processes that hold table shards.
        owners_per_host: How many of them fail together.
        save: Time that training stands still for one full save.
        load: Time to load a version in full recovery.
        restart: Time to reschedule and restart in full recovery.
        partial_load: The same in partial recovery; left out: as in full.
        partial_restart: The same in partial recovery; left out: as in full.
        parity_upkeep: Share of useful time that parity in memory costs; compared where given.
        plot: Where to write the overhead curves, as PNG, SVG or PDF.
        json_out: Where to write the plan as JSON.
    """
    check.positive("owners", owners)
    check.positive("owners_per_host", owners_per_host)
    full = Recovery(seconds(load), seconds(restart))
    partial = Recovery(seconds(partial_load or load), seconds(partial_restart or restart))
    hosts = tuple(tuple(range(o, min(o + owners_per_host, owners))) for o in range(0, owners, owners_per_host))
    parity = Parity(parity_upkeep, partial) if parity_upkeep is not None else None
    setting = Setting(
        owners=(1.0,) * owners,
        target_pls=target_pls,
        hosts=hosts,
        mtbf=Mtbf(seconds(mtbf), None),
        costs=Costs(seconds(save), full, partial, parity),
        total_seconds=seconds(total) if total is not None else None,
    )
    state = PlannerState(setting)
    found = plan(state)
    console = Console()
    console.print(plan_table(found))
    for reason in found.reasons:
        console.print(f"  {reason}", highlight=False)
    if json_out is not None:
        _write(json_out, json.dumps(found.to_json(), indent=1))
    if plot is not None:
        save_figure(plan_figure(state, found), plot)
    for written in filter(None, (json_out, plot)):
        _say_written(console, written)
    return found


def simulate_command(
    config: str, out: str = "simulation", runs: int | None = None, figure: bool = True
) -> list[Outcome]:
    """Simulate the jobs of a scenario, print the table, and write outcomes.json and figure.png.

    Args:
        config: The scenario, a YAML file (see recipes/simulate).
        out: Folder to write to.
        runs: Runs to simulate, in place of the scenario's.
        figure: Whether to draw the figure; needs matplotlib.
    """
    scenario = load_scenario(config)
    if runs is not None:
        scenario = replace(scenario, runs=runs)
    if figure:
        new_figure(1, 1)  # raises before the work is done
    outcomes = simulate(scenario)
    for case in dict.fromkeys(o.case for o in outcomes):
        title = f"{scenario.title}, {case}" if case else scenario.title
        Console().print(outcome_table([o for o in outcomes if o.case == case], title))
    _write(f"{out}/outcomes.json", json.dumps([o.to_json() for o in outcomes], indent=1))
    if figure:
        save_figure(outcome_figure(outcomes, scenario.title), f"{out}/figure.png")
    _say_written(Console(), out)
    return outcomes


def plan_table(found: Plan) -> Table:
    """The options side by side; the chosen one is marked."""
    table = _table("Recovery plan: overhead in % of useful time", ("", "recovery"))
    for column in ("save\nevery", "over-\nhead", "saves", "load", "lost", "restart", "PLS"):
        table.add_column(column, justify="right", no_wrap=True)
    for o in found.options:
        parts = [_percent(getattr(o.overhead, name)) for name in ("save", "load", "lost", "restart")]
        pls = f"{o.pls:.3g}" if o.allowed else f"{o.pls:.3g}, too high"
        mark = "->" if o.mode == found.mode else ""
        table.add_row(mark, o.mode, human(o.interval), _percent(o.overhead.total), *parts, pls)
    return table


def outcome_table(outcomes: Sequence[Outcome], title: str) -> Table:
    """Simulated beside closed form, PLS beside the share of the row updates that are really gone."""
    table = _table(f"{title}: overhead in % of useful time", ("strategy",))
    table.caption = "~: outside of where the closed form holds to 2 %"
    sweep = len({o.owners for o in outcomes}) > 1
    heads = ["save\nevery", "over-\nhead", "closed\nform", "worst\n5 %", "PLS", "closed\nform", "lost\nupdates"]
    for head in [*(["owners"] if sweep else []), *heads]:
        table.add_column(head, justify="right", no_wrap=True)
    for o in outcomes:
        near = "" if o.holds else "~"
        pls = [f"{o.pls:.4f}", f"{near}{o.closed_pls:.4f}", f"{o.lost_updates:.4f}"] if o.mode != "full" else ["-"] * 3
        overhead = [_percent(o.overhead.total), near + _percent(o.closed.total), _percent(o.worst)]
        table.add_row(o.strategy, *([str(o.owners)] if sweep else []), human(o.interval), *overhead, *pls)
    return table


def plan_figure(state: PlannerState, found: Plan) -> Figure:
    """Overhead against the save interval, with the interval of each mode marked."""
    costs, mtbf, total = state.costs, state.mtbf, state.total_seconds
    full, partial = found.option("full"), found.option("partial")
    low = min(full.interval, partial.interval) / 8
    high = total if total is not None else 8 * max(full.interval, partial.interval)
    intervals = np.geomspace(low, max(high, 2 * low), 200)
    figure = new_figure(7, 4.5)
    axes = figure.add_subplot()
    curves = {
        "full": [overhead_full(costs, float(x), mtbf, total).total for x in intervals],
        "partial": [overhead_partial(costs, float(x), mtbf).total for x in intervals],
    }
    # The full curve is open above its lowest point, the partial one falls all the way: their labels meet no line there.
    for option, color, offset in ((full, "#c44e52", (0, 12)), (partial, "#4c72b0", (-6, -26))):
        cost = 100 * option.overhead.total
        axes.plot(intervals / 3600, 100 * np.array(curves[option.mode]), color=color, label=f"{option.mode} recovery")
        axes.plot(option.interval / 3600, cost, "o", color=color, ms=8)
        axes.annotate(
            f"{human(option.interval)}, {cost:.3g} %" + (f"\nPLS {option.pls:.3g}" if option.pls else ""),
            (option.interval / 3600, cost),
            textcoords="offset points",
            xytext=offset,
            ha="center" if option is full else "right",
            color=color,
        )
    axes.set(xscale="log", yscale="log", xlabel="save interval (h)", ylabel="overhead (% of useful time)")
    axes.set_title(f"MTBF {human(mtbf)}, save {human(costs.save)}: {found.mode} recovery is chosen")
    axes.margins(y=0.15)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    return figure


def outcome_figure(outcomes: Sequence[Outcome], title: str) -> Figure:
    """Overhead against the number of owners, a panel a case; for one number of owners the four parts as bars."""
    cases = list(dict.fromkeys(o.case for o in outcomes))
    sweep = len({o.owners for o in outcomes}) > 1
    figure = new_figure(6 * len(cases) if sweep else 7 * len(cases), 4.5)
    figure.suptitle(title)
    shared: Axes | None = None
    for index, case in enumerate(cases):
        axes = figure.add_subplot(1, len(cases), index + 1, sharey=shared)
        shared = axes
        (_draw_sweep if sweep else _draw_parts)(axes, [o for o in outcomes if o.case == case])
        axes.set_title(case)
    return figure


def _draw_sweep(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    for index, name in enumerate(dict.fromkeys(o.strategy for o in outcomes)):
        line = [o for o in outcomes if o.strategy == name]
        owners, color = [o.owners for o in line], f"C{index}"
        axes.plot(owners, [100 * o.overhead.total for o in line], "o", color=color, label=f"{name}, simulated")
        axes.plot(owners, [100 * o.closed.total for o in line], "-", color=color, label=f"{name}, closed form")
    axes.set(xscale="log", yscale="log", xlabel="owners", ylabel="overhead (% of useful time)")
    ticks = sorted({o.owners for o in outcomes})
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)


def _draw_parts(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    names = [o.strategy for o in outcomes]
    bottom = np.zeros(len(outcomes))
    for part in PARTS:
        height = np.array([100 * getattr(o.overhead, part) for o in outcomes])
        if height.any():
            axes.bar(names, height, bottom=bottom, label=part, color=_COLORS[part])
        bottom += height
    for x, o in enumerate(outcomes):
        pls = f"\nPLS {o.pls:.3f}" if o.pls else ""
        axes.annotate(
            f"{bottom[x]:.3g} %{pls}", (x, bottom[x]), (0, 3), textcoords="offset points", ha="center", va="bottom"
        )
    axes.set_ylabel("overhead (% of useful time)")
    axes.set_ylim(0, max(1.2 * bottom.max(), axes.get_ylim()[1]))  # the panels share it
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", labelrotation=20 if len(names) > 4 else 0)
    axes.grid(alpha=0.3, axis="y")
    axes.legend()


def _say_written(console: Console, where: str) -> None:
    console.print(f"written to {where}", markup=False, highlight=False, soft_wrap=True)


def _percent(share: float) -> str:
    return f"{100 * share:.3g}"


def _table(title: str, left: Sequence[str]) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in left:
        table.add_column(column, no_wrap=True)
    return table


def _write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text + "\n")
