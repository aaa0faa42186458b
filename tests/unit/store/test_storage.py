from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem

from lightning_cpr.errors import ConfigError, CPRError, StorageError
from lightning_cpr.store import Storage, relative_to
from lightning_cpr.store import storage as module
from lightning_cpr.store.storage import Listed


@pytest.fixture(params=["path", "file url", "dirfs", "memory"])
def any_storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    made: dict[str, Callable[[], Storage]] = {
        "path": lambda: Storage(str(tmp_path / "root")),
        "file url": lambda: Storage(f"file://{tmp_path}/root/"),
        "dirfs": lambda: Storage("root", fs=DirFileSystem(path=str(tmp_path), fs=fsspec.filesystem("file"))),
        "memory": lambda: Storage("memory://bucket/root"),
    }
    return made[request.param]()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Waits are recorded, not slept."""
    waits: list[float] = []
    monkeypatch.setattr(module.time, "sleep", waits.append)
    return waits


def test_contract(any_storage: Storage) -> None:
    s = any_storage
    assert s.list("a") is None
    assert s.list() is None
    assert s.size("a/x") is None
    assert s.put("a/x", b"0123456789") == 10
    assert s.put("a/y", [b"ab", memoryview(b"cd"), bytearray(b"e")]) == 5
    assert s.put("a/b/z", b"") == 0
    assert s.get("a/x") == b"0123456789"
    assert s.get("a/x", 2, 5) == b"234"
    assert s.get("a/x", 8, 50) == b"89"
    assert s.get("a/x", 50, 60) == b""
    assert s.get("a/x", 5, 5) == b""
    assert s.get("a/y") == b"abcde"
    assert s.get("a/b/z") == b""
    assert (s.size("a/x"), s.exists("a/x"), s.exists("a/none"), s.exists("a")) == (10, True, False, False)
    assert s.list("a") == [Listed("a/b", 0, True), Listed("a/x", 10, False), Listed("a/y", 5, False)]
    assert s.list() == [Listed("a", 0, True)]
    s.put("a/x", b"new")
    assert s.get("a/x") == b"new"
    s.delete(["a/x", "a/never"])
    assert not s.exists("a/x")
    s.delete_folder("a/b")
    s.delete_folder("no such")
    assert [entry.path for entry in s.list("a") or []] == ["a/y"]
    with pytest.raises(StorageError) as info:
        s.get("a/none")
    assert info.value.errno == errno.ENOENT
    assert "a/none" in str(info.value)


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/passwd", "a//b", "", ".", "a/./b", "a\\b", "a\nb", "a/"])
def test_names_that_lead_out_are_refused(any_storage: Storage, name: str) -> None:
    for call in (any_storage.get, any_storage.size, lambda path: any_storage.put(path, b"x")):
        with pytest.raises(ConfigError, match="no object name"):
            call(name)


def test_other_writers_are_seen_at_once(tmp_path: Path) -> None:
    one, two = Storage(str(tmp_path)), Storage(str(tmp_path))
    assert one.list("m") is None
    two.put("m/a", b"1")
    assert [entry.path for entry in one.list("m") or []] == ["m/a"]
    two.delete(["m/a"])
    assert one.list("m") == []


def test_failed_put_leaves_the_old_object_and_no_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s = Storage(str(tmp_path))
    s.put("a", b"old")

    def fail(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", fail)
    with pytest.raises(StorageError, match="no space left: free space") as info:
        s.put("a", b"new")
    assert info.value.errno == errno.ENOSPC
    assert info.value.filename == f"{tmp_path}/a"
    assert os.listdir(tmp_path) == ["a"]
    assert s.get("a") == b"old"


def test_a_replaced_file_keeps_its_mode_and_a_new_one_follows_the_umask(tmp_path: Path) -> None:
    s = Storage(str(tmp_path))
    old = os.umask(0o027)
    try:
        s.put("a", b"1")
        s.put("d/b", b"1")
        os.chmod(tmp_path / "a", 0o604)
        s.put("a", b"22")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o604
    assert stat.S_IMODE((tmp_path / "d" / "b").stat().st_mode) == 0o640


@pytest.mark.parametrize("number", [errno.EBUSY, errno.ETIMEDOUT, errno.ESTALE])
def test_transient_errors_are_retried_with_growing_waits(tmp_path: Path, quick: list[float], number: int) -> None:
    s, failures = Storage(str(tmp_path)), [number] * 3

    def intercept(path: str, buffers: object) -> list[bytes]:
        if failures:
            raise OSError(failures.pop(), "try later")
        return [b"x"]

    s.intercept = intercept  # type: ignore[assignment]
    assert s.put("a", b"x") == 1
    assert s.retries == 3
    assert len(quick) == 3
    assert all(0.1 * 2**i <= wait <= 0.2 * 2**i for i, wait in enumerate(quick))


def test_after_five_tries_it_is_a_named_error(tmp_path: Path, quick: list[float]) -> None:
    s = Storage(str(tmp_path))
    tries = []

    def intercept(path: str, buffers: object) -> list[bytes]:
        tries.append(path)
        raise ConnectionResetError(errno.ECONNRESET, "reset")

    s.intercept = intercept  # type: ignore[assignment]
    with pytest.raises(StorageError, match=r"cannot write after 5 tries: .*reset.*reachable") as info:
        s.put("a/b", b"x")
    assert (len(tries), s.retries, info.value.errno) == (5, 4, errno.ECONNRESET)
    assert isinstance(info.value, CPRError)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.EACCES, "rights"), (errno.ENOSPC, "free space"), (errno.EROFS, "read-only"), (errno.EDQUOT, "quota")],
)
def test_final_errors_are_not_retried_and_name_the_remedy(
    tmp_path: Path, quick: list[float], number: int, remedy: str
) -> None:
    s = Storage(str(tmp_path))

    def intercept(path: str, buffers: object) -> list[bytes]:
        raise OSError(number, os.strerror(number))

    s.intercept = intercept  # type: ignore[assignment]
    with pytest.raises(StorageError, match=remedy) as info:
        s.put("a", b"x")
    assert (info.value.errno, s.retries, quick) == (number, 0, [])
    assert str(tmp_path) in str(info.value)


def test_bugs_are_not_dressed_up(tmp_path: Path) -> None:
    s = Storage(str(tmp_path))
    s.intercept = lambda path, buffers: 1 // 0  # type: ignore[assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        s.put("a", b"x")


def test_a_file_in_the_way_of_a_folder(tmp_path: Path, quick: list[float]) -> None:
    (tmp_path / "a").write_bytes(b"x")
    with pytest.raises(StorageError, match="a file stands where a folder is needed"):
        Storage(str(tmp_path)).put("a/b", b"x")


def test_credentials_are_in_no_message(tmp_path: Path, quick: list[float], caplog: pytest.LogCaptureFixture) -> None:
    options = {"auto_mkdir": True, "key": "AKIAVERYSECRET", "client_kwargs": {"aws_secret": "hush-hush-hush"}}
    s = Storage(str(tmp_path), options)
    s._local = False

    def pipe(path: str, data: bytes) -> None:
        raise TimeoutError("denied for AKIAVERYSECRET with hush-hush-hush")

    s._fs.pipe_file = pipe
    with pytest.raises(StorageError) as info:
        s.put("a", b"x")
    text = f"{info.value} {info.value.__cause__} {s!r} {caplog.text}"
    assert "AKIA" not in text
    assert "hush-" not in text
    assert "***" in str(info.value)
    assert Storage("memory://user:pw@bucket/x").root == "memory://bucket/x"


def test_unknown_protocol_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="cannot open storage root 'nosuch://x'"):
        Storage("nosuch://x")


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("/a/b/c.ckpt", ("/a/b", "c.ckpt")), ("/c.ckpt", ("/", "c.ckpt")), ("c.ckpt", (".", "c.ckpt")),
        ("s3://bucket/d/c.ckpt", ("s3://bucket/d", "c.ckpt")),
    ],
)  # fmt: skip
def test_relative_to(path: str, parts: tuple[str, str]) -> None:
    assert relative_to(path) == parts


def test_relative_to_refuses_folders() -> None:
    with pytest.raises(ConfigError, match="folder"):
        relative_to("/a/b/")
