"""Which step a broken job goes on with, and whose dense state everybody takes: decisions only, nothing is done here.

Survivors of one failure stand at most one dense step apart: tables are updated in the backward, the dense optimizer
steps later and waits for nobody. So the newest finished dense step wins, and ranks behind it skip their own copy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lightning_cpr.errors import RecoveryError


@dataclass(frozen=True)
class Holding:
    """What a rank brings into an epoch.

    ``step``: dense steps finished; None for a replacement, which holds nothing yet. ``plan``: the fingerprint of the
    shards it holds, "" for a replacement that has not built its model.
    """

    rank: int
    pid: int
    step: int | None
    plan: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, data: str) -> Holding:
        return cls(**json.loads(data))


@dataclass(frozen=True)
class Decision:
    """How the ranks of one epoch go on.

    ``step``: dense steps finished once all stand together. ``donor``: the rank whose dense state is the truth.
    ``lost``: ranks that hold nothing. ``behind``: survivors that take the donor's dense state and skip their copy of
    the batch.
    """

    step: int
    donor: int
    lost: tuple[int, ...]
    behind: tuple[int, ...]


def elect(holdings: Sequence[Holding]) -> Decision:
    """Decide from what all ranks hold.

    Raises:
        RecoveryError: nobody survived, survivors are more than one step apart, or they hold other shards.
    """
    alive = [h for h in holdings if h.step is not None]
    if not alive:
        raise RecoveryError("no rank kept its state: nothing is left in memory; restart from the newest version")
    steps = {h.rank: h.step for h in alive if h.step is not None}
    newest = max(steps.values())
    if newest - min(steps.values()) > 1:
        raise RecoveryError(
            f"survivors are more than one step apart (finished steps by rank: {steps}); restart the job"
        )
    if len({h.plan for h in holdings if h.plan}) > 1:
        raise RecoveryError(f"ranks hold shards of different plans: { {h.rank: h.plan for h in holdings} }")
    return Decision(
        step=newest,
        donor=min(rank for rank, step in steps.items() if step == newest),
        lost=tuple(h.rank for h in holdings if h.step is None),
        behind=tuple(sorted(rank for rank, step in steps.items() if step < newest)),
    )


_LOST_PEER = re.compile(
    r"gloo|connection closed by peer|connection reset by peer|broken pipe|socket closed|read error|write error"
    r"|timed out waiting|timeout caused pair closure|nccl (communicator|error)|process group.*abort",
    re.IGNORECASE,
)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error may mean that a peer is gone. Only a newer epoch confirms it (`Membership.join`)."""
    return isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None
