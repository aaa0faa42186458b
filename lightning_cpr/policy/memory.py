"""What protection takes of a host's memory beside the model, added up before it is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SPARE_BYTES = 300 << 20
"""A warm spare on a CPU build of torch: its own pages (PSS), with torch, torchrec and Lightning imported."""


@dataclass(frozen=True)
class Need:
    """Host memory of one rank, bytes.

    staging: buffers of a save that holds all rows, and what its writers hold. tracking: touched rows, counters. parity:
    0 without. spare: of its guardian. handover: its rows in /dev/shm, for the time of a restart.
    """

    staging: int
    tracking: int = 0
    parity: int = 0
    spare: int = 0
    handover: int = 0


@dataclass(frozen=True)
class Sum:
    """Of one host. ``line``: all of it in one sentence. ``problems``: what does not fit, each with its remedy."""

    line: str
    problems: tuple[str, ...]


def add_up(host: str, ranks: Sequence[Need], available: int | None, shm_free: int | None) -> Sum:
    """Add up what the ranks of a host need, against what the host has.

    Args:
        available: bytes that the host can still give, the model's own memory already taken; None: unknown.
        shm_free: bytes free in /dev/shm; None: there is none.
    """
    parts = {
        "staging": sum(n.staging for n in ranks),
        "touched rows": sum(n.tracking for n in ranks),
        "parity": sum(n.parity for n in ranks),
        "spares": sum(n.spare for n in ranks),
        "hand-over in /dev/shm": sum(n.handover for n in ranks),
    }
    total, handover = sum(parts.values()), parts["hand-over in /dev/shm"]
    listed = " + ".join(f"{what} {_text(size)}" for what, size in parts.items() if size) or "nothing"
    of = "an unknown amount" if available is None else _text(available)
    line = (
        f"host memory of {host}, {len(ranks)} rank{'s'[: len(ranks) > 1]}: {listed} = {_text(total)} of {of} available"
    )
    problems = []
    if available is not None and total > available:
        remedies = ["fewer ranks a host", "smaller tables"]
        if handover:
            remedies.insert(0, "--max-restarts=0, which does without hand-over")
        if parts["parity"]:
            remedies.insert(0, "parity with a larger k")
        if parts["spares"]:
            remedies.insert(0, "--spares 0")
        problems.append(
            f"{_text(total - available)} more than {host} has; the kernel may kill its processes. Remedies:"
            f" {', '.join(remedies)}"
        )
    if handover and handover > (shm_free or 0):
        problems.append(
            f"/dev/shm of {host} has {_text(shm_free or 0)} free and a hand-over takes {_text(handover)}: in a restart"
            " the rows come from the store instead. Enlarge it (mount -o remount,size=..., docker --shm-size)"
        )
    return Sum(line, tuple(problems))


def _text(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.3f} MB"
