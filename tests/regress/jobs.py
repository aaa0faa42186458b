"""What the regressions of whole jobs share: a module that notes its batches, callbacks, and tables put together."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.datasets.utils import Batch

from lightning_cpr import CPRCallback
from lightning_cpr._lightning import Callback
from tests._tiny import NUM_BATCHES, Tiny, make_batch

PREFIX = "net.ebc.embedding_bags."


def batch_number(batch: Batch, rank: int, count: int = NUM_BATCHES) -> int:
    """Which of the rank's fixed batches this one is, by its content."""
    return next(i for i in range(count) if torch.equal(make_batch(i, rank).dense_features, batch.dense_features))


class Noting(Tiny):
    """Notes which batches it trained on, by their content."""

    def __init__(self, rank: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rank = rank
        self.ids: list[int] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.ids.append(batch_number(batch, self.rank))
        return super().training_step(batch, batch_idx)


def step_of(trainer: Any) -> int:
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


class Settled(Callback):
    """Lets the save in flight end before each batch up to ``until``, so that every save which falls due happens."""

    def __init__(self, cpr: CPRCallback, until: int = 10**9) -> None:
        self.cpr, self.until = cpr, until

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if step_of(trainer) <= self.until and self.cpr._cycle.saves.busy:
            self.cpr._cycle.take(self.cpr._cycle.saves.poll(30))


class SaveAt(Callback):
    """Calls ``trainer.save_checkpoint`` at the end of chosen batches."""

    def __init__(self, paths: dict[int, str]) -> None:
        self.paths = paths

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if step_of(trainer) in self.paths:
            trainer.save_checkpoint(self.paths[step_of(trainer)])


class StopAt(Callback):
    """Ends the run as a crash would, by an error at the end of a batch."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if step_of(trainer) == self.step:
            raise KeyError("stop here")


class Logged(logging.Handler):
    """The package's log records of a level and above, as text, while it is entered."""

    def __init__(self, level: int = logging.WARNING) -> None:
        super().__init__(level)
        self.lines: list[str] = []
        self._logger = logging.getLogger("lightning_cpr")

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Logged:
        self._logger.addHandler(self)
        return self

    def __exit__(self, *args: object) -> None:
        self._logger.removeHandler(self)

    def having(self, part: str) -> list[str]:
        return [line for line in self.lines if part in line]


def whole(runs: Iterable[dict[str, Tensor]], shapes: dict[str, tuple[int, int]]) -> dict[str, Tensor]:
    """Tables from every rank's ``rows_of``: ``a`` [rows, cols], ``a.sum@<column>`` [rows] for each column block."""
    parts: dict[str, Tensor] = {}
    for run in runs:
        parts |= run
    tables = {name: torch.full(shape, float("nan")) for name, shape in shapes.items()}
    for key, rows in parts.items():
        name, span = key.removeprefix(PREFIX).split("[")
        span, kind = span.split("]")
        lines, column = span.split(",")
        low, high = map(int, lines.split(":"))
        if kind == "":
            tables[name][low:high, int(column) : int(column) + rows.shape[1]] = rows
        else:
            blank = torch.full((shapes[name][0], *rows.shape[1:]), float("nan"))
            tables.setdefault(f"{name}{kind}@{column}", blank)[low:high] = rows
    assert not any(table.isnan().any() for table in tables.values())
    return tables


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def steps_of(events: Sequence[dict[str, Any]], kind: str) -> list[int]:
    return [e["step"] for e in events if e["event"] == kind]
