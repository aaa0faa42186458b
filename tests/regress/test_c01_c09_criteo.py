"""C01, C04, C05, C06, C07, C09: what public reports say goes wrong with Criteo's files."""

from __future__ import annotations

import gzip
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from recipes.criteo import CriteoDataModule
from recipes.criteo_npy import convert, open_npy
from recipes.criteo_tsv import Reader
from recipes.errors import DataError
from tests.unit.recipes.lines import line, samples, write


def test_c01_a_file_without_labels_is_for_predict_only(tmp_path: Path) -> None:
    write(tmp_path / "train.txt", 30)
    write(tmp_path / "test.txt", 10, labelled=False)
    data = CriteoDataModule(str(tmp_path), 1000, "train.txt", "train.txt", "train.txt", "test.txt", batch_size=4)
    batches = list(data.predict_dataloader())
    assert [samples(b) for b in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert all(b.labels.isnan().all() for b in batches)

    (tmp_path / "train.txt").write_text("".join(line(i, labelled=i != 7) + "\n" for i in range(30)))
    with pytest.raises(DataError, match=r"train\.txt:8: label missing: 39 columns; an unlabelled file is for predict"):
        list(data.train_dataloader())


@pytest.mark.parametrize("kind", ["text", "npy"])
def test_c04_c09_an_id_beyond_its_table(tmp_path: Path, kind: str) -> None:
    lines = [line(i).split("\t") for i in range(2)]
    lines[0][14 + 2], lines[1][14 + 2] = "000f423f", f"{10_000_000:08x}"  # 999999 fits
    (tmp_path / "day_0").write_text("".join("\t".join(fields) + "\n" for fields in lines))
    convert([tmp_path / "day_0"], tmp_path)
    name = "day_0" if kind == "text" else "day_0_dense.npy"
    tables = {f"cat_{i}": 1_000_000 if i == 2 else 2**33 for i in range(26)}

    data = CriteoDataModule(str(tmp_path), tables, name, name, batch_size=2)
    batch = next(iter(data.train_dataloader()))
    assert batch.sparse["cat_2"].values().tolist() == [999_999, 1 + (10_000_000 - 1) % 999_999]

    strict = CriteoDataModule(str(tmp_path), tables, name, name, batch_size=2, out_of_range="error")
    where = r"day_0:2" if kind == "text" else r"day_0_sparse\.npy:1"
    with pytest.raises(DataError, match=where + r": cat_2 has id 10000000, its table 1000000 rows; make the table"):
        next(iter(strict.train_dataloader()))


@pytest.mark.parametrize("workers", [0, 1])
def test_c05_truncated_gzip(tmp_path: Path, workers: int) -> None:
    path = write(tmp_path / "day_0.gz", 1000)
    path.write_bytes(path.read_bytes()[:-100])
    with gzip.open(path) as file, pytest.raises(EOFError):
        file.read()  # the fault is there

    def seen(skip_bad: bool) -> list[int]:
        names = "day_0.gz"
        data = CriteoDataModule(str(tmp_path), 2000, names, names, batch_size=1, skip_bad=skip_bad, num_workers=workers)
        return [i for batch in data.train_dataloader() for i in samples(batch)]

    kept = seen(skip_bad=True)
    assert 990 <= len(kept) < 1000
    assert kept == list(range(len(kept)))
    with pytest.raises(DataError, match=rf"day_0\.gz: truncated or damaged gzip, {len(kept)} rows read"):
        seen(skip_bad=False)
    reader = Reader((path,), skip_bad=True)
    assert reader.rows() == len(kept)
    assert reader.counts.truncated_files == [str(path)]


def test_c05_damage_inside_a_gzip(tmp_path: Path) -> None:
    path = write(tmp_path / "day_0.gz", 1000)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"day_0\.gz"):
        Reader((path,)).rows()


def test_c06_preprocessing_goes_on_where_it_stopped(tmp_path: Path) -> None:
    files = [write(tmp_path / f"day_{i}", 10, start=10 * i) for i in range(20)]
    out = tmp_path / "npy"
    good = files[15].read_text()
    files[15].write_text(good + "torn\n")
    with pytest.raises(DataError, match=r"day_15:11: 1 columns where 40"):
        convert(files, out)
    assert sorted(p.name for p in out.glob("*.done.json")) == sorted(f"day_{i}.done.json" for i in range(15))
    assert not list(out.glob("day_15*"))
    assert not list(out.glob("*.part"))
    first = {p.name: p.stat().st_mtime_ns for p in out.glob("*.npy")}
    # what a kill leaves behind: outputs without a marker, one of them half-written
    (out / "day_15_dense.npy").write_bytes(b"half")
    (out / "day_16_labels.npy.part").write_bytes(b"half")

    files[15].write_text(good)
    results = convert(files, out)
    assert [r.reused for r in results] == [True] * 15 + [False] * 5
    assert {name: (out / name).stat().st_mtime_ns for name in first} == first
    assert not list(out.glob("*.part"))
    ids = np.concatenate([open_npy(out / f"day_{i}_dense.npy").sparse[:, 0] for i in range(20)])
    assert ids.tolist() == list(range(1, 201))
    # another source, or an output that was touched, is converted anew
    write(files[3], 11, start=30)
    (out / "day_4_sparse.npy").write_bytes(b"half")
    assert [r.stem for r in convert(files, out) if not r.reused] == ["day_3", "day_4"]


def test_c07_stages_of_one_file(tmp_path: Path) -> None:
    write(tmp_path / "train.txt", 1000)
    data = CriteoDataModule(str(tmp_path), 2000, batch_size=50, val_fraction=0.1, test_fraction=0.1)
    seen = {}
    for stage, hook in (("train", "fit"), ("val", "validate"), ("test", "test")):
        data.setup(hook)
        seen[stage] = [i for batch in data._loader(stage) for i in samples(batch)]
    assert seen == {"train": list(range(800)), "val": list(range(800, 900)), "test": list(range(900, 1000))}


def _mib(script: str) -> list[int]:
    """Numbers that a fresh process prints. VmHWM, for ru_maxrss counts the parent that it was forked from."""
    run = [sys.executable, "-c", PEAK + textwrap.dedent(script)]
    out = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    return [int(word) for word in out.stdout.split()]


PEAK = """
from pathlib import Path
def peak():
    (line,) = [l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM")]
    return int(line.split()[1]) // 1024
"""


def test_c07_memory_stays_small_on_a_million_lines(tmp_path: Path) -> None:
    block = "".join(line(i) + "\n" for i in range(10_000))
    for name, blocks in (("day_0", 10), ("day_1", 100)):
        with (tmp_path / name).open("w") as file:
            file.writelines([block] * blocks)
    # the converter, above what importing takes: a tenth of a million must not show
    script = f"""
        from recipes.criteo_npy import convert
        before = peak()
        (done,) = convert([Path({str(tmp_path / "day_0")!r})], Path({str(tmp_path / "npy")!r}))
        print(done.rows, peak() - before)
    """
    rows, mib = _mib(script)
    assert rows == 100_000
    assert mib < 100
    # the loader, above what importing torch and torchrec takes
    script = f"""
        from recipes.criteo import CriteoDataModule
        data = CriteoDataModule({str(tmp_path)!r}, 1000, "day_1", "day_1", batch_size=4096)
        before = peak()
        print(sum(batch.valid for batch in data.train_dataloader()), peak() - before)
    """
    rows, mib = _mib(script)
    assert rows == 1_000_000 // 4096 * 4096
    assert mib < 100
