"""What the planner is told about a job before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_cpr.errors import ConfigError
from lightning_cpr.policy import check
from lightning_cpr.policy.cost import Costs


@dataclass(frozen=True)
class Mtbf:
    """Mean useful time between failures of the whole job. ``strength`` None: given, not estimated.

    Else the rate has a gamma prior of mean ``1 / seconds``, worth ``strength`` failures seen before this job.
    """

    seconds: float = 20 * 3600.0
    strength: float | None = 2.0

    def __post_init__(self) -> None:
        check.positive("mtbf", self.seconds)
        if self.strength is not None:
            check.positive("strength", self.strength)

    def estimate(self, exposure: float, failures: int) -> float:
        """1 / posterior mean of the rate after ``failures`` in ``exposure`` useful seconds."""
        if self.strength is None:
            return self.seconds
        return (self.strength * self.seconds + exposure) / (self.strength + failures)


@dataclass(frozen=True)
class Setting:
    """What is fixed for a job.

    target_pls: expected PLS of the whole run, in (0, 1]. owners: sharded elements (or shares) of each owner. hosts:
    the owners of each host, which fail together; empty: each owner by itself. host_share: share of the failures that
    take a whole host, the others take one owner. total_samples, total_seconds: of the run; both None for a stream
    without an end. max_pls: above it a failure is recovered in full; default twice the target. ratio: share of the
    rows, and of the interval, of a priority save. min_interval: shortest time between two saves. row_bytes: by
    prioritised table, rows and bytes a row.
    """

    owners: tuple[float, ...]
    target_pls: float = 0.1
    hosts: tuple[tuple[int, ...], ...] = ()
    host_share: float = 1.0
    mtbf: Mtbf = field(default_factory=Mtbf)
    costs: Costs = field(default_factory=Costs)
    total_samples: int | None = None
    total_seconds: float | None = None
    max_pls: float | None = None
    ratio: float = 0.125
    min_interval: float = 30.0
    row_bytes: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        check.share("target_pls", self.target_pls)
        check.share("ratio", self.ratio)
        check.share("host_share", self.host_share, zero=True)
        check.positive("min_interval", self.min_interval)
        if not self.owners:
            raise ConfigError("owners is empty: name the sharded elements of at least one owner")
        for elements in self.owners:
            check.not_negative("owners", elements)
        named = sorted(owner for host in self.hosts for owner in host)
        if self.hosts and (named != list(range(len(self.owners))) or not all(self.hosts)):
            raise ConfigError(f"hosts={self.hosts}: must name each owner 0..{len(self.owners) - 1} once, no host empty")
        for name in ("total_samples", "total_seconds"):
            if getattr(self, name) is not None:
                check.positive(name, getattr(self, name))
        if self.max_pls is not None:
            check.share("max_pls", self.max_pls)
            if self.max_pls < self.target_pls:
                raise ConfigError(f"max_pls={self.max_pls}: must be at least target_pls={self.target_pls}")

    @property
    def pls_limit(self) -> float:
        return self.max_pls if self.max_pls is not None else min(1.0, 2 * self.target_pls)

    def share_of(self, owners: Sequence[int]) -> float:
        """``sum of w_o`` over these owners."""
        total = sum(self.owners)
        return sum(self.owners[o] for o in set(owners)) / total if total else 0.0

    def expected_share(self) -> float:
        """``E[sum of w per failure]``: any host, or any owner, is as likely to fail as another."""
        if not any(self.owners):
            return 0.0
        one = 1 / len(self.owners)
        return self.host_share / len(self.hosts) + (1 - self.host_share) * one if self.hosts else one
