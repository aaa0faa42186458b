"""Loaders that resume exactly, and the rule by which samples are dealt to ranks and workers.

**The rule.** A source has one order of samples an epoch. Step ``s`` takes the next ``world_size * batch_size`` of them
and rank ``r`` the ``r``-th run of ``batch_size`` within it; worker ``w`` of ``n`` prepares every ``n``-th step. So the
samples of a step depend neither on the number of workers nor, as a set, on anything but ``world_size * batch_size``,
and all ranks have the same number of steps. Training drops the samples that fill no whole step; evaluation and
prediction keep them, split evenly and padded with repeated rows (``Batch.padding``).

**State** is therefore one position: the epoch and the samples that all ranks have trained on in it. It is the same on
every rank, and a run of another world size may continue from it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_cpr._lightning import pl
from recipes.batch import Batch, Columns
from recipes.errors import DataError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Deal:
    """Which samples of a source go to one iterator: steps ``first``, ``first + stride``, ... of rank ``rank``.

    keep_rest: the samples that fill no whole step are kept (padded) instead of dropped.
    """

    rank: int = 0
    world_size: int = 1
    batch_size: int = 1
    first: int = 0
    stride: int = 1
    keep_rest: bool = False

    @property
    def step_rows(self) -> int:
        return self.world_size * self.batch_size

    def steps(self, rows: int) -> int:
        """Number of steps that ``rows`` samples make, on every rank."""
        return -(-rows // self.step_rows) if self.keep_rest else rows // self.step_rows

    def own(self, step: int, rows: int) -> tuple[int, int, int]:
        """``(start, stop, padding)``: this rank's samples of a step out of ``rows``, and how many rows to add."""
        begin = step * self.step_rows
        size = -(-min(self.step_rows, rows - begin) // self.world_size)
        start = min(begin + self.rank * size, rows)
        stop = min(start + size, rows)
        return start, stop, size - (stop - start)


class Source(ABC):
    """Samples in one order an epoch.

    tables: rows of each table, by feature, in the order of ``Columns.ids``. rows: samples an epoch, None where only
    reading to the end tells.
    """

    tables: Mapping[str, int]
    rows: int | None

    @abstractmethod
    def columns(self, deal: Deal, epoch: int) -> Iterator[Columns]:
        """The batches that ``deal`` names, in order. Runs in a worker process."""


class IndexedSource(Source):
    """A source that can read any samples by position; subclasses give ``take`` and the number of rows."""

    rows: int

    def order(self, epoch: int) -> NDArray[np.int64] | None:
        """The samples' order in an epoch; None for 0, 1, 2, ..."""
        return None

    @abstractmethod
    def take(self, rows: NDArray[np.int64]) -> Columns:
        """The samples at these positions (int64 ``[n]``)."""

    def columns(self, deal: Deal, epoch: int) -> Iterator[Columns]:
        order = self.order(epoch)
        for step in range(deal.first, deal.steps(self.rows), deal.stride):
            start, stop, padding = deal.own(step, self.rows)
            rows = np.arange(start, stop, dtype=np.int64)
            rows = np.concatenate([rows, np.full(padding, self.rows - 1, dtype=np.int64)])
            taken = self.take(rows if order is None else order[rows])
            yield Columns(taken.dense, taken.ids, taken.labels, taken.lengths, padding)


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the world size, (0, 1) outside a job."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


class _Steps(IterableDataset[Columns]):
    """One epoch's remaining steps of one rank, dealt on to the DataLoader's workers."""

    def __init__(self, source: Source, deal: Deal, epoch: int) -> None:
        self.source, self.deal, self.epoch = source, deal, epoch

    def __iter__(self) -> Iterator[Columns]:
        info, d = get_worker_info(), self.deal
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        deal = Deal(d.rank, d.world_size, d.batch_size, d.first + worker, workers, d.keep_rest)
        yield from self.source.columns(deal, self.epoch)


class ResumableLoader:
    """Iterates over this rank's batches of a source; after ``load_state_dict`` the next epoch begins mid-way.

    progress: number of batches of this epoch that were trained, where a consumer runs ahead (Lightning prefetches one
    batch of a loader without length, ``TrainPipelineSparseDist`` holds two); None where each batch handed out is
    used before the next is asked for. Has a length only if the source has. Iterating is lazy: rank, world size and
    epoch are read at the first batch.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        num_workers: int = 0,
        keep_rest: bool = False,
        pin_memory: bool = False,
        progress: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.source = source
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.keep_rest = keep_rest
        self.pin_memory = pin_memory
        self._progress = progress
        self._epoch = 0
        self._resume_at = 0  # samples of this epoch to leave out when the next iterator starts
        self._running: int | None = None  # batches of this epoch handed out, left-out ones included
        self._exhausted = False

    @property
    def batch_sampler(self) -> SimpleNamespace:
        """Lightning calls ``loader.batch_sampler.sampler.set_epoch``."""
        return SimpleNamespace(sampler=self)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iterator; a position restored for another epoch is void.

        A loader without length may be asked for its first batch before it is told the epoch: it goes on.
        """
        current, samples = self._position()
        if self._running is not None and not self._finished() and (epoch == current or self.source.rows is None):
            self._epoch = epoch
        else:
            self._start_at(epoch, samples if epoch == current else 0)

    def _start_at(self, epoch: int, samples: int) -> None:
        self._epoch, self._resume_at = epoch, samples
        self._running, self._exhausted = None, False

    def _deal(self, first: int = 0) -> Deal:
        rank, world = rank_and_world()
        return Deal(rank, world, self.batch_size, first, keep_rest=self.keep_rest)

    def __len__(self) -> int:
        if self.source.rows is None:
            raise TypeError("the number of samples is known only after reading them")
        return self._deal().steps(self.source.rows)

    def __iter__(self) -> Iterator[Batch]:
        if self._finished():
            self._start_at(self._epoch + 1, 0)
        step_rows = self._deal().step_rows
        first, over = divmod(self._resume_at, step_rows)
        if over:
            log.warning(
                "%d samples of the epoch were trained, no multiple of the %d a step: %d are repeated",
                self._resume_at,
                step_rows,
                over,
            )
        self._running, self._exhausted, self._resume_at = first, False, 0
        steps = _Steps(self.source, self._deal(first), self._epoch)
        features = list(self.source.tables)
        for columns in DataLoader(steps, batch_size=None, num_workers=self.num_workers, collate_fn=cast(Any, _as_is)):
            batch = columns.to_batch(features)
            self._running += 1
            yield batch.pin_memory() if self.pin_memory else batch
        self._exhausted = True

    def _finished(self) -> bool:
        if self._running is None:
            return False
        return self._exhausted or (self.source.rows is not None and self._running >= len(self))

    def _position(self) -> tuple[int, int]:
        """The epoch and the samples of it that are done with; (next epoch, 0) after the last of them."""
        if self._running is None:
            return self._epoch, self._resume_at
        trained = self._progress()
        done = self._running if trained is None else min(trained, self._running)
        if self._finished() and done == self._running:
            return self._epoch + 1, 0
        return self._epoch, done * self._deal().step_rows

    def state_dict(self) -> dict[str, Any]:
        epoch, samples = self._position()
        return {"epoch": epoch, "samples": samples, "rows": self.source.rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``. Raises `DataError` if the source has another number of samples than it had."""
        if state["rows"] != self.source.rows:
            raise DataError(
                f"the checkpoint's data had {state['rows']} samples an epoch, this data has {self.source.rows}: "
                "resume with the same files and split, or start a new run"
            )
        self._start_at(int(state["epoch"]), int(state["samples"]))


def _as_is(columns: Columns) -> Columns:
    return columns


class RecipeDataModule(pl.LightningDataModule):
    """Loaders over one source a stage. Subclasses build the sources in ``setup`` and name the tables.

    ``tables`` and ``dense_features`` say what the model must have; `recipes.dlrm.DLRMModule` checks them at set-up.
    """

    tables: Mapping[str, int]
    dense_features: int

    def __init__(self, batch_size: int, num_workers: int = 0, pin_memory: bool = False) -> None:
        super().__init__()
        if batch_size < 1:
            raise DataError(f"batch_size={batch_size}: must be 1 or more")
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.pin_memory = pin_memory

    def source(self, stage: str) -> Source:
        """The source of ``train``, ``val``, ``test`` or ``predict``; raises `DataError` where there is none."""
        raise NotImplementedError

    def _trained(self) -> int | None:
        trainer = self.trainer
        if trainer is None or trainer.state.fn != "fit":
            return None
        # "processed" counts a batch as soon as its step is done: before on_train_batch_end, where saves happen
        return int(cast(Any, trainer.fit_loop.epoch_loop.batch_progress.current).processed)

    def _loader(self, stage: str) -> ResumableLoader:
        train = stage == "train"
        return ResumableLoader(
            self.source(stage),
            self.batch_size,
            self.num_workers,
            keep_rest=not train,
            pin_memory=self.pin_memory,
            progress=self._trained if train else lambda: None,
        )

    def train_dataloader(self) -> ResumableLoader:
        return self._loader("train")

    def val_dataloader(self) -> ResumableLoader:
        return self._loader("val")

    def test_dataloader(self) -> ResumableLoader:
        return self._loader("test")

    def predict_dataloader(self) -> ResumableLoader:
        return self._loader("predict")
