"""One emulated job of the CPR experiment: real training, failed owners overwritten with their last saved rows.

As in the paper (section 5): the job trains for real in one process; its tables are cut into 8 emulated owners by rows;
at a failure the rows of the failed owners, weights and optimizer state, are overwritten with what was last saved of
them. Time is accounted with given costs. A full recovery loses no update, so its AUC is the undisturbed run's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc

from lightning_cpr.policy.cost import interval_full, interval_partial
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
            priority.observe(ids)

    def save(self) -> None:
        """A priority save of the chosen tables, all rows of the others."""
        for live, copy in zip(self.shards, self.copies, strict=True):
            priority = self.priority.get(live.spec.table)
            if priority is None:
                _copy(live, copy, slice(None))
            else:
                rows = priority.select(self.config.count(live.spec.rows))
                _copy(live, copy, rows)
                priority.saved(rows)

    def lose(self, owners: Sequence[int]) -> None:
        """Overwrite the failed owners' rows with what was saved of them."""
        for live, copy in zip(self.shards, self.copies, strict=True):
            for owner in owners:
                start, stop = (live.spec.rows * (owner + i) // OWNERS for i in (0, 1))
                _copy(copy, live, slice(start, stop))


def _copy(source: Shard, target: Shard, rows: Tensor | slice) -> None:
    with torch.no_grad():
        target.weight[rows] = source.weight[rows]
        for name, state in source.states.items():
            target.states[name][rows] = state[rows]


def emulate(case: Case, model: DLRMModule, train: Sequence[Batch], test: Sequence[Batch], clock: Clock) -> Outcome:
    """Train ``model`` on the batches with the failures of the case, and test it. One process, its own gloo group."""
    started = time.monotonic()
    torch.manual_seed(case.seed)
    world = World(1, 1, torch.device("cpu"))
    wrapped = shard(model, build_plan(model, world, "table_wise"), world.device)
    optimizer = model.configure_optimizers()
    shards = local_shards(model)
    partial = case.strategy not in ("none", "full")
    saved = Saved(shards, case.strategy, case.seed) if partial else None
    if saved is not None and case.strategy != "vanilla":
        saved.prioritise(select_tables(list(table_specs(model).values()), share=0.995))
    hook = register_lookup_hook(model, saved.observe) if saved is not None else None
    steps = len(train)
    cycle = save_interval(case, clock) / clock.total * steps if partial else math.inf
    every = cycle if case.strategy == "vanilla" else cycle * RATIO
    struck = {max(1, round(f.at * steps)): f for f in failures(case.seed, case.lost, clock)} if partial else {}
    ledger, closed, slot = Ledger(OWNERS), 0, 0
    for step, batch in enumerate(train, 1):
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(wrapped(batch), batch.labels)
        loss.backward()
        optimizer.step()
        if saved is not None and int(step / every) > slot:
            slot = int(step / every)
            saved.save()
        if int(step / cycle) * cycle > closed:
            closed = int(int(step / cycle) * cycle)
        if saved is not None and (failure := struck.get(step)) is not None:
            saved.lose(failure.owners)
            ledger, _ = charge(ledger, step, {owner: (1, [closed]) for owner in failure.owners})
    if hook is not None:
        hook.remove()
    auc = evaluate(wrapped, test)
    return Outcome(auc, ledger.pls(steps), overhead(case, clock), time.monotonic() - started)


def evaluate(model: torch.nn.Module, batches: Sequence[Batch]) -> float:
    """AUC on the batches."""
    model.eval()
    with torch.no_grad():
        logits = torch.cat([model(batch)[: batch.valid] for batch in batches])
    labels = torch.cat([batch.labels[: batch.valid] for batch in batches])
    return float(binary_auroc(torch.sigmoid(logits).double(), labels.long()))


def init_process() -> None:
    """One thread, and a process group of one: TorchRec needs one."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
