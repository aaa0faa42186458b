"""Every version of a chain restores the rows of its step, bit for bit, whatever was aborted or lost before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_cpr import CPRCallback, FaultInjector
from lightning_cpr._lightning import Callback
from lightning_cpr.report.events import read_events
from lightning_cpr.store.manifest import Manifest
from lightning_cpr.store.reader import read_table
from lightning_cpr.store.storage import Storage
from lightning_cpr.store.versions import list_versions, load_manifest
from lightning_cpr.strategy import TorchRecStrategy
from tests._ranks import run_ranks
from tests._tiny import Tiny, make_batch, make_trainer
from tests.dist.test_main_job import PLAN, rows_of, settle, stateful_loader

OTHER_PLAN = {"a": "table_wise", "b": "row_wise", "c": "table_wise"}
NAME = "net.ebc.embedding_bags."


class Steps(Callback):
    """This rank's rows after each batch, once a recovery is over; lets the save in flight end before the next batch."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Tensor]] = {}

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        settle(trainer)
        self.rows[trainer.fit_loop.epoch_loop.batch_progress.total.ready - 1] = rows_of(trainer.lightning_module)

    def on_train_end(self, trainer: Any, *args: Any) -> None:
        settle(trainer)
        self.rows[trainer.fit_loop.epoch_loop.batch_progress.total.ready] = rows_of(trainer.lightning_module)


def fit(
    rank: int,
    world: int,
    root: str,
    count: int = 32,
    injector: FaultInjector | None = None,
    plan: Any = PLAN,
    path: str | None = None,
    sparse: str = "rowwise_adagrad",
    **kwargs: Any,
) -> dict[str, Any]:
    model = Tiny(dense="adam", sparse=sparse)
    callback = CPRCallback(root, **{"save_every_n_steps": 2, "timeout_s": 20, **kwargs})
    steps = Steps()
    injector = injector or FaultInjector()
    trainer = make_trainer(world, TorchRecStrategy(plan=plan), callbacks=[callback, steps, injector], max_steps=count)
    trainer.fit(model, stateful_loader(rank), ckpt_path=path)
    return {
        "rows": steps.rows,
        "counts": callback.counts,
        "fired": len(injector.fired),
        "pls": callback.pls,
        "staged": callback._cycle.saves.stager.nbytes,
    }


def whole(results: list[dict[str, Any]], step: int, table: str) -> tuple[Tensor, Tensor]:
    """(weight, sum) of a whole table after a step, from the rows of all ranks."""
    parts: dict[str, Tensor] = {}
    for result in results:
        parts |= {k: v for k, v in result["rows"][step].items() if k.startswith(f"{NAME}{table}[")}
    keys = sorted((k for k in parts if not k.endswith(".sum")), key=lambda k: int(k.split("[")[1].split(":")[0]))
    return torch.cat([parts[k] for k in keys]), torch.cat([parts[f"{k}.sum"] for k in keys])


def manifests(root: str) -> list[Manifest]:
    """Oldest first."""
    storage = Storage(root)
    return [load_manifest(storage, ref) for ref in reversed(list_versions(storage))]


def own_rows(manifest: Manifest, table: str = "a") -> int:
    return sum(f.rows for f in manifest.files if f"/{manifest.version}/" in f.path and f.table == f"{NAME}{table}")


def assert_versions_are_their_steps(root: str, results: list[dict[str, Any]], start: int = 0) -> list[Manifest]:
    found = [m for m in manifests(root) if m.step >= start]
    for manifest in found:
        for table in "abc":
            weight, states = read_table(Storage(root), manifest, f"{NAME}{table}")
            expected = whole(results, manifest.step, table)
            assert torch.equal(weight, expected[0]), (manifest.version, manifest.kind, table)
            assert torch.equal(states["sum"], expected[1]), (manifest.version, manifest.kind, table)
    return found


def policies(rank: int, world: int, root: str) -> dict[str, Any]:
    return {
        p: fit(rank, world, f"{root}/{p}", incremental=p) for p in ("full", "one_shot", "consecutive", "intermittent")
    }


def test_versions_of_every_policy_are_bit_exact(tmp_path: Path) -> None:
    results = run_ranks(policies, 2, str(tmp_path), timeout=120)
    kinds, sizes = {}, {}
    for policy in results[0]:
        found = assert_versions_are_their_steps(str(tmp_path / policy), [r[policy] for r in results])
        assert [m.step for m in found] == list(range(0, 33, 2))
        kinds[policy] = [m.kind for m in found]
        sizes[policy] = [own_rows(m) for m in found]
        assert {r[policy]["counts"]["commits"] for r in results} == {17}
    assert set(kinds["full"]) == {"base"}
    assert kinds["one_shot"] == kinds["consecutive"] == ["base"] + 16 * ["delta"]
    assert kinds["intermittent"].count("base") > 1
    # deltas hold the changed rows alone: since the base they grow, since the last save they stay small
    assert sizes["consecutive"] == [100, *(touched(step, step + 2) for step in range(0, 32, 2))]
    assert sizes["one_shot"] == [100, *(touched(0, step) for step in range(2, 33, 2))]


def touched(after: int, step: int) -> int:
    """How many rows of table a the batches of both ranks looked up in the steps after one and up to another."""
    batches = [make_batch(index, rank) for index in range(after, step) for rank in (0, 1)]
    return len(torch.cat([b.sparse_features["f_a"].values() for b in batches]).unique())


ABORTS = [
    (point, rank) for point in ("pre_write", "mid_write", "pre_commit", "post_commit", "disk_full") for rank in (0, 1)
]


def aborted(rank: int, world: int, root: str) -> dict[str, Any]:
    results = {}
    for policy in ("consecutive", "intermittent"):
        injector = FaultInjector()
        for number, (point, where) in enumerate(ABORTS):
            step = 4 + 4 * number
            injector.disk_full(where, step) if point == "disk_full" else injector.raise_(where, step, point)
        results[policy] = fit(
            rank, world, f"{root}/{policy}", 48, injector, incremental=policy,
            sparse="adagrad" if policy == "intermittent" else "rowwise_adagrad",
        )  # fmt: skip
    return results


def test_no_bit_is_lost_by_an_abort_at_any_point_on_any_rank(tmp_path: Path) -> None:
    results = run_ranks(aborted, 2, str(tmp_path), timeout=150)
    for policy in results[0]:
        assert [r[policy]["fired"] for r in results] == [5, 5]
        root = str(tmp_path / policy)
        steps = {m.step for m in assert_versions_are_their_steps(root, [r[policy] for r in results])}
        # a failure after the commit leaves the version; all others leave none, and the next save is there again
        failed = {4 + 4 * n for n, (point, _) in enumerate(ABORTS) if point != "post_commit"}
        assert steps == set(range(0, 49, 2)) - failed
        events = read_events(Storage(root))
        assert len([e for e in events if e["event"] == "save_failed"]) == len(failed) + 1  # rank 0's own post_commit


def lost_and_resumed(rank: int, world: int, root: str) -> list[dict[str, Any]]:
    runs = []
    for policy in ("consecutive", "intermittent"):
        folder = f"{root}/{policy}"
        injector = FaultInjector().wipe(1, 11).wipe(0, 15)
        runs.append(fit(rank, world, folder, 16, injector, incremental=policy, recovery="partial"))
        # goes on under another plan, then full recovery from a chain
        runs.append(fit(rank, world, folder, 24, FaultInjector(), OTHER_PLAN, folder, incremental=policy))
        injector = FaultInjector().wipe(1, 29)
        runs.append(fit(rank, world, folder, 36, injector, OTHER_PLAN, incremental=policy, recovery="full"))
    return runs


def test_restored_shards_continue_the_chain(tmp_path: Path) -> None:
    results = run_ranks(lost_and_resumed, 2, str(tmp_path), timeout=150)
    for at, policy in enumerate(("consecutive", "intermittent")):
        root = str(tmp_path / policy)
        runs: list[dict[str, Any]] = []
        for rank, result in enumerate(results):
            first, second, third = result[3 * at : 3 * at + 3]
            assert [r["fired"] for r in (first, second, third)] == [1, 0, rank]
            runs.append({"rows": first["rows"] | second["rows"] | third["rows"]})
        found = assert_versions_are_their_steps(root, runs)
        # a plan of before a recovery is void: the saves of steps 12, 16 and, rewound to 28, all after it are there
        assert [m.step for m in found] == list(range(0, 37, 2))
        kinds = {m.step: m.kind for m in found}
        if policy == "consecutive":
            # neither a recovery, nor a resume, nor another plan costs a base
            assert [s for s, kind in kinds.items() if kind == "base"] == [0]
        recoveries = [e for e in read_events(Storage(root)) if e["event"] == "recovery"]
        assert [e["mode"] for e in recoveries] == ["partial", "partial", "full"]
        assert [e["lost_row_updates_exact"] for e in recoveries] == [True, True, True]
        assert recoveries[0]["lost_row_updates"] == lookups(1, 11)
        assert recoveries[2]["lost_row_updates"] == 0


def lookups(rank: int, step: int) -> int:
    """Ids of the batch of a step, of both ranks, that fall on the shards of a rank."""
    total = 0
    for source in (0, 1):
        features = make_batch(step - 1, source).sparse_features
        a, b, c = (features[f"f_{t}"].values() for t in "abc")
        total += int(((a >= 50) == bool(rank)).sum())
        owner = {"b": B_OWNER, "c": 1 - B_OWNER}
        total += sum(len(ids) for t, ids in (("b", b), ("c", c)) if owner[t] == rank)
    return total


B_OWNER = 0


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_versions_keep_their_bytes_where_nothing_was_trained(tmp_path: Path, bits: int) -> None:
    results = run_ranks(quantized, 2, str(tmp_path), bits, timeout=120)
    root = str(tmp_path)
    found = manifests(root)
    assert {f.codec for m in found for f in m.files if f.rows and f.cols == 8} <= {
        f"{'a' if bits < 8 else ''}int{bits}",
        "raw",
    }
    last = {m.step: m for m in found}
    before, states = read_table(Storage(root), last[8], f"{NAME}a")
    after, _ = read_table(Storage(root), last[9], f"{NAME}a")
    live = whole([r[0] for r in results], 8, "a")
    assert torch.equal(states["sum"], live[1])
    bound = (live[0].amax(1) - live[0].amin(1)) / (2**bits - 1)
    assert ((before - live[0]).abs().amax(1) <= bound + 1e-6).all()
    assert not torch.equal(before, live[0])
    # one more batch after a restore: of the other rows the decoded values are the same, in a base encoded anew
    trained = torch.zeros(100, dtype=torch.bool)
    for rank in (0, 1):
        trained[make_batch(8, rank).sparse_features["f_a"].values()] = True
    assert last[9].kind == "base"
    assert torch.equal(before[~trained], after[~trained])
    assert not torch.equal(before[trained], after[trained])


def quantized(rank: int, world: int, root: str, bits: int) -> list[dict[str, Any]]:
    first = fit(rank, world, root, 8, bits=bits)
    return [first, fit(rank, world, root, 9, bits=bits, incremental="full")]
