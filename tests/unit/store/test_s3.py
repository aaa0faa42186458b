from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from lightning_cpr.errors import CommitError, StorageError
from lightning_cpr.store import list_versions, newest, read_blob, read_table, remove, verify
from lightning_cpr.store import storage as module
from lightning_cpr.store.storage import Listed
from tests.unit.store.helpers import save_one, table
from tests.unit.store.s3 import S3, serve


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    monkeypatch.setattr(module, "BACKOFF_S", 0.001)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with serve() as server:
        yield server


def test_storage_contract(s3: S3) -> None:
    s = s3.storage()
    assert s.list() is None
    assert s.list("a") is None
    assert s.size("a/x") is None
    assert s.put("a/x", b"0123456789") == 10
    assert s.put("a/y", [b"ab", memoryview(b"cd")]) == 4
    assert s.put("a/b/z", b"") == 0
    assert (s.get("a/x"), s.get("a/x", 2, 5), s.get("a/x", 8, 50), s.get("a/x", 50, 60)) == (
        b"0123456789",
        b"234",
        b"89",
        b"",
    )
    assert (s.get("a/y"), s.get("a/b/z"), s.size("a/x"), s.exists("a/none")) == (b"abcd", b"", 10, False)
    assert s.list("a") == [Listed("a/b", 0, True), Listed("a/x", 10, False), Listed("a/y", 4, False)]
    # Another client's objects are seen at once, also in a folder that was listed before.
    s3.storage().put("a/w", b"1")
    assert [entry.path for entry in s.list("a") or []] == ["a/b", "a/w", "a/x", "a/y"]
    s.delete(["a/x", "a/never"])
    assert not s.exists("a/x")
    with pytest.raises(StorageError) as info:
        s.get("a/x")
    assert info.value.errno == errno.ENOENT


def test_save_read_delta_and_remove(s3: S3) -> None:
    storage, t = s3.storage(), table("a", 500, 8)
    base = save_one(storage, [t], 5, blobs={"dense": b"abc"}, chunk_bytes=4000)
    rows = torch.arange(0, 500, 7)
    t.weight[rows] += 1
    delta = save_one(storage, [t], 6, rows={"a": rows}, parent=base.path)
    other = s3.storage()
    found = newest(other).require()
    assert found == delta
    weight, states = read_table(other, found, "a")
    assert torch.equal(weight, t.weight)
    assert torch.equal(states["sum"], t.states["sum"])
    assert read_blob(other, base, "dense") == b"abc"
    assert verify(other, found) == []
    checkpoint = save_one(storage, [t], 7, path="epoch=1-step=7.ckpt")
    before = set(s3.keys())
    assert f"job/{checkpoint.path}" in before
    remove(storage, checkpoint.path)
    assert set(s3.keys()) == {key for key in before if "cpr-chunks" not in key and not key.endswith(".ckpt")}


def test_throttled_writes_and_reads_are_tried_again(s3: S3) -> None:
    storage, t = s3.storage(), table("a", 50, 8)
    left = {"PUT": 2, "GET": 2, "HEAD": 1}

    def fail(method: str, path: str) -> bool:
        left[method] = left.get(method, 0) - 1
        return left[method] >= 0

    s3.fail = fail
    manifest = save_one(storage, [t], 5)
    assert torch.equal(read_table(storage, manifest, "a")[0], t.weight)
    assert storage.size(manifest.path) is not None
    assert storage.retries == 5
    assert all(count < 0 for count in left.values())


def test_a_save_that_storage_refuses_leaves_the_version_before(s3: S3) -> None:
    storage, t = s3.storage(), table("a", 50, 8)
    old = save_one(storage, [t], 5)
    s3.fail = lambda method, path: method == "PUT" and "/r0-" in path
    with pytest.raises(CommitError, match=r"cannot write after 5 tries.*try again") as info:
        save_one(storage, [t], 10)
    assert "test-secret" not in str(info.value)
    s3.fail = lambda method, path: False
    assert newest(storage).require() == old
    assert [ref.step for ref in list_versions(storage)] == [5]


def test_large_objects_go_up_in_parts_and_failed_uploads_are_aborted(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRIES", 2)
    storage = s3.storage()
    # Parts of 5 MiB, the least that S3 takes, instead of 50.
    monkeypatch.setattr(storage._fs, "pipe_file", partial(storage._fs.pipe_file, chunksize=5 << 20))
    data = bytes(11 << 20)
    s3.fail = lambda method, path: method == "PUT"
    with pytest.raises(StorageError, match="after 2 tries"):
        storage.put("blob", data)
    posts = [method for method, path in s3.seen if path.endswith("/blob") and method in ("POST", "DELETE")]
    assert posts.count("POST") == posts.count("DELETE") == 2
    s3.fail = lambda method, path: False
    assert s3.keys() == []
    storage.put("blob", data)
    assert storage.size("blob") == len(data)


def test_a_vanished_bucket_is_named(s3: S3) -> None:
    storage = s3.storage("s3://gone/job")
    with pytest.raises(StorageError, match="create the bucket") as info:
        storage.put("a", b"x")
    assert info.value.errno == errno.ENOENT
    assert "s3://gone/job/a" in str(info.value)
    assert "no such folder" in newest(storage).why
