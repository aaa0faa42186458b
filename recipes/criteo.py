"""Criteo's click logs as a data module: Kaggle TSV, Terabyte day files (``.gz`` too) and TorchRec's npy triples.

`recipes.criteo_tsv` says what happens to missing, negative and malformed fields, bad lines and damaged files. An id
of the file becomes a row of its table like this: 0 (missing) is row 0, ``v > 0`` is row ``1 + (v - 1) % (rows - 1)``,
which leaves ids that fit as they are. ``out_of_range="error"`` refuses ids that do not fit instead, naming feature
and line. A negative id in an npy file is a 32-bit hash that was stored signed, and is read as unsigned.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_cpr.errors import ConfigError
from recipes.batch import Columns
from recipes.criteo_npy import Npy, open_npy
from recipes.criteo_tsv import DENSE, SPARSE, Block, Reader, log_dense
from recipes.errors import DataError
from recipes.loader import Deal, IndexedSource, RecipeDataModule, Source

log = logging.getLogger(__name__)

OutOfRange = Literal["modulo", "error"]
STAGES = ("train", "val", "test", "predict")


@dataclass(frozen=True)
class IdRule:
    """How ids of a file become rows. rows: of the 26 tables."""

    rows: tuple[int, ...]
    out_of_range: OutOfRange = "modulo"

    def apply(self, ids: NDArray[np.integer], where: str, lines: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 ``[26, n]`` from ``[n, 26]``. where, lines: the file and the line or row of each, for the error."""
        wide = ids.astype(np.int64)
        if ids.dtype.kind == "i":
            wide = np.where(wide < 0, wide & 0xFFFFFFFF, wide)
        sizes = np.array(self.rows, np.int64)
        if self.out_of_range == "error" and (over := wide >= sizes).any():
            row, column = np.argwhere(over)[0]
            raise DataError(
                f"{where}:{lines[row]}: {SPARSE[column]} has id {wide[row, column]}, its table {sizes[column]} rows; "
                'make the table larger or use out_of_range="modulo"'
            )
        return np.ascontiguousarray(np.where(wide == 0, 0, 1 + (wide - 1) % (sizes - 1)).T)


class TsvSource(Source):
    """Text files, read in order by every rank and worker, each of which parses its own lines only.

    start, stop: the good lines that belong to the source; stop None takes all, and their number is then not known.
    Resuming reads over the lines before: cheap against training on them, but not free (npy files are).
    """

    def __init__(self, reader: Reader, rule: IdRule, start: int = 0, stop: int | None = None) -> None:
        self.tables = dict(zip(SPARSE, rule.rows, strict=True))
        self.rows = None if stop is None else stop - start
        self.reader, self._rule, self._start, self._stop = reader, rule, start, stop

    def _blocks(self) -> Iterator[Block]:
        """Blocks of the source's own lines."""
        at = 0
        for block in self.reader.blocks():
            begin, at = at, at + len(block)
            own = block.slice(max(self._start - begin, 0), len(block) if self._stop is None else self._stop - begin)
            if len(own):
                yield own
            if self._stop is not None and at >= self._stop:
                return

    def columns(self, deal: Deal, epoch: int) -> Iterator[Columns]:
        step, end = deal.first, 0
        held: list[tuple[int, Block]] = []  # blocks from the beginning of `step` on, with their first line's position
        for block in self._blocks():
            held.append((end, block))
            end += len(block)
            while (step + 1) * deal.step_rows <= end:
                yield self._parse(held, *deal.own(step, (step + 1) * deal.step_rows))
                step += deal.stride
            held = [(at, b) for at, b in held if at + len(b) > step * deal.step_rows]
        if deal.keep_rest and step * deal.step_rows < end:
            yield self._parse(held, *deal.own(step, end), last=end - 1)

    def _parse(self, held: Sequence[tuple[int, Block]], start: int, stop: int, padding: int, last: int = 0) -> Columns:
        spans = [(start, stop)] + [(last, last + 1)] * padding
        parts = []
        for begin, end in spans:
            for at, block in held:
                own = block.slice(max(begin - at, 0), max(end - at, 0))
                if len(own):
                    rows = own.parse()
                    mapped = self._rule.apply(rows.ids, str(own.path), own.line)
                    parts.append((log_dense(rows.ints), mapped, rows.labels))
        dense, ids, labels = zip(*parts, strict=True)
        return Columns(np.concatenate(dense), np.concatenate(ids, axis=1), np.concatenate(labels), padding=padding)


class NpySource(IndexedSource):
    """npy triples, memory-mapped and read as one run of rows; a value of ``dense`` that is not finite is missing."""

    def __init__(self, files: Sequence[Npy], rule: IdRule, start: int, stop: int, labels_required: bool = True) -> None:
        self.tables = dict(zip(SPARSE, rule.rows, strict=True))
        self.rows = stop - start
        self._files, self._rule, self._first, self._labels_required = files, rule, start, labels_required
        self._ends = np.cumsum([len(f.labels) for f in files])

    def take(self, rows: NDArray[np.int64]) -> Columns:
        at = rows + self._first
        which = np.searchsorted(self._ends, at, side="right")
        parts = []
        for number in np.unique(which):
            file = self._files[number]
            local = at[which == number] - (self._ends[number] - len(file.labels))
            parts.append((self._dense(file, local), self._ids(file, local), self._labels(file, local)))
        dense, ids, labels = zip(*parts, strict=True)
        return Columns(np.concatenate(dense), np.concatenate(ids, axis=1), np.concatenate(labels))

    def _dense(self, file: Npy, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        dense = file.dense[rows].astype(np.float32)
        bad = ~np.isfinite(dense)
        if bad.any():
            log.warning("%s: %d values that are not finite are read as missing", file.path, int(bad.sum()))
        return np.where(bad, np.float32(np.log(3.0)), dense)

    def _ids(self, file: Npy, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._rule.apply(file.sparse[rows], str(file.path).replace("_dense.npy", "_sparse.npy"), rows)

    def _labels(self, file: Npy, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        labels = file.labels[rows].astype(np.float32)
        known = (labels == 0) | (labels == 1)
        if self._labels_required and not known.all():
            row = rows[np.flatnonzero(~known)[0]]
            raise DataError(f"{str(file.path).replace('_dense.npy', '_labels.npy')}:{row}: label missing")
        return np.where(known, labels, np.float32(np.nan))


class CriteoDataModule(RecipeDataModule):
    """Criteo from files under ``root``.

    train, val, test, predict: names or glob patterns; ``*_dense.npy`` stands for an npy triple. Files go by their
    numbers (day_2 before day_10). Where ``val`` and ``test`` name the same files, ``val`` is their first half and
    ``test`` their second (MLPerf's rule for day 23). Where neither is given, the last ``test_fraction`` of ``train``
    is the test set and ``val_fraction`` before it the validation set. Splitting text files reads them once more, to
    count lines; npy files and whole text files are not read ahead.
    tables: rows of the 26 tables, cat_0 ... cat_25; or one number for all. At least 2 each.
    batch_size: per rank. num_workers: see `recipes.loader`.

    Raises `ConfigError` for other tables, `DataError` for a stage without files.
    """

    dense_features = len(DENSE)

    def __init__(
        self,
        root: str,
        tables: dict[str, int] | int,
        train: list[str] | str = "train.txt",
        val: list[str] | str | None = None,
        test: list[str] | str | None = None,
        predict: list[str] | str | None = None,
        batch_size: int = 2048,
        val_fraction: float = 1 / 14,
        test_fraction: float = 1 / 14,
        out_of_range: OutOfRange = "modulo",
        skip_bad: bool = False,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(batch_size, num_workers, pin_memory)
        self.tables = dict.fromkeys(SPARSE, tables) if isinstance(tables, int) else tables
        if tuple(self.tables) != SPARSE or min(self.tables.values()) < 2:
            raise ConfigError(f"tables must give at least 2 rows each of {SPARSE[0]} ... {SPARSE[-1]}, in this order")
        self.root = Path(root)
        patterns = zip(STAGES, (train, val, test, predict), strict=True)
        self._patterns = {stage: [names] if isinstance(names, str) else names or [] for stage, names in patterns}
        self.val_fraction, self.test_fraction = val_fraction, test_fraction
        self.skip_bad = skip_bad
        self._rule = IdRule(tuple(self.tables.values()), out_of_range)
        self._lengths: dict[tuple[Path, ...], int] = {}

    def setup(self, stage: str) -> None:
        """Finds the files that ``stage`` needs, so that a wrong name fails before the model is built."""
        for needed in {"fit": ("train", "val"), "validate": ("val",)}.get(stage, (stage,)):
            self._files(self._held_in(needed))

    def source(self, stage: str) -> Source:
        files = self._files(self._held_in(stage))
        labels = stage != "predict"
        low, high = self._share(stage)
        if files[0].name.endswith("_dense.npy"):
            triples = [open_npy(f) for f in files]
            n = sum(len(t.labels) for t in triples)
            return NpySource(triples, self._rule, round(low * n), round(high * n), labels)
        reader = Reader(files, labels, self.skip_bad)
        if (low, high) == (0.0, 1.0):
            return TsvSource(reader, self._rule)
        if files not in self._lengths:
            self._lengths[files] = reader.rows()
        n = self._lengths[files]
        # a pass over the files counts anew
        return TsvSource(Reader(files, labels, self.skip_bad), self._rule, round(low * n), round(high * n))

    def _held_in(self, stage: str) -> str:
        """The stage whose files hold the samples of ``stage``."""
        return "train" if stage in ("val", "test") and not (self._patterns["val"] or self._patterns["test"]) else stage

    def _share(self, stage: str) -> tuple[float, float]:
        """The part of its files that belongs to ``stage``."""
        p = self._patterns
        if stage == "predict":
            return 0.0, 1.0
        if not (p["val"] or p["test"]):
            val, test = 1 - self.val_fraction - self.test_fraction, 1 - self.test_fraction
            return {"train": (0.0, val), "val": (val, test), "test": (test, 1.0)}[stage]
        if p["val"] == p["test"] and stage != "train":
            return (0.0, 0.5) if stage == "val" else (0.5, 1.0)
        return 0.0, 1.0

    def _files(self, stage: str) -> tuple[Path, ...]:
        files: list[Path] = []
        for pattern in self._patterns[stage]:
            found = sorted(self.root.glob(pattern), key=_natural)
            if not found:
                raise DataError(f"{stage}: no file {pattern!r} in {self.root}")
            files += found
        if not files:
            raise DataError(f"no files are given for the stage {stage!r}; set {stage}=[...] (have: {self._patterns})")
        if len({f.name.endswith("_dense.npy") for f in files}) > 1:
            raise DataError(f"{stage}: npy and text files cannot be mixed: {[f.name for f in files]}")
        return tuple(files)


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]
