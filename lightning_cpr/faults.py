"""FaultInjector: makes a chosen rank fail at a chosen step and point, and counts what fired.

Every rank holds the same schedule, so all of them know of a wipe without a collective. Steps count trained batches
from 1: ``step=7`` is the 7th batch of the run, or the save that follows it.

==============  ================================================================================================
point           where
==============  ================================================================================================
``forward``     at the start of the batch
``backward``    after the forward pass, before the backward
``optimizer``   before the dense optimizer's step
``batch_end``   after the batch (where shards are wiped)
``pre_write``   a save's writer has its rows and has not written yet
``mid_write``   some of the save's files are written
``pre_commit``  all files are written, the manifest is not
``post_commit`` the manifest is written
==============  ================================================================================================

And of the exchange of parity that ends at the step: ``exchange_closed``, ``exchange_packed``, ``exchange_received``,
``exchange_applied``, ``exchange_acknowledged`` (`recovery.parity.exchange`).
"""

from __future__ import annotations

import errno
import logging
import math
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch

from lightning_cpr._lightning import pl
from lightning_cpr.errors import ConfigError, FaultInjectedError
from lightning_cpr.recovery.membership import REPLACES_ENV

if TYPE_CHECKING:
    from lightning_cpr.spec import Shard
    from lightning_cpr.store.local_files import Buffer

log = logging.getLogger(__name__)

Kind = Literal["wipe", "kill", "hang", "raise", "torn_write", "bit_flip", "disk_full", "slow"]
Point = Literal[
    "forward", "backward", "optimizer", "batch_end", "pre_write", "mid_write", "pre_commit", "post_commit",
    "exchange_closed", "exchange_packed", "exchange_received", "exchange_applied", "exchange_acknowledged",
]  # fmt: skip
SAVE_POINTS = ("pre_write", "mid_write", "pre_commit", "post_commit")
STORAGE_KINDS = ("torn_write", "bit_flip", "disk_full", "slow")


@dataclass(frozen=True)
class Fault:
    """One fault. It fires once, in the attempt of the job that it names (torchrun's restart count; None: in each).

    A process that replaces a dead one fires the faults of the batches after its first.

    ``seconds`` is how long ``hang`` and ``slow`` last. Storage faults strike the first file that the save of ``step``
    writes on ``rank``.
    """

    kind: Kind
    rank: int
    step: int
    point: Point = "batch_end"
    attempt: int | None = 0
    seconds: float = 3600.0

    def __post_init__(self) -> None:
        for name, allowed in (("kind", get_args(Kind)), ("point", get_args(Point))):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"Fault({name}={getattr(self, name)!r}): allowed are {', '.join(allowed)}")
        first = 0 if self.point in SAVE_POINTS else 1
        if self.rank < 0 or self.step < first or self.seconds < 0:
            raise ConfigError(f"{self}: rank and seconds start at 0, steps at 1 (at 0 the points of a save)")
        if self.kind == "wipe" and self.point != "batch_end":
            raise ConfigError("a wipe happens at point 'batch_end': tables are at rest there")


@dataclass(frozen=True)
class RandomFaults:
    """A random schedule: times between failures in steps, drawn with mean ``mtbf_steps``; each strikes a random rank.

    ``shape`` is the shape of the gamma or Weibull distribution and has no meaning for the exponential one.
    """

    mtbf_steps: float
    distribution: Literal["exponential", "gamma", "weibull"] = "exponential"
    shape: float = 1.0
    kind: Kind = "wipe"
    point: Point = "batch_end"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mtbf_steps <= 0 or self.shape <= 0:
            raise ConfigError(f"{self}: mtbf_steps and shape must be above 0")
        if self.distribution not in ("exponential", "gamma", "weibull"):
            raise ConfigError(f"distribution {self.distribution!r}: allowed are exponential, gamma, weibull")

    def schedule(self, world_size: int, max_steps: int) -> list[Fault]:
        """The faults of steps 1 to ``max_steps``; the same for the same seed, on every rank."""
        rng, t = np.random.default_rng(self.seed), 0.0
        faults: list[Fault] = []
        while True:
            t += self._gap(rng)
            step = math.ceil(t)
            if step > max_steps:
                return faults
            faults.append(Fault(self.kind, int(rng.integers(world_size)), max(1, step), self.point))

    def _gap(self, rng: np.random.Generator) -> float:
        match self.distribution:
            case "gamma":
                return float(rng.gamma(self.shape, self.mtbf_steps / self.shape))
            case "weibull":
                return float(rng.weibull(self.shape) * self.mtbf_steps / math.gamma(1 + 1 / self.shape))
            case _:
                return float(rng.exponential(self.mtbf_steps))


class FaultInjector(pl.Callback):
    """The fault-injection plugin. Add it beside `CPRCallback`::

        FaultInjector().wipe(rank=1, step=200).kill(rank=0, step=300, point="pre_commit")

    Args:
        faults: faults to start with; more are added by the methods below.
        random: a random schedule on top.

    ``fired`` holds the faults that struck this process, `count` counts them.
    """

    def __init__(self, faults: Sequence[Fault] = (), random: RandomFaults | None = None) -> None:
        super().__init__()
        self.faults = list(faults)
        self.random = random
        self.fired: list[Fault] = []
        self._emit: Callable[..., Any] | None = None
        self._local_shards: Callable[[], Iterable[Shard]] | None = None
        self._wiped: list[int] = []
        self._saving_step = 0
        self._rank = 0
        self._attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self._replaces = REPLACES_ENV in os.environ
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        # For copies and for launchers that pickle the Trainer; what `connect` gave belongs to one fit.
        return {**vars(self), "_emit": None, "_local_shards": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def wipe(self, rank: int, step: int) -> FaultInjector:
        """Overwrite the rank's shards, weights and optimizer state, with garbage after ``step``; tell the recovery."""
        return self._add(Fault("wipe", rank, step))

    def kill(self, rank: int, step: int, point: Point = "forward", attempt: int | None = 0) -> FaultInjector:
        """SIGKILL the rank's process."""
        return self._add(Fault("kill", rank, step, point, attempt))

    def hang(self, rank: int, step: int, point: Point = "forward", seconds: float = 3600.0) -> FaultInjector:
        """Stop the rank's thread at the point for ``seconds``."""
        return self._add(Fault("hang", rank, step, point, seconds=seconds))

    def raise_(self, rank: int, step: int, point: Point = "forward") -> FaultInjector:
        """Raise `FaultInjectedError` on the rank, as a bug in the user's code would."""
        return self._add(Fault("raise", rank, step, point))

    def torn_write(self, rank: int, step: int) -> FaultInjector:
        """The save's first file keeps its first half only, and storage says that all is well."""
        return self._add(Fault("torn_write", rank, step, "mid_write"))

    def bit_flip(self, rank: int, step: int) -> FaultInjector:
        """One bit of the save's first file is stored wrong, silently."""
        return self._add(Fault("bit_flip", rank, step, "mid_write"))

    def disk_full(self, rank: int, step: int) -> FaultInjector:
        """The save's first file meets ENOSPC."""
        return self._add(Fault("disk_full", rank, step, "mid_write"))

    def slow(self, rank: int, step: int, seconds: float) -> FaultInjector:
        """The save's first file takes ``seconds`` longer."""
        return self._add(Fault("slow", rank, step, "mid_write", seconds=seconds))

    def count(self, kind: Kind) -> int:
        """How many faults of a kind fired in this process."""
        return Counter(fault.kind for fault in self.fired)[kind]

    def take_wiped(self) -> list[int]:
        """The ranks whose shards were wiped since the last call, each once: what the recovery has to bring back."""
        wiped, self._wiped = self._wiped, []
        return sorted(set(wiped))

    def connect(self, emit: Callable[..., Any], local_shards: Callable[[], Iterable[Shard]] | None) -> None:
        """Called by `CPRCallback`: where fired faults are logged, and the shards that a wipe overwrites; None: it could
        not restore them alone.
        """
        self._emit, self._local_shards = emit, local_shards

    def intercept(self, path: str, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        """`Storage.intercept`: what a scheduled storage fault makes of the bytes on their way to ``path``."""
        if path.startswith("events"):
            return buffers
        for fault in self._due(lambda f: f.kind in STORAGE_KINDS and f.step == self._saving_step):
            self._record(fault)
            buffers = [_spoil(fault, b"".join(buffers))]
        return buffers

    def at_point(self, point: str, step: int) -> None:
        """Fire what is scheduled for this rank here. Called by the save's writer thread and by the hooks below."""
        if point == "pre_write":
            self._saving_step = step
        for fault in self._due(
            lambda f: f.point == point and f.step == step and f.kind not in (*STORAGE_KINDS, "wipe")
        ):
            self._fire(fault)

    # Lightning's hooks

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._rank = trainer.global_rank

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.random is not None:
            steps = trainer.estimated_stepping_batches
            if not math.isfinite(steps):
                raise ConfigError("a random fault schedule needs max_steps, or a loader with a length")
            self.faults += self.random.schedule(trainer.world_size, int(steps))
            self.random = None
        late = [f for f in self.faults if f.rank >= trainer.world_size]
        if late:
            raise ConfigError(f"{late[0]}: this job has {trainer.world_size} ranks")
        self._check_wipes(self.faults)

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if self._replaces:  # what was due up to this batch was due in the process that died
            self._replaces = False
            self.faults = [f for f in self.faults if f.step > _batch(trainer)]
        self.at_point("forward", _batch(trainer))

    def on_before_backward(self, trainer: pl.Trainer, *args: Any) -> None:
        self.at_point("backward", _batch(trainer))

    def on_before_optimizer_step(self, trainer: pl.Trainer, *args: Any) -> None:
        self.at_point("optimizer", _batch(trainer))

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        step, wipes = _batch(trainer), self.wipes_due(trainer)
        self._check_wipes(wipes)
        for fault in wipes:
            self.faults.remove(fault)
            self._wiped.append(fault.rank)
            if fault.rank == self._rank:
                self._record(fault)
                self._overwrite(fault)
        self.at_point("batch_end", step)

    def wipes_due(self, trainer: pl.Trainer) -> list[Fault]:
        """Those of the batch that ends."""
        step, attempts = _batch(trainer), (None, self._attempt)
        return [f for f in self.faults if f.kind == "wipe" and f.step == step and f.attempt in attempts]

    def _add(self, fault: Fault) -> FaultInjector:
        self.faults.append(fault)
        return self

    def _due(self, wanted: Callable[[Fault], bool]) -> list[Fault]:
        """Take the faults that strike now: each is given to one caller only, whichever thread comes first."""
        with self._lock:
            due = [f for f in self.faults if f.rank == self._rank and f.attempt in (None, self._attempt) and wanted(f)]
            self.faults = [f for f in self.faults if f not in due]
        return due

    def _record(self, fault: Fault) -> None:
        self.fired.append(fault)
        log.warning("injected fault: %s", fault)
        if self._emit is not None:
            self._emit("fault", kind=fault.kind, step=fault.step, point=fault.point)

    def _fire(self, fault: Fault) -> None:
        self._record(fault)
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "hang":
            threading.Event().wait(fault.seconds)
        elif fault.kind == "raise":
            raise FaultInjectedError(f"injected at step {fault.step}, point {fault.point}, rank {fault.rank}")

    def _check_wipes(self, faults: Iterable[Fault]) -> None:
        """On all ranks alike, before anything is lost."""
        if self._local_shards is None and any(fault.kind == "wipe" for fault in faults):
            raise ConfigError(
                "wiping shards needs exactly one CPRCallback in the Trainer: nothing else could restore them, and"
                " several would each restore versions of their own"
            )

    def _overwrite(self, fault: Fault) -> None:
        assert self._local_shards is not None
        generator = torch.Generator().manual_seed(fault.step)
        with torch.no_grad():
            for shard in self._local_shards():
                if not shard.spec.replicated:
                    for tensor in (shard.weight, *shard.states.values()):
                        garbage = torch.rand(tensor.shape, generator=generator).mul_(1e3).add_(1e3)
                        tensor.copy_(garbage.to(tensor.dtype))


def _spoil(fault: Fault, data: bytes) -> bytes:
    match fault.kind:
        case "torn_write":
            return data[: len(data) // 2]
        case "bit_flip":
            middle = len(data) // 2
            return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        case "disk_full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        case _:
            threading.Event().wait(fault.seconds)
            return data


def _batch(trainer: pl.Trainer) -> int:
    return trainer.fit_loop.total_batch_idx + 1
