"""Safetensors files written piece by piece, and read back as tensors that live in the page cache."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from lightning_cpr.store.chunk import DTYPE_NAMES


class TensorFile:
    """Tensors of known shapes, each filled by ranges of its first dimension. Visible under its name once complete.

    Use it as a context manager; an error in it leaves nothing behind.
    """

    def __init__(self, path: Path, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self._path = path
        self._temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._starts: dict[str, int] = {}
        self._shapes = dict(shapes)
        # Widest elements first, so that each tensor begins at a multiple of its element size.
        order = sorted(shapes, key=lambda name: -shapes[name][0].itemsize)
        header, offset = {}, 0
        for name in order:
            dtype, shape = shapes[name]
            end = offset + dtype.itemsize * math.prod(shape)
            header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            self._starts[name], offset = offset, end
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        text += b" " * (-len(text) % 8)
        self._head = len(text).to_bytes(8, "little") + text
        self._bytes = len(self._head) + offset

    def __enter__(self) -> TensorFile:
        self._file = open(self._temp, "wb")
        self._file.truncate(self._bytes)
        self._file.write(self._head)
        return self

    def write(self, name: str, start: int, values: Tensor) -> None:
        """``values`` ``[n, ...]`` as the rows from ``start`` on."""
        row_bytes = values.dtype.itemsize * math.prod(values.shape[1:])
        self._file.seek(len(self._head) + self._starts[name] + start * row_bytes)
        self._file.write(values.contiguous().reshape(-1).view(torch.uint8).numpy().data if values.numel() else b"")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if kind is None:
            os.replace(self._temp, self._path)
        else:
            os.unlink(self._temp)

    def mapped(self) -> dict[str, Tensor]:
        """The tensors of the finished file, paged in as they are used. Writing to them does not change the file."""
        found = {}
        for name, (dtype, shape) in self._shapes.items():
            count = dtype.itemsize * math.prod(shape)
            if not count:
                found[name] = torch.empty(shape, dtype=dtype)
                continue
            at = len(self._head) + self._starts[name]
            raw = np.memmap(self._path, np.uint8, "c", at, (count,))
            found[name] = torch.from_numpy(raw).view(dtype).view(shape)
        return found
