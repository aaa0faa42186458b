"""The job's key-value store, through which ranks that save in the background agree. Never through collectives.

Any ``torch.distributed.Store`` (TCPStore, HashStore, a PrefixStore of one) is a `KeyValue`; `LocalKeyValue` serves one
process. Only calls that return at once are used: a blocking ``get`` holds a TCPStore client's lock against the
training thread.
"""

from __future__ import annotations

import threading
from typing import Protocol


class KeyValue(Protocol):
    """What the store needs of a ``torch.distributed.Store``. ``get`` is called on present keys only."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...

    def delete_key(self, key: str) -> bool: ...


class LocalKeyValue:
    """A `KeyValue` for the threads of one process, with the meaning of ``torch.distributed.HashStore``."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        with self._lock:
            return self._values[key]

    def check(self, keys: list[str]) -> bool:
        with self._lock:
            return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._lock:
            present = self._values.get(key)
            if (present is None and not expected) or present == expected.encode():
                self._values[key] = desired.encode()
                return desired.encode()
            return expected.encode() if present is None else present

    def delete_key(self, key: str) -> bool:
        with self._lock:
            return self._values.pop(key, None) is not None
