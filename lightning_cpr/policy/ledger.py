"""The PLS ledger: what share of the samples' updates the failures of this run have cost (CPR, section 4).

    PLS = sum over failures i, failed owners o of  w_o * (S_i - S_held(o)) / S_total

``w_o`` is the owner's share of all sharded elements (data-parallel tables do not count: every rank holds them),
``S_i`` the samples done at the failure, ``S_held(o)`` the samples at the later of its shards' ``complete_step`` and
its last recovery. Lost samples are kept as integers, elements x samples, so that the value does not depend on the
order of summation and a recomputation from the event log gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from lightning_cpr.errors import ConfigError


@dataclass(frozen=True)
class Loss:
    """One failed owner: its sharded elements, and the samples up to which its state came back.

    ``kept``: it lost nothing that it held, but left out the samples from ``held`` on: no recovery of its own.
    """

    owner: int
    elements: int
    held: int
    kept: bool = False


@dataclass(frozen=True)
class Charge:
    """A failure at ``samples`` that was recovered without a rewind. A loss with ``held == samples`` costs nothing."""

    samples: int
    losses: tuple[Loss, ...]

    def lost(self) -> int:
        return sum(loss.elements * (self.samples - loss.held) for loss in self.losses)


@dataclass(frozen=True)
class Rewind:
    """All owners went back to one exact version of ``samples`` and do the work after it again."""

    samples: int


Event = Charge | Rewind


@dataclass(frozen=True)
class Ledger:
    """The charges that stand. ``total_elements``: sharded elements of all owners together."""

    total_elements: int
    charges: tuple[Charge, ...] = ()

    def __post_init__(self) -> None:
        if self.total_elements < 0:
            raise ConfigError(f"total_elements={self.total_elements}: must be 0 or above")

    def last_recovery(self, owner: int) -> int:
        """Samples at the owner's last recovery, 0 if it never failed."""
        events = [(c.samples, loss) for c in self.charges for loss in c.losses]
        return max((samples for samples, loss in events if loss.owner == owner and not loss.kept), default=0)

    @property
    def lost(self) -> int:
        """Elements x samples."""
        return sum(charge.lost() for charge in self.charges)

    def pls(self, total_samples: int) -> float:
        """In [0, inf). ``total_samples`` of the whole run; a stream without an end passes its samples so far."""
        if total_samples < 0:
            raise ConfigError(f"total_samples={total_samples}: must be 0 or above")
        whole = self.total_elements * total_samples
        return float(Fraction(self.lost, whole)) if whole else 0.0

    def to_json(self) -> dict[str, Any]:
        return {"total_elements": self.total_elements, "charges": [event_to_json(c) for c in self.charges]}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Ledger:
        return replay(data["total_elements"], [event_from_json(c) for c in data["charges"]])


Failed = Mapping[int, tuple[int, Sequence[int]]]
"""By owner: its elements, and the samples that each of its shards is complete to."""

LeftOut = Mapping[int, tuple[int, int]]
"""By owner that kept its shards but left samples out: its elements, and the samples up to which they are whole."""


def make_charge(ledger: Ledger, samples: int, failed: Failed, left_out: LeftOut = MappingProxyType({})) -> Charge:
    """The event of a failure at ``samples``.

    An owner is as old as its oldest shard, but never older than its last recovery: what that lost is charged already.
    Raises ConfigError where a shard claims samples that have not been done, or an owner has no shard but elements.
    """
    losses = []
    for owner, (elements, complete) in sorted(failed.items()):
        if elements and not complete:
            raise ConfigError(f"owner {owner} holds {elements} elements: pass the complete samples of its shards")
        if not all(0 <= c <= samples for c in complete):
            raise ConfigError(f"owner {owner} complete at {list(complete)} samples: must be 0..{samples}, those done")
        held = max(min(complete, default=samples), ledger.last_recovery(owner))
        losses.append(Loss(owner, elements, held))
    losses += [Loss(owner, elements, held, kept=True) for owner, (elements, held) in sorted(left_out.items())]
    return Charge(samples, tuple(losses))


def charge(
    ledger: Ledger, samples: int, failed: Failed, left_out: LeftOut = MappingProxyType({})
) -> tuple[Ledger, Charge]:
    """`make_charge`, applied. Log the event: `replay` of all events gives the ledger back."""
    event = make_charge(ledger, samples, failed, left_out)
    return apply(ledger, event), event


def rewind(ledger: Ledger, samples: int) -> tuple[Ledger, Rewind]:
    """Everybody restored the exact version of ``samples``: the charges after it are void."""
    event = Rewind(samples)
    return apply(ledger, event), event


def apply(ledger: Ledger, event: Event) -> Ledger:
    """The ledger after one event. Raises ConfigError on an event that cannot be of this run."""
    if event.samples < 0:
        raise ConfigError(f"event at {event.samples} samples: must be 0 or above")
    if isinstance(event, Rewind):
        return Ledger(ledger.total_elements, tuple(c for c in ledger.charges if c.samples <= event.samples))
    owners = [loss.owner for loss in event.losses]
    if len(set(owners)) != len(owners):
        raise ConfigError(f"owners {owners} of one failure at {event.samples} samples: each may be named once")
    for loss in event.losses:
        if not 0 <= loss.held <= event.samples:
            raise ConfigError(f"owner {loss.owner} holds {loss.held} samples at {event.samples} done: must be 0..done")
        if loss.elements < 0:
            raise ConfigError(f"owner {loss.owner} holds {loss.elements} elements: must be 0 or above")
    if sum(loss.elements for loss in event.losses) > ledger.total_elements:
        raise ConfigError(f"failed owners hold more than all {ledger.total_elements} sharded elements")
    return Ledger(ledger.total_elements, (*ledger.charges, event))


def replay(total_elements: int, events: Iterable[Event]) -> Ledger:
    """The ledger that these events, in order, lead to."""
    ledger = Ledger(total_elements)
    for event in events:
        ledger = apply(ledger, event)
    return ledger


def event_to_json(event: Event) -> dict[str, Any]:
    """Plain JSON values: one line of the event log."""
    if isinstance(event, Rewind):
        return {"event": "rewind", "samples": event.samples}
    losses = [
        {"owner": x.owner, "elements": x.elements, "held": x.held} | ({"kept": True} if x.kept else {})
        for x in event.losses
    ]
    return {"event": "charge", "samples": event.samples, "losses": losses}


def event_from_json(data: Mapping[str, Any]) -> Event:
    """The inverse of `event_to_json`. Raises ConfigError on any other event."""
    if data.get("event") == "rewind":
        return Rewind(data["samples"])
    if data.get("event") == "charge":
        losses = (Loss(x["owner"], x["elements"], x["held"], x.get("kept", False)) for x in data["losses"])
        return Charge(data["samples"], tuple(losses))
    raise ConfigError(f"ledger event {data.get('event')!r}: must be one of charge, rewind")
