from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_cpr.errors import CorruptShardError, StorageError
from lightning_cpr.spec import RowBlock
from lightning_cpr.store import Manifest, Storage, clean_torn, list_versions, load_manifest, newest, read_into, verify
from lightning_cpr.store.codec import get_codec
from lightning_cpr.store.compact import chain_length, compact
from lightning_cpr.store.manifest import is_compaction
from lightning_cpr.store.save import Compacted
from tests.unit.store.helpers import ELEMENT, ROW, Table, files_of, save_one, save_spec, table
from tests.unit.store.s3 import serve


def chain(storage: Storage, tables: list[Table], deltas: int, seed: int = 0, **options: object) -> Manifest:
    """A base and ``deltas`` deltas of random rows; ``tables`` follow along."""
    g = torch.Generator().manual_seed(seed)
    last = save_one(storage, tables, 0, blobs={"job.pt": b"dense"}, **options)
    for step in range(1, deltas + 1):
        rows = {}
        for t in tables:
            mine = torch.unique(torch.randint(0, t.spec.rows, (max(1, t.spec.rows // 8),), generator=g))
            train(t, mine, g)
            rows[t.spec.fqn] = mine
        last = save_one(
            storage, tables, step, rows=rows, parent=last.path, blobs={"job.pt": b"dense%d" % step}, **options
        )
    return last


def train(t: Table, rows: Tensor, g: torch.Generator) -> None:
    t.weight[rows] = torch.randn(len(rows), t.spec.cols, generator=g).to(t.spec.dtype)
    for state in t.states.values():
        state[rows] = torch.rand(state[rows].shape, generator=g)


def holds(storage: Storage, manifest: Manifest, tables: list[Table]) -> int:
    """Check every bit of a version; returns the bytes that were read."""
    shards = [t.shard(0, t.spec.rows, 0, t.spec.cols) for t in tables]
    report = read_into(storage, manifest, shards)
    for t, shard in zip(tables, shards, strict=True):
        assert torch.equal(shard.weight, t.weight)
        for name, state in t.states.items():
            assert torch.equal(shard.states[name], state)
    return report.bytes_read


def test_a_compacted_chain_holds_the_same_rows_and_reads_each_about_once(storage: Storage) -> None:
    tables = [table("a", 20000, 16), table("b", 300, 4, (ROW, ELEMENT)), table("c", 1, 8, ())]
    last = chain(storage, tables, 12)
    before = files_of(storage.root)
    done = compact(storage, last)
    assert done is not None
    new = done.manifest
    assert load_manifest(storage, new.path) == new
    assert (new.step, new.epoch, new.samples, new.blobs) == (last.step, last.epoch, last.samples, last.blobs)
    assert (new.kind, new.parent, is_compaction(new.version)) == ("base", last.path, True)
    assert newest(storage).require() == new
    assert (chain_length(last), chain_length(new)) == (13, 1)
    assert done.files == (39, 3)
    rows = sum(t.spec.rows for t in tables)
    assert done.rows_copied == rows
    assert holds(storage, new, tables) <= 1.05 * sum(
        t.weight.nbytes + sum(s.nbytes for s in t.states.values()) for t in tables
    )
    assert holds(storage, last, tables) > 0
    assert verify(storage, new) == []
    after = files_of(storage.root)
    assert before.items() <= after.items()
    assert done.bytes_written == sum(size for path, size in after.items() if path not in before)
    assert compact(storage, new) is None


def test_deltas_go_on_from_a_compacted_version(storage: Storage) -> None:
    t = table("a", 500, 4)
    done = compact(storage, chain(storage, [t], 4))
    assert done is not None
    rows = torch.arange(3, 500, 5)
    train(t, rows, torch.Generator().manual_seed(9))
    last = save_one(storage, [t], 5, rows={"a": rows}, parent=done.manifest.path)
    assert chain_length(last) == 2
    assert newest(storage).require() == last
    holds(storage, last, [t])


def test_a_chain_that_grew_meanwhile_moves_onto_the_compacted_files(storage: Storage) -> None:
    t = table("a", 2000, 8)
    last = chain(storage, [t], 4)
    done = compact(storage, last)
    assert done is not None
    moved = Compacted(last.files, done.manifest.files)
    g, rows = torch.Generator().manual_seed(1), torch.arange(0, 1900, 7)
    train(t, rows + 5, g)
    last = save_one(storage, [t], 5, rows={"a": rows + 5}, parent=last.path)  # in flight while the compaction ran
    train(t, rows, g)
    last = save_one(storage, [t], 6, rows={"a": rows}, parent=last.path, compacted=moved)
    assert last.files[: len(done.manifest.files)] == done.manifest.files
    assert len(last.files) == len(done.manifest.files) + 2
    holds(storage, last, [t])
    # once it is gone, what it stands for is built upon
    before = save_one(storage, [t], 7, rows={"a": rows}, parent=list_versions(storage)[1].path)
    storage.delete_folder(f"chunks/{done.manifest.version}")
    last = save_one(storage, [t], 8, rows={"a": rows}, parent=before.path, compacted=moved)
    assert last.files[: len(before.files)] == before.files
    holds(storage, last, [t])


def test_files_that_are_mostly_live_are_inherited(storage: Storage) -> None:
    t = table("a", 4000, 16)
    base = save_one(storage, [t], 0, chunk_bytes=40000)
    g, last, rows = torch.Generator().manual_seed(1), base, torch.arange(0, 900)
    for step in (1, 2, 3):
        train(t, rows, g)
        last = save_one(storage, [t], step, rows={"a": rows}, parent=last.path, chunk_bytes=40000)
    done = compact(storage, last, chunk_bytes=40000)
    assert done is not None
    new = done.manifest
    kept = [entry for entry in new.files if entry in base.files]
    assert len(base.files) == 7
    assert [entry.row_start for entry in kept] == [entry.row_start for entry in base.files[2:]]
    assert new.kind == "delta"
    holds(storage, new, [t])
    rewritten = [entry for entry in new.files if entry not in base.files]
    assert sum(entry.rows for entry in rewritten) + sum(entry.rows for entry in kept) == 4000


def test_encoded_bytes_are_carried_forward(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    t = table("a", 600, 8)
    last = chain(storage, [t], 5, codecs={"a": "fp16"})
    t.weight[7] = 1e30  # does not fit fp16: stored raw
    last = save_one(storage, [t], 6, rows={"a": torch.arange(5, 9)}, parent=last.path, codecs={"a": "fp16"})
    shard = t.shard(0, 600, 0, 8)
    read_into(storage, last, [shard])
    monkeypatch.setattr(type(get_codec("fp16")), "encode", lambda *a: pytest.fail("encoded again"))
    done = compact(storage, last)
    assert done is not None
    assert {entry.codec for entry in done.manifest.files} == {"fp16", "raw"}
    again = t.shard(0, 600, 0, 8)
    read_into(storage, done.manifest, [again])
    assert torch.equal(again.weight, shard.weight)
    assert torch.equal(again.states["sum"], t.states["sum"])


def blocks_delta(storage: Storage, t: Table, parent: Manifest, blocks: list[RowBlock]) -> Manifest:
    from functools import partial

    from lightning_cpr.store import LocalKeyValue, RankPart, SaveIO, save

    spec = save_spec([t], parent.step + 1, parent=parent.path)
    report = save(SaveIO(storage, LocalKeyValue(), partial(int, 0)), spec, RankPart(0, blocks))
    return load_manifest(storage, report.path)


def test_column_ranges_that_cut_across_each_other(storage: Storage) -> None:
    """Plans may change between saves: rows whole, in two column blocks, in other blocks, and whole again."""
    t = table("a", 300, 12, (ROW, ELEMENT))
    g = torch.Generator().manual_seed(3)
    last = save_one(storage, [t], 0)
    for splits in [[(0, 6), (6, 6)], [(0, 6), (6, 6)], [(0, 4), (4, 8)], [(0, 12)], [(0, 4)], [(8, 4)]]:
        rows = torch.unique(torch.randint(0, 300, (60,), generator=g))
        blocks = []
        for col_start, cols in splits:
            t.weight[rows, col_start : col_start + cols] = torch.randn(len(rows), cols, generator=g)
            blocks.append(t.block(rows, col_start, cols))
        last = blocks_delta(storage, t, last, blocks)
    whole, again = t.shard(0, 300, 0, 12), t.shard(0, 300, 0, 12)
    read_into(storage, last, [whole])
    assert torch.equal(whole.weight, t.weight)
    done = compact(storage, last)
    assert done is not None
    assert len(done.manifest.files) < len(last.files)
    read_into(storage, done.manifest, [again])
    for name in ("weight", "sum", "exp_avg"):
        one, two = (s.weight if name == "weight" else s.states[name] for s in (whole, again))
        assert torch.equal(one, two), name


def test_a_failure_at_any_write_leaves_nothing_and_the_old_version(storage: Storage) -> None:
    t = table("a", 2000, 8)
    last = chain(storage, [t], 4)
    before = files_of(storage.root)
    writes = 0

    def intercept(path: str, buffers: object) -> object:
        nonlocal writes
        writes += 1
        if writes == at:
            raise OSError(28, "no space")
        return buffers

    storage.intercept = intercept  # type: ignore[assignment]
    failed = 0
    for at in range(1, 20):  # noqa: B007 (the hook reads it)
        writes = 0
        try:
            done = compact(storage, last, chunk_bytes=16000)
        except StorageError:
            failed += 1
            assert files_of(storage.root) == before
            assert newest(storage).require() == last
        else:
            break
    assert done is not None
    assert failed == 1 + sum(entry not in last.files for entry in done.manifest.files) > 3
    holds(storage, done.manifest, [t])


def test_check_ends_it_before_the_commit(storage: Storage) -> None:
    last = chain(storage, [table("a", 2000, 8)], 4)
    before, calls = files_of(storage.root), 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("the epoch has moved on")

    with pytest.raises(RuntimeError, match="moved on"):
        compact(storage, last, chunk_bytes=40000, check=check)
    assert calls == 3
    assert files_of(storage.root) == before


def test_damage_is_found_and_not_copied(storage: Storage) -> None:
    last = chain(storage, [table("a", 2000, 8)], 3)
    path = Path(storage.root) / last.files[1].path
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CorruptShardError, match=last.files[1].path):
        compact(storage, last)
    assert len(list_versions(storage)) == 4


def test_a_compaction_whose_inherited_files_vanished_is_taken_back(storage: Storage) -> None:
    t = table("a", 4000, 16)
    base = save_one(storage, [t], 0, chunk_bytes=40000)
    last = save_one(storage, [t], 1, rows={"a": torch.arange(900)}, parent=base.path, chunk_bytes=40000)

    def intercept(path: str, buffers: object) -> object:
        if path.startswith("manifests/"):
            (Path(storage.root) / base.files[3].path).unlink()
        return buffers

    storage.intercept = intercept  # type: ignore[assignment]
    with pytest.raises(CorruptShardError, match="is missing"):
        compact(storage, last, chunk_bytes=40000)
    assert [ref.version for ref in list_versions(storage)] == [last.version, base.version]


def test_cleaning_torn_saves_spares_a_compaction_in_the_making(storage: Storage) -> None:
    t = table("a", 2000, 8)
    last = chain(storage, [t], 3)
    cleaned: list[str] = []

    def intercept(path: str, buffers: object) -> object:
        if path.startswith("manifests/"):
            storage.intercept = None
            newer = save_one(storage, [t], 9)
            cleaned.extend(clean_torn(storage, newer))
        return buffers

    storage.intercept = intercept  # type: ignore[assignment]
    done = compact(storage, last)
    assert done is not None
    assert cleaned == []
    holds(storage, done.manifest, [t])


def test_on_s3(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as s3:
        storage, t = s3.storage(), table("a", 500, 8)
        last = chain(storage, [t], 3)
        done = compact(storage, last)
        assert done is not None
        assert json.loads(bytes(storage.get(done.manifest.path)))["manifest"]["parent"] == last.path
        holds(s3.storage(), newest(s3.storage()).require(), [t])
