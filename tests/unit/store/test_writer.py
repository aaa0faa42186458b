from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_cpr.errors import CommitError, ConfigError, CorruptShardError, ManifestError
from lightning_cpr.spec import RowBlock, ShardSpec
from lightning_cpr.store import (
    KeyValue,
    LocalKeyValue,
    RankPart,
    SaveIO,
    SaveReport,
    SaveSpec,
    ShardRecord,
    Storage,
    commit,
    list_versions,
    load_manifest,
    newest,
    read_blob,
    read_table,
    save,
    verify,
    write_part,
)
from lightning_cpr.store.agree import CoverageError
from tests.unit.store.helpers import ELEMENT, ROW, files_of, save_one, save_ranks, save_spec, table, whole

POINTS = ["pre_write", "mid_write", "pre_commit", "post_commit"]


def halves(tables: list[Any]) -> list[RankPart]:
    """Two ranks that hold half of each table's rows."""
    parts = []
    for rank in range(2):
        blocks, shards = [], []
        for t in tables:
            rows = torch.arange(t.spec.rows).chunk(2)[rank]
            blocks.append(t.block(rows))
            spec = ShardSpec(t.spec.fqn, int(rows[0]), len(rows), 0, t.spec.cols, rank)
            shards.append(ShardRecord(spec, 5))
        parts.append(RankPart(rank, blocks, tuple(shards), {f"rank{rank}/rng": bytes([rank] * 3)}))
    return parts


@pytest.fixture(params=["local", "hash store", "tcp store"])
def kv(request: pytest.FixtureRequest) -> KeyValue:
    if request.param == "local":
        return LocalKeyValue()
    store = dist.HashStore() if request.param == "hash store" else dist.TCPStore("127.0.0.1", 0, 1, True)
    return dist.PrefixStore("job/", store)


def test_two_ranks_save_and_the_manifest_says_all(storage: Storage, kv: KeyValue) -> None:
    tables = [table("a", 100, 8), table("b", 7, 4, (ROW, ELEMENT), seed=1)]
    spec = save_spec(tables, 5, 2, config_fingerprint="cfg", plan_fingerprint="plan")
    io = SaveIO(storage, kv, partial(int, 0), timeout_s=20)
    parts = halves(tables)
    reports = save_ranks([io, io], spec, parts, partial(_save_with, planner={"t": 1.5}, ledger=[1, None]))
    manifest = load_manifest(storage, spec.manifest)
    assert [type(report) for report in reports] == [SaveReport, SaveReport]
    assert newest(storage).manifest == manifest
    assert (manifest.step, manifest.samples, manifest.kind, manifest.consistency) == (5, 50, "base", "exact")
    assert (manifest.config_fingerprint, manifest.plan_fingerprint, manifest.world_size) == ("cfg", "plan", 2)
    assert (manifest.planner, manifest.ledger, manifest.parent) == ({"t": 1.5}, [1, None], None)
    assert manifest.shards == parts[0].shards + parts[1].shards
    assert [(f.table, f.rows, f.row_start, f.step) for f in manifest.files] == [
        ("a", 50, 0, 5), ("b", 4, 0, 5), ("a", 50, 50, 5), ("b", 3, 4, 5),
    ]  # fmt: skip
    for t in tables:
        weight, states = read_table(storage, manifest, t.spec.fqn)
        assert torch.equal(weight, t.weight)
        assert all(torch.equal(states[name], state) for name, state in t.states.items())
    assert [read_blob(storage, manifest, f"rank{rank}/rng") for rank in (0, 1)] == [bytes(3), b"\1\1\1"]
    assert verify(storage, manifest) == []
    # Nothing is on disk but what the manifest names.
    on_disk = files_of(storage.root)
    assert on_disk == {**{s.path: s.bytes for s in manifest.stored}, spec.manifest: on_disk[spec.manifest]}
    sizes = [report.part.bytes for report in reports if isinstance(report, SaveReport)]
    assert sum(sizes) > sum(s.bytes for s in manifest.stored)


def _save_with(io: SaveIO, spec: SaveSpec, part: RankPart, **more: Any) -> SaveReport:
    return save(io, spec, part, **more)


def test_a_large_block_is_cut_into_chunks_in_order(storage: Storage) -> None:
    t = table("a", 1000, 8)
    manifest = save_one(storage, [t], 1, chunk_bytes=36 * 300)
    assert [(f.row_start, f.row_end) for f in manifest.files] == [(0, 300), (300, 600), (600, 900), (900, 1000)]
    assert all(f.bytes < 36 * 300 + 2000 for f in manifest.files)
    assert torch.equal(read_table(storage, manifest, "a")[0], t.weight)


def test_blocks_are_drawn_only_as_fast_as_they_are_written(storage: Storage) -> None:
    """Memory is bounded: of the encoded chunks at most writers + 1 wait, and written blocks are let go."""
    t = table("a", 64, 4, ())
    drawn: list[weakref.ref[torch.Tensor]] = []
    written: list[str] = []
    most = 0
    storage.intercept = lambda path, buffers: written.append(path) or buffers  # type: ignore[func-returns-value]

    def blocks() -> Iterator[RowBlock]:
        nonlocal most
        for row in range(64):
            block = t.block(torch.tensor([row]))
            drawn.append(weakref.ref(block.weight))
            most = max(most, sum(weight() is not None for weight in drawn))
            assert len(drawn) - len(written) <= 4
            yield block
            del block

    save(SaveIO(storage, LocalKeyValue(), partial(int, 0)), save_spec([t], 1), RankPart(0, blocks()))
    assert len(drawn) == 64
    assert most <= 6


def test_rows_that_the_codec_cannot_hold_are_stored_raw_and_counted(storage: Storage) -> None:
    t = table("a", 50, 4)
    t.weight = t.weight.half().float()
    t.weight[7, 1] = float("inf")
    t.weight[9, 2] = float("nan")
    t.weight[30, 0] = 1e9
    spec = save_spec([t], 1)
    io = SaveIO(storage, LocalKeyValue(), partial(int, 0))
    report = save(io, spec, RankPart(0, whole([t]), codecs={"a": "fp16"}))
    manifest = load_manifest(storage, report.path)
    assert (report.part.raw_rows, report.part.rows, report.part.files) == (3, 50, 2)
    assert [(f.codec, f.rows, f.row_start, f.row_end) for f in manifest.files] == [
        ("fp16", 47, 0, 50),
        ("raw", 3, 7, 31),
    ]
    weight, states = read_table(storage, manifest, "a")
    assert torch.equal(weight.view(torch.int32), t.weight.view(torch.int32))
    assert torch.equal(states["sum"], t.states["sum"])
    assert verify(storage, manifest) == []


def test_states_have_their_own_codec(storage: Storage) -> None:
    t = table("a", 20, 4, (ROW, ELEMENT))
    io = SaveIO(storage, LocalKeyValue(), partial(int, 0))
    report = save(io, save_spec([t], 1), RankPart(0, whole([t]), state_codecs={"exp_avg": "fp16"}))
    _, states = read_table(storage, load_manifest(storage, report.path), "a")
    assert torch.equal(states["exp_avg"], t.states["exp_avg"].half().float())
    assert torch.equal(states["sum"], t.states["sum"])


def test_empty_shards_blocks_and_tables(storage: Storage) -> None:
    tables = [table("a", 10, 4), table("no rows", 0, 4), table("no columns", 5, 0, ())]
    blocks = [*whole(tables), tables[0].block(torch.arange(0))]
    spec = save_spec(tables, 1)
    save(SaveIO(storage, LocalKeyValue(), partial(int, 0)), spec, RankPart(0, blocks))
    manifest = load_manifest(storage, spec.manifest)
    assert verify(storage, manifest) == []
    for t in tables:
        assert torch.equal(read_table(storage, manifest, t.spec.fqn)[0], t.weight)


def test_delta_inherits_and_is_small(storage: Storage) -> None:
    t = table("a", 1000, 8)
    base = save_one(storage, [t], 5)
    rows = torch.tensor([1, 2, 500, 999])
    t.weight[rows] += 1
    delta = save_one(storage, [t], 6, rows={"a": rows}, parent=base.path)
    assert delta.files[:1] == base.files
    assert (delta.parent, delta.files[1].rows, delta.files[1].step) == (base.path, 4, 6)
    assert delta.files[1].bytes < 2000
    assert torch.equal(read_table(storage, delta, "a")[0], t.weight)


def test_delta_on_another_table_or_run_is_refused(storage: Storage) -> None:
    t, u = table("a", 10, 4), table("a", 11, 4)
    base = save_one(storage, [t], 5)
    for other, run in ((u, "run"), (t, "run2")):
        with pytest.raises(CommitError, match="save a base"):
            save_one(storage, [other], 6, rows={"a": torch.tensor([1])}, parent=base.path, run=run)
    assert [ref.step for ref in list_versions(storage)] == [5]


def test_delta_names_a_parent_and_a_base_does_not() -> None:
    with pytest.raises(ConfigError, match="parent"):
        save_spec([table("a", 3, 2)], 1, kind="delta")
    with pytest.raises(ConfigError, match="parent"):
        save_spec([table("a", 3, 2)], 1, kind="base", parent="manifests/x")
    with pytest.raises(ConfigError, match="can be removed at any time"):
        save_spec([table("a", 3, 2)], 1, parent="last.ckpt")
    with pytest.raises(ConfigError, match="only a base"):
        save_spec([table("a", 3, 2)], 1, parent="manifests/x", path="last.ckpt")


def test_a_vanished_parent_commits_nothing(storage: Storage) -> None:
    t = table("a", 10, 4)
    with pytest.raises(CommitError, match="no such version"):
        save_one(storage, [t], 6, rows={"a": torch.tensor([1])}, parent="manifests/none.json")
    assert list_versions(storage) == []


BAD_BLOCKS: dict[str, Callable[[RowBlock], RowBlock]] = {
    "unknown table": lambda b: dataclasses.replace(b, table="z"),
    "weight dtype": lambda b: dataclasses.replace(b, weight=b.weight.half()),
    "state missing": lambda b: dataclasses.replace(b, states={}),
    "state too many": lambda b: dataclasses.replace(b, states={**b.states, "x": b.states["sum"]}),
    "state kind": lambda b: dataclasses.replace(b, states={"sum": b.weight}),
    "columns beyond": lambda b: dataclasses.replace(b, col_start=1),
    "rows beyond": lambda b: dataclasses.replace(b, rows=b.rows + 1),
    "rows unsorted": lambda b: dataclasses.replace(b, rows=b.rows.flip(0)),
}


@pytest.mark.parametrize("change", BAD_BLOCKS.values(), ids=BAD_BLOCKS)
def test_blocks_that_fit_no_table_are_refused(storage: Storage, change: Callable[[RowBlock], RowBlock]) -> None:
    t = table("a", 10, 4)
    spec = save_spec([t], 1)
    with pytest.raises(CommitError, match=r"rank 0 failed while writing: ConfigError"):
        save(SaveIO(storage, LocalKeyValue(), partial(int, 0)), spec, RankPart(0, [change(whole([t])[0])]))
    assert files_of(storage.root) == {}


COVERAGE = {
    "rows missing": (lambda t: [t.block(torch.arange(0, 90))], r"table a lacks rows \[90, 100\) of columns \[0, 8\)"),
    "a hole": (lambda t: [t.block(torch.tensor([*range(40), *range(43, 100)]))], r"lacks rows \[40, 43\)"),
    "columns missing": (lambda t: [t.block(torch.arange(100), 0, 6)], r"lacks rows \[0, 100\) of columns \[6, 8\)"),
    "all missing": (lambda t: [], r"lacks rows \[0, 100\)"),
    "twice": (lambda t: [t.block(torch.arange(100)), t.block(torch.arange(3, 5))], r"holds rows \[3, 5\) .* twice"),
}


@pytest.mark.parametrize(("blocks", "message"), COVERAGE.values(), ids=COVERAGE)
def test_a_base_that_does_not_cover_is_not_committed(
    storage: Storage, blocks: Callable[..., Any], message: str
) -> None:
    t = table("a", 100, 8)
    spec = save_spec([t], 1)
    with pytest.raises(ManifestError, match=message) as info:
        save(SaveIO(storage, LocalKeyValue(), partial(int, 0)), spec, RankPart(0, blocks(t)))
    assert isinstance(info.value, CoverageError)
    assert files_of(storage.root) == {}


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_at_each_point_on_each_rank(storage: Storage, kv: KeyValue, rank: int, point: str) -> None:
    tables = [table("a", 100, 8)]
    old = save_one(storage, tables, 5)
    before = files_of(storage.root)
    fired = []

    def points(name: str, step: int) -> None:
        if name == point:
            fired.append((name, step))
            raise RuntimeError("injected")

    ios = [SaveIO(storage, kv, partial(int, 0), timeout_s=20) for _ in range(2)]
    ios[rank] = dataclasses.replace(ios[rank], points=points)
    spec = save_spec(tables, 10, 2)
    outcomes = save_ranks(ios, spec, halves(tables))
    assert fired == [(point, 10)]
    if point == "post_commit":
        assert isinstance(outcomes[rank], RuntimeError)
        assert isinstance(outcomes[1 - rank], SaveReport)
        assert newest(storage).require().step == 10
        return
    texts = [str(outcome) for outcome in outcomes]
    assert [type(outcome) for outcome in outcomes] == [CommitError, CommitError]
    assert texts[0] == texts[1]
    assert f"rank {rank} failed" in texts[0]
    assert "RuntimeError: injected" in texts[0]
    assert "in points" in texts[0]
    assert newest(storage).require() == old
    assert {path: size for path, size in files_of(storage.root).items() if path in before} == before
    assert not any(entry.is_dir for entry in storage.list("manifests") or [])


def test_base_exceptions_of_the_block_source_abort_too(storage: Storage) -> None:
    from torch.distributed.checkpoint import CheckpointException

    def blocks() -> Iterator[RowBlock]:
        raise CheckpointException("broken", {})
        yield

    with pytest.raises(CommitError, match="CheckpointException") as info:
        save(SaveIO(storage, LocalKeyValue(), partial(int, 0)), save_spec([table("a", 3, 2)], 1), RankPart(0, blocks()))
    assert isinstance(info.value.__cause__, CheckpointException)


def test_a_rank_that_never_reports_is_named_after_the_deadline(storage: Storage) -> None:
    tables = [table("a", 100, 8)]
    spec = save_spec(tables, 1, 2)
    io = SaveIO(storage, LocalKeyValue(), partial(int, 0), timeout_s=0.3)
    with pytest.raises(CommitError, match=r"parts of ranks are not there after 0.3 s: part/1$|part/1\n"):
        save(io, spec, halves(tables)[0])
    assert files_of(storage.root) == {}


def test_a_rank_whose_leader_never_commits_gives_up_and_voids_the_save(storage: Storage) -> None:
    tables = [table("a", 100, 8)]
    spec = save_spec(tables, 1, 2)
    io = SaveIO(storage, LocalKeyValue(), partial(int, 0), timeout_s=0.3)
    parts = halves(tables)
    with pytest.raises(CommitError, match=r"rank 1 failed while waiting for the commit.*done"):
        save(io, spec, parts[1])
    write = pytest.raises(CommitError, match="rank 1 failed")
    with write:
        save(io, spec, parts[0])
    assert list_versions(storage) == []


def test_an_epoch_that_moves_on_before_the_manifest_aborts(storage: Storage) -> None:
    t = table("a", 10, 4)
    epoch = [3]

    def points(name: str, step: int) -> None:
        if name == "pre_commit":
            epoch[0] = 4

    io = SaveIO(storage, LocalKeyValue(), lambda: epoch[0], points)
    with pytest.raises(CommitError, match="is of epoch 3 and the job is in 4"):
        save(io, save_spec([t], 1, epoch=3), RankPart(0, whole([t])))
    assert files_of(storage.root) == {}


def test_cancel_stops_between_chunks(storage: Storage) -> None:
    t = table("a", 100, 4, ())
    cancel = threading.Event()
    puts = []

    def points(name: str, step: int) -> None:
        if name == "mid_write":
            cancel.set()

    storage.intercept = lambda path, buffers: puts.append(path) or buffers  # type: ignore[func-returns-value]
    io = SaveIO(storage, LocalKeyValue(), partial(int, 0), points, cancel=cancel, chunk_bytes=16)
    with pytest.raises(CommitError, match="was cancelled"):
        save(io, save_spec([t], 1), RankPart(0, whole([t])))
    assert 1 <= len(puts) < 10
    assert files_of(storage.root) == {}


@pytest.mark.parametrize("what", ["torn", "vanished"])
def test_files_that_are_not_as_written_stop_the_commit(storage: Storage, what: str) -> None:
    t = table("a", 100, 8)

    def points(name: str, step: int) -> None:
        (path,) = Path(storage.root).rglob("*.safetensors")
        if name == "mid_write":
            path.unlink() if what == "vanished" else path.write_bytes(path.read_bytes()[:50])

    io = SaveIO(storage, LocalKeyValue(), partial(int, 0), lambda n, s: points(n, s) if n == "mid_write" else None)
    with pytest.raises(CommitError, match=r"r0-00000.safetensors: (50|no) bytes in storage, \d+ were written"):
        save(io, save_spec([t], 1), RankPart(0, whole([t])))
    assert list_versions(storage) == []


def test_a_part_manifest_that_is_not_as_written_stops_the_commit(storage: Storage) -> None:
    t = table("a", 100, 8)
    io = SaveIO(storage, LocalKeyValue(), partial(int, 0))
    spec = save_spec([t], 1)
    write_part(io, spec, RankPart(0, whole([t])))
    raw = storage.get(spec.part_path(0))
    raw[-9] ^= 1
    storage.put(spec.part_path(0), raw)
    with pytest.raises(CommitError, match=r"CorruptShardError: .*part-0.json"):
        commit(io, spec, 0)


def test_blobs_of_one_name_on_two_ranks_are_refused(storage: Storage) -> None:
    tables = [table("a", 100, 8)]
    io = SaveIO(storage, LocalKeyValue(), partial(int, 0), timeout_s=20)
    parts = [dataclasses.replace(part, blobs={"dense": b"x"}) for part in halves(tables)]
    outcomes = save_ranks([io, io], save_spec(tables, 1, 2), parts)
    assert all("two ranks saved a blob of one name" in str(outcome) for outcome in outcomes)
    assert list_versions(storage) == []


def test_a_flipped_blob_is_refused(storage: Storage) -> None:
    manifest = save_one(storage, [table("a", 3, 2)], 1, blobs={"dense": b"weights", "e/f": b""})
    assert read_blob(storage, manifest, "e/f") == b""
    storage.put(manifest.blobs[0].path, b"weightz")
    with pytest.raises(CorruptShardError, match=r"r0-dense.blob \(dense\)"):
        read_blob(storage, manifest, "dense")
    with pytest.raises(ManifestError, match="no blob 'x'; it has dense, e/f"):
        read_blob(storage, manifest, "x")


def test_source_tensors_are_never_altered(storage: Storage) -> None:
    t = table("a", 50, 4)
    block = whole([t])[0]
    before = (block.weight.clone(), block.states["sum"].clone(), block.rows.clone())
    save(
        SaveIO(storage, LocalKeyValue(), partial(int, 0)), save_spec([t], 1), RankPart(0, [block], codecs={"a": "fp16"})
    )
    assert torch.equal(block.weight, before[0])
    assert torch.equal(block.states["sum"], before[1])
    assert torch.equal(block.rows, before[2])
