from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightning_cpr.errors import DependencyError
from recipes.errors import DataError
from recipes.movielens import GENRES, TABLES, MovieLensDataModule, Ratings, features, read_ratings

RATINGS = [(1, 7, 4, 30), (2, 7, 3, 10), (1, 8, 5, 20), (2, 8, 1, 20), (3, 9, 4, 40)]


def _recbole(root: Path) -> Path:
    rows = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    (root / "ml-100k.inter").write_text("\n".join(rows + ["\t".join(map(str, r)) for r in RATINGS]) + "\n")
    (root / "ml-100k.user").write_text("user_id\tage\tgender\tjob\tzip\n1\t24\tM\tartist\t0\n2\t60\tF\twriter\t0\n")
    (root / "ml-100k.item").write_text("item_id\ttitle\tyear\tclass\n7\tX\t1995\tComedy War\n8\tY\tV\tunknown\n")
    return root


def _original(root: Path) -> Path:
    (root / "u.data").write_text("".join("\t".join(map(str, r)) + "\n" for r in RATINGS))
    (root / "u.user").write_text("1|24|M|artist|0\n2|60|F|writer|0\n")
    flags = {7: ["Comedy", "War"], 8: []}
    dates = {7: "01-Jan-1995", 8: ""}
    lines = []
    for i in (7, 8):
        marks = [str(int(genre in flags[i])) for genre in GENRES]
        lines.append("|".join([str(i), "Caf\xe9", dates[i], "", "http://x", str(int(not flags[i])), *marks]))
    (root / "u.item").write_text("\n".join(lines) + "\n", encoding="latin-1")
    return root


@pytest.mark.parametrize("make", [_recbole, _original])
def test_both_layouts_read_alike(tmp_path: Path, make: object) -> None:
    r = read_ratings(make(tmp_path))
    assert r.time.tolist() == [10, 20, 20, 30, 40]
    assert r.user.tolist() == [2, 1, 2, 1, 3]
    assert r.item.tolist() == [7, 8, 8, 7, 9]
    assert r.label.tolist() == [0, 1, 0, 1, 1]  # a click is a rating of 4 or 5
    assert r.users == {1: (2, 1, 2), 2: (7, 2, 21)}
    assert (r.films[7].year, r.films[7].genres) == (76, (5, 17))
    assert (r.films[8].year, r.films[8].genres) == (0, (0,))


def test_features_by_value(tmp_path: Path) -> None:
    f = features(read_ratings(_recbole(tmp_path)), history=2, warm=1)
    bags = {name: [bag.take(np.array([i])).tolist() for i in range(5)] for name, bag in f.bags.items()}
    # rows 1 and 2 are of the same second: neither user 1 nor film 8 is known in either
    assert bags["user"] == [[0], [0], [2], [1], [0]]
    assert bags["item"] == [[0], [0], [0], [7], [0]]
    assert bags["liked"] == [[0], [0], [0], [8], [0]]
    assert bags["disliked"] == [[0], [0], [7], [0], [0]]
    assert bags["genres"] == [[5, 17], [0], [0], [5, 17], [0]]
    assert bags["age"] == [[7], [2], [7], [2], [0]]
    # user 1 has one earlier click, film 7 one earlier rating without
    rate_user, rate_item = (1 + 5 * 0.55) / 6, 5 * 0.55 / 6
    assert f.dense[3].tolist() == pytest.approx(
        [np.log(2) / 4, 4 * (rate_user - 0.55), np.log(2) / 4, 4 * (rate_item - 0.55), 0], rel=1e-6
    )


def test_nothing_leaks_from_the_future() -> None:
    rng = np.random.default_rng(0)
    n = 400
    r = Ratings(
        rng.integers(1, 9, n),
        rng.integers(1, 9, n),
        (rng.random(n) < 0.5).astype(np.float32),
        np.sort(rng.integers(0, 150, n)),
        {},
        {},
    )
    before = features(r, 3, 2)
    for cut in (0, 77, 399):
        # every label of this second and later is turned round
        turned = features(replace(r, label=np.where(r.time >= r.time[cut], 1 - r.label, r.label)), 3, 2)
        rows = np.flatnonzero(r.time <= r.time[cut])
        assert np.array_equal(turned.dense[rows], before.dense[rows])
        for name in TABLES:
            assert np.array_equal(turned.bags[name].take(rows), before.bags[name].take(rows))


def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"neither u.data nor \*.inter"):
        read_ratings(tmp_path)
    for text, message in (
        ("1\t2\t3\n", r"u\.data:1: 3 columns where 4"),
        ("1\t2\t3\t4\n1\tx\t3\t4\n", r"u\.data:2: invalid literal"),
        ("1\t9999\t3\t4\n", r"u\.data:1: user 1, item 9999 are not ids"),
        ("", r"u\.data holds no ratings"),
    ):
        (tmp_path / "u.data").write_text(text)
        with pytest.raises(DataError, match=message):
            read_ratings(tmp_path)

    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(DependencyError, match=r"pip install --no-deps recbole==1\.2\.1"):
        MovieLensDataModule().setup("fit")


def test_the_real_data_are_split_by_time() -> None:
    pytest.importorskip("importlib.metadata").version("recbole")
    data = MovieLensDataModule(batch_size=100)
    data.setup("fit")
    assert [len(data._loader(s)) for s in ("train", "val", "test")] == [800, 100, 100]
    train, again = (next(iter(data.train_dataloader())) for _ in range(2))
    assert train.sparse.keys() == list(TABLES)
    assert train.sparse.values().equal(again.sparse.values())
    ids = data.source("train").take(np.arange(80_000)).ids
    assert ids.min() == 0
    for name, rows in TABLES.items():
        assert data._data.bags[name].values.max() < rows, name
    labels = [data.source(s).take(np.arange(data.source(s).rows)).labels.mean() for s in ("train", "val", "test")]
    assert labels == pytest.approx([0.5508, 0.5674, 0.5629], abs=1e-3)
