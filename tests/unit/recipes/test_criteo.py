from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrec.datasets.criteo import BinaryCriteoUtils

from lightning_cpr.errors import ConfigError
from recipes import loader as loader_module
from recipes.criteo import CriteoDataModule
from recipes.criteo_npy import convert, open_npy
from recipes.criteo_tsv import SPARSE, Reader, log_dense
from recipes.errors import DataError
from tests.unit.recipes.lines import line, samples, write


def _fields(label: str = "1", ints: dict[int, str] | None = None, ids: dict[int, str] | None = None) -> str:
    """A line of label, 13 times 5 and 26 times 0000000a, but for the fields given."""
    dense = [(ints or {}).get(i, "5") for i in range(13)]
    sparse = [(ids or {}).get(i, "0000000a") for i in range(26)]
    return "\t".join([label, *dense, *sparse]) + "\n"


def _one(tmp_path: Path, text: str, **options: object) -> CriteoDataModule:
    (tmp_path / "train.txt").write_text(text)
    return CriteoDataModule(
        str(tmp_path), 1000, val="train.txt", test="train.txt", batch_size=text.count("\n"), **options
    )


def test_each_kind_of_field_has_its_documented_value(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ints = {0: "", 1: "-1", 2: "-2", 3: "-7", 4: "12x", 5: "-", 6: "1" * 19, 7: "0"}
    text = _fields("0", ints, {0: "", 1: "00000000"})
    text += _fields("1", {}, {0: "zz", 1: "FfFf", 2: "68fd1e64", 3: "1" * 16, 4: "000003e7", 5: "000003e8"})
    data = _one(tmp_path, text)
    batch = next(iter(data.train_dataloader()))
    expected = [0, -1, -2, -2, 0, 0, 0, 0] + [5] * 5
    assert torch.equal(batch.dense[0], torch.tensor([np.float32(math.log(v + 3)) for v in expected]))
    assert batch.dense.dtype == torch.float32
    assert batch.labels.tolist() == [0.0, 1.0]
    ids = {name: batch.sparse[name].values().tolist() for name in SPARSE}
    assert [ids[f"cat_{i}"][0] for i in range(3)] == [0, 0, 10]
    # missing, hashed, hashed, too long, the last id that fits, the first that does not
    assert [ids[f"cat_{i}"][1] for i in range(6)] == [0, 1 + 65534 % 999, 1 + (0x68FD1E64 - 1) % 999, 0, 999, 1]
    assert data.train_dataloader().source.reader.counts.malformed_fields == 0  # a pass of its own counts
    assert "train.txt:1: int_4 is malformed" in caplog.text


def test_counts_are_those_of_the_pass(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text(_fields("2") + _fields() + "\n" + _fields(ints={3: "q", 4: "q"}) + "1\t2\n")
    reader = Reader((path,), skip_bad=True)
    assert [len(block.parse().labels) for block in reader.blocks()] == [2]
    assert (reader.counts.bad_lines, reader.counts.malformed_fields) == (2, 2)
    with pytest.raises(DataError, match=r"f:1: the label is neither 0 nor 1"):
        Reader((path,)).rows()


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("name", ["a.txt", "a.gz"])
@pytest.mark.parametrize("block", [100, 1 << 20])
def test_line_endings_blocks_and_compression_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, name: str, block: int
) -> None:
    monkeypatch.setattr("recipes.criteo_tsv.BLOCK", block)
    text = ending.join(line(i) for i in range(20)).encode()  # the last line has no ending
    # two gzip members, the second padded with zeros, as tape tools write them
    cut = len(text) // 2
    path = tmp_path / name
    path.write_bytes(gzip.compress(text[:cut]) + gzip.compress(text[cut:]) + b"\0" * 9 if name == "a.gz" else text)
    blocks = [b.parse() for b in Reader((path,)).blocks()]
    assert np.concatenate([b.ids[:, 0] for b in blocks]).tolist() == list(range(1, 21))
    expected = [int(line(i).split("\t")[13] or 0) for i in range(20)]
    assert np.concatenate([b.ints[:, 12] for b in blocks]).tolist() == expected
    last = [int(line(i).split("\t")[39] or "0", 16) for i in range(20)]
    assert np.concatenate([b.ids[:, 25] for b in blocks]).tolist() == last


def test_npy_equals_torchrecs(tmp_path: Path) -> None:
    source = write(tmp_path / "day_0", 300)
    assert [c.rows for c in convert([source], tmp_path / "ours")] == [300]
    theirs = [tmp_path / f"{part}.npy" for part in ("dense", "sparse", "labels")]
    BinaryCriteoUtils.tsv_to_npys(str(source), *map(str, theirs))
    ours = open_npy(tmp_path / "ours" / "day_0_dense.npy")
    dense, sparse, labels = map(np.load, theirs)
    np.testing.assert_allclose(ours.dense, dense, rtol=1e-6)  # the files' smallest integer is -1
    assert np.array_equal(ours.sparse, sparse)
    assert np.array_equal(ours.labels, labels.reshape(-1))
    assert ours.dense.dtype == dense.dtype == np.float32


@pytest.mark.parametrize("kind", ["text", "npy"])
@pytest.mark.parametrize("world", [1, 3])
def test_stages_and_ranks_cover_every_line_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, world: int
) -> None:
    files = [write(tmp_path / f"day_{i}", 50, start=50 * i) for i in (0, 1, 2)]
    files.append(write(tmp_path / "day_10.gz", 47, start=150))
    if kind == "npy":
        convert(files, tmp_path)
    names = (lambda n: f"day_{n}_dense.npy") if kind == "npy" else (lambda n: f"day_{n}" + ".gz" * (n == 10))
    data = CriteoDataModule(
        str(tmp_path), 1000, [names(i) for i in (0, 1, 2)], names(10), names(10), names(10), batch_size=4
    )
    seen: dict[str, list[int]] = {}
    steps = []
    for rank in range(world):
        monkeypatch.setattr(loader_module, "rank_and_world", lambda rank=rank: (rank, world))
        for stage in ("train", "val", "test", "predict"):
            batches = list(data._loader(stage))
            seen.setdefault(stage, []).extend(i for b in batches for i in samples(b))
            steps.append((stage, [len(b.labels) for b in batches]))
    half = 150 + round(47 / 2)
    assert sorted(seen["train"]) == list(range(150 // (4 * world) * 4 * world))
    assert sorted(seen["val"]) == list(range(150, half))
    assert sorted(seen["test"]) == list(range(half, 197))
    assert sorted(seen["predict"]) == list(range(150, 197))
    assert all(sizes == dict(steps)[stage] for stage, sizes in steps)


def test_text_and_npy_give_the_same_batches(tmp_path: Path) -> None:
    convert([write(tmp_path / "day_0", 40)], tmp_path)

    def batches(name: str) -> list:
        data = CriteoDataModule(str(tmp_path), 97, name, name, name, batch_size=16)
        return list(data._loader("val"))

    for a, b in zip(batches("day_0"), batches("day_0_dense.npy"), strict=True):
        assert torch.equal(a.dense, b.dense)
        assert torch.equal(a.sparse.values(), b.sparse.values())
        assert torch.equal(a.labels, b.labels)
        assert a.padding == b.padding


def test_signed_ids_and_values_that_are_not_finite(tmp_path: Path) -> None:
    np.save(tmp_path / "a_dense.npy", np.array([[np.nan, np.inf] + [1.5] * 11] * 2, np.float32))
    np.save(tmp_path / "a_sparse.npy", np.array([[-1, 0] + [7] * 24] * 2, np.int32))
    np.save(tmp_path / "a_labels.npy", np.array([[1], [0]], np.int32))
    data = CriteoDataModule(str(tmp_path), 1000, "a_dense.npy", "a_dense.npy", batch_size=2)
    batch = next(iter(data.train_dataloader()))
    assert batch.dense[0].tolist() == [np.float32(math.log(3))] * 2 + [1.5] * 11
    assert batch.sparse["cat_0"].values()[0] == 1 + (2**32 - 2) % 999
    assert batch.sparse["cat_1"].values()[0] == 0


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    data = CriteoDataModule(str(tmp_path), 1000)
    with pytest.raises(DataError, match=r"train: no file 'train.txt' in"):
        data.setup("fit")
    with pytest.raises(DataError, match="no files are given for the stage 'predict'"):
        data.setup("predict")
    with pytest.raises(ConfigError, match="at least 2 rows each of cat_0"):
        CriteoDataModule(str(tmp_path), {"cat_0": 10})
    with pytest.raises(ConfigError, match="at least 2 rows"):
        CriteoDataModule(str(tmp_path), 1)
    np.save(tmp_path / "a_dense.npy", np.zeros((2, 13), np.float32))
    with pytest.raises(DataError, match=r"a_sparse.npy is missing; convert again"):
        open_npy(tmp_path / "a_dense.npy")
    np.save(tmp_path / "a_sparse.npy", np.zeros((3, 26), np.int64))
    np.save(tmp_path / "a_labels.npy", np.zeros((2, 1), np.int32))
    with pytest.raises(DataError, match=r"\[2, 3, 2\] rows"):
        open_npy(tmp_path / "a_dense.npy")


def test_log_dense_is_defined_everywhere() -> None:
    values = log_dense(np.array([-(2**40), -3, -2, -1, 0, 10**18]))
    assert values[:3].tolist() == [0.0, 0.0, 0.0]
    assert np.isfinite(values).all()
    assert (np.diff(values) >= 0).all()
