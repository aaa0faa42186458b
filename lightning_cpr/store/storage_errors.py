"""What an error of a storage client means: may a try be repeated, what is its errno, what would mend it."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Mapping
from typing import Any

from fsspec.exceptions import FSTimeoutError

_TRANSIENT_ERRNO = {
    errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED,
    errno.EPIPE, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ESTALE,
    getattr(errno, "EREMOTEIO", errno.EAGAIN),
}  # fmt: skip
_TRANSIENT_STATUS = {429, 500, 502, 503, 504}
REMEDIES = {
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


def secrets_of(options: Mapping[str, Any]) -> list[str]:
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


def codes_of(error: BaseException) -> set[str | int]:
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


def is_foreign(error: BaseException) -> bool:
    """Whether a storage client raised it (clients have errors that are no OSError)."""
    return any(
        type(link).__module__.partition(".")[0] in {"botocore", "aiobotocore", "aiohttp", "gcsfs", "fsspec", "s3fs"}
        for link in _chain(error)
    )


def is_transient(error: BaseException) -> bool:
    if isinstance(error, TimeoutError | ConnectionError | FSTimeoutError):
        return True
    if isinstance(error, FileNotFoundError | PermissionError):
        return False
    codes = codes_of(error)
    if codes & _TRANSIENT_STATUS or codes & {"SlowDown", "Throttling", "ThrottlingException", "RequestTimeout"}:
        return True
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO:
        return True
    return any("Connect" in type(link).__name__ or "Timeout" in type(link).__name__ for link in _chain(error))


def errno_of(error: BaseException) -> int:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    kinds = ((FileNotFoundError, errno.ENOENT), (PermissionError, errno.EACCES), (TimeoutError, errno.ETIMEDOUT))
    return next((number for kind, number in kinds if isinstance(error, kind)), errno.EIO)
