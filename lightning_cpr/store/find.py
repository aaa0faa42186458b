"""Which version a path that a user wrote means."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_cpr.errors import ManifestError
from lightning_cpr.store.blob import decode_blob, rank_blob
from lightning_cpr.store.manifest import FOLDER, Manifest
from lightning_cpr.store.reader import read_blob
from lightning_cpr.store.storage import Storage, relative_to
from lightning_cpr.store.versions import list_versions, load_manifest, newest

log = logging.getLogger(__name__)

_LAST = re.compile(r"last(-v\d+)?\.ckpt")


@dataclass(frozen=True)
class Version:
    """A committed version and the storage that holds it.

    refused: where it was chosen as the newest sound one of a root, the manifests passed over for damage so far; None
    where it was asked for by name, so that no other will do.
    """

    storage: Storage
    manifest: Manifest
    refused: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        return f"{self.storage.root}@{self.manifest.version}"

    def blob(self, name: str) -> dict[str, Any]:
        """A blob's plain values."""
        return decode_blob(read_blob(self.storage, self.manifest, name), name)

    def rank_blobs(self) -> list[dict[str, Any]]:
        """The blobs of all ranks that saved the version."""
        return [self.blob(rank_blob(rank)) for rank in range(self.manifest.world_size)]

    def scalars(self) -> dict[str, dict[str, Any]]:
        """The scalars of all tables' optimizers (`tables.scalars`), by table."""
        return {fqn: values for blob in self.rank_blobs() for fqn, values in blob["scalars"].items()}


def find_root(path: str, storage_options: Mapping[str, Any] | None = None) -> Storage | None:
    """The root at a path if it has versions; None for a checkpoint file, ``<root>@<version>``, and anything else."""
    folder, name = relative_to(path.rstrip("/"))
    if Storage(folder, storage_options).exists(name):
        return None
    storage = Storage(path, storage_options)
    return storage if storage.list(FOLDER) else None


def find_version(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Version:
    """The version that a ``ckpt_path`` means.

    A file is a checkpoint of `CPRCheckpointIO`; a folder is a root, of which the newest exact valid version is taken;
    ``<root>@<version>`` names one by its id or its step ("@" splits at the last one, where no such path exists).
    ``last.ckpt`` means the checkpoint of the highest step among ``last*.ckpt`` beside it, whatever the file times say.

    Raises:
        ManifestError: there is nothing usable; the message says what is there.
    """
    text = os.fspath(path)
    folder, name = relative_to(text.rstrip("/"))
    beside = Storage(folder, storage_options)
    if beside.exists(name):
        if _LAST.fullmatch(name):
            name = _newest_last(beside, name)
        return Version(beside, load_manifest(beside, name))
    root, at, wanted = text.rpartition("@")
    storage = Storage(text, storage_options)
    if not at or storage.list() is not None:
        return Version(storage, newest(storage).require(), refused=())
    storage = Storage(root, storage_options)
    refs = [r for r in list_versions(storage) if wanted in (r.version, str(r.step))]
    if not refs:
        raise ManifestError(f"{root} has no version {wanted!r}; `lightning-cpr inspect {root}` lists what it has")
    return Version(storage, load_manifest(storage, refs[0]))


def _newest_last(storage: Storage, name: str) -> str:
    rivals = [e.path for e in storage.list() or [] if not e.is_dir and _LAST.fullmatch(e.path)]
    if len(rivals) < 2:
        return name
    manifests = {path: load_manifest(storage, path) for path in rivals}
    best = max(rivals, key=lambda path: (manifests[path].step, manifests[path].wall_time))
    log.info("%s of step %d is the newest of %s", best, manifests[best].step, ", ".join(sorted(rivals)))
    return best
