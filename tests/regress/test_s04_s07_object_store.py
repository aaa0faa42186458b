"""S04 (s3fs#705): objects written inside a transaction are visible at once, so the manifest comes last.
S07 (s3fs#253): ``exists`` raised under throttling.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_cpr.errors import StorageError
from lightning_cpr.store import list_versions, newest
from lightning_cpr.store import storage as module
from tests.unit.store.helpers import save_one, table
from tests.unit.store.s3 import S3, serve


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    monkeypatch.setattr(module, "BACKOFF_S", 0.001)
    with serve() as server:
        yield server


def test_s04_no_manifest_is_seen_before_all_files_are_there(s3: S3) -> None:
    storage, other = s3.storage(), s3.storage()
    seen: list[tuple[str, int, dict[str, int]]] = []

    def look(point: str, step: int) -> None:
        folders = [entry.path for entry in other.list("chunks") or []]
        sizes = {entry.path: entry.bytes for folder in folders for entry in other.list(folder) or []}
        seen.append((point, len(list_versions(other)), sizes))

    manifest = save_one(storage, [table("a", 300, 8)], 5, points=look, chunk_bytes=4000, blobs={"dense": b"abc"})
    assert [(point, versions) for point, versions, _ in seen] == [
        ("pre_write", 0), ("mid_write", 0), ("pre_commit", 0), ("post_commit", 1),
    ]  # fmt: skip
    wanted = {stored.path: stored.bytes for stored in manifest.stored}
    assert len(wanted) == 4
    assert wanted.items() <= seen[2][2].items()
    assert seen[3][2] == wanted
    assert newest(other).require() == manifest


def test_s07_exists_under_throttling(s3: S3) -> None:
    storage = s3.storage()
    storage.put("a", b"x")
    answers = [True, True]
    s3.fail = lambda method, path: bool(answers) and answers.pop()
    assert storage.exists("a")
    assert (answers, storage.retries) == ([], 2)
    s3.fail = lambda method, path: True
    before = len(s3.seen)
    with pytest.raises(StorageError, match="cannot look up after 5 tries"):
        storage.exists("a")
    assert len(s3.seen) - before == 5
