"""Which step a broken job goes on with, and whose dense state everybody takes: decisions only, nothing is done here.

Survivors of one failure stand at most one dense step apart: tables are updated in the backward, the dense optimizer
steps later and waits for nobody. So the newest finished dense step wins, and ranks behind it skip their own copy.

With parity of every step survivors can go back instead: to the newest exchange that all of them can stand at, the
step in progress or the one before. Nothing is lost then, and no row sees a batch twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from lightning_cpr.errors import RecoveryError
from lightning_cpr.recovery.parity.agree import RankState, agree


class LostPeerError(RecoveryError, RuntimeError):
    """A peer is gone, or a wait for it was broken off: found by one of our own channels."""


@dataclass(frozen=True)
class Standing:
    """Where a survivor could go back to.

    ``loop``: batches that its training loop has left. ``again``: whether it can run the last of these again.
    ``steps``: the step of each exchange that it may be told to stand at.
    """

    loop: int
    again: bool
    state: RankState
    steps: dict[int, int]


@dataclass(frozen=True)
class Holding:
    """What a rank brings into an epoch.

    ``step``: dense steps finished; None for a replacement, which holds nothing yet. ``plan``: the fingerprint of the
    shards it holds, "" for a replacement that has not built its model. ``standing``: with parity of every step.
    """

    rank: int
    pid: int
    step: int | None
    plan: str = ""
    standing: Standing | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, data: str) -> Holding:
        holding = cls(**json.loads(data))
        told = holding.standing
        if isinstance(told, dict):
            steps = {int(exchange): step for exchange, step in told["steps"].items()}
            told = Standing(**{**told, "state": RankState(**told["state"]), "steps": steps})
        return replace(holding, standing=told)


@dataclass(frozen=True)
class Decision:
    """How the ranks of one epoch go on.

    ``step``: dense steps finished once all stand together. ``donor``: the rank whose dense state is the truth.
    ``lost``: ranks that hold nothing. ``behind``: survivors that take the donor's dense state and skip their copy of
    the batch. ``exchange``: of parity, which all survivors go back to; None: they keep what they have.
    """

    step: int
    donor: int
    lost: tuple[int, ...]
    behind: tuple[int, ...]
    exchange: int | None = None


def elect(holdings: Sequence[Holding]) -> Decision:
    """Decide from what all ranks hold.

    Raises:
        RecoveryError: nobody survived, survivors are more than one step apart, or they hold other shards.
    """
    alive = [h for h in holdings if h.step is not None]
    if not alive:
        raise RecoveryError("no rank kept its state: nothing is left in memory; restart from the newest version")
    if len({h.plan for h in holdings if h.plan}) > 1:
        raise RecoveryError(f"ranks hold shards of different plans: { {h.rank: h.plan for h in holdings} }")
    lost = tuple(h.rank for h in holdings if h.step is None)
    back = _way_back(alive, lost)
    if back is not None:
        return back
    steps = {h.rank: h.step for h in alive if h.step is not None}
    newest = max(steps.values())
    if newest - min(steps.values()) > 1:
        raise RecoveryError(
            f"survivors are more than one step apart (finished steps by rank: {steps}); restart the job"
        )
    return Decision(
        step=newest,
        donor=min(rank for rank, step in steps.items() if step == newest),
        lost=lost,
        behind=tuple(sorted(rank for rank, step in steps.items() if step < newest)),
    )


def _way_back(alive: Sequence[Holding], lost: Sequence[int]) -> Decision | None:
    """The exchange that all survivors can stand at, if their loops can go on from there."""
    standings = [h.standing for h in alive if h.standing is not None]
    if len(standings) < len(alive):
        return None
    exchange = agree([s.state for s in standings], lost).exchange
    steps = {s.steps.get(exchange) for s in standings}
    if len(steps) != 1 or None in steps:
        return None
    (step,) = steps
    assert step is not None
    if not all(s.loop - (1 if s.again else 0) <= step <= s.loop + 1 for s in standings):
        return None
    farthest = max(s.loop for s in standings)
    donor = min(h.rank for h in alive if h.standing is not None and h.standing.loop == farthest)
    return Decision(step, donor, tuple(lost), (), exchange)


_LOST_PEER = re.compile(
    r"gloo|connection closed by peer|connection reset by peer|broken pipe|socket closed|read error|write error"
    r"|timed out waiting|timeout caused pair closure|nccl (communicator|error)|process group.*abort",
    re.IGNORECASE,
)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error may mean that a peer is gone. Only a newer epoch confirms it (`Membership.join`)."""
    if isinstance(error, LostPeerError):
        return True
    return isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None
