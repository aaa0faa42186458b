"""TorchRec's binary Criteo format, and a converter to it that can be stopped and run again.

A file ``day_0`` becomes ``day_0_dense.npy`` (float32 ``[n, 13]``, already ``log_dense``), ``day_0_sparse.npy`` (int64
``[n, 26]``, ids as in the text, 0 = missing) and ``day_0_labels.npy`` (int32 ``[n, 1]``, -1 = unlabelled).

``python -m recipes.criteo_npy --out DIR FILE...``
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from recipes.criteo_tsv import DENSE, SPARSE, Counts, Reader, log_dense
from recipes.errors import DataError

log = logging.getLogger(__name__)

PARTS: dict[str, tuple[str, int]] = {
    "dense": ("<f4", len(DENSE)),
    "sparse": ("<i8", len(SPARSE)),
    "labels": ("<i4", 1),
}


@dataclass(frozen=True)
class Converted:
    """What one text file gave. reused: it was converted by an earlier run."""

    stem: str
    rows: int
    counts: Counts
    reused: bool


def stem_of(path: Path) -> str:
    """``day_0`` for ``day_0``, ``day_0.gz``, ``day_0.tsv.gz``; ``train`` for ``train.txt``."""
    return path.name.split(".")[0]


def convert(files: Sequence[Path], out: Path, labels_required: bool = True, skip_bad: bool = False) -> list[Converted]:
    """Convert each file; those that an earlier run finished, from the same bytes and settings, are left alone.

    A file's outputs get their names only when whole and its ``.done.json`` marker comes last: whatever has no marker
    is made anew. Raises `DataError` (`recipes.criteo_tsv`) at the first bad line, after which the finished files stay.
    """
    out.mkdir(parents=True, exist_ok=True)
    stems = [stem_of(f) for f in files]
    if len(set(stems)) < len(stems):
        raise DataError(f"two of the files would have the same output name: {sorted(stems)}")
    return [_convert(path, out, labels_required, skip_bad) for path in files]


def _convert(path: Path, out: Path, labels_required: bool, skip_bad: bool) -> Converted:
    stem, status = stem_of(path), path.stat()
    settings = {
        "source": path.name,
        "bytes": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "labels_required": labels_required,
        "skip_bad": skip_bad,
    }
    marker = out / f"{stem}.done.json"
    finals = {part: out / f"{stem}_{part}.npy" for part in PARTS}
    if (done := _finished(marker, settings, finals)) is not None:
        log.info("%s: %d rows, converted before", stem, done["rows"])
        return Converted(stem, done["rows"], Counts(**done["counts"]), reused=True)
    marker.unlink(missing_ok=True)
    reader = Reader((path,), labels_required, skip_bad)
    temporary = {part: final.with_suffix(".npy.part") for part, final in finals.items()}
    try:
        rows = _write(reader, temporary)
        for part, final in finals.items():
            os.replace(temporary[part], final)
    finally:
        for leftover in temporary.values():
            leftover.unlink(missing_ok=True)
    sizes = {final.name: final.stat().st_size for final in finals.values()}
    record = {"settings": settings, "rows": rows, "counts": asdict(reader.counts), "sizes": sizes}
    scratch = marker.with_suffix(".part")
    scratch.write_text(json.dumps(record))
    os.replace(scratch, marker)  # the commit: nothing above counts without it
    log.info("%s: %d rows", stem, rows)
    return Converted(stem, rows, reader.counts, reused=False)


def _finished(marker: Path, settings: dict[str, Any], finals: dict[str, Path]) -> dict[str, Any] | None:
    try:
        done: dict[str, Any] = json.loads(marker.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    sizes = {final.name: final.stat().st_size for final in finals.values() if final.exists()}
    return done if done.get("settings") == settings and done.get("sizes") == sizes else None


def _write(reader: Reader, paths: dict[str, Path]) -> int:
    files = {part: path.open("wb") for part, path in paths.items()}
    rows = 0
    try:
        for part, file in files.items():
            _header(file, part, 0)
        for block in reader.blocks():
            parsed = block.parse()
            labels = np.nan_to_num(parsed.labels, nan=-1).astype("<i4")[:, None]
            for part, array in (("dense", log_dense(parsed.ints)), ("sparse", parsed.ids), ("labels", labels)):
                files[part].write(np.ascontiguousarray(array, dtype=PARTS[part][0]).data)
            rows += len(block)
        for part, file in files.items():
            file.seek(0)
            _header(file, part, rows)
            file.flush()
            os.fsync(file.fileno())
    finally:
        for file in files.values():
            file.close()
    return rows


def _header(file: BinaryIO, part: str, rows: int) -> None:
    # numpy pads the header so that the first axis can grow in place: its length does not depend on ``rows``
    descr, width = PARTS[part]
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": (rows, width)})


@dataclass(frozen=True)
class Npy:
    """One memory-mapped triple. dense: ``[n, 13]``, sparse: ``[n, 26]`` ints, labels: ``[n]``."""

    path: Path
    dense: NDArray[Any]
    sparse: NDArray[Any]
    labels: NDArray[Any]


def open_npy(dense: Path) -> Npy:
    """The triple that ``*_dense.npy`` belongs to. Raises `DataError` for a missing part or another shape."""
    stem = dense.name.removesuffix("_dense.npy")
    arrays = {}
    for part, (_, width) in PARTS.items():
        path = dense.with_name(f"{stem}_{part}.npy")
        if not path.exists():
            raise DataError(f"{path} is missing; convert again (python -m recipes.criteo_npy)")
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise DataError(f"{path} is not a whole npy file ({error}); convert again") from error
        if array.reshape(len(array), -1).shape[1] != width:
            raise DataError(f"{path} has shape {array.shape}, [n, {width}] is expected")
        arrays[part] = array
    if len({len(array) for array in arrays.values()}) != 1:
        raise DataError(f"{dense}: dense, sparse and labels have {[len(a) for a in arrays.values()]} rows")
    return Npy(dense, arrays["dense"], arrays["sparse"], arrays["labels"].reshape(-1))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.criteo_npy", description=convert.__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--unlabelled", action="store_true", help="also take 39-column files")
    parser.add_argument("--skip-bad", action="store_true", help="leave bad lines out and keep truncated files' prefix")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        convert(args.files, args.out, not args.unlabelled, args.skip_bad)
    except DataError as error:
        log.error("%s", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
