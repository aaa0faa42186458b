"""A replacement reads its rows while it joins the others, who all wait for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from lightning_cpr.errors import CPRError
from lightning_cpr.spec import Shard
from lightning_cpr.store.reader import ReadReport, read_into
from lightning_cpr.store.storage import Storage
from lightning_cpr.store.versions import newest

log = logging.getLogger(__name__)


class EarlyRead:
    """Reads the newest version of a root into shards that hold nothing, on a thread of its own, from now on.

    Nobody else may write to the shards until `take` has returned.
    """

    def __init__(self, storage: Storage, shards: Sequence[Shard]) -> None:
        self._storage = storage
        self._shards = shards
        self._path = ""
        self._report: ReadReport | None = None
        self._thread = threading.Thread(target=self._read, name="cpr-early-read", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            manifest = newest(self._storage, None).manifest
            if manifest is not None:
                self._path = manifest.path
                self._report = read_into(self._storage, manifest, self._shards, undefined=True)
        except CPRError as error:  # it is read again, where an error counts
            log.warning("rows could not be read ahead: %s", error)

    def take(self, path: str) -> ReadReport | None:
        """Wait for the end. What was read, once, if it is the version with this manifest; the shards hold it then."""
        self._thread.join()
        report, self._report = self._report, None
        return report if self._path == path else None
