"""Reading ``torch.distributed.checkpoint`` folders without trusting them: no pickle in them can run code.

DCP keeps its metadata in a pickle. It is loaded here with the few classes that such metadata consists of, and tensors
with ``weights_only``; both may come from someone else.
"""

from __future__ import annotations

import io
import math
import pathlib
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.serialization import _get_layout

from lightning_cpr.errors import CorruptShardError, ManifestError, UnsupportedError
from lightning_cpr.store.storage import Storage

_METADATA_LIMIT = 1 << 30
_CLASSES: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    # Paths in it name the folder that was written to; nothing is opened by them.
    **{("pathlib", name): pathlib.PurePosixPath for name in ("PosixPath", "PurePosixPath", "WindowsPath")},
    **{("pathlib._local", name): pathlib.PurePosixPath for name in ("PosixPath", "PurePosixPath", "WindowsPath")},
    **{
        ("torch.distributed.checkpoint.metadata", name): getattr(metadata, name)
        for name in (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )
    },
}  # fmt: skip
_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
_CLASSES |= {("torch", name): getattr(torch, name) for name in _DTYPES}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _CLASSES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's metadata") from None

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("persistent ids have no place in a checkpoint's metadata")


@dataclass(frozen=True)
class Piece:
    """A saved rectangle of a tensor, and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: str
    start: int
    length: int


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint; its pieces are sorted by offset and need not cover it."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def read_metadata(storage: Storage) -> dict[str, SavedTensor]:
    """The tensors of the checkpoint in a folder, by flattened key. Values that are no tensors are left out.

    Raises:
        ManifestError: there is no DCP checkpoint.
        CorruptShardError: its metadata is damaged, or holds what metadata does not.
    """
    size = storage.size(".metadata")
    if size is None:
        raise ManifestError(f"{storage.root}: holds no DCP checkpoint (no file .metadata); check the path")
    if size > _METADATA_LIMIT:
        raise CorruptShardError(f"{storage.root}/.metadata: {size} bytes are no metadata")
    try:
        found = _Unpickler(io.BytesIO(storage.get(".metadata"))).load()
        return {
            key: _tensor(key, item, found.storage_data)
            for key, item in found.state_dict_metadata.items()
            if isinstance(item, metadata.TensorStorageMetadata)
        }
    except UnsupportedError:
        raise
    except Exception as error:  # a damaged pickle raises any kind
        raise CorruptShardError(f"{storage.root}/.metadata cannot be read: {type(error).__name__}: {error}") from error


def read_piece(storage: Storage, tensor: SavedTensor, piece: Piece) -> Tensor:
    """One piece in host memory. Raises CorruptShardError naming file and tensor unless it is what the metadata say."""
    where = f"{storage.root}/{piece.path} ({tensor.key})"
    data = storage.get(piece.path, piece.start, piece.start + piece.length)
    if len(data) != piece.length:
        raise CorruptShardError(f"{where}: cut off: {len(data)} of {piece.length} bytes from byte {piece.start} on")
    try:
        value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many kinds; each means that the bytes are no plain tensor
        raise CorruptShardError(f"{where}: is no plain tensor: {type(error).__name__}") from error
    if not isinstance(value, Tensor) or value.dtype != tensor.dtype or tuple(value.shape) != piece.sizes:
        raise CorruptShardError(f"{where}: does not hold {tensor.dtype} {list(piece.sizes)}")
    return value.detach().contiguous()


def read_whole(storage: Storage, tensor: SavedTensor) -> Tensor:
    """A small tensor as a whole. CorruptShardError if pieces of it are missing."""
    if sum(math.prod(piece.sizes) for piece in tensor.pieces) != math.prod(tensor.shape):
        raise CorruptShardError(f"{storage.root}: {tensor.key}: the pieces do not add up to {list(tensor.shape)}")
    if len(tensor.pieces) == 1:
        return read_piece(storage, tensor, tensor.pieces[0])
    loaded = [read_piece(storage, tensor, piece) for piece in tensor.pieces]
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for piece, value in zip(tensor.pieces, loaded, strict=True):
        whole[tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))] = value
    return whole


def _tensor(key: str, item: Any, stored: Any) -> SavedTensor:
    shape = tuple(int(n) for n in item.size)
    pieces = []
    for number, chunk in enumerate(item.chunks):
        offsets, sizes = tuple(int(n) for n in chunk.offsets), tuple(int(n) for n in chunk.sizes)
        if len(offsets) != len(shape) or any(
            o < 0 or n < 0 or o + n > d for o, n, d in zip(offsets, sizes, shape, strict=True)
        ):
            raise ValueError(f"{key}: a piece at {offsets} of {sizes} in {shape}")
        info = stored[metadata.MetadataIndex(key, chunk.offsets, number)]
        if getattr(info, "transform_descriptors", None):
            raise UnsupportedError(f"{key}: is stored with transforms ({info.transform_descriptors}); save it without")
        start, length = int(info.offset), int(info.length)
        if start < 0 or length < 0 or not isinstance(info.relative_path, str):
            raise ValueError(f"{key}: {length} bytes at {start} of {info.relative_path!r}")
        pieces.append(Piece(offsets, sizes, info.relative_path, start, length))
    return SavedTensor(key, item.properties.dtype, shape, tuple(sorted(pieces, key=lambda piece: piece.offsets)))
