"""One emulated job of the CPR experiment: real training, failed owners overwritten with their last saved rows.

As in the paper (section 5): the job trains for real in one process; its tables are cut into 8 emulated owners by rows;
at a failure the rows of the failed owners, weights and optimizer state, are overwritten with what was last saved of
them. Time is accounted with given costs. A full recovery loses no update, so its AUC is the undisturbed run's.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics.functional.classification import binary_auroc

from lightning_cpr.policy.cost import (
    Costs,
    Recovery,
    interval_full,
    interval_partial,
    overhead_full,
    overhead_partial,
)
from lightning_cpr.policy.ledger import Ledger, charge
from lightning_cpr.policy.priority import PriorityConfig, RowPriority, make_priority, select_tables
from lightning_cpr.spec import Shard, ShardSpec
from lightning_cpr.tables.lookup import register_lookup_hook
from lightning_cpr.tables.sharding import World, build_plan, shard
from lightning_cpr.tables.shards import local_shards, table_specs
from recipes.batch import Batch
from recipes.dlrm import DLRMModule

OWNERS = 8
RATIO = 0.125


@dataclass(frozen=True)
class Clock:
    """The published setting, hours: papers that it reproduces state full 8.2-8.5 %, partial about 0.5 %."""

    total: float = 56.0
    mtbf: float = 28.0
    save: float = 5.6 / 60
    load_and_restart: float = 5.0 / 60


@dataclass(frozen=True)
class Case:
    """strategy: none, full, or partial with vanilla, scar, mfu, ssu. lost: owners that fail together."""

    strategy: str
    target_pls: float
    lost: int
    seed: int


@dataclass(frozen=True)
class Outcome:
    """seconds: it took, of a case with failures from the first one on."""

    auc: float
    pls: float
    overhead: float
    seconds: float


@dataclass(frozen=True)
class Failure:
    """After this share of the run, these owners."""

    at: float
    owners: tuple[int, ...]


def failures(seed: int, lost: int, clock: Clock) -> list[Failure]:
    """The failures of a seed: as many as the MTBF says on average, at uniform times, the same for every strategy."""
    generator = torch.Generator().manual_seed(1000 + seed)
    count = round(clock.total / clock.mtbf)
    times = sorted(torch.rand(count, generator=generator).tolist())
    orders = [torch.randperm(OWNERS, generator=generator).tolist() for _ in range(count)]
    return [Failure(at, tuple(sorted(order[:lost]))) for at, order in zip(times, orders, strict=True)]


def strikes(seed: int, lost: int, steps: int, clock: Clock) -> dict[int, Failure]:
    """The failures of a seed by the step after which they strike."""
    return {max(1, round(f.at * steps)): f for f in failures(seed, lost, clock)}


def save_interval(case: Case, clock: Clock) -> float:
    """Hours between full cycles of saves, at most the whole run."""
    if case.strategy == "full":
        return interval_full(clock.save, clock.mtbf)
    return min(clock.total, interval_partial(case.target_pls, clock.mtbf, case.lost / OWNERS))


def overhead(case: Case, clock: Clock) -> float:
    """Share of useful time that saving and the failures of the seed cost."""
    if case.strategy == "none":
        return 0.0
    interval = save_interval(case, clock)
    struck = failures(case.seed, case.lost, clock)
    cost = clock.save * clock.total / interval + clock.load_and_restart * len(struck)
    if case.strategy == "full":
        cost += sum((failure.at * clock.total) % interval for failure in struck)
    return cost / clock.total


def expected_overhead(case: Case, clock: Clock) -> float:
    """`overhead` by the closed forms, for failures at any time."""
    costs = Costs(clock.save, *(Recovery(clock.load_and_restart, 0.0) for _ in ("full", "partial")))
    interval = save_interval(case, clock)
    if case.strategy == "full":
        return overhead_full(costs, interval, clock.mtbf, clock.total).total
    return overhead_partial(costs, interval, clock.mtbf).total


class Saved:
    """The rows that storage would hold: for each shard, the newest saved value of each row."""

    def __init__(self, shards: Sequence[Shard], variant: str, seed: int) -> None:
        self.shards = shards
        self.copies = [Shard(s.spec, s.weight.clone(), {n: t.clone() for n, t in s.states.items()}) for s in shards]
        self.priority: dict[str, RowPriority] = {}
        self.config = PriorityConfig(variant, RATIO, seed)

    def prioritise(self, tables: Sequence[str]) -> None:
        for live in self.shards:
            if live.spec.table in tables:
                self.priority[live.spec.table] = make_priority(self.config, live.weight)

    def observe(self, spec: ShardSpec, ids: Tensor) -> None:
        if (priority := self.priority.get(spec.table)) is not None:
            priority.observe(ids, [len(ids)])

    def save(self) -> None:
        """A priority save of the chosen tables, all rows of the others."""
        for live, held in zip(self.shards, self.copies, strict=True):
            priority = self.priority.get(live.spec.table)
            if priority is None:
                _copy(live, held, slice(None))
            else:
                rows = priority.select(self.config.count(live.spec.rows))
                _copy(live, held, rows)
                priority.saved(rows)

    def lose(self, owners: Sequence[int]) -> None:
        """Overwrite the failed owners' rows with what was saved of them."""
        for live, held in zip(self.shards, self.copies, strict=True):
            for owner in owners:
                start, stop = (live.spec.rows * (owner + i) // OWNERS for i in (0, 1))
                _copy(held, live, slice(start, stop))


def _copy(source: Shard, target: Shard, rows: Tensor | slice) -> None:
    with torch.no_grad():
        target.weight[rows] = source.weight[rows]
        for name, state in source.states.items():
            target.states[name][rows] = state[rows]


class Run:
    """The saves, failures and PLS of one case, step by step beside the training."""

    def __init__(self, case: Case, trainee: Trainee, steps: int, clock: Clock) -> None:
        self.case = case
        self.saved = Saved(trainee.shards, case.strategy, case.seed)
        if case.strategy != "vanilla":
            self.saved.prioritise(select_tables(list(table_specs(trainee.model).values()), share=0.995))
        self.cycle = save_interval(case, clock) / clock.total * steps
        self.every = self.cycle if case.strategy == "vanilla" else self.cycle * RATIO
        self.struck = strikes(case.seed, case.lost, steps, clock)
        self.ledger, self.closed, self.slot = Ledger(OWNERS), 0, 0

    def after(self, step: int) -> None:
        """Save what is due after this step, then lose what fails."""
        if int(step / self.every) > self.slot:
            self.slot = int(step / self.every)
            self.saved.save()
        self.closed = max(self.closed, int(int(step / self.cycle) * self.cycle))
        if (failure := self.struck.get(step)) is not None:
            self.saved.lose(failure.owners)
            self.ledger, _ = charge(self.ledger, step, {owner: (1, [self.closed]) for owner in failure.owners})


class Trainee:
    """The model in training, in one process with a gloo group of its own."""

    def __init__(self, model: DLRMModule) -> None:
        world = World(1, 1, torch.device("cpu"))
        self.model = model
        self.wrapped = shard(model, build_plan(model, world, "table_wise"), world.device)
        self.optimizer = model.configure_optimizers()
        self.shards = local_shards(model)

    def train(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        binary_cross_entropy_with_logits(self.wrapped(batch), batch.labels).backward()
        self.optimizer.step()

    def snapshot(self) -> Snapshot:
        rows = [[shard.weight.clone(), *(state.clone() for state in shard.states.values())] for shard in self.shards]
        dense = [parameter.detach().clone() for parameter in self._dense()]
        return Snapshot(rows, dense, copy.deepcopy(self.optimizer.state_dict()))

    def load(self, snapshot: Snapshot) -> None:
        with torch.no_grad():
            for shard, rows in zip(self.shards, snapshot.rows, strict=True):
                for target, value in zip((shard.weight, *shard.states.values()), rows, strict=True):
                    target.copy_(value)
            for parameter, value in zip(self._dense(), snapshot.dense, strict=True):
                parameter.copy_(value)
        self.optimizer.load_state_dict(copy.deepcopy(snapshot.optimizer))

    def _dense(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]


@dataclass(frozen=True)
class Snapshot:
    """rows: by shard, its weight and optimizer states."""

    rows: list[list[Tensor]]
    dense: list[Tensor]
    optimizer: dict[str, Any]


def emulate(
    cases: Sequence[Case], model: DLRMModule, train: Sequence[Batch], test: Sequence[Batch], clock: Clock
) -> Iterator[tuple[Case, Outcome]]:
    """Train ``model`` on the batches with the failures of each case, and test it. The cases are partial, or none, of
    one seed: up to the first failure, which is the same of all, they share one training.
    """
    started = time.monotonic()
    torch.manual_seed(cases[0].seed)
    trainee = Trainee(model)
    runs = [Run(case, trainee, len(train), clock) for case in cases if case.strategy != "none"]
    first = min((step for run in runs for step in run.struck), default=0)
    shared = trainee.snapshot()
    with _observed(trainee, runs):
        for step, batch in enumerate(train[:first], 1):
            trainee.train(batch)
            if step == first:
                shared = trainee.snapshot()
            else:
                for run in runs:
                    run.after(step)
    for case in cases:
        if case.strategy == "none":
            for batch in train[first:]:
                trainee.train(batch)
            yield case, Outcome(evaluate(trainee.wrapped, test), 0.0, 0.0, time.monotonic() - started)
    while runs:
        started = time.monotonic()
        run = runs.pop(0)
        trainee.load(shared)
        run.after(first)
        last = max(run.struck)
        with _observed(trainee, [run]):
            for step, batch in enumerate(train[first:last], first + 1):
                trainee.train(batch)
                run.after(step)
        for batch in train[last:]:
            trainee.train(batch)
        auc, pls = evaluate(trainee.wrapped, test), run.ledger.pls(len(train))
        yield run.case, Outcome(auc, pls, overhead(run.case, clock), time.monotonic() - started)


@contextmanager
def _observed(trainee: Trainee, runs: Sequence[Run]) -> Iterator[None]:
    def observe(spec: ShardSpec, ids: Tensor) -> None:
        for run in runs:
            run.saved.observe(spec, ids)

    hook = register_lookup_hook(trainee.model, observe)
    try:
        yield
    finally:
        hook.remove()


def evaluate(model: torch.nn.Module, batches: Sequence[Batch]) -> float:
    """AUC on the batches."""
    model.eval()
    with torch.no_grad():
        logits = torch.cat([model(batch)[: batch.valid] for batch in batches])
    model.train()
    labels = torch.cat([batch.labels[: batch.valid] for batch in batches])
    return float(binary_auroc(torch.sigmoid(logits).double(), labels.long()))


def init_process() -> None:
    """One thread, and a process group of one: TorchRec needs one."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
