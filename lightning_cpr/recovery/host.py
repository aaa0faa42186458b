"""What this host has: memory that processes can still get, room in shared memory, and its name."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

SHM = Path("/dev/shm")
_CGROUP_LIMITS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


def host_id() -> str:
    """What ranks of one host, and only they, have in common: the shared memory that they see."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    seen = SHM.stat() if SHM.is_dir() else None
    return f"{os.uname().nodename}/{boot}/{'' if seen is None else f'{seen.st_dev}-{seen.st_ino}'}"


def available_memory() -> int | None:
    """Bytes that can still be taken, by the host's count and by the container's limit; None: neither is known."""
    found = []
    with suppress(OSError, ValueError):
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) << 10)
    for limit, used in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # no such cgroup version, or "max"
            found.append(max(0, int(limit.read_text()) - int(used.read_text())))
    return min(found, default=None)


def shared_memory_free() -> int | None:
    """Bytes free in /dev/shm; None without it."""
    try:
        state = os.statvfs(SHM)
    except OSError:
        return None
    return state.f_bavail * state.f_frsize
