"""The training loader's position after the batch that was trained last, although fetching runs ahead of training.

Lightning prefetches a batch where a loader has no length, and a `TrainPipelineSparseDist` keeps several in flight. The
loader's own state is then ahead of the model's, and a resume from it would skip the batches in between. So each state
is noted as its batch is handed out, and a save takes the note of the batch trained last.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from lightning_cpr._lightning import pl

log = logging.getLogger(__name__)


@runtime_checkable
class StatefulLoader(Protocol):
    """A loader that can say where it stands, e.g. torchdata's StatefulDataLoader."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def has_length(loader: Any) -> bool:
    """Whether a loader knows how many batches it has: if not, Lightning fetches one ahead."""
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return True


def restart_warning(loaders: Iterable[Any], batches: int) -> str | None:
    """What to tell a user whose epoch goes on after ``batches`` of its batches with loaders that start it over."""
    names = sorted({type(loader).__name__ for loader in loaders if not isinstance(loader, StatefulLoader)})
    if not names or not batches:
        return None
    return (
        f"the training loader ({', '.join(names)}) cannot say where it stands: {batches} batches into the epoch it"
        " starts over, so that batches are trained on twice and others left out. Use torchdata's StatefulDataLoader,"
        " or give it state_dict and load_state_dict."
    )


@dataclass(frozen=True)
class Position:
    """Where training stands. ahead: batches handed out and not yet trained. epoch_done: the epoch's last is trained."""

    ahead: int
    epoch_done: bool


class TrackedLoader:
    """Wraps a stateful loader.

    Args:
        loader: the stateful loader.
        position: where training stands, at the time of the call.
        runs_ahead: whether batches may be handed out before the last one is trained; states are noted only then.
    """

    def __init__(self, loader: Any, position: Callable[[], Position], runs_ahead: bool = True) -> None:
        self._loader = loader
        self._position = position
        self._runs_ahead = runs_ahead
        self._states: deque[dict[str, Any]] = deque()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        # Not lazily: a loader's iterator draws its seed from the random stream when it is made.
        self._states.clear()
        batches = iter(self._loader)
        return self._noting(batches) if self._runs_ahead else batches

    def _noting(self, batches: Iterator[Any]) -> Iterator[Any]:
        self._states.append(self._loader.state_dict())
        for batch in batches:
            self._states.append(self._loader.state_dict())
            while len(self._states) > self._position().ahead + 2:
                self._states.popleft()
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The state from which the loader hands out the batch after the one trained last."""
        at = self._position()
        state = self._states[-1 - at.ahead] if self._states else self._loader.state_dict()
        return {"loader": state, "epoch_done": at.epoch_done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` returned; with the next epoch where it was of an epoch's end."""
        self._states.clear()
        self._loader.load_state_dict(state["loader"])
        if state["epoch_done"]:
            # The loader has handed out its last batch but has not been asked for one more: ask, so that it ends too.
            next(iter(self._loader), None)


def tracked(loader: Any, trainer: pl.Trainer) -> Any:
    """A stateful training loader as a `TrackedLoader`, so that a resume repeats and skips nothing; others as is."""
    if not isinstance(loader, StatefulLoader):
        return loader
    runs_ahead = not has_length(loader) or hasattr(trainer.lightning_module, "in_flight")
    return TrackedLoader(loader, lambda: _position(trainer), runs_ahead)


def _position(trainer: Any) -> Position:
    """Batches fetched and not trained (Lightning's prefetch, a pipeline's batches in flight), and the epoch's end."""
    fetched = len(getattr(trainer.fit_loop._data_fetcher, "batches", ()))
    ahead = fetched + int(getattr(trainer.lightning_module, "in_flight", 0))
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return Position(ahead, progress.is_last_batch and not ahead)


def warn_of_a_restart(trainer: Any) -> None:
    """Log `restart_warning` if the resumed epoch starts over."""
    loop = trainer.fit_loop
    progress = loop.epoch_loop.batch_progress
    loaders = [] if loop._combined_loader is None else loop._combined_loader.flattened
    if warning := restart_warning(loaders, 0 if progress.is_last_batch else progress.current.ready):
        log.warning(warning)
