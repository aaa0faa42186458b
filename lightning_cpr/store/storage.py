"""Objects under one root, over fsspec: local folders and object stores alike.

An object is never visible half-written: a local one is written beside its target, synced and moved over it; a remote
one is a single put, or a multipart upload that is aborted on an error. Nothing here relies on renaming remote objects,
on listing caches, or on ``fs.transaction`` (a failed one leaves the shared filesystem object swallowing later writes).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any, TypeVar

import fsspec
from fsspec.exceptions import FSTimeoutError
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from lightning_cpr.errors import ConfigError, StorageError

log = logging.getLogger(__name__)

TRIES = 5
BACKOFF_S = 0.1

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")

_TRANSIENT_ERRNO = {
    errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED,
    errno.EPIPE, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ESTALE,
    getattr(errno, "EREMOTEIO", errno.EAGAIN),
}  # fmt: skip
_TRANSIENT_STATUS = {429, 500, 502, 503, 504}
_REMEDIES = {
    errno.ENOSPC: "no space left: free space there, keep fewer versions, or choose another root",
    errno.EDQUOT: "the quota is used up: free space there, keep fewer versions, or choose another root",
    errno.EACCES: "permission denied: give this user (or these credentials) read, write and delete rights there",
    errno.EPERM: "not permitted: give this user write rights there (is the folder read-only or immutable?)",
    errno.EROFS: "the file system is read-only: choose another root",
    errno.ENOENT: "it does not exist: create the bucket or folder, or correct the root",
    errno.ENOTDIR: "a file stands where a folder is needed: choose another root",
    errno.EISDIR: "a folder stands where a file is needed: choose another name",
    errno.EMFILE: "too many open files: raise `ulimit -n`",
}


@dataclass(frozen=True)
class Listed:
    """One entry of a listing. ``path`` is relative to the root, ``bytes`` is 0 for a folder.

    modified: when the object was last written, seconds Unix; 0.0 for a folder, and where the filesystem does not say.
    """

    path: str
    bytes: int
    is_dir: bool
    modified: float = field(default=0.0, compare=False)


class Storage:
    """Objects under ``root``, a path or an fsspec URL. Thread-safe.

    storage_options go to fsspec and appear in no message. With ``fs`` given, ``root`` is a path in it. ``intercept``,
    when set, sees ``(path, buffers)`` of every put and returns the buffers to write: the fault injector's hook.
    ``retries`` counts repeated tries. Every method raises `StorageError` with the path, the errno and a remedy.
    """

    def __init__(
        self,
        root: str,
        storage_options: Mapping[str, Any] | None = None,
        *,
        fs: fsspec.AbstractFileSystem | None = None,
    ) -> None:
        self._secrets = _secrets(storage_options or {})
        self.intercept: Callable[[str, Sequence[Buffer]], Sequence[Buffer]] | None = None
        self.retries = 0
        self._lock = threading.Lock()
        self.root = re.sub(r"//[^/@]*@", "//", root).rstrip("/") or "/"
        if fs is None:
            # An own instance: fsspec shares cached ones, and someone's failed transaction would swallow our writes.
            options = {**(storage_options or {}), "skip_instance_cache": True, "use_listings_cache": False}
            try:
                fs, root = fsspec.core.url_to_fs(root, **options)
            except (ValueError, ImportError, TypeError) as error:
                raise ConfigError(f"cannot open storage root {self.root!r}: {self._redact(str(error))}") from None
        while isinstance(fs, DirFileSystem):
            fs, root = fs.fs, fs._join(root)
        self._fs: fsspec.AbstractFileSystem = fs
        self._base = fs._strip_protocol(root).rstrip("/")
        self._local = isinstance(fs, LocalFileSystem)
        if self._local:
            self.root = self._base or "/"

    def __repr__(self) -> str:
        return f"Storage({self.root!r})"

    def put(self, path: str, data: Buffer | Iterable[Buffer]) -> int:
        """Write an object, replacing any; returns its bytes. On an error nothing of it is visible."""
        buffers: Sequence[Buffer] = [data] if isinstance(data, bytes | bytearray | memoryview) else list(data)
        full = self._full(path)

        def write() -> int:
            passed = self.intercept(path, buffers) if self.intercept else buffers
            if self._local:
                return _write_local(full, passed)
            if getattr(self._fs, "_intrans", False):
                raise ConfigError(f"the filesystem given for {self.root} is inside a transaction: end it first")
            single = passed[0] if len(passed) == 1 and isinstance(passed[0], bytes) else b"".join(passed)
            self._fs.pipe_file(full, single)
            return len(single)

        return self._try("write", path, write)

    def append(self, path: str, data: bytes) -> None:
        """Add bytes at the end of an object, made if missing. For logs with one writer: remote ones are put anew."""
        full = self._full(path)
        if not self._local:
            self.put(path, (bytes(self.get(path)) if self.exists(path) else b"") + data)
            return

        def write() -> None:
            _make_folder(str(PurePosixPath(full).parent))
            with open(full, "ab", buffering=0) as file:
                file.write(data)

        self._try("append to", path, write)

    def get(self, path: str, start: int = 0, end: int | None = None) -> bytearray:
        """Bytes ``[start, end)`` of an object, fewer where it ends before."""
        full = self._full(path)
        if end is not None and end <= start:
            return bytearray()

        def read() -> bytearray:
            if self._local:
                return _read_local(full, start, end)
            if start == 0 and end is None:
                return bytearray(self._fs.cat_file(full))
            try:
                return bytearray(self._fs.cat_file(full, start=start, end=end))
            except OSError as error:
                if _codes(error) & {"InvalidRange", 416}:
                    return bytearray()
                raise

        return self._try("read", path, read)

    def size(self, path: str) -> int | None:
        """Bytes of an object, None where there is none. Never from a cache."""
        full = self._full(path)

        def info() -> int | None:
            self._fs.invalidate_cache()
            try:
                found = self._fs.info(full)
            except FileNotFoundError:
                return None
            return int(found["size"]) if found["type"] == "file" else None

        return self._try("look up", path, info)

    def exists(self, path: str) -> bool:
        return self.size(path) is not None

    def list(self, prefix: str = "") -> list[Listed] | None:
        """What lies directly under a folder, sorted, never from a cache. None where the folder does not exist."""
        full = self._full(prefix) if prefix else self._base or "/"

        def entries() -> list[Listed] | None:
            try:
                found = _list_local(full) if self._local else _list_remote(self._fs, full)
            except FileNotFoundError:
                return None
            return sorted(
                (Listed(f"{prefix}/{name}".lstrip("/"), size, is_dir, at) for name, size, is_dir, at in found),
                key=lambda listed: listed.path,
            )

        return self._try("list", prefix or ".", entries)

    def delete(self, paths: Iterable[str]) -> None:
        """Remove objects; one that is not there is no error."""
        for path in paths:
            full = self._full(path)

            def remove(full: str = full) -> None:
                try:
                    if self._local:
                        os.unlink(full)
                    else:
                        self._fs.rm_file(full)
                except FileNotFoundError:
                    return

            self._try("delete", path, remove)

    def delete_folder(self, prefix: str) -> None:
        """Remove the objects directly under a folder, and then the folder as `drop_empty` does."""
        self.delete(entry.path for entry in self.list(prefix) or [] if not entry.is_dir)
        self.drop_empty(prefix)

    def drop_empty(self, prefix: str) -> None:
        """Remove a folder where there is such a thing and it is empty."""
        if self._local:
            try:
                os.rmdir(self._full(prefix))
            except OSError as error:
                log.debug("%s stays: %s", prefix, error)

    def _full(self, path: str) -> str:
        """The filesystem's path of an object; ConfigError for a name that leads out of the root."""
        parts = path.split("/")
        if any(part in ("", ".", "..") for part in parts) or "\\" in path or any(ord(char) < 32 for char in path):
            raise ConfigError(
                f"{path!r} is no object name under {self.root}: relative, without '..', '\\\\' or controls"
            )
        return f"{self._base}/{path}"

    def _try(self, what: str, path: str, call: Callable[[], T]) -> T:
        for attempt in range(1, TRIES + 1):
            try:
                return call()
            except Exception as error:
                if not isinstance(error, OSError) and not _foreign(error):
                    raise
                if attempt == TRIES or not _transient(error):
                    raise self._named(what, path, error, attempt) from (None if self._leaks(error) else error)
                delay = BACKOFF_S * 2 ** (attempt - 1) * (1 + random.random())
                with self._lock:
                    self.retries += 1
                log.warning(
                    "cannot %s %s/%s yet (%s), try %d of %d in %.1f s",
                    what, self.root, path, self._redact(str(error)), attempt + 1, TRIES, delay,
                )  # fmt: skip
                time.sleep(delay)
        raise AssertionError("unreachable")

    def _named(self, what: str, path: str, error: BaseException, tries: int) -> StorageError:
        number = _errno(error)
        remedy = _REMEDIES.get(number, "check that the storage is reachable and the credentials are valid")
        text = f"cannot {what} after {tries} tries" if tries > 1 else f"cannot {what}"
        return StorageError(number, f"{text}: {self._redact(str(error))}; {remedy}", f"{self.root}/{path}")

    def _redact(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def _leaks(self, error: BaseException | None) -> bool:
        seen: set[int] = set()
        while error is not None and id(error) not in seen:
            if self._redact(str(error)) != str(error):
                return True
            seen.add(id(error))
            error = error.__cause__ or error.__context__
        return False


def relative_to(root_file: str) -> tuple[str, str]:
    """``(root, name)`` of the object at a path or URL: the storage root that holds it and its name in there."""
    head, _, name = root_file.rpartition("/")
    if not name:
        raise ConfigError(f"{root_file!r} names a folder, not a file")
    if name in (".", "..") and "://" not in root_file:
        return relative_to(os.path.abspath(root_file))
    return (head or ("/" if root_file.startswith("/") else ".")), name


def _secrets(options: Mapping[str, Any]) -> list[str]:
    """Every string under an option whose name speaks of credentials, and every string below such an option."""

    def walk(value: Any, inside: bool) -> Iterable[str]:
        if isinstance(value, Mapping):
            for key, below in value.items():
                yield from walk(
                    below, inside or bool(re.search("key|secret|token|pass|cred|auth|user", str(key), re.I))
                )
        elif isinstance(value, list | tuple):
            for below in value:
                yield from walk(below, inside)
        elif inside and isinstance(value, str) and len(value) > 3:
            yield value

    return sorted(walk(options, False), key=len, reverse=True)


def _chain(error: BaseException) -> Iterable[BaseException]:
    current: BaseException | None = error
    for _ in range(8):
        if current is None:
            return
        yield current
        current = current.__cause__ or current.__context__


def _codes(error: BaseException) -> set[str | int]:
    """Error codes and HTTP status of a store's client error, wherever in the chain of causes it is."""
    found: set[str | int] = set()
    for link in _chain(error):
        response = getattr(link, "response", None)
        if isinstance(response, Mapping):
            found.add(response.get("Error", {}).get("Code", ""))
            found.add(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        for name in ("status", "code"):
            status = getattr(link, name, None)
            if isinstance(status, int):
                found.add(status)
    return found


def _foreign(error: BaseException) -> bool:
    """Whether a storage client raised it (clients have errors that are no OSError)."""
    return any(
        type(link).__module__.partition(".")[0] in {"botocore", "aiobotocore", "aiohttp", "gcsfs", "fsspec", "s3fs"}
        for link in _chain(error)
    )


def _transient(error: BaseException) -> bool:
    if isinstance(error, TimeoutError | ConnectionError | FSTimeoutError):
        return True
    if isinstance(error, FileNotFoundError | PermissionError):
        return False
    codes = _codes(error)
    if codes & _TRANSIENT_STATUS or codes & {"SlowDown", "Throttling", "ThrottlingException", "RequestTimeout"}:
        return True
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO:
        return True
    return any("Connect" in type(link).__name__ or "Timeout" in type(link).__name__ for link in _chain(error))


def _errno(error: BaseException) -> int:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    kinds = ((FileNotFoundError, errno.ENOENT), (PermissionError, errno.EACCES), (TimeoutError, errno.ETIMEDOUT))
    return next((number for kind, number in kinds if isinstance(error, kind)), errno.EIO)


def _write_local(full: str, buffers: Sequence[Buffer]) -> int:
    target = PurePosixPath(full)
    _make_folder(str(target.parent))
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


def _make_folder(folder: str) -> None:
    """Make a folder. On a shared filesystem even ``exist_ok`` loses the race now and then: look again, and retry."""
    for attempt in range(TRIES):
        try:
            os.makedirs(folder, exist_ok=True)
            return
        except FileExistsError:
            if os.path.isdir(folder):
                return
            if attempt == TRIES - 1:
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


_Found = tuple[str, int, bool, float]


def _list_remote(fs: fsspec.AbstractFileSystem, full: str) -> list[_Found]:
    fs.invalidate_cache()
    found = []
    for entry in fs.ls(full, detail=True):
        folder, _, name = entry["name"].rstrip("/").rpartition("/")
        # Object stores list a folder's placeholder, and a file, as children of themselves.
        if folder.strip("/") == full.strip("/"):
            is_dir = entry["type"] == "directory"
            found.append((name, 0, True, 0.0) if is_dir else (name, int(entry["size"]), False, _modified(entry)))
    return found


def _modified(entry: Mapping[str, Any]) -> float:
    """When a listed object was written, by the names that s3fs, gcsfs, adlfs and fsspec's memory filesystem use."""
    for key in ("LastModified", "mtime", "updated", "last_modified", "created"):
        value = entry.get(key)
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            return value.timestamp()
    return 0.0


def _list_local(full: str) -> list[_Found]:
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


def _read_local(full: str, start: int, end: int | None) -> bytearray:
    with open(full, "rb", buffering=0) as file:
        length = os.fstat(file.fileno()).st_size
        data = bytearray(max(0, (length if end is None else min(end, length)) - start))
        view, filled = memoryview(data), 0
        while filled < len(data):
            count = os.preadv(file.fileno(), [view[filled:]], start + filled)
            if not count:
                return data[:filled]
            filled += count
    return data
