"""What every recipe feeds to the model: dense features, a bag of ids per table, and labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable


@dataclass
class Batch(Pipelineable):
    """One rank's samples of one step; moves through ``TrainPipelineSparseDist``.

    dense: float32 ``[B, D]``. sparse: B bags for each table, int64 ids. labels: float32 ``[B]``, NaN where unknown
    (unlabelled files). padding: the last ``padding`` rows repeat another row, so that all ranks have the same number
    of rows; losses, metrics and predictions leave them out.
    """

    dense: Tensor
    sparse: KeyedJaggedTensor
    labels: Tensor
    padding: int = 0

    @property
    def valid(self) -> int:
        """Number of rows that are not padding."""
        return int(self.labels.shape[0]) - self.padding

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(
            self.dense.to(device=device, non_blocking=non_blocking),
            self.sparse.to(device=device, non_blocking=non_blocking),
            self.labels.to(device=device, non_blocking=non_blocking),
            self.padding,
        )

    def record_stream(self, stream: torch.Stream) -> None:
        self.dense.record_stream(stream)
        self.sparse.record_stream(stream)
        self.labels.record_stream(stream)

    def pin_memory(self) -> Batch:
        return Batch(self.dense.pin_memory(), self.sparse.pin_memory(), self.labels.pin_memory(), self.padding)


@dataclass(frozen=True)
class Columns:
    """Samples as numpy arrays: what a source reads and a loader's worker sends.

    dense: float32 ``[n, D]``. ids: int64, feature-major (all bags of the first feature, then of the second, ...).
    lengths: int32 ``[F, n]``, ids per bag, or None where every bag holds one id. labels: float32 ``[n]``.
    """

    dense: NDArray[np.float32]
    ids: NDArray[np.int64]
    labels: NDArray[np.float32]
    lengths: NDArray[np.int32] | None = None
    padding: int = 0

    def to_batch(self, features: Sequence[str]) -> Batch:
        rows = len(self.labels)
        lengths = np.ones((len(features), rows), np.int32) if self.lengths is None else self.lengths
        sparse = KeyedJaggedTensor(
            keys=list(features),
            values=torch.from_numpy(self.ids.reshape(-1)),
            lengths=torch.from_numpy(lengths.reshape(-1)),
            stride=rows,
        )
        return Batch(torch.from_numpy(self.dense), sparse, torch.from_numpy(self.labels), self.padding)
