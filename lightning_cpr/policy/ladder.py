"""The waits of a job, which end in an order: each must leave the one before it the time to do its work.

    free < detection < announce < join        a replacement's way in, under ``lightning-cpr run``
    commit < collective, detection < collective

Where the order is broken a job ends, or restarts in full, for something that it would have mended.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_cpr.errors import ConfigError

ANNOUNCE_S = 120.0
JOIN_S = 180.0
FREE_S = 20.0
START_S = 15.0
"""What a new process takes to announce itself: to start, and to import torch."""


@dataclass(frozen=True)
class Waits:
    """Seconds.

    collective: of the process group. detection: silence after which a guardian ends its trainer; None without
    guardians, 0: it never does. announce, join, free: of `recovery.membership.Timeouts`. commit: how long a rank waits
    for a save or a recovery (``CPRCallback(timeout_s=)``).
    """

    collective: float
    detection: float | None = None
    announce: float = ANNOUNCE_S
    join: float = JOIN_S
    free: float = FREE_S
    commit: float = 0.0


def waits_for(collective: float, detection: float | None, commit: float = 0.0) -> Waits:
    """The waits that follow from those that the user sets.

    A rank that is stopped is only known to be dead after ``detection``, and whoever failed first waits that long for
    its replacement.
    """
    announce = max(ANNOUNCE_S, (detection or 0.0) + START_S)
    return Waits(collective, detection, announce, max(JOIN_S, announce + FREE_S), FREE_S, commit)


def check_order(waits: Waits) -> list[str]:
    """What is doubtful about the waits, for the log.

    Raises:
        ConfigError: they contradict each other; lists all.
    """
    problems, doubts = [], []
    if min(waits.collective, waits.announce, waits.join, waits.free) <= 0:
        problems.append(f"{waits}: all must be above 0")
    if waits.detection and waits.collective <= waits.detection:
        problems.append(
            f"the collective timeout of {waits.collective:g} s ends before a stopped rank is noticed, after"
            f" --hang-timeout={waits.detection:g} s, so that it ends the job: raise TorchRecStrategy(timeout=...), or"
            " lower --hang-timeout"
        )
    if waits.detection and waits.announce <= waits.detection:
        problems.append(
            f"a survivor waits {waits.announce:g} s for a replacement, and a stopped rank is noticed only after"
            f" --hang-timeout={waits.detection:g} s"
        )
    if waits.join < waits.announce:
        problems.append(f"ranks wait {waits.join:g} s for each other, and {waits.announce:g} s for one alone to start")
    if waits.collective <= waits.commit:
        doubts.append(
            f"CPRCallback(timeout_s={waits.commit:g}) is not below the collective timeout of {waits.collective:g} s: a"
            " rank whose storage hangs ends the job before its save gives up. Lower timeout_s, or raise"
            " TorchRecStrategy(timeout=...)"
        )
    if waits.detection == 0:
        doubts.append("--hang-timeout=0: a process that hangs is never replaced, its peers wait for it until they fail")
    if problems:
        raise ConfigError("; ".join(problems))
    return doubts
