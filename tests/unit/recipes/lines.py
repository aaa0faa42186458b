"""Criteo text for tests. Line i (from 0) has i + 1 as the id of cat_0, so that batches can be told apart."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

from recipes.batch import Batch


def line(i: int, labelled: bool = True) -> str:
    rng = random.Random(i)
    ints = ["" if rng.random() < 0.1 else str(rng.randint(-1, 900)) for _ in range(13)]
    ids = [f"{i + 1:08x}"] + ["" if rng.random() < 0.1 else f"{rng.getrandbits(32):08x}" for _ in range(25)]
    label = [str(int(rng.random() < 0.25))] if labelled else []
    return "\t".join([*label, *ints, *ids])


def write(path: Path, count: int, start: int = 0, labelled: bool = True) -> Path:
    text = "".join(line(i, labelled) + "\n" for i in range(start, start + count))
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
    else:
        path.write_text(text)
    return path


def samples(batch: Batch) -> list[int]:
    """The lines of a batch (padding left out), if cat_0's table is larger than the number of lines."""
    return [int(v) - 1 for v in batch.sparse["cat_0"].values()[: batch.valid]]
