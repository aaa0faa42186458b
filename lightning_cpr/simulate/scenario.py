"""What the job simulator is asked: a frozen `Scenario`, read from YAML. Durations as ``28h``, sizes as ``4TB``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import yaml

from lightning_cpr.errors import ConfigError
from lightning_cpr.policy import check
from lightning_cpr.policy.baseline import POLICIES
from lightning_cpr.policy.priority import VARIANTS
from lightning_cpr.units import seconds, size

Seconds = Annotated[float, seconds]
Bytes = Annotated[float, size]

FAILURE_KINDS = ("exponential", "gamma", "weibull", "trace")
CLOCKS = ("useful", "wall")
MODES = ("full", "partial", "parity")
# What may differ between the jobs of a population.
SPREADS = ("total", "mtbf", "save", "load", "restart")


@dataclass(frozen=True)
class Job:
    """total: useful training time. owners: processes that hold shards, ``owners_per_host`` to a host. rows, zipf: the
    rows of all tables, and how skewed their lookups are (rank ** -zipf). spread: for a population of jobs, by
    quantity the sigma of a log-normal factor with median 1; every run is then a job of its own.
    """

    total: Seconds
    owners: int = 8
    owners_per_host: int = 1
    model: Bytes | None = None
    rows: int = 100_000_000
    zipf: float = 1.05
    spread: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("total", "owners", "owners_per_host", "rows"):
            check.positive(name, getattr(self, name))
        check.not_negative("zipf", self.zipf)
        if self.model is not None:
            check.positive("model", self.model)
        for name, sigma in self.spread.items():
            check.one_of("spread", name, SPREADS)
            check.not_negative(f"spread.{name}", sigma)


@dataclass(frozen=True)
class Failures:
    """When owners die. mtbf: mean time between the failures of a job of ``reference_owners`` owners, inversely
    proportional to their number; None: `mtbf` whatever the size. shape: of gamma and Weibull. clock: ``useful``:
    failures come in first-time training only, as the closed forms have it; ``wall``: also while work is done again,
    saved or loaded. host_share: share of the failures that take a whole host. trace: a file with one gap between
    failures a line (``3.5h``; ``#`` comments), scaled to the mean `mtbf`; each run starts at a random line and goes
    round.
    """

    mtbf: Seconds
    kind: str = "exponential"
    shape: float = 1.0
    reference_owners: int | None = None
    clock: str = "useful"
    host_share: float = 0.0
    trace: str | None = None

    def __post_init__(self) -> None:
        check.positive("mtbf", self.mtbf)
        check.positive("shape", self.shape)
        check.one_of("kind", self.kind, FAILURE_KINDS)
        check.one_of("clock", self.clock, CLOCKS)
        check.share("host_share", self.host_share, zero=True)
        if self.reference_owners is not None:
            check.positive("reference_owners", self.reference_owners)
        if (self.kind == "trace") != (self.trace is not None):
            raise ConfigError(
                f"kind={self.kind!r}, trace={self.trace!r}: kind must be 'trace' exactly where a file is named"
            )

    def of(self, owners: int) -> float:
        """Mean time between the failures of a job of this many owners."""
        return self.mtbf * (self.reference_owners or owners) / owners


@dataclass(frozen=True)
class SimulatedCosts:
    """Seconds of one full raw save, and of one failure, at ``reference_owners`` owners. ``save`` and the two loads
    may be left out where the model's size and the bandwidths are given: the store's for all together, the node's for
    one owner. Partial costs scale as ``(reference_owners / owners) ** exponent``.
    """

    save: Seconds | None = None
    load: Seconds | None = None
    partial_load: Seconds | None = None
    restart: Seconds = 240.0
    partial_restart: Seconds | None = None
    store_bandwidth: Bytes | None = None
    node_bandwidth: Bytes | None = None
    load_exponent: float = 0.0
    restart_exponent: float = 0.0

    def __post_init__(self) -> None:
        for f in fields(self):
            if (value := getattr(self, f.name)) is not None:
                (check.positive if "bandwidth" in f.name else check.not_negative)(f.name, value)


@dataclass(frozen=True)
class Strategy:
    """One way to run the job. interval: ``T_save``, None: the planner's. target_pls: for the partial modes.

    priority, ratio: row priorities; hot_share: share of the row updates that fall on rows of every priority save,
    None: from ``zipf``. baseline: full or incremental saves; touched: share of the rows changed in 30 min, growing
    with time to the power touched_exponent. compression: bytes stored a raw byte (8 bit: 0.28). stall: saves stop
    training for this long and go on in the background. upkeep, rebuild, rebuild_restart, uncovered: parity
    (`policy.cost.Parity`).
    """

    name: str
    mode: str = "full"
    interval: Seconds | None = None
    target_pls: float = 0.1
    priority: str = "vanilla"
    ratio: float = 0.125
    hot_share: float | None = None
    baseline: str = "full"
    touched: float = 0.26
    touched_exponent: float = 0.3
    compression: float = 1.0
    stall: Seconds | None = None
    upkeep: float = 0.0
    rebuild: Seconds = 0.0
    rebuild_restart: Seconds = 0.0
    uncovered: float = 0.0

    def __post_init__(self) -> None:
        check.one_of("mode", self.mode, MODES)
        check.one_of("priority", self.priority, VARIANTS)
        check.one_of("baseline", self.baseline, POLICIES)
        for name in ("target_pls", "ratio", "touched", "compression"):
            check.share(name, getattr(self, name))
        check.share("uncovered", self.uncovered, zero=True)
        for name in ("upkeep", "rebuild", "rebuild_restart", "touched_exponent"):
            check.not_negative(name, getattr(self, name))
        if self.interval is not None:
            check.positive("interval", self.interval)
        if self.stall is not None:
            check.not_negative("stall", self.stall)
        if self.hot_share is not None:
            check.share("hot_share", self.hot_share, zero=True)


@dataclass(frozen=True)
class Scenario:
    """owners: numbers of owners to sweep, empty: that of the job. cases: by name, values that replace those of
    ``costs``.
    """

    job: Job
    failures: Failures
    costs: SimulatedCosts
    strategies: tuple[Strategy, ...]
    title: str = "Checkpoint overhead"
    runs: int = 1000
    seed: int = 0
    owners: tuple[int, ...] = ()
    cases: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check.positive("runs", self.runs)
        for owners in self.owners:
            check.positive("owners", owners)
        names = [s.name for s in self.strategies]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"strategies {names}: must be at least one, each with a name of its own")
        for _, _, costs in self.points():
            known = self.job.model is not None and costs.store_bandwidth is not None
            if not known and (costs.save is None or costs.load is None):
                raise ConfigError("costs: must give save and load, or store_bandwidth and the job's model size")

    def points(self) -> list[tuple[str, Job, SimulatedCosts]]:
        """Each case with each number of owners."""
        cases = {name: replace(self.costs, **_parse_fields(SimulatedCosts, c, name)) for name, c in self.cases.items()}
        sizes = self.owners or (self.job.owners,)
        return [
            (name, replace(self.job, owners=n), costs)
            for name, costs in (cases or {"": self.costs}).items()
            for n in sizes
        ]


def load_scenario(path: str | Path) -> Scenario:
    """Reads a YAML file; a relative trace lies beside it. Raises ConfigError naming the file and the key that is
    wrong.
    """
    try:
        data = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: not a readable YAML file: {error}") from error
    try:
        scenario = _parse(Scenario, data, "scenario")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    trace = scenario.failures.trace
    if trace is not None:
        located = str(Path(path).parent / trace)
        scenario = replace(scenario, failures=replace(scenario.failures, trace=located))
    return scenario


def load_trace(path: str) -> list[float]:
    """The gaps between failures of a trace file, seconds. Raises ConfigError naming the line that is wrong."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"trace {path}: cannot be read: {error}") from error
    gaps = []
    for number, line in enumerate(lines, 1):
        if text := line.split("#")[0].strip():
            gaps.append(seconds(text))
            if gaps[-1] <= 0:
                raise ConfigError(f"trace {path} line {number}: {text!r} must be above 0")
    if not gaps:
        raise ConfigError(f"trace {path}: holds no gap; one a line is needed")
    return gaps


def _parse(hint: Any, value: Any, where: str) -> Any:
    if is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}={value!r}: must be a mapping of {', '.join(f.name for f in fields(hint))}")
        try:
            return hint(**_parse_fields(hint, value, where))
        except TypeError as error:
            raise ConfigError(f"{where}: {error}") from error
    if get_origin(hint) is Annotated:
        _expect(
            isinstance(value, int | float | str) and not isinstance(value, bool), where, value, "a number with a unit"
        )
        return get_args(hint)[1](value)
    if get_origin(hint) is tuple:
        _expect(isinstance(value, list), where, value, "a list")
        return tuple(_parse(get_args(hint)[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if get_origin(hint) is Mapping or hint is Any:
        _expect(hint is Any or isinstance(value, Mapping), where, value, "a mapping")
        return value
    options = get_args(hint)
    if type(None) in options:
        return None if value is None else _parse(next(o for o in options if o is not type(None)), value, where)
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if hint is float:
        _expect(number, where, value, "a number")
        return float(value)
    if hint is int:
        _expect(number and value == int(value), where, value, "a whole number")
        return int(value)
    _expect(isinstance(value, hint), where, value, hint.__name__)
    return value


def _parse_fields(cls: type, data: Mapping[str, Any], where: str) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    for key in data:
        check.one_of(f"{where} key", key, tuple(hints))
    return {key: _parse(hints[key], value, f"{where}.{key}") for key, value in data.items()}


def _expect(good: bool, where: str, value: Any, wanted: str) -> None:
    if not good:
        raise ConfigError(f"{where}={value!r}: must be {wanted}")
