"""How fast rows enter parity."""

from __future__ import annotations

from lightning_cpr.recovery.parity.pace import FLOOR_BYTES, EncodePace


def test_pace_doubles_while_exchanges_are_in_time_and_never_leaves_its_bounds() -> None:
    pace = EncodePace(shard_bytes=10**8, limit=1 << 20)
    assert pace.room == FLOOR_BYTES
    rooms = []
    for late in (False, False, False, True, True, True):
        pace.tell(late)
        rooms.append(pace.room)
    assert rooms == [1 << 19, 1 << 20, 1 << 20, 1 << 19, 1 << 18, 1 << 18]


def test_large_shards_have_a_larger_least_and_the_limit_holds_first() -> None:
    assert EncodePace(shard_bytes=10**11, limit=1 << 30).room == 10**11 // 4096
    assert EncodePace(shard_bytes=10**11, limit=1 << 20).room == 1 << 20
