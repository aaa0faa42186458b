"""MovieLens-100k: real clicks in two megabytes. A click is a rating of 4 or 5; the split is by time.

Reads a folder with the original files (``u.data``, and where present ``u.user``, ``u.item``, ``u.genre``) or with
RecBole's (``*.inter``, ``*.user``, ``*.item``); without a folder, the copy that the PyPI package ``recbole`` carries.

Every feature of a rating is known before that rating: ids, what the site knows of the user and the film, and
statistics of ratings with a strictly earlier timestamp, whichever split those fall into. Nothing is fitted on later
rows. An unknown or absent value is row 0 of its table.
"""

from __future__ import annotations

import importlib.metadata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_cpr.errors import DependencyError
from recipes.batch import Columns
from recipes.errors import DataError
from recipes.loader import IndexedSource, RecipeDataModule

INSTALL = "pip install --no-deps recbole==1.2.1"
CLICK = 4.0
# fmt: off
GENRES = (
    "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)
OCCUPATIONS = (
    "administrator", "artist", "doctor", "educator", "engineer", "entertainment", "executive", "healthcare",
    "homemaker", "lawyer", "librarian", "marketing", "none", "other", "programmer", "retired", "salesman",
    "scientist", "student", "technician", "writer",
)
# fmt: on
AGES = (18, 25, 35, 45, 50, 56)
FIRST_YEAR, LAST_YEAR = 1920, 1999
TABLES: dict[str, int] = {
    "user": 944,
    "item": 1683,
    "age": len(AGES) + 2,
    "gender": 3,
    "occupation": len(OCCUPATIONS) + 1,
    "genres": len(GENRES) + 1,
    "year": LAST_YEAR - FIRST_YEAR + 2,
    "liked": 1683,
    "disliked": 1683,
}
DENSE = ("user_count", "user_rate", "item_count", "item_rate", "genre_rate")
# A rate from n ratings is (clicks + PRIOR * 0.55) / (n + PRIOR): 0.55 of all ratings are 4 or 5.
PRIOR, PRIOR_RATE = 5.0, 0.55


@dataclass(frozen=True)
class Film:
    year: int = 0
    genres: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Ratings:
    """Ratings in time order (ties by user, then item) and the side information. Ids are those of the files."""

    user: NDArray[np.int64]
    item: NDArray[np.int64]
    label: NDArray[np.float32]
    time: NDArray[np.int64]
    users: dict[int, tuple[int, int, int]]
    films: dict[int, Film]


def recbole_folder() -> Path:
    """The ``ml-100k`` folder inside the installed recbole package, which is not imported."""
    try:
        files = importlib.metadata.files("recbole") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "ml-100k.inter":
            return Path(str(file.locate())).parent
    raise DependencyError(f"MovieLens-100k is not on this machine: {INSTALL} (2 MB), or pass root=<folder with u.data>")


def read_ratings(root: Path) -> Ratings:
    """Raises `DataError` naming the file and line where a row is not as declared."""
    inter = sorted(root.glob("*.inter"))
    if (root / "u.data").exists():
        rows, users, films = _read_original(root)
    elif inter:
        rows, users, films = _read_recbole(inter[0])
    else:
        raise DataError(
            f"{root} holds neither u.data nor *.inter; {INSTALL} and leave root out, or give another folder"
        )
    rows.sort(key=lambda r: (r[3], r[0], r[1]))
    user, item, rating, time = zip(*rows, strict=True)
    label = (np.array(rating) >= CLICK).astype(np.float32)
    return Ratings(np.array(user), np.array(item), label, np.array(time), users, films)


Raw = tuple[list[tuple[int, int, float, int]], dict[int, tuple[int, int, int]], dict[int, Film]]


def _lines(path: Path, separator: str, columns: int, header: bool = False) -> Iterable[list[str]]:
    if not path.exists():
        return
    with path.open(encoding="latin-1" if path.name.startswith("u.") else "utf-8") as file:
        for number, line in enumerate(file, 1):
            fields = line.rstrip("\r\n").split(separator)
            if (header and number == 1) or fields == [""]:
                continue
            if len(fields) < columns:
                raise DataError(f"{path}:{number}: {len(fields)} columns where {columns} are expected")
            yield fields


def _ratings(path: Path, header: bool) -> list[tuple[int, int, float, int]]:
    rows = []
    for number, f in enumerate(_lines(path, "\t", 4, header), 2 if header else 1):
        try:
            row = (int(f[0]), int(f[1]), float(f[2]), int(float(f[3])))
        except ValueError as error:
            raise DataError(f"{path}:{number}: {error}") from error
        if not (0 < row[0] < TABLES["user"] and 0 < row[1] < TABLES["item"]):
            raise DataError(f"{path}:{number}: user {row[0]}, item {row[1]} are not ids of MovieLens-100k")
        rows.append(row)
    if not rows:
        raise DataError(f"{path} holds no ratings")
    return rows


def _read_original(root: Path) -> Raw:
    users = {int(f[0]): _user(f[1], f[2], f[3]) for f in _lines(root / "u.user", "|", 4)}
    films = {}
    for f in _lines(root / "u.item", "|", 24):
        # 19 flags, "unknown" first, then the genres in GENRES' order
        films[int(f[0])] = _film(f[2][-4:], [g for g, flag in zip(GENRES, f[6:24], strict=True) if flag == "1"])
    return _ratings(root / "u.data", header=False), users, films


def _read_recbole(inter: Path) -> Raw:
    users = {int(f[0]): _user(*f[1:4]) for f in _lines(inter.with_suffix(".user"), "\t", 4, header=True)}
    films = {int(f[0]): _film(f[2], f[3].split()) for f in _lines(inter.with_suffix(".item"), "\t", 4, header=True)}
    return _ratings(inter, header=True), users, films


def _user(age: str, gender: str, occupation: str) -> tuple[int, int, int]:
    bucket = 1 + sum(int(age) >= edge for edge in AGES) if age.isdigit() else 0
    job = OCCUPATIONS.index(occupation) + 1 if occupation in OCCUPATIONS else 0
    return bucket, {"M": 1, "F": 2}.get(gender, 0), job


def _film(year: str, genres: Sequence[str]) -> Film:
    known = tuple(GENRES.index(g) + 1 for g in genres if g in GENRES)
    in_range = year.isdigit() and FIRST_YEAR <= int(year) <= LAST_YEAR
    return Film(int(year) - FIRST_YEAR + 1 if in_range else 0, known or (0,))


class MovieLensSource(IndexedSource):
    """A run of ratings with their features; ``order`` shuffles them by (seed, epoch) if ``shuffle``."""

    def __init__(self, data: Features, start: int, stop: int, shuffle: bool, seed: int) -> None:
        self.tables = TABLES
        self.rows = stop - start
        self._data, self._start, self._shuffle, self._seed = data, start, shuffle, seed

    def order(self, epoch: int) -> NDArray[np.int64] | None:
        return np.random.default_rng((self._seed, epoch)).permutation(self.rows) if self._shuffle else None

    def take(self, rows: NDArray[np.int64]) -> Columns:
        at = rows + self._start
        bags = [self._data.bags[name] for name in TABLES]
        lengths = np.stack([bag.lengths[at] for bag in bags])
        ids = np.concatenate([bag.take(at) for bag in bags])
        return Columns(self._data.dense[at], ids, self._data.label[at], lengths)


@dataclass(frozen=True)
class Bags:
    """Ids of all rows, concatenated; row i holds ``lengths[i]`` of them from ``offsets[i]`` on."""

    values: NDArray[np.int64]
    lengths: NDArray[np.int32]
    offsets: NDArray[np.int64]

    @staticmethod
    def of(bags: Sequence[Sequence[int]]) -> Bags:
        lengths = np.array([len(b) for b in bags], np.int32)
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)[:-1]])
        return Bags(np.fromiter(chain.from_iterable(bags), np.int64, int(lengths.sum())), lengths, offsets)

    @staticmethod
    def single(ids: NDArray[np.int64]) -> Bags:
        return Bags(ids.astype(np.int64), np.ones(len(ids), np.int32), np.arange(len(ids)))

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        lengths = self.lengths[rows].astype(np.int64)
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return self.values[np.repeat(self.offsets[rows], lengths) + within]


@dataclass(frozen=True)
class Features:
    """dense: float32 ``[n, len(DENSE)]``, bags: by table, label: float32 ``[n]``; in time order."""

    dense: NDArray[np.float32]
    bags: dict[str, Bags]
    label: NDArray[np.float32]


class _Rate:
    """Clicks and ratings so far, by key."""

    def __init__(self) -> None:
        self.clicks: dict[object, float] = defaultdict(float)
        self.count: dict[object, int] = defaultdict(int)

    def add(self, key: object, label: float) -> None:
        self.clicks[key] += label
        self.count[key] += 1

    def one(self, key: object) -> tuple[int, float]:
        """The number of ratings of one key, and their rate."""
        count = self.count.get(key, 0)
        return count, (self.clicks.get(key, 0.0) + PRIOR * PRIOR_RATE) / (count + PRIOR)

    def of(self, keys: Iterable[object]) -> float:
        """The rate over several keys."""
        clicks = count = 0.0
        for key in keys:
            clicks, count = clicks + self.clicks.get(key, 0.0), count + self.count.get(key, 0)
        return (clicks + PRIOR * PRIOR_RATE) / (count + PRIOR)


def features(r: Ratings, history: int, warm: int) -> Features:
    """Features of each rating from strictly earlier ones.

    history: films in ``liked`` and ``disliked`` each, the user's latest. warm: a user or film with fewer earlier
    ratings is row 0 of its table, so that the model learns what to do with a new one.
    """
    users, items, tastes = _Rate(), _Rate(), _Rate()
    latest: tuple[dict[int, list[int]], ...] = (defaultdict(list), defaultdict(list))
    films = [r.films.get(int(item), Film()) for item in r.item]
    rates: list[tuple[int, float, int, float, float]] = []
    liked: list[list[int]] = []
    disliked: list[list[int]] = []
    rows = list(zip(r.user.tolist(), r.item.tolist(), films, r.label.tolist(), strict=True))
    seconds = np.flatnonzero(np.diff(r.time, prepend=r.time[0] - 1)).tolist()
    for start, stop in pairwise([*seconds, len(rows)]):
        for user, item, film, _ in rows[start:stop]:
            taste = tastes.of([(user, genre) for genre in film.genres])
            rates.append((*users.one(user), *items.one(item), taste))
            disliked.append(latest[0][user][-history:] or [0])
            liked.append(latest[1][user][-history:] or [0])
        # only now, after the whole second: a rating must not see another of its own second
        for user, item, film, label in rows[start:stop]:
            users.add(user, label)
            items.add(item, label)
            for genre in film.genres:
                tastes.add((user, genre), label)
            latest[int(label)][user].append(item)
    user_count, user_rate, item_count, item_rate, taste_rate = np.array(rates).T
    people = np.array([r.users.get(user, (0, 0, 0)) for user in r.user.tolist()])
    single = {
        "user": np.where(user_count >= warm, r.user, 0),
        "item": np.where(item_count >= warm, r.item, 0),
        "age": people[:, 0],
        "gender": people[:, 1],
        "occupation": people[:, 2],
        "year": np.array([film.year for film in films]),
    }
    several: dict[str, Sequence[Sequence[int]]] = {
        "genres": [film.genres for film in films],
        "liked": liked,
        "disliked": disliked,
    }
    bags = {name: Bags.of(bag) for name, bag in several.items()}
    bags |= {name: Bags.single(ids) for name, ids in single.items()}
    rate = [4 * (rate - PRIOR_RATE) for rate in (user_rate, item_rate, taste_rate)]
    counts = [np.log1p(count) / 4 for count in (user_count, item_count)]
    dense = np.stack([counts[0], rate[0], counts[1], rate[1], rate[2]], axis=1).astype(np.float32)
    return Features(dense, bags, r.label)


class MovieLensDataModule(RecipeDataModule):
    """MovieLens-100k, split by time: the last ``test_fraction`` of the ratings, ``val_fraction`` before them, the rest.

    root: folder with ``u.data`` or ``*.inter``; None takes the one of the recbole package. batch_size: per rank.
    history, warm: see `features`. seed: of the training set's order, which each epoch has its own.
    """

    tables = TABLES
    dense_features = len(DENSE)

    def __init__(
        self,
        root: str | None = None,
        batch_size: int = 128,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        history: int = 50,
        warm: int = 20,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, num_workers)
        self.root = root
        self.val_fraction, self.test_fraction = val_fraction, test_fraction
        self.history, self.warm, self.seed = history, warm, seed
        self._data: Features | None = None

    def setup(self, stage: str) -> None:
        if self._data is None:
            root = recbole_folder() if self.root is None else Path(self.root)
            self._data = features(read_ratings(root), self.history, self.warm)

    def source(self, stage: str) -> MovieLensSource:
        assert self._data is not None
        n = len(self._data.label)
        val = round(n * (1 - self.val_fraction - self.test_fraction))
        test = round(n * (1 - self.test_fraction))
        start, stop = {"train": (0, val), "val": (val, test), "test": (test, n), "predict": (test, n)}[stage]
        return MovieLensSource(self._data, start, stop, stage == "train", self.seed)
