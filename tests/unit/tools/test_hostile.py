"""Files that someone made to do harm: every tool refuses them in one line, opens nothing outside, runs nothing."""

from __future__ import annotations

import builtins
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_cpr.store import Storage, newest
from lightning_cpr.store.blob import JOB_BLOB
from lightning_cpr.store.manifest import digest, seal, unseal
from tests.unit.store.helpers import files_of
from tests.unit.tools.helpers import Root, command, make_root
from tests.unit.tools.test_export import Evil

Capsys = pytest.CaptureFixture[str]


def forge(root: Root, change: Callable[[dict[str, Any]], None]) -> str:
    """Rewrite the newest manifest under a digest of its own; its path."""
    path = root.versions[-1].path
    body = unseal(root.storage.get(path), path)
    change(body)
    root.storage.put(path, seal(body))
    return path


def first(body: dict[str, Any], **values: Any) -> None:
    body["files"][0].update(values)


def everything(root: Root, tmp_path: Path) -> list[list[str]]:
    """Each tool on the newest version."""
    newest = f"{root.path}@2"
    return [
        ["verify", newest],
        ["diff", f"{root.path}@1", newest],
        ["export", newest, f"{tmp_path}/a"],
        ["export", newest, f"{tmp_path}/b", "--to", "torch"],
        ["export", newest, f"{tmp_path}/c", "--to", "dcp"],
        ["export", newest, f"{tmp_path}/d", "--since", "1"],
    ]


FORGED: list[tuple[str, Callable[[dict[str, Any]], None]]] = [
    ("escape", lambda b: first(b, path="chunks/../../../etc/passwd")),
    ("absolute", lambda b: first(b, path="/etc/passwd")),
    ("escape inside", lambda b: first(b, path=b["files"][0]["path"].rpartition("/")[0] + "/..")),
    ("other run", lambda b: first(b, path=b["files"][0]["path"].replace("run.", "other."))),
    ("huge head", lambda b: first(b, index_bytes=1 << 50, bytes=1 << 51)),
    ("huge file", lambda b: first(b, bytes=1 << 50)),
    ("huge table", lambda b: b["tables"][0].update(rows=1 << 60)),
    ("negative", lambda b: first(b, rows=-1)),
    ("codec", lambda b: first(b, codec="../raw")),
    ("dtype", lambda b: b["tables"][0].update(dtype="object")),
    ("no list", lambda b: b.update(files={"x": 1})),
    ("newer", lambda b: b.update(schema=99)),
]


@pytest.mark.parametrize(("name", "change"), FORGED, ids=[name for name, _ in FORGED])
def test_forged_manifests(
    name: str, change: Callable[[dict[str, Any]], None], storage: Storage, capsys: Capsys, tmp_path: Path
) -> None:
    root = make_root(storage)
    path = forge(root, change)
    for args in everything(root, tmp_path):
        status, out, err = command(capsys, *args)
        if name == "codec" and (args[0] == "diff" or "--since" in args):
            assert status == 0  # of a file that both versions share nothing is read
            continue
        assert status in (1, 2), (args, out, err)
        assert err.count("\n") == (status == 2), err
        assert path in out + err or root.versions[-1].files[0].table in out + err or "chunks/" in out + err
        assert "root:" not in out + err
    status, out, err = command(capsys, "gc", root.path, "--keep-last", "1", "--grace", "0s", "--dry-run")
    assert status in (0, 2)


@pytest.mark.parametrize("at", ["head", "index", "rows", "short", "empty", "swapped"])
def test_damaged_chunks(at: str, storage: Storage, capsys: Capsys, tmp_path: Path) -> None:
    root = make_root(storage)
    entry = root.versions[-1].files[-2]
    file = Path(root.path) / entry.path
    raw = bytearray(file.read_bytes())
    if at == "head":  # a header of 2**56 bytes
        raw[7] = 1
    elif at == "index":
        raw[entry.index_bytes - 1] ^= 1
    elif at == "rows":
        raw[entry.index_bytes + 1] ^= 1
    elif at == "swapped":
        raw = bytearray((Path(root.path) / root.versions[-1].files[-1].path).read_bytes())
    file.write_bytes(b"" if at == "empty" else raw[: len(raw) // 2] if at == "short" else raw)
    for args in everything(root, tmp_path):
        status, out, err = command(capsys, *args)
        assert status in (1, 2), (args, out)
        assert entry.path in out + err
        assert entry.table in out + err


def test_a_pickle_for_a_blob(storage: Storage, capsys: Capsys, tmp_path: Path) -> None:
    root = make_root(storage)
    evil = pickle.dumps(Evil())
    blob = next(b for b in root.versions[-1].blobs if b.name == JOB_BLOB)
    storage.put(blob.path, evil)
    status, _, err = command(capsys, "export", f"{root.path}@2", f"{tmp_path}/a")
    assert (status, "job.pt" in err) == (2, True)

    def change(body: dict[str, Any]) -> None:
        for entry in body["blobs"]:
            if entry["name"] == JOB_BLOB:
                entry.update(bytes=len(evil), blake2b=digest(evil))

    forge(root, change)
    status, _, err = command(capsys, "export", root.path, f"{tmp_path}/a")
    assert (status, "cannot be read back as plain tensors" in err) == (2, True)
    assert not hasattr(builtins, "cpr_was_here")


def test_gc_of_a_forged_root_removes_nothing_outside(storage: Storage, capsys: Capsys, tmp_path: Path) -> None:
    root = make_root(storage)
    (tmp_path / "precious").write_text("mine")
    for name in ("chunks/run.000000.000000000009.x/..%2f..%2fprecious", "chunks/run.000000.000000000009.x/y"):
        storage.put(name, b"x")
    (Path(root.path) / "chunks/run.000000.000000000009.x/link").symlink_to(tmp_path / "precious")
    assert command(capsys, "gc", root.path, "--grace", "0s")[0] == 0
    assert (tmp_path / "precious").read_text() == "mine"
    assert not [path for path in files_of(root.path) if "0009.x" in path]
    assert newest(storage).require() == root.versions[-1]


def test_names_cannot_play_tricks_on_a_terminal(storage: Storage, capsys: Capsys) -> None:
    root = make_root(storage)
    forge(root, lambda body: body["tables"][0].update(optimizer="[red]"))
    status, out, _ = command(capsys, "inspect", root.path)
    assert (status, "[red] (sum a row)" in out) == (0, True)
    forge(root, lambda body: body["tables"][0].update(optimizer="x\x1b[31m\ny"))
    status, out, _ = command(capsys, "inspect", root.path)
    assert (status, "\x1b" in out) == (0, False)
    assert "x\\x1b[31m" in out
    status, out, _ = command(capsys, "inspect", root.path, "--json")
    assert json.loads(out)["versions"][0]["tables"][0]["optimizer"] == "x\x1b[31m\ny"
