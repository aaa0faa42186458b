"""A training loop without Lightning that recovers in place: what the tests of live recovery run and kill.

    lightning-cpr run --nproc-per-node 2 recovery_job.py --steps 40 --out DIR

Each process appends JSON lines to ``DIR/<rank>-<pid>.jsonl``. With ``--kill rank:step:point`` (several times)
that rank's first process kills itself there. ``--raise-at rank:step`` raises a ValueError.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, data_parallel, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from lightning_cpr.recovery.child import heartbeat
from lightning_cpr.recovery.election import Decision, Holding, is_lost_peer
from lightning_cpr.recovery.live import Recovery, recover
from lightning_cpr.recovery.membership import REPLACES_ENV, Membership, Timeouts
from lightning_cpr.tables.dense import dense_state, load_dense_state
from lightning_cpr.tables.rebind import drop_traces, rebind, stand_in_group
from lightning_cpr.tables.replicas import load_replicated_state, replicated_state
from lightning_cpr.tables.shards import local_shards

WIDTH = 8


class Sharder(EmbeddingBagCollectionSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["row_wise", "table_wise", "data_parallel"]


class Net(nn.Module):
    def __init__(self, rows: int, tables: int, width: int) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(name=f"t{i}", num_embeddings=rows, embedding_dim=width, feature_names=[f"f{i}"])
            for i in range(tables)
        ]
        self.ebc = EmbeddingBagCollection(configs, device=torch.device("meta"))
        fused = [bag.weight for i, bag in enumerate(self.ebc.embedding_bags.values()) if i % 3 != 2]
        apply_optimizer_in_backward(RowWiseAdagrad, fused, {"lr": 0.1})
        self.mlp = nn.Sequential(nn.Linear(tables * width, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.mlp(self.ebc(features).values()).square().mean()


def build(rank: int, world: int, rows: int, tables: int, width: int) -> DistributedModelParallel:
    torch.manual_seed(100 + rank)  # differs by rank: only a real hand-over makes the dense parts agree
    net = Net(rows, tables, width)
    kinds = {
        f"t{i}": row_wise() if i % 3 == 0 else table_wise(rank=i % world) if i % 3 == 1 else data_parallel()
        for i in range(tables)
    }
    plan = construct_module_sharding_plan(
        net.ebc, kinds, sharder=Sharder(), world_size=world, local_size=world, device_type="cpu"
    )
    return DistributedModelParallel(
        net, plan=ShardingPlan({"ebc": plan}), sharders=[Sharder()], device=torch.device("cpu")
    )


def features(step: int, rank: int, rows: int, tables: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    values = torch.randint(0, rows, (4 * tables,), generator=generator)
    return KeyedJaggedTensor(
        [f"f{i}" for i in range(tables)], values, lengths=torch.ones(4 * tables, dtype=torch.int64)
    )


def local_tensors(model: DistributedModelParallel) -> dict[str, Tensor]:
    """Every table shard of this rank alone, weight and optimizer state."""
    return {
        f"{shard.spec.table}.{name}": tensor
        for shard in local_shards(model)
        if not shard.spec.replicated
        for name, tensor in (("weight", shard.weight), *shard.states.items())
    }


def digest(tensors: dict[str, Tensor]) -> str:
    h = hashlib.sha256()
    for name in sorted(tensors):
        h.update(name.encode())
        h.update(tensors[name].detach().contiguous().numpy().tobytes())
    return h.hexdigest()


class State:
    """`LiveState` of this loop."""

    def __init__(self, model: DistributedModelParallel, dense: torch.optim.Optimizer, record: Any) -> None:
        self.model, self.dense, self.record, self.step = model, dense, record, 0

    def parameters(self) -> dict[str, Tensor]:
        """What all ranks must agree on: dense weights, data-parallel tables, Adam's moments."""
        tables = replicated_state(self.model, [self.dense])
        flat = {f"{fqn}.{name}": tensor for fqn, held in tables.items() for name, tensor in held.items()}
        for i, moments in enumerate(self.dense.state.values()):
            flat |= {f"adam{i}.{name}": value for name, value in moments.items()}
        return dense_state(self.model) | flat

    def rebind(self, group: dist.ProcessGroup) -> None:
        rebind(self.model, group)

    def go_back(self, decision: Decision) -> None:
        """Without parity there is nothing to go back to."""

    def held(self, holding: Holding) -> Holding:
        return holding

    def capture(self) -> bytes:
        buffer = io.BytesIO()
        tables = replicated_state(self.model, [self.dense])
        told = {"step": self.step, "dense": dense_state(self.model), "tables": tables, "adam": self.dense.state_dict()}
        torch.save(told, buffer)
        return buffer.getvalue()

    def adopt(self, data: bytes, lost: bool) -> None:
        told = torch.load(io.BytesIO(data), weights_only=True)
        load_dense_state(self.model, told["dense"])
        self.dense.load_state_dict(told["adam"])
        load_replicated_state(self.model, told["tables"], [self.dense])
        self.step = told["step"]

    def restore(self, recovery: Recovery) -> None:
        if recovery.lost:
            for tensor in local_tensors(self.model).values():
                tensor.fill_(0.5)
        self.record(
            "restored", rows=digest(local_tensors(self.model)), dense=digest(self.parameters()), epoch=recovery.epoch,
            donor=recovery.decision.donor, lost=list(recovery.decision.lost), behind=list(recovery.decision.behind),
            step=recovery.decision.step, seconds=recovery.seconds,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tables", type=int, default=6)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--kill", action="append", default=[])
    parser.add_argument("--raise-at", default="")
    parser.add_argument("--collective", type=float, default=20)
    parser.add_argument("--free", type=float, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    log = (options.out / f"{rank}-{os.getpid()}.jsonl").open("a", buffering=1)

    def record(event: str, **told: Any) -> None:
        log.write(json.dumps({"event": event, "time": time.time(), **told}) + "\n")

    fresh = REPLACES_ENV in os.environ
    killed = set() if fresh else {tuple(k.split(":")) for k in options.kill}

    def strike(step: int, point: str) -> None:
        if (str(rank), str(step), point) in killed:
            record("kill", step=step, point=point)
            if point == "stall":  # as in a loader that hangs; the heartbeat goes on
                time.sleep(600)
            os.kill(os.getpid(), signal.SIGSTOP if point == "stop" else signal.SIGKILL)

    record("start", fresh=fresh, attempt=os.environ["TORCHELASTIC_RESTART_COUNT"])
    membership = Membership.from_env(
        on_beat=heartbeat(), timeouts=Timeouts(options.collective, announce=40, join=60, free=options.free)
    )
    if fresh:
        stand_in_group(rank, world)
    else:
        assert membership.form(membership.meet(Holding(rank, os.getpid(), 0), after=-1))
    model = build(rank, world, options.rows, options.tables, options.width)
    replicated = [bag.weight for i, bag in enumerate(model.module.ebc.embedding_bags.values()) if i % 3 == 2]
    dense = torch.optim.Adam([*model.module.mlp.parameters(), *replicated], lr=0.01)
    state = State(model, dense, record)
    if fresh:
        strike_first = f"{rank}:join" in options.kill
        if strike_first and int(os.environ[REPLACES_ENV]) == 1:
            record("kill", step=-1, point="join")
            os.kill(os.getpid(), signal.SIGKILL)
        recover(membership, state, Holding(rank, os.getpid(), None), after=int(os.environ[REPLACES_ENV]) - 1)
    while state.step < options.steps:
        step = state.step + 1
        try:
            strike(step, "forward")
            strike(step, "stop")
            strike(step, "stall")
            if options.raise_at == f"{rank}:{step}":
                raise ValueError("a bug in the user's code")
            dense.zero_grad()
            loss = model(features(step, rank, options.rows, options.tables))
            strike(step, "backward")
            loss.backward()
            strike(step, "optimizer")
            dense.step()
            state.step = step
            strike(step, "batch_end")
        except RuntimeError as e:
            if not is_lost_peer(e):
                raise
            record("broke", step=step, error=str(e)[:80])
            loss = None
            drop_traces(e)
            record("before", rows=digest(local_tensors(model)), dense=digest(state.parameters()), step=state.step)
            recover(membership, state, Holding(rank, os.getpid(), state.step), membership.epoch, error=str(e))
            continue
        record("step", step=step)
    dist.barrier()
    record("end", step=state.step, dense=digest(state.parameters()))
    membership.leave()
    membership.close()


if __name__ == "__main__":
    main()
