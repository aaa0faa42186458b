"""A job of plain tensors for the parity tests: tables, sharded over ranks, updated at random like an optimizer does."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_cpr.errors import RecoveryError
from lightning_cpr.recovery.parity import groups
from lightning_cpr.recovery.parity.rebuild import Rebuild
from lightning_cpr.spec import Shard, ShardSpec, StateSpec, TableSpec

STATES = {
    "sgd": (),
    "rowwise_adagrad": (StateSpec("sum", "row", torch.float32),),
    "adagrad": (StateSpec("sum", "element", torch.float32),),
}


def table(
    fqn: str, rows: int, cols: int, optimizer: str = "rowwise_adagrad", dtype: torch.dtype = torch.float32
) -> TableSpec:
    return TableSpec(fqn, rows, cols, dtype, optimizer, STATES[optimizer], row_sparse=True)


def random_layout(seed: int, world: int) -> tuple[dict[str, TableSpec], list[ShardSpec]]:
    """Tables of many widths, dtypes and optimizers; table-, row- and column-wise, 0-row and replicated shards."""
    rng = random.Random(seed)
    tables, specs = {}, []
    for i in range(rng.randint(1, 5)):
        dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16])
        t = table(f"t{i}", rng.randint(1, 200), rng.choice([1, 3, 4, 6, 16]), rng.choice(list(STATES)), dtype)
        tables[t.fqn] = t
        kind = rng.choice(["table", "row", "column", "replicated"])
        if kind == "row":
            edges = sorted(rng.randint(0, t.rows) for _ in range(world - 1))
            bounds = list(zip([0, *edges], [*edges, t.rows], strict=True))
            specs += [ShardSpec(t.fqn, a, b - a, 0, t.cols, r) for r, (a, b) in enumerate(bounds)]
        elif kind == "column" and t.cols > 1:
            cut = rng.randint(1, t.cols - 1)
            for low, high in ((0, cut), (cut, t.cols)):
                specs.append(ShardSpec(t.fqn, 0, t.rows, low, high - low, rng.randrange(world)))
        elif kind == "replicated":
            specs.append(ShardSpec(t.fqn, 0, t.rows, 0, t.cols, 0, replicated=True))
        else:
            specs.append(ShardSpec(t.fqn, 0, t.rows, 0, t.cols, rng.randrange(world)))
    return tables, specs


def rich_layout(world: int) -> tuple[dict[str, TableSpec], list[ShardSpec]]:
    """Every kind of shard at once, and rows on every rank."""
    tables = {
        t.fqn: t
        for t in (
            table("rows", 50 * world, 6, "rowwise_adagrad"),
            table("halves", 20 * world, 3, "adagrad", torch.float16),
            table("columns", 61, 5, "rowwise_adagrad", torch.bfloat16),
            table("whole", 33, 1, "sgd"),
            table("copied", 9, 4, "sgd"),
        )
    }
    specs = [ShardSpec("rows", 50 * r, 50, 0, 6, r) for r in range(world)]
    specs += [ShardSpec("halves", 20 * r + 7, 20, 0, 3, r) for r in range(1, world - 1)]
    specs += [ShardSpec("halves", 0, 27, 0, 3, 0), ShardSpec("halves", 20 * world - 13, 13, 0, 3, world - 1)]
    specs += [ShardSpec("halves", 20 * world, 0, 0, 3, 0)]
    specs += [ShardSpec("columns", 0, 61, 0, 2, 0), ShardSpec("columns", 0, 61, 2, 3, world - 1)]
    specs += [ShardSpec("whole", 0, 33, 0, 1, 1), ShardSpec("copied", 0, 9, 0, 4, 0, replicated=True)]
    return tables, specs


def make_shards(tables: dict[str, TableSpec], specs: Sequence[ShardSpec], rank: int, seed: int | None) -> list[Shard]:
    """A rank's shards; without a seed they hold NaN, as a replacement's memory might."""
    shards = []
    for spec in specs:
        if spec.owner == rank or spec.replicated:
            t = tables[spec.table]
            generator = torch.Generator().manual_seed(
                0 if seed is None else seed + hash((spec.row_start, spec.col_start))
            )

            def fill(*shape: int, dtype: torch.dtype, generator: torch.Generator = generator) -> Tensor:
                values = torch.randn(shape, generator=generator)
                return (values * float("nan") if seed is None else values).to(dtype)

            states = {
                s.name: fill(*((spec.rows,) if s.kind == "row" else (spec.rows, spec.cols)), dtype=s.dtype).abs_()
                for s in t.states
            }
            shards.append(Shard(spec, fill(spec.rows, spec.cols, dtype=t.dtype), states))
    return shards


def touched_rows(shards: Sequence[Shard], rank: int, step: int) -> dict[ShardSpec, Tensor | None]:
    """What a step looks up: a few rows with repeats, sometimes all of a shard, sometimes none."""
    rng = random.Random(f"{rank}/{step}")
    touched: dict[ShardSpec, Tensor | None] = {}
    for shard in shards:
        if rng.random() < 0.1:
            touched[shard.spec] = None
        elif shard.spec.rows:
            touched[shard.spec] = torch.tensor(
                [rng.randrange(shard.spec.rows) for _ in range(rng.randint(0, 12))]
            ).long()
    return touched


def train(shards: Sequence[Shard], touched: dict[ShardSpec, Tensor | None], rank: int, step: int) -> None:
    """Update the touched rows as SGD, Adagrad or row-wise Adagrad would."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    for shard in shards:
        if shard.spec.replicated or shard.spec not in touched:
            continue
        rows = touched[shard.spec]
        rows = torch.arange(shard.spec.rows) if rows is None else rows.unique()
        gradient = torch.randn((rows.numel(), shard.spec.cols), generator=generator)
        for state in shard.states.values():
            squares = gradient.square() if state.dim() == 2 else gradient.square().mean(1)
            state[rows] += squares.to(state.dtype)
            scale = state[rows].sqrt() + 1e-8
            gradient = gradient / (scale if state.dim() == 2 else scale.unsqueeze(1))
        shard.weight[rows] -= (0.1 * gradient).to(shard.weight.dtype)


def come_back_slowly() -> None:
    """In this process, rows come back behind the training a few at a time, as over a slow network."""
    groups.MIN_PIECE_WORDS, groups.BLOCK_WORDS = 40, 5
    run = Rebuild.round

    def slow_round(rebuild: Rebuild, now: Any, before: Any) -> None:
        run(rebuild, now, before)
        if now and now[0].wanted is None:
            time.sleep(0.2)

    Rebuild.round = slow_round  # type: ignore[method-assign]


def bits(shards: Sequence[Shard]) -> list[bytes]:
    """Everything a rank's shards hold, for exact comparison (NaN included)."""
    tensors = [t for s in shards if not s.spec.replicated for t in (s.weight, *(s.states[n] for n in sorted(s.states)))]
    return [
        torch.empty(t.numel(), dtype=t.dtype).copy_(t.reshape(-1)).view(torch.uint8).numpy().tobytes() for t in tensors
    ]


class Died(RuntimeError):
    """Stands for SIGKILL in a job of threads."""


@dataclass
class Hub:
    """Where the ranks of a one-process job meet. A rank that is `dead` takes part in nothing any more.

    partial: (rank, swap number, targets): that rank dies in the middle of that swap, having reached only the targets.
    """

    world: int
    partial: tuple[int, int, frozenset[int]] | None = None
    dead: set[int] = field(default_factory=set)
    mail: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def kill(self, rank: int) -> None:
        with self.changed:
            self.dead.add(rank)
            self.changed.notify_all()


class HubChannel:
    def __init__(self, hub: Hub, rank: int) -> None:
        self.rank, self.world, self.hub, self.count, self.aborted = rank, hub.world, hub, 0, False

    def swap(self, outgoing: Sequence[Tensor], sizes: Sequence[int] | None = None) -> list[Tensor]:
        hub, number = self.hub, self.count
        self.count += 1
        targets = set(range(self.world))
        torn = hub.partial is not None and hub.partial[:2] == (self.rank, number)
        if torn:
            targets = set(hub.partial[2])
        with hub.changed:
            for target in targets:
                hub.mail[self.rank, target, number] = outgoing[target].clone()
            hub.changed.notify_all()
        if torn:
            hub.kill(self.rank)
            raise Died(f"rank {self.rank} died in swap {number}")
        received = []
        for source in range(self.world):
            key = (source, self.rank, number)
            with hub.changed:
                settled = hub.changed.wait_for(
                    lambda key=key: key in hub.mail or self.aborted or key[0] in hub.dead, 20
                )
                if key not in hub.mail or not settled:
                    raise RecoveryError(f"rank {self.rank}: no message from rank {source}")
                received.append(hub.mail.pop(key))
        if sizes is not None:
            assert [len(message) for message in received] == list(sizes)
        return received

    def abort(self) -> None:
        with self.hub.changed:
            self.aborted = True
            self.hub.changed.notify_all()


def everywhere(call: Callable[[int], Any], ranks: Sequence[int]) -> list[Any]:
    """Run a collective call on all ranks of a one-process job; the first error of any is raised."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [future.result() for future in [pool.submit(call, rank) for rank in ranks]]
