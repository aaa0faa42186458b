"""Row codecs: how rows become bytes. `raw` is bit-exact; the quantizers state their bound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from lightning_cpr.errors import ConfigError


class Codec(Protocol):
    """Encodes rows ``[n, cols]`` into named parts and back. ``name`` is what the manifest stores."""

    name: str

    def fits(self, rows: Tensor) -> Tensor:
        """Bool ``[n]``: the rows that the codec can hold. The writer stores the others raw and counts them."""
        ...

    def encode(self, rows: Tensor) -> dict[str, Tensor]:
        """Parts by name, each with leading dimension n, so that a range of rows slices every part."""
        ...

    def decode(self, parts: Mapping[str, Tensor], cols: int, dtype: torch.dtype) -> Tensor:
        """Rows ``[n, cols]`` of ``dtype`` from the parts that `encode` made."""
        ...


class RawCodec:
    """The bytes of the rows as they are, NaN payloads included."""

    name = "raw"

    def fits(self, rows: Tensor) -> Tensor:
        return torch.ones(rows.shape[0], dtype=torch.bool)

    def encode(self, rows: Tensor) -> dict[str, Tensor]:
        return {"raw": rows}

    def decode(self, parts: Mapping[str, Tensor], cols: int, dtype: torch.dtype) -> Tensor:
        raw = parts["raw"]
        if raw.dtype != dtype or raw.shape[1:] != (cols,):
            raise ConfigError(f"raw part is {raw.dtype} {tuple(raw.shape)}, wanted {dtype} [n, {cols}]")
        return raw


_CODECS: dict[str, Codec] = {"raw": RawCodec()}


def get_codec(name: str) -> Codec:
    """The codec of that name; ConfigError names the known ones."""
    try:
        return _CODECS[name]
    except KeyError:
        raise ConfigError(f"unknown codec {name!r}; known: {', '.join(sorted(_CODECS))}") from None
