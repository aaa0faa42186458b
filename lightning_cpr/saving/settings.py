"""CPRCallback's arguments: checked, and what they mean for a job."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning_cpr.errors import ConfigError
from lightning_cpr.job.job import Job
from lightning_cpr.policy import check
from lightning_cpr.policy.baseline import POLICIES, BaselinePolicy
from lightning_cpr.policy.cost import Costs, Parity, Recovery
from lightning_cpr.policy.due import Schedule
from lightning_cpr.policy.priority import VARIANTS, PriorityConfig, Variant, choose_variant, select_tables
from lightning_cpr.policy.setting import Mtbf, Setting
from lightning_cpr.recovery.parity.config import ParityConfig
from lightning_cpr.saving.controller import Bits, Fixed, RecoveryChoice
from lightning_cpr.saving.saver import BITS
from lightning_cpr.spec import sharded_elements
from lightning_cpr.store.retention import Rules
from lightning_cpr.tables.tracker import RowTracker
from lightning_cpr.units import seconds

Resume = Literal["auto", "reshard", "never"]

EXPECTED_PARITY = Parity(upkeep=0.01, recovery=Recovery(load=5.0, restart=0.0), uncovered=0.1)
"""What the planner takes parity to cost and to cover until it is measured."""


@dataclass(frozen=True)
class Settings:
    """The arguments of `CPRCallback`, which describes them.

    Raises:
        ConfigError: one is out of range; names it and what is allowed.
    """

    root: str
    save_every_n_steps: int | None
    save_interval: float | str | None
    target_pls: float
    mtbf: float | str | None
    max_pls: float | None
    recovery: RecoveryChoice
    incremental: BaselinePolicy
    bits: Bits | None
    priority: Variant | Literal["auto"]
    ratio: float
    priority_tables: Sequence[str] | None
    exact_close: bool
    keep_last: int | None
    resume: Resume
    storage_options: Mapping[str, Any] | None
    timeout_s: float
    max_failed_saves: int
    parity: ParityConfig | None

    def __post_init__(self) -> None:
        check.one_of("recovery", self.recovery, get_args(RecoveryChoice))
        check.one_of("incremental", self.incremental, POLICIES)
        check.one_of("priority", self.priority, (*VARIANTS, "auto"))
        check.one_of("resume", self.resume, get_args(Resume))
        if self.save_every_n_steps is not None and self.save_interval is not None:
            raise ConfigError(
                f"save_every_n_steps={self.save_every_n_steps}, save_interval={self.save_interval!r}: set one of them,"
                " or none for the planner's"
            )
        if self.save_every_n_steps is not None:
            check.count("save_every_n_steps", self.save_every_n_steps)
        if self.save_interval is not None:
            check.positive("save_interval", seconds(self.save_interval))
        check.share("target_pls", self.target_pls)
        check.share("ratio", self.ratio)
        if self.bits not in (*BITS, "auto"):
            raise ConfigError(f"bits={self.bits!r}: must be one of {', '.join(map(repr, BITS))}, 'auto'")
        if self.max_pls is not None:
            check.share("max_pls", self.max_pls)
            if self.max_pls < self.target_pls:
                raise ConfigError(f"max_pls={self.max_pls}: must be at least target_pls={self.target_pls}")
        if not (self.timeout_s > 0 and math.isfinite(self.timeout_s)) or self.max_failed_saves < 1:
            raise ConfigError(
                f"timeout_s={self.timeout_s}, max_failed_saves={self.max_failed_saves}: above 0, and 1 or more"
            )
        if self.parity is not None and not isinstance(self.parity, ParityConfig):
            raise ConfigError(f"parity={self.parity!r}: must be a ParityConfig, or None for no parity")
        _ = self.known_mtbf, self.keep

    @staticmethod
    def root_of(root: str | os.PathLike[str]) -> str:
        """A root as it is kept: without a slash at its end.

        Raises:
            ConfigError: it is no path.
        """
        if not isinstance(root, str | os.PathLike) or not os.fspath(root):
            raise ConfigError(f"root={root!r}: a folder or an fsspec URL is needed")
        return os.fspath(root).rstrip("/") or "/"

    @property
    def place(self) -> str:
        """The root in one spelling, to compare roots by."""
        return self.root if "://" in self.root else os.path.realpath(self.root)

    @property
    def planned(self) -> bool:
        """Whether the planner sets the interval."""
        return self.save_every_n_steps is None and self.save_interval is None

    @property
    def variant(self) -> Variant | Literal["auto"]:
        """The row priority; ``auto`` is left to memory, where the planner sets the interval."""
        return "vanilla" if self.priority == "auto" and not self.planned else self.priority

    @property
    def fixed(self) -> Fixed:
        """What the planner may not choose."""
        schedule = None
        if not self.planned:
            interval = None if self.save_interval is None else seconds(self.save_interval)
            schedule = Schedule(self.save_every_n_steps, interval, self._ratio)
        return Fixed(schedule, self.recovery, self.bits, self.max_pls)

    @property
    def known_mtbf(self) -> Mtbf:
        return Mtbf() if self.mtbf is None else Mtbf(seconds(self.mtbf), None)

    @property
    def keep(self) -> Rules | None:
        return None if self.keep_last is None else Rules(last=self.keep_last)

    @property
    def _ratio(self) -> float:
        return 1.0 if self.variant == "vanilla" else self.ratio

    def setting(self, job: Job) -> Setting:
        """What the planner is told of a job."""
        nodes = job.trainer.num_nodes
        each = job.world_size // nodes
        hosts = tuple(tuple(range(n * each, (n + 1) * each)) for n in range(nodes)) if nodes > 1 else ()
        return Setting(
            owners=tuple(float(sharded_elements(job.plan, rank)) for rank in range(job.world_size)),
            target_pls=self.target_pls,
            hosts=hosts,
            mtbf=self.known_mtbf,
            costs=Costs() if self.parity is None else Costs(parity=EXPECTED_PARITY),
            max_pls=self.max_pls,
            ratio=self._ratio,
            row_bytes=tuple(
                (spec.rows, spec.cols * spec.dtype.itemsize) for spec in job.specs.values() if spec.row_sparse
            ),
        )

    def tracker(self, job: Job, count: bool) -> RowTracker:
        """What watches this rank's rows. count: also how often each was updated.

        Raises:
            ConfigError: ``priority_tables`` names a table that does not exist.
        """
        tables = select_tables([spec for spec in job.specs.values() if spec.row_sparse])
        if self.priority_tables is not None:
            names = {fqn.rpartition(".")[2]: fqn for fqn in job.specs}
            tables = select_tables(list(job.specs.values()), names=[names.get(n, n) for n in self.priority_tables])
        config = None
        if self.variant != "vanilla":
            variant = choose_variant(self.setting(job).row_bytes) if self.variant == "auto" else self.variant
            config = PriorityConfig(variant, self.ratio)
        return RowTracker(job.module, job.owned, job.specs, priority=config, tables=tables, count=count)
