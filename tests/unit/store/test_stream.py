from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cpr.errors import CorruptShardError, IncompatiblePlanError, ManifestError
from lightning_cpr.store import Storage, read_into
from lightning_cpr.store.compact import compact
from lightning_cpr.store.compare import changed_rows, diff_table
from lightning_cpr.store.stream import TableReader
from tests.unit.store.helpers import ELEMENT, ROW, save_one, table
from tests.unit.store.test_compact import blocks_delta, chain, train


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_rows_in_any_pieces(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    storage = Storage(str(tmp_path_factory.mktemp("root")))
    t = table("a", 300, 6, (ROW, ELEMENT))
    last = chain(storage, [t], 4, chunk_bytes=3000)
    with TableReader(storage, last, "a") as reader:
        found = list(reader.slabs(data.draw(st.integers(1, 30000))))
        assert torch.equal(torch.cat([block.weight for block in found]), t.weight)
        assert torch.equal(torch.cat([block.rows for block in found]), torch.arange(300))
        for name, state in t.states.items():
            assert torch.equal(torch.cat([block.states[name] for block in found]), state)
        rows = torch.tensor(sorted(data.draw(st.sets(st.integers(0, 299)))), dtype=torch.int64)
        some = reader.read(rows)
        assert torch.equal(some.weight, t.weight[rows])
        assert torch.equal(some.states["sum"], t.states["sum"][rows])


def test_column_blocks_give_the_same_as_a_whole_read(storage: Storage) -> None:
    t = table("a", 100, 8, (ROW, ELEMENT))
    last = save_one(storage, [t], 0)
    rows = torch.arange(0, 100, 3)
    train(t, rows, torch.Generator().manual_seed(1))
    blocks = [t.block(rows, 0, 5), t.block(rows, 5, 3)]
    blocks[0].states["sum"] += 1
    last = blocks_delta(storage, t, last, blocks)
    whole = t.shard(0, 100, 0, 8)
    read_into(storage, last, [whole])
    with TableReader(storage, last, "a") as reader:
        found = reader.read(torch.arange(50, 100))
        assert torch.equal(found.weight, t.weight[50:])
        assert torch.equal(found.states["sum"], whole.states["sum"][50:])
        assert torch.equal(torch.cat([b.states["sum"] for b in reader.slabs(500)]), whole.states["sum"])


def test_each_row_is_read_about_once_and_checked(storage: Storage) -> None:
    t = table("a", 50000, 16)
    last = chain(storage, [t], 1)
    with TableReader(storage, last, "a") as reader:
        assert sum(len(block.rows) for block in reader.slabs()) == 50000
        assert reader.bytes_read <= 1.3 * (t.weight.nbytes + t.states["sum"].nbytes)
    path = f"{storage.root}/{last.files[0].path}"
    with open(path, "r+b") as file:
        file.seek(-3, 2)
        file.write(b"\xff\xff\xff")
    with TableReader(storage, last, "a") as reader, pytest.raises(CorruptShardError, match=last.files[0].path):
        list(reader.slabs())
    with pytest.raises(ManifestError, match="holds no table 'z'"):
        TableReader(storage, last, "z")


def test_changed_rows_are_those_with_other_bits(storage: Storage) -> None:
    t = table("a", 200, 4)
    t.weight[3, 0] = float("nan")
    t.weight[10:12] = 1.0
    old = save_one(storage, [t], 0)
    before = t.weight.clone()
    t.weight[10] += 0.5
    t.weight[11, 2] -= 2.0
    t.states["sum"][12] = 7.0
    new = save_one(storage, [t], 1, rows={"a": torch.arange(3, 40)}, parent=old.path)
    with TableReader(storage, old, "a") as one, TableReader(storage, new, "a") as two:
        (pair,) = changed_rows(one, two)
        assert pair[1].rows.tolist() == [10, 11, 12]
        assert torch.equal(pair[1].weight, t.weight[10:13])
        assert torch.equal(pair[0].weight, before[10:13])
        assert torch.equal(torch.cat([after.rows for _, after in changed_rows(one, two, 20)]), pair[1].rows)
        found = diff_table(one, two)
        assert (found.rows, found.changed, found.states, found.largest) == (200, 2, 1, 2.0)
        assert found.norm == pytest.approx(math.sqrt(4 * 0.25 + 4.0), rel=1e-6)
        read = two.bytes_read
        assert diff_table(two, two).changed == 0
        assert two.bytes_read == read
    done = compact(storage, new)
    assert done is not None
    with TableReader(storage, new, "a") as one, TableReader(storage, done.manifest, "a") as two:
        assert list(changed_rows(one, two)) == []


def test_tables_of_other_shapes_are_refused(storage: Storage) -> None:
    one, two = save_one(storage, [table("a", 9, 4)], 0), save_one(storage, [table("a", 10, 4)], 1)
    with (
        TableReader(storage, one, "a") as old,
        TableReader(storage, two, "a") as new,
        pytest.raises(IncompatiblePlanError, match=r"table a is \(9, 4.* and \(10, 4"),
    ):
        list(changed_rows(old, new))
