"""The training loader's position after the batch that was trained last, although fetching runs ahead of training.

Lightning prefetches a batch where a loader has no length, and a `TrainPipelineSparseDist` keeps several in flight. The
loader's own state is then ahead of the model's, and a resume from it would skip the batches in between. So each state
is noted as its batch is handed out, and a save takes the note of the batch trained last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class StatefulLoader(Protocol):
    """A loader that can say where it stands, e.g. torchdata's StatefulDataLoader."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class TrackedLoader:
    """Wraps a stateful loader (``state_dict`` and ``load_state_dict``).

    Args:
        loader: the stateful loader.
        ahead: how many batches have been handed out and not yet trained, at the time of the call.
    """

    def __init__(self, loader: Any, ahead: Callable[[], int]) -> None:
        self._loader = loader
        self._ahead = ahead
        self._states: deque[dict[str, Any]] = deque()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._states.clear()
        self._states.append(self._loader.state_dict())
        for batch in self._loader:
            self._states.append(self._loader.state_dict())
            while len(self._states) > self._ahead() + 2:
                self._states.popleft()
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The state from which the loader hands out the batch after the one trained last."""
        ahead = self._ahead()
        if not self._states:
            return self._loader.state_dict()
        return self._states[-1 - ahead]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` returned."""
        self._states.clear()
        self._loader.load_state_dict(state)
