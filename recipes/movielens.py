"""MovieLens-100k: real clicks in two megabytes. A click is a rating of 4 or 5; the split is by time.

Reads a folder with the original files (``u.data``, and where present ``u.user``, ``u.item``, ``u.genre``) or with
RecBole's (``*.inter``, ``*.user``, ``*.item``); without a folder, the copy that the PyPI package ``recbole`` carries.

Every feature of a rating is known before that rating: ids, what the site knows of the user and the film, and
statistics of ratings with a strictly earlier timestamp, whichever split those fall into. Nothing is fitted on later
rows. An unknown or absent value is row 0 of its table.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

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
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0], rows[:, 3]))]
    user, item, time = rows[:, [0, 1, 3]].astype(np.int64).T
    return Ratings(user, item, (rows[:, 2] >= CLICK).astype(np.float32), time, users, films)


Raw = tuple[NDArray[np.float64], dict[int, tuple[int, int, int]], dict[int, Film]]


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


def _ratings(path: Path, header: bool) -> NDArray[np.float64]:
    """User, item, rating, time of each."""
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
    return np.array(rows, np.float64)


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


@dataclass(frozen=True)
class Earlier:
    """Ratings of one key each, by key and time, to ask for those of a key in earlier seconds. Times are ``>= 0``.

    ``sum[i]``: of the values of the first i.
    """

    key: NDArray[np.int64]
    sum: NDArray[np.float64]
    order: NDArray[np.int64]
    _code: NDArray[np.int64]
    _span: int

    @staticmethod
    def of(key: NDArray[np.int64], time: NDArray[np.int64], value: NDArray[Any]) -> Earlier:
        span = int(time.max(initial=0)) + 1
        order = np.lexsort((time, key))  # stable: the files' order within a second
        return Earlier(
            key[order], np.concatenate([[0.0], np.cumsum(value[order])]), order, (key * span + time)[order], span
        )

    def ranges(self, key: NDArray[np.int64], time: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of each asked key before the asked time: from, to, as places in ``order``."""
        code = key * self._span + np.minimum(time, self._span)  # later than all there is: all of the key
        return np.searchsorted(self.key, key), np.searchsorted(self._code, code)

    def sums(self, key: NDArray[np.int64], time: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """How many there are, and the sum of their values."""
        start, stop = self.ranges(key, time)
        return stop - start, self.sum[stop] - self.sum[start]


def _rate(count: NDArray[np.int64], clicks: NDArray[np.float64]) -> NDArray[np.float64]:
    return (clicks + PRIOR * PRIOR_RATE) / (count + PRIOR)


def _latest(r: Ratings, time: NDArray[np.int64], label: int, history: int) -> Bags:
    """The user's latest films of this label from before each rating, oldest first; row 0 where there is none."""
    of_label = np.flatnonzero(r.label == label)
    earlier = Earlier.of(r.user[of_label], time[of_label], r.label[of_label])
    start, stop = earlier.ranges(r.user, time)
    start = np.maximum(start, stop - history)
    films = np.append(r.item[of_label][earlier.order], 0)
    none = start == stop
    lengths = np.where(none, 1, stop - start).astype(np.int32)
    return Bags(films, lengths, np.where(none, len(of_label), start))


def features(r: Ratings, history: int, warm: int) -> Features:
    """Features of each rating from those of strictly earlier seconds.

    history: films in ``liked`` and ``disliked`` each, the user's latest. warm: a user or film with fewer earlier
    ratings is row 0 of its table, so that the model learns what to do with a new one.
    """
    time = r.time - r.time.min()
    films = [r.films.get(item, Film()) for item in r.item.tolist()]
    genres = Bags.of([film.genres for film in films])
    rating = np.repeat(np.arange(len(time)), genres.lengths)  # of each genre of each film rated
    user_count, user_clicks = Earlier.of(r.user, time, r.label).sums(r.user, time)
    item_count, item_clicks = Earlier.of(r.item, time, r.label).sums(r.item, time)
    taste = r.user[rating] * TABLES["genres"] + genres.values
    tastes = Earlier.of(taste, time[rating], r.label[rating]).sums(taste, time[rating])
    taste_count, taste_clicks = (np.add.reduceat(column, genres.offsets) for column in tastes)
    people = np.array([r.users.get(user, (0, 0, 0)) for user in r.user.tolist()])
    bags = {
        "user": Bags.single(np.where(user_count >= warm, r.user, 0)),
        "item": Bags.single(np.where(item_count >= warm, r.item, 0)),
        "age": Bags.single(people[:, 0]),
        "gender": Bags.single(people[:, 1]),
        "occupation": Bags.single(people[:, 2]),
        "genres": genres,
        "year": Bags.single(np.array([film.year for film in films])),
        "liked": _latest(r, time, 1, history),
        "disliked": _latest(r, time, 0, history),
    }
    rates = [(user_count, user_clicks), (item_count, item_clicks), (taste_count, taste_clicks)]
    rate = [4 * (_rate(*sums) - PRIOR_RATE) for sums in rates]
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
