"""How fast rows enter parity while training goes on. Pure."""

from __future__ import annotations

FLOOR_BYTES = 256 << 10
FLOOR_SHARE = 4096


class EncodePace:
    """Bytes of new rows an exchange takes: doubled after one that ended before the next was due, halved after one that
    a step had to wait for.

    Encoding so uses what time the steps leave to the exchanges. Where they leave none it takes the least: 256 KiB, or
    1/4096 of the rank's rows if that is more, so that protection comes back at all.

    Args:
        shard_bytes: of the rank's rows.
        limit: the most.
    """

    def __init__(self, shard_bytes: int, limit: int) -> None:
        self._floor = min(limit, max(FLOOR_BYTES, shard_bytes // FLOOR_SHARE))
        self._limit = limit
        self.room = self._floor

    def tell(self, late: bool) -> None:
        """Whether the last exchange was still under way when the next was due."""
        self.room = max(self._floor, self.room // 2) if late else min(self._limit, self.room * 2)
