from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_cpr.errors import CorruptShardError, IncompatiblePlanError, ManifestError, RecoveryError
from lightning_cpr.spec import Shard, ShardSpec, StateSpec
from lightning_cpr.store import (
    LocalKeyValue,
    Manifest,
    RankPart,
    SaveIO,
    Storage,
    chunk,
    fetch,
    load_manifest,
    read_into,
    read_table,
    save,
    verify,
)
from lightning_cpr.store.codec import CODECS, tune
from lightning_cpr.store.resolve import resolve
from tests.unit.store.helpers import ELEMENT, ROW, Table, files_of, save_one, save_spec, table

SMALL_BLOCKS = 96
"""Bytes a block, so that tables of a few rows have many."""


@st.composite
def rectangles(draw: st.DrawFn, rows: int, cols: int) -> list[tuple[int, int, int, int]]:
    """A sharding: ``(row_start, rows, col_start, cols)`` that tile a table, column-wise, then row-wise in each."""

    def cuts(size: int) -> list[tuple[int, int]]:
        at = sorted(draw(st.lists(st.integers(0, size), max_size=3)))
        return list(zip([0, *at], [*at, size], strict=True))

    return [(r0, r1 - r0, c0, c1 - c0) for c0, c1 in cuts(cols) for r0, r1 in cuts(rows)]


def save_sharded(storage: Storage, t: Table, tiles: Sequence[tuple[int, int, int, int]]) -> Manifest:
    """A base saved by a plan; a tile's row-wise state is that of the table plus a tenth of its first column."""
    blocks = []
    for r0, rows, c0, cols in tiles:
        block = t.block(torch.arange(r0, r0 + rows), c0, cols)
        block.states["sum"] += c0 / 10
        blocks.append(block)
    spec = save_spec([t], 1)
    save(SaveIO(storage, LocalKeyValue(), partial(int, 0), chunk_bytes=600), spec, RankPart(0, blocks))
    return load_manifest(storage, spec.manifest)


def merged_sum(t: Table, tiles: Sequence[tuple[int, int, int, int]], shard: ShardSpec) -> Tensor:
    """The documented rule, row by row: the mean of the column blocks' states, weighted by how much of each is taken."""
    total = torch.zeros(shard.rows, dtype=torch.float64)
    for r0, rows, c0, cols in tiles:
        width = min(c0 + cols, shard.col_end) - max(c0, shard.col_start)
        for row in range(max(r0, shard.row_start), min(r0 + rows, shard.row_end)):
            if width > 0:
                total[row - shard.row_start] += (t.states["sum"][row] + c0 / 10).double() * width
    return (total / shard.cols).float() if shard.cols else total.float()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_plan_to_any_plan(data: st.DataObject) -> None:
    rows, cols = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 9))
    t = table("a", rows, cols, (ROW, ELEMENT), seed=rows * 10 + cols)
    saved, wanted = data.draw(rectangles(rows, cols)), data.draw(rectangles(rows, cols))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk, "BLOCK_BYTES", SMALL_BLOCKS)
        patch.setattr(fetch, "PIECE_BYTES", 3 * SMALL_BLOCKS)
        storage = Storage(f"memory://{uuid.uuid4().hex}")
        manifest = save_sharded(storage, t, saved)
        shards = [t.shard(*tile) for tile in wanted]
        cache = data.draw(st.sampled_from([0, 500, 1 << 30]))
        report = read_into(storage, manifest, shards, cache_bytes=cache, undefined=data.draw(st.booleans()))
    assert report.rows == sum(tile[1] for tile in wanted)
    for shard in shards:
        s = shard.spec
        where = (slice(s.row_start, s.row_end), slice(s.col_start, s.col_end))
        assert torch.equal(shard.weight, t.weight[where])
        assert torch.equal(shard.states["exp_avg"], t.states["exp_avg"][where])
        if s.cols:
            expected = merged_sum(t, saved, s)
            assert torch.allclose(shard.states["sum"], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("cols", [[3, 3, 3], [2, 7], [1, 8]])
def test_equal_column_blocks_merge_to_exactly_their_value(storage: Storage, cols: list[int]) -> None:
    t = table("a", 500, 9)
    starts = [sum(cols[:i]) for i in range(len(cols))]
    blocks = [t.block(torch.arange(500), start, width) for start, width in zip(starts, cols, strict=True)]
    spec = save_spec([t], 1)
    save(SaveIO(storage, LocalKeyValue(), partial(int, 0)), spec, RankPart(0, blocks))
    _, states = read_table(storage, load_manifest(storage, spec.manifest), "a")
    assert torch.equal(states["sum"], t.states["sum"])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_histories_of_bases_and_deltas_against_a_plain_model(data: st.DataObject) -> None:
    """Random saves under changing plans; every version restores to what the model held when it was saved."""
    t = table("a", 30, 6, (ROW, ELEMENT), seed=3)
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk, "BLOCK_BYTES", SMALL_BLOCKS)
        storage = Storage(f"memory://{uuid.uuid4().hex}")
        versions: list[tuple[Manifest, Tensor, dict[str, Tensor]]] = []
        for step in range(1, data.draw(st.integers(2, 7))):
            rows = torch.tensor(sorted(data.draw(st.sets(st.integers(0, 29)))), dtype=torch.int64)
            t.weight[rows] = torch.randn(len(rows), 6, generator=g)
            for state in t.states.values():
                state[rows] = torch.rand((len(rows), *state.shape[1:]), generator=g)
            parent = versions[-1][0].path if versions and data.draw(st.booleans()) else None
            bands = data.draw(st.sampled_from([[(0, 6)], [(0, 2), (2, 4)], [(0, 5), (5, 1)]]))
            which = rows if parent else torch.arange(30)
            spec = save_spec([t], step, parent=parent)
            part = RankPart(0, [t.block(which, c0, cols) for c0, cols in bands])
            save(SaveIO(storage, LocalKeyValue(), partial(int, 0)), spec, part)
            manifest = load_manifest(storage, spec.manifest)
            versions.append((manifest, t.weight.clone(), {name: state.clone() for name, state in t.states.items()}))
        for manifest, weight, states in versions:
            found, found_states = read_table(storage, manifest, "a")
            assert torch.equal(found, weight)
            assert all(torch.equal(found_states[name], state) for name, state in states.items())
            assert verify(storage, manifest) == []


def test_each_live_row_is_read_about_once(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten deltas over all rows: nine and the base are superseded, so only the last is opened."""
    monkeypatch.setattr(chunk, "BLOCK_BYTES", 4096)
    t = table("a", 2000, 16)
    manifest = save_one(storage, [t], 1)
    rows = torch.arange(2000)
    for step in range(2, 12):
        t.weight += 1
        manifest = save_one(storage, [t], step, rows={"a": rows}, parent=manifest.path)
    assert len(manifest.files) == 11
    shard = t.shard(0, 2000, 0, 16)
    report = read_into(storage, manifest, [shard])
    assert torch.equal(shard.weight, t.weight)
    assert report.files_opened == 1
    assert report.bytes_read == manifest.files[-1].bytes


def test_a_target_that_holds_nothing_is_written_in_one_pass(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk, "BLOCK_BYTES", 4096)
    t = table("a", 2000, 16)
    manifest = save_one(storage, [t], 1)
    twice = read_into(storage, manifest, [t.shard(0, 2000, 0, 16)], cache_bytes=0)
    shard = t.shard(0, 2000, 0, 16)
    monkeypatch.delattr(fetch.Fetcher, "checked")  # whole raw rows are read straight into it, without a buffer
    report = read_into(storage, manifest, [shard], cache_bytes=0, undefined=True)
    assert torch.equal(shard.weight, t.weight)
    assert torch.equal(shard.states["sum"], t.states["sum"])
    assert report.bytes_read == manifest.files[0].bytes < twice.bytes_read
    path = Path(storage.root) / manifest.files[0].path
    whole = path.read_bytes()
    for damaged in (whole[:-1] + b"x", whole[:-1]):
        path.write_bytes(damaged)
        with pytest.raises(CorruptShardError, match="table a"):
            read_into(storage, manifest, [shard], undefined=True)
    path.unlink()
    with pytest.raises(CorruptShardError, match="table a"):
        read_into(storage, manifest, [shard], undefined=True)


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_that_do_not_lie_side_by_side_are_read_through_a_buffer(storage: Storage, rows: int) -> None:
    t = table("a", rows, 4)
    manifest = save_one(storage, [t], 1)
    shard = t.shard(0, rows, 0, 4)
    apart = Shard(shard.spec, torch.zeros(rows, 9)[:, 2:6], {"sum": torch.zeros(rows, 2)[:, 1]})
    read_into(storage, manifest, [apart], undefined=True)
    assert torch.equal(apart.weight, t.weight)
    assert torch.equal(apart.states["sum"], t.states["sum"])


def test_blocks_without_a_live_row_are_not_read(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk, "BLOCK_BYTES", 640)
    t = table("a", 1000, 15, ())
    base = save_one(storage, [t], 1)
    t.weight[100:900] += 1
    delta = save_one(storage, [t], 2, rows={"a": torch.arange(100, 900)}, parent=base.path)
    shard = t.shard(0, 1000, 0, 15)
    report = read_into(storage, delta, [shard])
    assert torch.equal(shard.weight, t.weight)
    heads = sum(entry.index_bytes for entry in delta.files)
    # 60 bytes a row, blocks of 10 rows that divide the ranges: each live row once, no other.
    assert report.bytes_read == heads + 1000 * 60


def test_a_small_target_reads_little(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk, "BLOCK_BYTES", 4096)
    t = table("a", 10_000, 16)
    manifest = save_one(storage, [t], 1, chunk_bytes=100_000)
    shard = t.shard(5000, 64, 0, 16)
    report = read_into(storage, manifest, [shard])
    assert torch.equal(shard.weight, t.weight[5000:5064])
    assert torch.equal(shard.states["sum"], t.states["sum"][5000:5064])
    assert report.files_opened == 1
    assert report.bytes_read < 20_000


def test_live_views_are_written_in_place(storage: Storage) -> None:
    """Targets are strided views of what the optimizer updates, and may require grad."""
    t = table("a", 40, 4)
    manifest = save_one(storage, [t], 1)
    memory = torch.zeros(40, 10, requires_grad=True)
    shard = Shard(ShardSpec("a", 10, 20, 1, 3, 0), memory[5:25, 2:5], {"sum": torch.zeros(60)[::3]})
    read_into(storage, manifest, [shard])
    assert torch.equal(memory[5:25, 2:5], t.weight[10:30, 1:4])
    assert torch.equal(shard.states["sum"], t.states["sum"][10:30])
    assert float(memory.detach()[:, :2].abs().sum() + memory.detach()[:5].abs().sum()) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_are_bit_exact(storage: Storage, dtype: torch.dtype) -> None:
    states = (StateSpec("sum", "row", torch.float32), StateSpec("m", "element", dtype))
    t = table("a", 33, 5, states, dtype)
    t.weight[3, 2] = float("nan")
    t.weight[4, 1] = float("-inf")
    manifest = save_one(storage, [t], 1)
    weight, found = read_table(storage, manifest, "a")
    assert torch.equal(weight.view(torch.int16), t.weight.view(torch.int16))
    assert torch.equal(found["m"].view(torch.int16), t.states["m"].view(torch.int16))


@pytest.mark.parametrize("name", sorted(set(CODECS) - {"up16"}))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_codec_through_files(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    """What a version gives back is what the codec makes of the rows, whatever blocks and columns are read."""
    monkeypatch.setattr(chunk, "BLOCK_BYTES", 100)
    t = table("a", 70, 9, (ROW, ELEMENT), dtype)
    io = SaveIO(storage, LocalKeyValue(), partial(int, 0), chunk_bytes=2000)
    part = RankPart(0, [t.block(torch.arange(70))], codecs={"a": name}, state_codecs={"sum": "up16", "exp_avg": name})
    report = save(io, save_spec([t], 1), part)
    manifest = load_manifest(storage, report.path)
    assert report.part.raw_rows == 0
    codec, sums = CODECS[name], CODECS["up16"]
    tuned = tune(codec, t.weight)  # of few rows the writer's sample is all
    weight = tuned.decode(tuned.encode(t.weight), 9, dtype)
    moments = codec.decode(codec.encode(t.states["exp_avg"]), 9, torch.float32)
    total = sums.decode(sums.encode(t.states["sum"][:, None]), 1, torch.float32)[:, 0]
    assert verify(storage, manifest) == []
    for row, rows, col, cols in [(0, 70, 0, 9), (13, 40, 2, 5), (69, 1, 8, 1)]:
        shard = t.shard(row, rows, col, cols)
        read_into(storage, manifest, [shard])
        assert torch.equal(shard.weight, weight[row : row + rows, col : col + cols])
        assert torch.equal(shard.states["exp_avg"], moments[row : row + rows, col : col + cols])
        assert torch.equal(shard.states["sum"], total[row : row + rows])


def test_weights_alone(storage: Storage) -> None:
    t = table("a", 100, 4, (ROW, ELEMENT))
    manifest = save_one(storage, [t], 1)
    shard = dataclasses.replace(t.shard(0, 100, 0, 4), states={})
    with pytest.raises(IncompatiblePlanError, match=r"sum is absent here and \[100\] float32 in the version"):
        read_into(storage, manifest, [shard])
    report = read_into(storage, manifest, [shard], with_states=False)
    assert torch.equal(shard.weight, t.weight)
    assert report.bytes_read == manifest.files[0].index_bytes + 1600


def _replace(shard: Shard, **changes: Any) -> Shard:
    return dataclasses.replace(shard, **changes)


def test_all_mismatches_are_listed_and_nothing_is_changed(storage: Storage) -> None:
    t, u = table("a", 20, 4), table("b", 6, 4)
    manifest = save_one(storage, [t, u], 1)
    good = u.shard(0, 6, 0, 4, fill=7.0)
    bad = [
        table("gone", 5, 2).shard(0, 5, 0, 2),
        table("a", 30, 4).shard(0, 30, 0, 4),
        table("a", 20, 6).shard(0, 20, 0, 6),
        _replace(t.shard(0, 20, 0, 4), weight=torch.zeros(20, 4, dtype=torch.float16)),
        _replace(t.shard(1, 19, 0, 4), states={}),
        _replace(t.shard(2, 18, 0, 4), states={"sum": torch.zeros(18, 4)}),
        _replace(t.shard(3, 17, 0, 4), states={"sum": torch.zeros(17), "exp_avg": torch.zeros(17, 4)}),
    ]
    with pytest.raises(IncompatiblePlanError, match="nothing was changed") as info:
        read_into(storage, manifest, [good, *bad])
    text = str(info.value)
    for wanted in (
        "table gone is not in the version",
        "table a rows [0, 30) columns [0, 4): the saved table is 20 x 4",
        "table a rows [0, 20) columns [0, 6): the saved table is 20 x 4",
        "weight is [20, 4] float16 here and [20, 4] float32 in the version",
        "rows [1, 20) columns [0, 4): sum is absent here and [19] float32",
        "rows [2, 20) columns [0, 4): sum is [18, 4] float32 here and [18] float32",
        "rows [3, 20) columns [0, 4): exp_avg is [17, 4] float32 here and absent in the version (optimizer",
    ):
        assert wanted in text, wanted
    assert bool((good.weight == 7.0).all())


def test_an_unknown_codec_is_named(storage: Storage) -> None:
    t = table("a", 20, 4)
    manifest = save_one(storage, [t], 1)
    newer = dataclasses.replace(manifest, files=(dataclasses.replace(manifest.files[0], codec="int1"),))
    with pytest.raises(IncompatiblePlanError, match=r"unknown codec 'int1'.*upgrade"):
        read_into(storage, newer, [t.shard(0, 20, 0, 4)])
    with pytest.raises(ManifestError, match="holds no table 'x'; it holds a"):
        read_table(storage, manifest, "x")


def test_rows_in_no_file_are_an_error_before_anything_is_touched(storage: Storage) -> None:
    t = table("a", 20, 4)
    manifest = save_one(storage, [t], 1, chunk_bytes=100)
    holed = dataclasses.replace(manifest, files=manifest.files[:1] + manifest.files[2:])
    shard = t.shard(0, 20, 0, 4, fill=7.0)
    with pytest.raises(ManifestError, match=r"table a: 5 rows of columns \[0, 4\) are in no file.*\[5, 6, 7\]"):
        read_into(storage, holed, [shard])
    assert bool((shard.weight == 7.0).all())
    assert any("lacks rows [5, 10)" in problem.message for problem in verify(storage, holed))


@pytest.mark.parametrize("cache_bytes", [0, 1 << 30])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "missing"])
def test_damage_in_any_file_is_found_before_any_target_changes(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, damage: str, cache_bytes: int
) -> None:
    monkeypatch.setattr(chunk, "BLOCK_BYTES", 64)
    t, u = table("a", 60, 4), table("b", 6, 4)
    base = save_one(storage, [t, u], 1, chunk_bytes=400)
    rows = torch.tensor([0, 7, 9, 33, 59])
    t.weight[rows] += 1
    manifest = save_one(storage, [t, u], 2, rows={"a": rows}, parent=base.path)
    assert len(manifest.files) > 3
    for entry in manifest.files:
        path = Path(storage.root) / entry.path
        whole = path.read_bytes()
        if damage == "missing":
            path.unlink()
        else:
            # The last byte is of the last row's state; it is live in every file here.
            path.write_bytes({"flip": whole[:-1] + bytes([whole[-1] ^ 1]), "cut": whole[:-1], "empty": b""}[damage])
        shards = [t.shard(0, 60, 0, 4, fill=7.0), u.shard(0, 6, 0, 4, fill=7.0)]
        with pytest.raises(CorruptShardError, match=rf"{entry.path} \(table {entry.table}"):
            read_into(storage, manifest, shards, cache_bytes=cache_bytes)
        assert all(bool((x == 7.0).all()) for shard in shards for x in (shard.weight, shard.states["sum"]))
        problems = verify(storage, manifest)
        assert [(problem.path, problem.table) for problem in problems] == [(entry.path, entry.table)]
        path.write_bytes(whole)
    assert verify(storage, manifest) == []


def test_every_byte_of_every_file_is_guarded(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk, "BLOCK_BYTES", 32)
    t = table("a", 4, 2)
    manifest = save_one(storage, [t], 1, blobs={"dense": b"abc"})
    for name in set(files_of(storage.root)) - {manifest.path}:
        path = Path(storage.root) / name
        whole = path.read_bytes()
        for at in range(len(whole)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 8]) + whole[at + 1 :])
            assert [problem.path for problem in verify(storage, manifest)] == [name]
        path.write_bytes(whole)
    assert verify(storage, manifest) == []


def test_storage_that_fails_between_the_passes_says_that_targets_are_mixed(storage: Storage) -> None:
    t = table("a", 60, 4)
    manifest = save_one(storage, [t], 1)
    gone = lambda done, total: (Path(storage.root) / manifest.files[0].path).unlink()  # noqa: E731
    with pytest.raises(RecoveryError, match="the targets hold a mix, restore them again"):
        read_into(storage, manifest, [t.shard(0, 60, 0, 4)], cache_bytes=0, progress=gone)


def test_progress_ends_at_the_total(storage: Storage) -> None:
    t = table("a", 600, 4)
    manifest = save_one(storage, [t], 1, chunk_bytes=2000)
    seen: list[tuple[int, int]] = []
    read_into(storage, manifest, [t.shard(0, 600, 0, 4)], progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (12_000, 12_000)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    checked: list[tuple[int, int]] = []
    verify(storage, manifest, lambda done, total: checked.append((done, total)))
    assert checked[-1][0] == checked[-1][1] == sum(entry.bytes for entry in manifest.files)


def test_resolve_asks_for_row_numbers_of_sparse_files_only(storage: Storage) -> None:
    t = table("a", 60, 4)
    manifest = save_one(storage, [t], 1)
    shard = ShardSpec("a", 10, 20, 0, 4, 0)
    needs = resolve(manifest.files, [shard], lambda entry: pytest.fail("asked"))
    (need,) = needs[0]
    assert (need.positions, need.rows, need.whole) == (range(10, 30), range(20), True)


def test_seventy_million_rows_resolve_by_range() -> None:
    """Row arithmetic beyond 2**31 elements, without the rows."""
    t = table("a", 1, 32)
    spec = dataclasses.replace(t.spec, rows=70_000_000)
    index_offset = 69_999_990 * spec.cols * 4
    assert index_offset > 1 << 32
    from lightning_cpr.store.chunk import ChunkIndex, Part
    from lightning_cpr.store.manifest import FileEntry
    from lightning_cpr.store.rows import encode_rows

    entry = FileEntry("chunks/v/f", 1 << 40, "a", spec.rows, 0, spec.rows, 0, 32, "raw", {"sum": "raw"}, 90, "", 1)
    index = ChunkIndex(entry, 8192, encode_rows(torch.arange(1)), (Part("weight.raw", torch.float32, (32,), 100),), b"")
    assert index.span(index.parts[0], index.blocks - 1, index.blocks)[1] == 100 + spec.rows * 128
