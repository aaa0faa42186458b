"""Criteo-like samples of any number from a planted model: 13 dense features, 26 tables, Zipf ids, and a known best AUC.

Sample ``i`` is a pure function of ``(seed, i)`` (a counter-based generator, splitmix64), so every split over ranks and
workers gives the same samples, and any position is reached at once.

The click probability is ``sigmoid(bias + dense . w + sum_f e_f(id_f) + sum_pairs e_f(id_f) * e_g(id_g))``, where the
effect ``e_f(id)`` of an id is a hash of it: no tables are stored, whatever their size.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from lightning_cpr.errors import ConfigError
from recipes.batch import Columns
from recipes.loader import IndexedSource, RecipeDataModule

# Distinct ids per feature in Criteo Kaggle's training set, as DLRM's repository lists them
# (facebookresearch/dlrm, Kaggle pre-processing).
# fmt: off
KAGGLE_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)
# fmt: on
DENSE = 13
# An effect's standard deviation: 26 of them and the dense part give logits of about +-2 around the bias.
EFFECT, DENSE_EFFECT, PAIR_EFFECT = 0.35, 0.25, 0.35
PAIRS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def criteo_like_tables(total_rows: int) -> dict[str, int]:
    """26 tables with Criteo Kaggle's proportions and about ``total_rows`` rows together; none is cut below 100."""
    scale = total_rows / sum(KAGGLE_ROWS)
    return {f"cat_{i}": max(min(rows, 100), round(rows * scale)) for i, rows in enumerate(KAGGLE_ROWS)}


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finalizer (Steele, Lea, Flood: Fast splittable pseudorandom number generators), in place."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def _uniform(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """In (0, 1), from the upper 53 bits."""
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


class SyntheticSource(IndexedSource):
    """Samples ``[start, start + rows)``. zipf: exponent of the ids' popularity. bias: sets the click rate."""

    def __init__(
        self,
        tables: Mapping[str, int],
        rows: int,
        start: int = 0,
        seed: int = 0,
        zipf: float = 1.05,
        bias: float = -1.5,
    ) -> None:
        self.tables, self.rows = dict(tables), rows
        self._start, self._seed, self._zipf, self._bias = start, seed, zipf, bias
        self._sizes = np.array(list(tables.values()), np.int64)[:, None]
        rng = np.random.default_rng(seed)
        self._weights = rng.normal(0.0, DENSE_EFFECT, DENSE)
        self._salt = rng.integers(0, 2**63, len(tables), dtype=np.uint64)[:, None]
        self._pairs = [tuple(rng.choice(len(tables), 2, replace=False)) for _ in range(PAIRS if len(tables) > 1 else 0)]
        self._key = _mix(np.array([seed], np.uint64) * _GOLDEN + np.uint64(1))[0]
        # Popular ids are spread over the table: rank k is id (k * stride + shift) % rows, a permutation.
        self._stride = np.array([_coprime(int(n), rng) for n in self._sizes[:, 0]], np.int64)[:, None]
        self._shift = np.array([rng.integers(0, n) for n in self._sizes[:, 0]], np.int64)[:, None]

    def take(self, rows: NDArray[np.int64]) -> Columns:
        dense, ids, p, u = self._draw(rows + self._start)
        return Columns(dense, ids, (u < p).astype(np.float32))

    def probabilities(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """The planted click probability of samples by position: the best score there is."""
        return self._draw(rows + self._start)[2]

    def bayes_auc(self, samples: int = 100_000) -> float:
        """The expected AUC of the planted probabilities, from the first ``samples`` samples: no model can beat it."""
        p = np.sort(self.probabilities(np.arange(min(samples, self.rows), dtype=np.int64)))
        below = np.cumsum(1 - p) - (1 - p)  # expected negatives with a lower score
        positives, negatives = p.sum(), (1 - p).sum()
        return float((p * below).sum() / (positives * negatives - (p * (1 - p)).sum()))

    def _draw(
        self, samples: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        """dense, ids ``[F, n]``, click probability and the uniform number that decides the click."""
        columns = len(self._sizes) + DENSE + 1
        counter = np.arange(columns, dtype=np.uint64)[:, None] + samples.astype(np.uint64) * np.uint64(columns)
        u = _uniform(_mix(counter * _GOLDEN + self._key))
        dense = -np.log(u[:DENSE])
        ids = self._ids(u[DENSE:-1])
        effects = self._effects(ids)
        # element by element: a BLAS product would round differently for other numbers of samples
        logit = self._bias + effects.sum(axis=0)
        for weight, values in zip(self._weights, dense, strict=True):
            logit += weight * (values - 1)
        for f, g in self._pairs:
            logit += effects[f] * effects[g] * (PAIR_EFFECT / EFFECT**2)
        return np.ascontiguousarray(dense.T, np.float32), ids, 1 / (1 + np.exp(-logit)), u[-1]

    def _ids(self, u: NDArray[np.float64]) -> NDArray[np.int64]:
        """Inverse of the continuous power law on [1, rows + 1), then the permutation."""
        n = self._sizes
        if self._zipf == 1:
            rank = np.exp(u * np.log(n + 1.0))
        else:
            a = 1 - self._zipf
            rank = (1 + u * ((n + 1.0) ** a - 1)) ** (1 / a)
        rank = np.minimum(rank.astype(np.int64) - 1, n - 1)
        return (rank * self._stride + self._shift) % n

    def _effects(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """``[F, n]``: uniform with standard deviation EFFECT."""
        bits = _mix(ids.astype(np.uint64) * _GOLDEN + self._salt)
        return (_uniform(bits) - 0.5) * (EFFECT * np.sqrt(12.0))


def _coprime(n: int, rng: np.random.Generator) -> int:
    """A multiplier for a permutation of n numbers; small enough that ``rank * stride`` fits in int64."""
    while True:
        stride = int(rng.integers(1, min(n, 2**31) + 1))
        if np.gcd(stride, n) == 1:
            return stride


class SyntheticDataModule(RecipeDataModule):
    """Samples [0, train) are the training set, the next ``val`` and ``test`` ones the others.

    tables: rows by feature, or the total that `criteo_like_tables` divides. batch_size: per rank.
    """

    dense_features = DENSE

    def __init__(
        self,
        tables: dict[str, int] | int = 100_000,
        train: int = 1_000_000,
        val: int = 50_000,
        test: int = 50_000,
        batch_size: int = 2048,
        zipf: float = 1.05,
        bias: float = -1.5,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(batch_size, num_workers, pin_memory)
        self.tables = criteo_like_tables(tables) if isinstance(tables, int) else tables
        if min(self.tables.values(), default=0) < 1 or min(train, val, test) < 0 or zipf <= 0:
            raise ConfigError("tables, zipf and the numbers of samples must be positive")
        self._ranges = {"train": (0, train), "val": (train, val), "test": (train + val, test)}
        self._ranges["predict"] = self._ranges["test"]
        self.zipf, self.bias, self.seed = zipf, bias, seed

    def source(self, stage: str) -> SyntheticSource:
        start, rows = self._ranges[stage]
        return SyntheticSource(self.tables, rows, start, self.seed, self.zipf, self.bias)
