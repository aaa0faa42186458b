"""What parity in memory costs a step, how much memory it takes, and how fast a lost shard comes back.

    python -m benchmarks.parity [--rows 400000] [--steps 96] [--out benchmarks/parity/results.json]

All ranks are processes of one machine and talk over gloo on loopback: bytes are what a cluster would send, times are of
shared CPU cores, and the exchange competes with training for them. Each mode runs the same steps on the same rows,
between two runs without parity. On a busy machine only bytes, memory and processor time (``core_ms``) mean something.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.parity.overhead import STEP_S, overheads, recovery_ratio
from lightning_cpr.recovery.parity.channel import GroupChannel
from lightning_cpr.recovery.parity.config import ParityConfig
from lightning_cpr.recovery.parity.groups import ParityPlan, plan_parity
from lightning_cpr.recovery.parity.keeper import ParityKeeper
from lightning_cpr.spec import RowBlock, Shard, ShardSpec, StateSpec, TableSpec
from lightning_cpr.store import (
    LocalKeyValue,
    RankPart,
    SaveIO,
    SaveSpec,
    Storage,
    load_manifest,
    new_version_id,
    read_into,
    save,
)

WIDTH = 64
SPANS = ("unhidden_s", "wait_s", "hidden_s", "unhidden_core_s", "hidden_core_s", "unbegun_core_s")


def lookups(args: argparse.Namespace, rank: int, step: int) -> torch.Tensor:
    """Row numbers with a power-law skew, repeats included, as a batch of a recommender looks up."""
    generator = torch.Generator().manual_seed(step * args.world + rank)
    return (args.rows * torch.rand(args.lookups, generator=generator) ** 4).long()


def compute() -> None:
    """A dense part that takes about as long as a small DLRM's."""
    dense = torch.full((384, 384), 1e-3)
    for _ in range(4):
        dense = torch.tanh(dense @ dense)


def beside() -> None:
    """A dense part on an accelerator, which leaves the cores alone."""
    time.sleep(STEP_S)


def train(
    keeper: ParityKeeper | None, shard: Shard, rows: torch.Tensor, step: int, dense: Callable[[], None] = compute
) -> float:
    """Seconds of a step: a dense part, then row-wise Adagrad on the touched rows. Parity hears of them before the dense
    part, where a forward looks up, and has kept them by the end of it, where a backward reaches the lookup."""
    started = time.perf_counter()
    coming = keeper.look_ahead(rows, lambda: [(shard.spec, rows)]) if keeper else None
    dense()
    if keeper and coming:
        keeper.before_step(coming)
    unique = rows.unique()
    gradient = torch.full((unique.numel(), WIDTH), 1e-3)
    shard.states["sum"][unique] += gradient.square().mean(1)
    shard.weight[unique] -= gradient / shard.states["sum"][unique].sqrt().unsqueeze(1)
    if keeper:
        keeper.after_step(step)
    return time.perf_counter() - started


def run_mode(
    keeper: ParityKeeper | None, shard: Shard, args: argparse.Namespace, rank: int, warm_up: int = 0
) -> dict[str, float]:
    for step in range(1, warm_up + 1):
        train(keeper, shard, lookups(args, rank, step), step)
    before = keeper.metrics() if keeper else {}
    steps, core, started = [], time.process_time(), time.perf_counter()
    for step in range(warm_up + 1, warm_up + args.steps + 1):
        steps.append(train(keeper, shard, lookups(args, rank, step), step))
    seconds = time.perf_counter() - started
    after = keeper.metrics() if keeper else {}
    if keeper:
        keeper.flush()  # its wait belongs to no step, its bytes do
        after |= {name: keeper.metrics()[name] for name in ("hidden_s", "hidden_core_s", "bytes_sent", "rows")}
    core = time.process_time() - core
    result = {"step_ms": 1e3 * statistics.median(steps), "run_s": seconds, "core_ms_a_step": 1e3 * core / args.steps}
    for name in (*SPANS, "bytes_sent", "rows"):
        if keeper:
            seconds_to_ms = 1e3 if name in SPANS else 1
            result[(name[:-1] + "ms" if name in SPANS else name) + "_a_step"] = (
                (after[name] - before[name]) / args.steps * seconds_to_ms
            )
    return result


def rebuild(keeper: ParityKeeper, shard: Shard) -> dict[str, float]:
    """Lose rank 1's shard and decode it, three times."""
    shard_bytes = shard.weight.nbytes + shard.states["sum"].nbytes
    exact, times = shard.weight.clone(), []
    for _ in range(3):
        keeper.encode()
        dist.barrier()
        if keeper.rank == 1:
            shard.weight.fill_(float("nan"))
        times.append(keeper.rebuild([1]).seconds)
        assert torch.equal(shard.weight, exact)
    return {"seconds": statistics.median(times), "gb_s": shard_bytes / statistics.median(times) / 1e9}


def recovering(keeper: ParityKeeper, shard: Shard, args: argparse.Namespace, rank: int) -> dict[str, float]:
    """Steps from the loss of rank 1 until all is protected again, against as many before and after, all encoded."""
    step = keeper.point.step

    def run(count: int) -> list[float]:
        nonlocal step
        times = []
        while len(times) < count if count else not keeper.protected:
            step += 1
            times.append(train(keeper, shard, lookups(args, rank, step), step))
        return times

    before = run(args.steps)
    keeper.flush()
    dist.barrier()
    rebuilt = keeper.rebuild([1]).seconds
    during = run(0)
    after = run(args.steps)
    usual = statistics.mean(before + after)
    return {
        "steps": float(len(during)),
        "encode_s": sum(during),
        "usual_step_ms": 1e3 * usual,
        "encode_step_ms": 1e3 * statistics.mean(during),
        "throughput_while_encoding": usual / statistics.mean(during),
        "throughput_with_rebuild": usual * len(during) / (sum(during) + rebuilt),
    }


def behind(keeper: ParityKeeper, shard: Shard, args: argparse.Namespace, rank: int) -> dict[str, float]:
    """Rank 1's shard comes back behind the training: from its loss until every row is there, against the rebuild that
    stops the training for all of it. Steps of 0.1 s leave the cores alone; all ranks meet in each, after their lookups.
    """
    step = keeper.point.step
    trained: list[torch.Tensor] = []

    def run(count: int) -> list[float]:
        nonlocal step
        times = []
        while len(times) < count if count else keeper.degraded is not None:
            step += 1
            started = time.perf_counter()
            rows = lookups(args, rank, step)
            keeper.wait_for(shard.spec, rows)
            dist.barrier()
            train(keeper, shard, rows, step, beside)
            times.append(time.perf_counter() - started)
            trained.append(rows)
        return times

    usual = statistics.median(run(16))
    keeper.flush()
    exact = shard.weight.clone()
    dist.barrier()
    stopped = keeper.rebuild([1]).seconds
    keeper.encode()
    dist.barrier()
    if rank == 1:
        shard.weight.fill_(float("nan"))
    trained.clear()
    started = time.perf_counter()
    keeper.rebuild([1], behind=True)
    began = time.perf_counter() - started
    degraded = keeper.degraded
    assert degraded is not None
    times = [*run(1), *run(0)]
    seconds = time.perf_counter() - started
    kept = torch.ones(len(exact), dtype=torch.bool)
    kept[torch.cat(trained)] = False
    assert torch.equal(shard.weight[kept], exact[kept])
    lost = seconds - usual * len(times)
    return {
        "stop_s": stopped,
        "first_step_later_s": began + times[0] - usual,
        "steps": float(len(times)),
        "seconds": seconds,
        "usual_step_ms": 1e3 * usual,
        "lost_s": lost,
        "throughput": 1 - lost / seconds,
        "blocks": float(degraded.demanded),
        "waited_s": degraded.waited_s,
    }


def store(shard: Shard, table: TableSpec, folder: Path) -> dict[str, float]:
    """Save this rank's shard as a version of its own, and read it back: all ranks at once, from the page cache."""
    name, rows = f"t{shard.spec.owner}", shard.spec.rows
    own = TableSpec(name, rows, WIDTH, table.dtype, table.optimizer, table.states)
    block = RowBlock(name, torch.arange(rows), 0, shard.weight, shard.states)
    io = SaveIO(Storage(str(folder)), LocalKeyValue(), lambda: 0)
    spec = SaveSpec(new_version_id("bench", 0, 0, "n"), 0, "base", "exact", 1, (own,))
    started = time.perf_counter()
    shard.weight.clone(), shard.states["sum"].clone()
    copied, started = time.perf_counter() - started, time.perf_counter()
    report = save(io, spec, RankPart(0, [block]))
    saved = time.perf_counter()
    target = Shard(ShardSpec(name, 0, rows, 0, WIDTH, 0), torch.empty_like(shard.weight), {"sum": torch.empty(rows)})
    read_into(io.storage, load_manifest(io.storage, report.path), [target])
    loaded = time.perf_counter()
    assert torch.equal(target.weight, shard.weight)
    return {"save_s": saved - started, "load_s": loaded - saved, "copy_s": copied}


def plan_of(k: int) -> ParityPlan:
    """Nine ranks on nine hosts, shards of 90 000 to 110 000 rows."""
    state = StateSpec("sum", "row", torch.float32)
    table = TableSpec("t", 900_000, WIDTH, torch.float32, "rowwise_adagrad", (state,), True)
    sizes = [90_000 + 2500 * r for r in range(9)]
    specs = [ShardSpec("t", sum(sizes[:r]), size, 0, WIDTH, r) for r, size in enumerate(sizes)]
    return plan_parity(ParityConfig(k=k), specs, {"t": table}, [f"h{r}" for r in range(9)])


def rank_main(rank: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    world = args.world
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world)
    table = TableSpec(
        "t", args.rows * world, WIDTH, torch.float32, "rowwise_adagrad", (StateSpec("sum", "row", torch.float32),), True
    )
    specs = [ShardSpec("t", r * args.rows, args.rows, 0, WIDTH, r) for r in range(world)]
    shard = Shard(specs[rank], torch.randn(args.rows, WIDTH), {"sum": torch.rand(args.rows)})
    shard_bytes = shard.weight.nbytes + shard.states["sum"].nbytes
    results: dict[str, dict[str, float]] = {"store": store(shard, table, Path(folder) / f"store{rank}")}

    def make_channel() -> GroupChannel:
        return GroupChannel(dist.new_group(backend="gloo"), timedelta(seconds=60))

    def keeper_of(config: ParityConfig) -> ParityKeeper:
        hosts = [f"h{r}" for r in range(world)]
        keeper = ParityKeeper(config, [shard], {"t": table}, specs, hosts, rank, make_channel)
        keeper.start(0)
        return keeper

    run_mode(None, shard, argparse.Namespace(**{**vars(args), "steps": 8}), rank)
    for every in args.every:
        off = run_mode(None, shard, args, rank)
        keeper = keeper_of(ParityConfig(k=args.k, m=args.m, every_n_steps=every))
        started = time.perf_counter()
        keeper.encode()
        encode = time.perf_counter() - started
        dist.barrier()
        # Two exchanges first, in which the buffers of touched rows grow to their size.
        result = results[f"every_{every}"] = run_mode(keeper, shard, args, rank, warm_up=2 * every)
        result |= {
            "encode_gb_s": shard_bytes / encode / 1e9,
            "memory_over_shards": keeper.memory_bytes / shard_bytes,
            "parity_over_shards": keeper.metrics()["parity_bytes"] / shard_bytes,
        }
        if every == 1:
            results["rebuild"] = rebuild(keeper, shard)
            keeper.encode()
            dist.barrier()
            results["recovering"] = recovering(keeper, shard, args, rank)
        keeper.close()  # the run without parity changes rows untracked
        dist.barrier()
        again = run_mode(None, shard, args, rank)
        result |= {f"off_{name}": (off[name] + again[name]) / 2 for name in off}
    if not args.every:
        keeper = keeper_of(ParityConfig(k=args.k))
        keeper.encode()
        dist.barrier()
        results["behind"] = behind(keeper, shard, args, rank)
        keeper.close()
        dist.barrier()
    for k in args.memory_k:
        keeper = keeper_of(ParityConfig(k=k))
        keeper.encode()
        memory = {"parity": keeper.metrics()["parity_bytes"], "all": keeper.memory_bytes}
        results[f"memory_k{k}"] = {name: value / shard_bytes for name, value in memory.items()}
        keeper.close()
        dist.barrier()
    gathered: list[object] = [None] * world
    dist.all_gather_object(gathered, results)
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(gathered))
    dist.barrier()
    dist.destroy_process_group()


def run(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """What all ranks measured, mean over ranks."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (args, folder), args.world)
        ranks = json.loads(Path(folder, "results.json").read_text())
    modes = {
        mode: {name: round(statistics.mean(r[mode][name] for r in ranks), 4) for name in ranks[0][mode]}
        for mode in ranks[0]
    }
    for mode, result in modes.items():
        if mode.startswith("every"):
            result["throughput_over_off"] = round(result["off_run_s"] / result["run_s"], 3)
    return modes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=400_000, help="rows of width 64 a rank")
    parser.add_argument("--large-rows", type=int, default=4_000_000, help="of the shard that comes back behind steps")
    parser.add_argument("--lookups", type=int, default=8192, help="row lookups a rank and step")
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--m", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results.json")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    runs = {
        2: run(argparse.Namespace(**vars(args), world=4, k=2, every=(1, 8, 64), memory_k=(1, 2, 3))),
        4: run(argparse.Namespace(**vars(args), world=5, k=4, every=(1,), memory_k=(4,))),
    }
    large = argparse.Namespace(**{**vars(args), "rows": args.large_rows}, world=4, k=2, every=(), memory_k=())
    shard_bytes = args.rows * 4 * (WIDTH + 1)
    report = {
        "what": "parity in memory; mean over ranks; gloo over loopback, all ranks share the cores of one machine; the "
        "store is a local disk's page cache",
        "settings": {"world": "4 at k=2, 5 at k=4", "width": WIDTH, "optimizer": "row-wise Adagrad, fp32"}
        | {name: getattr(args, name) for name in ("rows", "lookups", "steps", "m")},
        "machine": {
            "cores": os.cpu_count(),
            "cpu": platform.processor() or platform.machine(),
            "load_before": round(load, 2),
            "wall_times_mean_something": load < (os.cpu_count() or 1) / 4,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "results": {f"k{k}": modes for k, modes in runs.items()},
        "behind": run(large)["behind"] | {"gb_a_rank": args.large_rows * 4 * (WIDTH + 1) / 1e9},
        "plan_overhead_by_k": {k: round(plan_of(k).overhead, 4) for k in (2, 4, 8)},
        "recovery": {f"k{k}": recovery_ratio(modes) for k, modes in runs.items()},
        "total_overhead": overheads(runs, shard_bytes),
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
