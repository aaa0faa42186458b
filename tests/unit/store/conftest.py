from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import Tensor

from lightning_cpr.store import Storage, codec
from tests.unit.store.helpers import threads


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    assert threads() == set()


@pytest.fixture(autouse=True)
def no_memory_left() -> Iterator[None]:
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "root"))


class HalfCodec:
    """fp16, for finite rows in its range: stands for any codec that is not raw."""

    name = "half-test"

    def fits(self, rows: Tensor) -> Tensor:
        return (rows.float().abs() <= 65504).all(dim=1)

    def encode(self, rows: Tensor) -> dict[str, Tensor]:
        return {"codes": rows.half(), "count": torch.full((len(rows),), rows.shape[1], dtype=torch.int32)}

    def decode(self, parts: Mapping[str, Tensor], cols: int, dtype: torch.dtype) -> Tensor:
        if not (parts["count"] == cols).all():
            raise RuntimeError("wrong width")
        return parts["codes"].to(dtype)


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(codec._CODECS, HalfCodec.name, HalfCodec())
    return HalfCodec.name
