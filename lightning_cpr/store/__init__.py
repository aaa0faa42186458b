"""What is on disk: versions of immutable chunk files and one manifest each, written last."""

from lightning_cpr.store.background import BackgroundWriter
from lightning_cpr.store.commit import commit, save
from lightning_cpr.store.kv import KeyValue, LocalKeyValue
from lightning_cpr.store.manifest import Manifest, ShardRecord, VersionRef, new_version_id
from lightning_cpr.store.reader import ReadReport, read_blob, read_into, read_table
from lightning_cpr.store.save import RankPart, SaveIO, SaveReport, SaveSpec
from lightning_cpr.store.storage import Storage, relative_to
from lightning_cpr.store.verify import verify
from lightning_cpr.store.versions import (
    Newest,
    Problem,
    clean_torn,
    fence,
    list_versions,
    load_manifest,
    newest,
    remove,
    torn_versions,
)
from lightning_cpr.store.writer import write_part

__all__ = [
    "BackgroundWriter",
    "KeyValue",
    "LocalKeyValue",
    "Manifest",
    "Newest",
    "Problem",
    "RankPart",
    "ReadReport",
    "SaveIO",
    "SaveReport",
    "SaveSpec",
    "ShardRecord",
    "Storage",
    "VersionRef",
    "clean_torn",
    "commit",
    "fence",
    "list_versions",
    "load_manifest",
    "new_version_id",
    "newest",
    "read_blob",
    "read_into",
    "read_table",
    "relative_to",
    "remove",
    "save",
    "torn_versions",
    "verify",
    "write_part",
]
