"""The line that adds up what protection takes of a host's memory, and what it warns of."""

from __future__ import annotations

from lightning_cpr.policy.memory import SPARE_BYTES, Need, add_up
from lightning_cpr.recovery.host import available_memory, host_id, shared_memory_free

GB = 10**9


def test_all_parts_are_added_up_in_one_line() -> None:
    need = Need(staging=2 * GB, tracking=GB // 10, parity=GB, spare=SPARE_BYTES, handover=2 * GB)
    found = add_up("node0", [need, need], available=64 * GB, shm_free=32 * GB)
    assert found.problems == ()
    assert found.line == (
        "host memory of node0, 2 ranks: staging 4.00 GB + touched rows 0.20 GB + parity 2.00 GB + spares 0.63 GB +"
        " hand-over in /dev/shm 4.00 GB = 10.83 GB of 64.00 GB available"
    )
    assert "1 rank: staging 0.001 MB = 0.001 MB of an unknown amount" in add_up("n", [Need(1000)], None, None).line


def test_what_does_not_fit_is_said_with_its_remedies() -> None:
    need = Need(staging=2 * GB, spare=SPARE_BYTES, handover=2 * GB)
    memory, shm = add_up("node0", [need, need], available=8 * GB, shm_free=64 << 20).problems
    assert memory.startswith("0.63 GB more than node0 has")
    assert "--spares 0, --max-restarts=0" in memory
    assert "parity" not in memory
    assert "has 0.07 GB free and a hand-over takes 4.00 GB" in shm
    assert "--shm-size" in shm
    assert add_up("node0", [Need(GB)], available=GB, shm_free=None).problems == ()


def test_this_host_is_measured() -> None:
    assert (available_memory() or 0) > 1 << 20
    assert (shared_memory_free() or 0) > 0
    assert host_id() == host_id()
