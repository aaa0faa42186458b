"""Reads Criteo's click logs (Kaggle ``train.txt``/``test.txt``, Terabyte ``day_N``, also ``.gz``) block by block.

A line is a label (0 or 1; absent in Kaggle's test file), 13 integers and 26 hexadecimal ids, separated by tabs.
What is not as it should be:

- **missing field**: an integer is 0, an id is 0 (the row of its table that stands for "missing").
- **negative integer**: kept; the transform ``log(max(x, -2) + 3)`` takes everything down from -2 to 0.
- **malformed field** (not a decimal or hexadecimal number, or over 18 digits or 15 hex digits): as missing, counted,
  the first one logged with file, line and feature.
- **line with another number of columns, or another label**: `DataError` with file and line; with ``skip_bad`` it is
  left out and counted. Blank lines are ignored.
- **truncated or damaged gzip**: `DataError` with the file and the rows read; with ``skip_bad`` the complete lines
  before the damage are kept, and the file is counted.

Needs numpy alone and holds a few blocks in memory, whatever the files' size.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recipes.errors import DataError

log = logging.getLogger(__name__)

DENSE = tuple(f"int_{i}" for i in range(13))
SPARSE = tuple(f"cat_{i}" for i in range(26))
COLUMNS = len(DENSE) + len(SPARSE)
BLOCK = 1 << 20
_TAB, _NEWLINE, _RETURN, _MINUS = 9, 10, 13, 45
_DECIMAL = np.full(256, 255, np.uint8)
_DECIMAL[48:58] = range(10)
_HEX = _DECIMAL.copy()
_HEX[65:71] = _HEX[97:103] = range(10, 16)


@dataclass
class Counts:
    """What was left out or replaced so far in one pass."""

    bad_lines: int = 0
    malformed_fields: int = 0
    truncated_files: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Rows:
    """ints: int64 ``[n, 13]``. ids: int64 ``[n, 26]``, as in the file. labels: float32 ``[n]``, NaN without labels."""

    ints: NDArray[np.int64]
    ids: NDArray[np.int64]
    labels: NDArray[np.float32]


def log_dense(ints: NDArray[np.int64]) -> NDArray[np.float32]:
    """``log(max(x, -2) + 3)``: the transform of TorchRec's npy files for a minimum of -1, and defined for all x."""
    return np.log(np.maximum(ints, -2).astype(np.float64) + 3).astype(np.float32)


@dataclass(frozen=True)
class Block:
    """The good lines of one piece of a file, not parsed yet.

    separators: positions in ``text`` of tabs and newlines; line i begins at ``begin[i]`` and its first separator is
    number ``first[i]``. line: number in the file, from 1.
    """

    path: Path
    text: NDArray[np.uint8]
    separators: NDArray[np.int64]
    begin: NDArray[np.int64]
    first: NDArray[np.int64]
    line: NDArray[np.int64]
    labelled: bool
    counts: Counts

    def __len__(self) -> int:
        return len(self.begin)

    def slice(self, start: int, stop: int) -> Block:
        at = slice(start, stop)
        begin, first, line = self.begin[at], self.first[at], self.line[at]
        return Block(self.path, self.text, self.separators, begin, first, line, self.labelled, self.counts)

    def parse(self) -> Rows:
        columns = COLUMNS + self.labelled
        ends = self.separators[self.first[:, None] + np.arange(columns)]
        starts = np.concatenate([self.begin[:, None], ends[:, :-1] + 1], axis=1)
        ends[:, -1] -= self.text[ends[:, -1] - 1] == _RETURN
        labels = np.full(len(self), np.nan, np.float32)
        if self.labelled:
            labels[:] = self.text[self.begin] - 48
        at = int(self.labelled)
        dense, sparse = slice(at, at + len(DENSE)), slice(at + len(DENSE), None)
        ints = self._numbers(starts[:, dense], ends[:, dense], _DECIMAL, 10, 18, DENSE)
        ids = self._numbers(starts[:, sparse], ends[:, sparse], _HEX, 16, 15, SPARSE)
        return Rows(ints, ids, labels)

    def _numbers(
        self,
        starts: NDArray[np.int64],
        ends: NDArray[np.int64],
        digits: NDArray[np.uint8],
        base: int,
        longest: int,
        names: Sequence[str],
    ) -> NDArray[np.int64]:
        value = np.zeros(starts.shape, np.int64)
        negative = np.zeros(starts.shape, bool)
        if base == 10:
            negative = (ends > starts) & (self.text[starts] == _MINUS)
        first = starts + negative
        length = ends - first
        bad = (length > longest) | (negative & (length == 0))
        for place in range(min(int(length.max(initial=0)), longest)):
            inside = place < length
            digit = digits[self.text[np.where(inside, first + place, 0)]]
            bad |= inside & (digit == 255)
            value = np.where(inside, value * base + digit, value)
        if bad.any():
            self._note_malformed(bad, names)
            value[bad] = 0
        return np.where(negative, -value, value)

    def _note_malformed(self, bad: NDArray[np.bool_], names: Sequence[str]) -> None:
        if self.counts.malformed_fields == 0:
            row, column = np.argwhere(bad)[0]
            log.warning(
                "%s:%d: %s is malformed and read as missing; further ones are only counted",
                self.path,
                self.line[row],
                names[column],
            )
        self.counts.malformed_fields += int(bad.sum())


@dataclass(frozen=True)
class Reader:
    """The good lines of some files, in order. labels_required: False also takes files without a label column."""

    files: tuple[Path, ...]
    labels_required: bool = True
    skip_bad: bool = False
    counts: Counts = field(default_factory=Counts)

    def blocks(self) -> Iterator[Block]:
        for path in self.files:
            labelled, line, rows = None, 1, 0
            pieces = _pieces(path)
            while True:
                try:
                    data = next(pieces, None)
                except (EOFError, zlib.error) as error:
                    self._refuse_damage(path, rows, error)
                    break
                if data is None:
                    break
                text = np.frombuffer(data, np.uint8)
                if labelled is None:
                    labelled = self.labels_required or data.split(b"\n", 1)[0].count(b"\t") == COLUMNS
                block, lines = self._block(path, text, line, labelled)
                line, rows = line + lines, rows + len(block)
                yield block
        if self.counts.bad_lines:
            log.warning("%d lines with another number of columns or label were left out", self.counts.bad_lines)

    def rows(self) -> int:
        """Number of good lines; reads everything, parses nothing."""
        return sum(len(block) for block in self.blocks())

    def _block(self, path: Path, text: NDArray[np.uint8], line: int, labelled: bool) -> tuple[Block, int]:
        separators = np.flatnonzero((text == _TAB) | (text == _NEWLINE))
        newline = np.flatnonzero(text[separators] == _NEWLINE)
        first = np.concatenate([[0], newline[:-1] + 1])
        begin = np.concatenate([[0], separators[newline[:-1]] + 1])
        tabs = newline - first
        good = tabs == COLUMNS - 1 + labelled
        if labelled:
            good &= (separators[first] - begin == 1) & ((text[begin] == 48) | (text[begin] == 49))
        blank = (tabs == 0) & ((separators[newline] == begin) | (text[begin] == _RETURN))
        bad = np.flatnonzero(~good & ~blank)
        if len(bad):
            self._refuse_lines(path, line + int(bad[0]), int(tabs[bad[0]]) + 1, labelled, len(bad))
        keep = np.flatnonzero(good)
        return Block(path, text, separators, begin[keep], first[keep], line + keep, labelled, self.counts), len(newline)

    def _refuse_lines(self, path: Path, line: int, columns: int, labelled: bool, number: int) -> None:
        if not self.skip_bad:
            if columns == COLUMNS and self.labels_required:
                why = f"label missing: {COLUMNS} columns; an unlabelled file is for predict only"
            elif columns == COLUMNS + labelled:
                why = "the label is neither 0 nor 1"
            else:
                why = f"{columns} columns where {COLUMNS + labelled} are expected"
            raise DataError(f"{path}:{line}: {why} (skip_bad=True leaves such lines out)")
        if self.counts.bad_lines == 0:
            log.warning("%s:%d: bad line (%d columns) left out; further ones are only counted", path, line, columns)
        self.counts.bad_lines += number

    def _refuse_damage(self, path: Path, rows: int, error: Exception) -> None:
        found = f"{path}: truncated or damaged gzip, {rows} rows read ({error})"
        if not self.skip_bad:
            raise DataError(f"{found}; fetch the file again, or keep these rows with skip_bad=True") from error
        log.warning("%s; these rows are kept", found)
        self.counts.truncated_files.append(str(path))


def _pieces(path: Path) -> Iterator[bytes]:
    """The file's text in whole lines; at damage EOFError or zlib.error, after the last whole line before it."""
    rest = b""
    damage: Exception | None = None
    chunks = _gzip(path) if path.suffix == ".gz" else _plain(path)
    while True:
        try:
            chunk = next(chunks, None)
        except (EOFError, zlib.error) as error:
            chunk, damage = None, error
        if chunk is None:
            break
        cut = chunk.rfind(b"\n") + 1
        if cut:
            yield rest + chunk[:cut]
            rest = chunk[cut:]
        else:
            rest += chunk
    if damage is not None:
        raise damage
    if rest:
        yield rest + b"\n"


def _plain(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(BLOCK):
            yield chunk


def _gzip(path: Path) -> Iterator[bytes]:
    """Decompressed text; `gzip` would lose what it had read when it meets the end of a truncated file."""
    with path.open("rb", buffering=0) as file:
        member = zlib.decompressobj(wbits=31)
        data = b""
        while data or (data := file.read(BLOCK // 4)):
            if member.eof:
                data = data.lstrip(b"\0")  # members may be padded with zeros
                if not data:
                    continue
                member = zlib.decompressobj(wbits=31)
            if text := member.decompress(data, BLOCK):
                yield text
            data = member.unused_data if member.eof else member.unconsumed_tail
        if text := member.flush():
            yield text
        if not member.eof:
            raise EOFError("it ends before the end-of-stream marker")
