"""Objects under one root, over fsspec: local folders and object stores alike.

An object is never visible half-written: a local one is written beside its target, synced and moved over it; a remote
one is a single put, or a multipart upload that is aborted on an error. Nothing here relies on renaming remote objects,
on listing caches, or on ``fs.transaction`` (a failed one leaves the shared filesystem object swallowing later writes).
"""

from __future__ import annotations

import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from lightning_cpr.errors import ConfigError, StorageError
from lightning_cpr.store import local_files
from lightning_cpr.store.local_files import Buffer, Found
from lightning_cpr.store.storage_errors import REMEDIES, codes_of, errno_of, is_foreign, is_transient, secrets_of

log = logging.getLogger(__name__)

TRIES = 5
BACKOFF_S = 0.1

T = TypeVar("T")


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
        self._secrets = secrets_of(storage_options or {})
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
                return local_files.write(full, passed)
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
            local_files.make_folder(str(PurePosixPath(full).parent))
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
                return local_files.read(full, start, end)
            if start == 0 and end is None:
                return bytearray(self._fs.cat_file(full))
            try:
                return bytearray(self._fs.cat_file(full, start=start, end=end))
            except OSError as error:
                if codes_of(error) & {"InvalidRange", 416}:
                    return bytearray()
                raise

        return self._try("read", path, read)

    @property
    def local(self) -> bool:
        """Whether objects are files of this machine, or of a filesystem that it has mounted."""
        return self._local

    def get_into(self, path: str, start: int, view: memoryview) -> int:
        """Fill ``view`` with the bytes from ``start`` on; returns how many there are, fewer where the object ends."""
        if self._local:
            full = self._full(path)
            return self._try("read", path, lambda: local_files.read_into(full, start, view))
        data = self.get(path, start, start + len(view))[: len(view)]
        view[: len(data)] = data
        return len(data)

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
                found = local_files.list_folder(full) if self._local else _list_remote(self._fs, full)
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
                if not isinstance(error, OSError) and not is_foreign(error):
                    raise
                if attempt == TRIES or not is_transient(error):
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
        number = errno_of(error)
        remedy = REMEDIES.get(number, "check that the storage is reachable and the credentials are valid")
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


def _list_remote(fs: fsspec.AbstractFileSystem, full: str) -> list[Found]:
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
