"""Recovers a running job in place: survivors and replacements meet in a new epoch and leave it standing together.

Call order on every rank: `recover` meets the others and forms the new group (`Membership`), then calls the `LiveState`
it was given: `rebind`, `go_back`, then `capture` on the donor only, `adopt` on the ranks that are lost or behind,
`restore` on all. A peer that dies meanwhile starts it over. Ranks leave through a barrier: nobody trains before
everybody stands.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from lightning_cpr.errors import RecoveryError
from lightning_cpr.recovery.election import Decision, Holding, elect, is_lost_peer
from lightning_cpr.recovery.membership import Epoch, Membership

log = logging.getLogger(__name__)


class LiveState(Protocol):
    """The state of one rank's trainer, as the recovery sees it."""

    def rebind(self, group: dist.ProcessGroup) -> None:
        """Put the model onto the new group. Collective where the model has a DDP."""

    def go_back(self, decision: Decision) -> None:
        """Stand at the decision's exchange, if it names one and this rank survived. No collective."""

    def held(self, holding: Holding) -> Holding:
        """The holding as it is after a recovery that a dying peer broke off."""

    def capture(self) -> bytes:
        """Everything but the tables: dense part, its optimizer, schedulers, loops, RNG. Runs on the donor only."""

    def adopt(self, data: bytes, lost: bool) -> None:
        """Take over what the donor captured. ``lost``: this rank is a replacement, else it is one step behind."""

    def restore(self, recovery: Recovery) -> None:
        """Bring the lost ranks' rows back. Runs on all ranks, with the new group up: it may run collectives."""


@dataclass(frozen=True)
class Recovery:
    """One recovery.

    ``seconds`` by phase: on a survivor ``detect`` (from the end of the first lost process until this rank noticed; by
    the wall clocks of two hosts, where they are two), on a replacement ``start`` (from there until its script ran) and
    ``build`` (until it met the others); then meet, form, rebind, dense, restore. ``error``: what this rank saw break.
    ``died_at``: when the first lost process ended, ``time.time()``.
    """

    epoch: int
    rank: int
    decision: Decision
    holdings: tuple[Holding, ...]
    seconds: dict[str, float]
    error: str = ""
    died_at: float = 0.0

    @property
    def lost(self) -> bool:
        """Whether this rank is the replacement."""
        return self.rank in self.decision.lost


def recover(
    membership: Membership,
    state: LiveState,
    holding: Holding,
    after: int,
    position: str = "",
    met: Epoch | None = None,
    error: str = "",
    device: torch.device | None = None,
    reached: Mapping[str, float] | None = None,
) -> Recovery:
    """Meet the other ranks in an epoch above ``after`` and bring the job back to one agreed step.

    Args:
        holding: what this rank has.
        position: of this rank in the run, for replacements (`Membership.meet`).
        met: the epoch in which a replacement has met the others already, and after whose agreed step it stands.
        error: what this rank saw break.
        reached: when (``time.time()``) this rank reached a phase before this call, in order; None: it notices now.

    Raises:
        RecoveryError: it cannot be done in place; the process should end, for the next step down.
    """
    planned = None if met is None else elect(met.holdings).step
    reached, since = dict(reached or {"detect": time.time()}), after if met is None else met.number - 1
    while True:
        clock = _Clock()
        epoch = met or membership.meet(holding, after, position)
        met, after = None, epoch.number
        clock.mark("meet")
        if not membership.form(epoch):
            continue
        clock.mark("form")
        decision = elect(epoch.holdings)
        if planned is not None and decision.step != planned:
            raise RecoveryError(
                f"this replacement prepared for step {planned}, but the job goes on from {decision.step}"
            )
        died_at = membership.died_at(since, epoch.number)
        clock.seconds = _durations(died_at, reached) | clock.seconds
        recovery = Recovery(epoch.number, membership.rank, decision, epoch.holdings, clock.seconds, error, died_at)
        try:
            _bring_together(recovery, state, clock, device or torch.device("cpu"))
        except RuntimeError as e:
            if not is_lost_peer(e):
                raise
            log.warning("epoch %d lost a peer during its recovery: %s", epoch.number, e)
            holding = state.held(holding)
            continue
        log.warning(
            "rank %d: recovered in epoch %d at step %d (lost %s, behind %s, dense state of rank %d): %s",
            recovery.rank, recovery.epoch, decision.step, list(decision.lost), list(decision.behind), decision.donor,
            ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in clock.seconds.items()),
        )  # fmt: skip
        return recovery


def _bring_together(recovery: Recovery, state: LiveState, clock: _Clock, device: torch.device) -> None:
    decision, rank = recovery.decision, recovery.rank
    group = dist.group.WORLD
    assert group is not None
    state.rebind(group)
    state.go_back(decision)
    clock.mark("rebind")
    blob = broadcast_bytes(state.capture() if rank == decision.donor else None, decision.donor, device)
    if recovery.lost or rank in decision.behind:
        state.adopt(blob, recovery.lost)
    clock.mark("dense")
    state.restore(recovery)
    dist.barrier()
    clock.mark("restore")


def broadcast_bytes(data: bytes | None, src: int, device: torch.device) -> bytes:
    """The bytes of rank ``src`` on every rank. ``data`` is read there only."""
    size = torch.tensor([len(data) if data is not None else 0], dtype=torch.int64, device=device)
    dist.broadcast(size, src)
    if data is not None:
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    else:
        payload = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(payload, src)
    return data if data is not None else payload.cpu().numpy().tobytes()


def _durations(start: float, reached: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each phase, from when each was reached."""
    spent = {}
    for phase, moment in reached.items():
        spent[phase] = max(0.0, moment - start)
        start = max(start, moment)
    return spent


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def mark(self, phase: str) -> None:
        now = time.monotonic()
        self.seconds[phase] = now - self._last
        self._last = now
