"""Objects as local files: durable and never visible half-written."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import stat
import time
from collections.abc import Sequence
from pathlib import PurePosixPath

log = logging.getLogger(__name__)

Buffer = bytes | bytearray | memoryview

Found = tuple[str, int, bool, float]
"""An entry of a folder: name, bytes, whether it is a folder, when it was written (seconds Unix)."""

_TRIES = 5


def write(full: str, buffers: Sequence[Buffer]) -> int:
    target = PurePosixPath(full)
    make_folder(str(target.parent))
    temp = str(target.parent / f".{target.name[:80]}.{os.getpid()}.{random.getrandbits(48):012x}.tmp")
    done = False
    try:
        # Mode 0666 less the umask, as any new file; a replaced one keeps its own.
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            total = _write_all(fd, buffers)
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(fd, stat.S_IMODE(os.stat(full).st_mode))
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temp, full)
        done = True
    finally:
        if not done:
            try:
                os.unlink(temp)
            except OSError as error:
                log.debug("no temporary file to remove: %s", error)
    _sync_folder(str(target.parent))
    return total


def _write_all(fd: int, buffers: Sequence[Buffer]) -> int:
    total = 0
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        while view:
            written = os.write(fd, view)
            view = view[written:]
            total += written
    return total


def make_folder(folder: str) -> None:
    """Make a folder. On a shared filesystem even ``exist_ok`` loses the race now and then: look again, and retry."""
    for attempt in range(_TRIES):
        try:
            os.makedirs(folder, exist_ok=True)
            return
        except FileExistsError:
            if os.path.isdir(folder):
                return
            if attempt == _TRIES - 1:
                raise NotADirectoryError(errno.ENOTDIR, "not a folder", folder) from None
            time.sleep(0.01 * 2**attempt)


def _sync_folder(folder: str) -> None:
    """Make the new name durable as well; some network filesystems cannot and say so."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EACCES, errno.ENOTSUP):
            raise
        log.debug("cannot sync folder %s: %s", folder, error)


def list_folder(full: str) -> list[Found]:
    found = []
    with os.scandir(full) as entries:
        for entry in entries:
            # A name may be gone again: another rank's temporary file, a link that leads nowhere.
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat()
                is_dir = stat.S_ISDIR(status.st_mode)
                found.append(
                    (entry.name, 0, True, 0.0) if is_dir else (entry.name, status.st_size, False, status.st_mtime)
                )
    return found


def read(full: str, start: int, end: int | None) -> bytearray:
    with open(full, "rb", buffering=0) as file:
        length = os.fstat(file.fileno()).st_size
        data = bytearray(max(0, (length if end is None else min(end, length)) - start))
        filled = _fill(file.fileno(), start, memoryview(data))
        return data if filled == len(data) else data[:filled]


def read_into(full: str, start: int, view: memoryview) -> int:
    with open(full, "rb", buffering=0) as file:
        return _fill(file.fileno(), start, view)


def _fill(fd: int, start: int, view: memoryview) -> int:
    filled = 0
    while filled < len(view):
        count = os.preadv(fd, [view[filled:]], start + filled)
        if not count:
            break
        filled += count
    return filled
