"""A LightningModule base that trains through TorchRec's sparse pipeline instead of batch by batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lightning_cpr._lightning import pl
from lightning_cpr.errors import ConfigError
from lightning_cpr.tables.pipeline import Item, SparsePipeline


class PipelinedModule(pl.LightningModule):
    """Base for modules that train with `SparsePipeline` under `TorchRecStrategy`.

    Write ``forward(batch) -> (loss, output)`` as for TorchRec's own pipeline: traceable by torch.fx, the collections'
    inputs read from the batch by attribute or index; the batch has ``to`` and ``record_stream``. Write
    ``configure_optimizers`` as usual, and `training_output` to log. Do not override ``training_step``.

    Each training step trains on one batch, the loader's next one in order, every batch exactly once; ``batch`` and
    ``batch_idx`` of ``on_train_batch_end`` are those of the batch just trained on. Validation within an epoch leaves
    the batches in flight alone. Step-wise learning-rate schedulers are stepped after each batch, epoch-wise ones after
    each epoch, except ReduceLROnPlateau.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False
        self._pipeline: SparsePipeline | None = None
        self._source: Iterator[Any] | None = None
        self._exhausted = False
        self._current: Item | None = None  # of the step that runs, once its batch has left the pipeline

    @property
    def in_flight(self) -> int:
        """Batches that were taken from the loader and not trained on: a resume must deliver these again."""
        return 0 if self._pipeline is None else self._pipeline.in_flight

    def reset(self, replay: bool = True) -> int:
        """Empties the pipeline after a failed step, on all ranks. Returns how many batches were in flight.

        They are trained on next, the failed one first; ``replay=False`` drops them.
        """
        return 0 if self._pipeline is None else self._pipeline.start_over(replay)

    def rebuild(self) -> None:
        """Takes the pipeline apart after a lost peer; the next step builds it anew, with what was in flight first.

        A new process builds its own with other collectives than a pipeline that runs already needs to go on.
        """
        self.reset()
        if self._pipeline is not None and self._current is not None:
            self._pipeline.put_first(self._current)
        self._current = None
        self.pause_pipeline()

    def skip_step(self, dataloader_iter: Iterator[Any]) -> None:
        """In place of `training_step`, after `rebuild`: the next batch is left out, the others have trained it."""
        pipeline = self._open(dataloader_iter)
        self._trained(*pipeline.skip_next(dataloader_iter))

    def training_output(self, output: Any, batch_idx: int) -> None:
        """Called after each batch with what ``forward`` returned besides the loss."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> None:
        """Trains on one batch of the pipeline."""
        pipeline = self._open(dataloader_iter)
        output, self._current = pipeline.train_next(dataloader_iter)
        item = self._current
        self.training_output(output, item[1])
        self._step_schedulers("step")
        self._trained(*item)

    def _open(self, dataloader_iter: Iterator[Any]) -> SparsePipeline:
        if self._pipeline is None:
            self._pipeline = self._make_pipeline()
        if dataloader_iter is not self._source:
            self._source, self._exhausted = dataloader_iter, False
        return self._pipeline

    def _trained(self, batch: Any, batch_idx: int, *_: Any) -> None:
        """The loop ends an epoch when the loader is exhausted, and tells hooks of the batch fetched last."""
        pipeline, fetcher = self._pipeline, self.trainer.fit_loop._data_fetcher
        assert pipeline is not None
        assert fetcher is not None
        self._exhausted = self._exhausted or fetcher.done
        fetcher.done = self._exhausted and not pipeline.in_flight
        fetcher._batch, fetcher._batch_idx = batch, batch_idx  # type: ignore[attr-defined]
        self._current = None

    def _make_pipeline(self) -> SparsePipeline:
        model = self.trainer.strategy.model
        if model is None or model is self:
            raise ConfigError("PipelinedModule needs Trainer(strategy='torchrec').")
        return SparsePipeline(model, _AllOptimizers(self), self.device, self._pipeline_backward)

    def _pipeline_backward(self, loss: Tensor) -> None:
        self.manual_backward(loss)

    def _step_schedulers(self, interval: str) -> None:
        for config in self.trainer.lr_scheduler_configs:
            if config.interval == interval and not config.reduce_on_plateau:
                config.scheduler.step()  # type: ignore[call-arg]

    def on_train_epoch_end(self) -> None:
        """Overrides must call this one."""
        self._step_schedulers("epoch")
        self.reset(replay=False)

    def pause_pipeline(self) -> None:
        """Gives the collections their plain forward back until the next training step; in-flight batches stay.

        A pipelined collection takes its input from the pipeline, so evaluation would eat a training batch.
        """
        if self._pipeline is not None:
            self._pipeline.detach()

    def close_pipeline(self) -> None:
        """Ends the pipeline and drops what is in flight. The strategy calls it at tear-down."""
        self.pause_pipeline()
        self._pipeline = self._source = None


class _AllOptimizers:
    """The module's optimizers as the one that the pipeline expects."""

    def __init__(self, module: PipelinedModule) -> None:
        self._module = module

    def _each(self) -> list[Any]:
        optimizers = self._module.optimizers()
        return optimizers if isinstance(optimizers, list) else [optimizers]

    def zero_grad(self) -> None:
        for optimizer in self._each():
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self._each():
            optimizer.step()
