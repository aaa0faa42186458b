"""Blobs: everything of a version that is not a table row, as plain values in ``torch.save`` files.

``job.pt``: what is the same on every rank. ``rank<r>.pt``: what is a rank's own.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch

from lightning_cpr.errors import CorruptShardError

JOB_BLOB = "job.pt"


def rank_blob(rank: int) -> str:
    """The name of a rank's blob."""
    return f"rank{rank}.pt"


def encode_blob(value: Mapping[str, Any]) -> bytes:
    """Plain values as the bytes of a ``torch.save`` file."""
    buffer = io.BytesIO()
    torch.save(dict(value), buffer)
    return buffer.getvalue()


def decode_blob(data: bytes, name: str) -> dict[str, Any]:
    """The inverse of `encode_blob`; never runs code from the file.

    Raises:
        CorruptShardError: the bytes are no such file.
    """
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as e:  # torch.load raises many kinds; each means that the bytes are not ours
        raise CorruptShardError(f"{name} cannot be read back as plain tensors and values: {type(e).__name__}") from e
