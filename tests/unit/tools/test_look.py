"""inspect, verify, diff and gc, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lightning_cpr.store import Storage, list_versions
from lightning_cpr.units import counted
from tests.unit.store.helpers import files_of, save_one, table
from tests.unit.store.s3 import serve
from tests.unit.tools.helpers import command, files_in, make_root

Capsys = pytest.CaptureFixture[str]


def test_inspect_tells_versions_and_tables(storage: Storage, capsys: Capsys) -> None:
    root = make_root(storage)
    status, out, err = command(capsys, "inspect", root.path)
    assert (status, err) == (0, "")
    assert all(version.version in out for version in root.versions)
    assert "rowwise_adagrad (sum a row, exp_avg a element)" in out
    status, out, _ = command(capsys, "inspect", root.path, "--json")
    said = json.loads(out)
    assert [(v["step"], v["kind"], v["chain"], v["files"]) for v in said["versions"]] == [
        (2, "delta", 3, 6),
        (1, "delta", 2, 4),
        (0, "base", 1, 2),
    ]
    newest = said["versions"][0]
    assert newest["saved_bytes"] == sum(s.bytes for s in root.versions[2].stored if "0002.n" in s.path)
    assert newest["restore_bytes"] == sum(s.bytes for s in root.versions[2].stored)
    assert newest["tables"][0] == {
        "table": "net.ebc.embedding_bags.user", "rows": 200, "cols": 8, "dtype": "float32",
        "optimizer": "rowwise_adagrad", "codecs": ["raw"],
        "bytes": sum(f.bytes for f in root.versions[2].files if f.table.endswith("user")),
        "states": [{"name": "sum", "kind": "row", "dtype": "float32"}],
    }  # fmt: skip
    assert (said["problems"], said["torn"]) == ([], [])


def test_inspect_names_one_version_a_checkpoint_and_what_is_wrong(storage: Storage, capsys: Capsys) -> None:
    root = make_root(storage)
    _, out, _ = command(capsys, "inspect", f"{root.path}@1", "--json")
    assert [v["step"] for v in json.loads(out)["versions"]] == [1]
    save_one(storage, [table("a", 5, 2)], 8, path="last.ckpt")
    _, out, _ = command(capsys, "inspect", f"{root.path}/last.ckpt", "--json")
    assert [v["manifest"] for v in json.loads(out)["versions"]] == ["last.ckpt"]
    storage.put("chunks/run.000000.000000000009.dead/r0-00000.safetensors", b"torn")
    storage.put(root.versions[1].path, b"")
    status, out, _ = command(capsys, "inspect", root.path)
    assert status == 1
    assert f"! {root.versions[1].path}: is empty" in out
    assert "! run.000000.000000000009.dead: not committed" in out


@pytest.mark.parametrize("name", ["inspect", "verify", "gc", "diff", "export"])
def test_what_is_not_there_is_one_line_and_status_2(name: str, tmp_path: Path, capsys: Capsys) -> None:
    more = {"diff": [f"{tmp_path}/none"], "export": [f"{tmp_path}/out"]}.get(name, [])
    status, out, err = command(capsys, name, f"{tmp_path}/none", *more)
    assert (status, out) == (2, "")
    assert err.startswith(f"lightning-cpr {name}: ")
    assert str(tmp_path) in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_root_is_named_by_a_dot(
    storage: Storage, capsys: Capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = make_root(storage)
    monkeypatch.chdir(root.path)
    status, out, _ = command(capsys, "verify", ".")
    assert status == 0
    assert out.startswith("3 versions, 12 files,")
    (Path(root.path) / "below").mkdir()
    monkeypatch.chdir(Path(root.path) / "below")
    assert command(capsys, "inspect", "..")[0] == 0
    status, _, err = command(capsys, "inspect", ".")
    assert status == 2
    assert err.count("\n") == 1
    assert "below" in err


def test_nothing_to_collect(tmp_path: Path, capsys: Capsys) -> None:
    assert (
        command(capsys, "gc", f"{tmp_path}")[2] == f"lightning-cpr gc: {tmp_path} holds no versions; check the path\n"
    )


def test_verify_names_file_and_table_of_every_flipped_byte(storage: Storage, capsys: Capsys) -> None:
    root = make_root(storage)
    status, out, _ = command(capsys, "verify", root.path)
    assert status == 0
    assert out.startswith("3 versions, 12 files,")
    assert out.endswith("all sound\n")
    for path in files_in(root):
        file = Path(root.path) / path
        whole = file.read_bytes()
        for at in (0, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
            status, out, _ = command(capsys, "verify", root.path)
            assert status == 1, (path, at)
            assert f"BAD {path}" in out
            assert out.count(path) == 1
            if path.endswith(".safetensors"):
                user = "table net.ebc.embedding_bags." + ("user" if "00000.safe" in path else "item")
                assert user in out
            assert out.endswith("1 problem\n")
        file.write_bytes(whole[:-1])
        assert command(capsys, "verify", root.path)[0] == 1
        file.write_bytes(whole)
    assert command(capsys, "verify", f"{root.path}@0")[0] == 0


def test_diff_counts_and_measures(storage: Storage, capsys: Capsys) -> None:
    root = make_root(storage)
    status, out, _ = command(capsys, "diff", f"{root.path}@0", f"{root.path}@2", "--json")
    assert status == 0
    said = json.loads(out)
    for found in said["tables"]:
        before, after = (root.weights[i][found["table"]] for i in (0, 2))
        delta = after.double() - before.double()
        assert found["changed"] == int((before != after).any(dim=1).sum()) > 0
        assert found["norm"] == pytest.approx(float(delta.norm()), rel=1e-6)
        assert found["largest"] == float(delta.abs().max())
        assert found["states"] == 0
    _, out, _ = command(capsys, "diff", f"{root.path}@0", f"{root.path}@0")
    assert " 0 " in out


def test_gc_says_and_does(storage: Storage, capsys: Capsys) -> None:
    root = make_root(storage)
    before = files_of(root.path)
    args = ("gc", root.path, "--keep-last", "1", "--grace", "0s")
    status, out, _ = command(capsys, *args, "--dry-run")
    assert status == 0
    assert "would be removed: 2 versions and 4 files" in out
    assert files_of(root.path) == before
    status, out, _ = command(capsys, *args)
    assert "removed: 2 versions and 4 files" in out
    assert [ref.step for ref in list_versions(storage)] == [2]
    assert command(capsys, "verify", root.path)[0] == 0
    assert command(capsys, "gc", root.path, "--keep-age", "soon")[0] == 2
    assert command(capsys, "gc", root.path, "--keep-last", "0")[0] == 2


def test_gc_removes_what_killed_saves_of_checkpoints_left(storage: Storage, capsys: Capsys) -> None:
    t = table("a", 5, 2)
    kept = save_one(storage, [t], 8, path="step=8.ckpt")
    storage.put("last.ckpt", storage.get("step=8.ckpt"))  # a copy
    storage.put("stock.ckpt", b"PK not ours")
    killed = save_one(storage, [t], 9, path="step=9.ckpt")
    storage.delete(["step=9.ckpt", "step=8.ckpt"])
    storage.put("cpr-chunks/notes/mine.txt", b"no version of ours")
    before, args = files_of(storage.root), ("gc", storage.root, "--grace", "0s")
    assert command(capsys, "gc", storage.root)[:2] == (0, "")  # a save may be in flight
    status, out, _ = command(capsys, *args, "--dry-run")
    assert (status, files_of(storage.root)) == (0, before)
    count = counted(len(killed.stored), "file")
    assert f"would be removed: {count} of a checkpoint that was never finished" in out
    assert f"cpr-chunks/{killed.version}" in out
    status, out, _ = command(capsys, *args)
    assert f"removed: {count} of a checkpoint" in out
    gone = {stored.path for stored in killed.stored}
    assert files_of(storage.root) == {path: data for path, data in before.items() if path not in gone}
    assert command(capsys, "verify", f"{storage.root}/last.ckpt")[0] == 0
    raw = storage.get("last.ckpt")
    storage.put("last.ckpt", raw[:-9])
    status, _, err = command(capsys, *args)
    assert status == 2
    assert "last.ckpt" in err
    assert "what it needs is unknown" in err
    assert {stored.path for stored in kept.stored} <= set(files_of(storage.root))


def test_all_of_it_on_s3(capsys: Capsys, tmp_path: Path) -> None:
    with serve() as s3:
        root = make_root(s3.storage())
        options = ("--storage-options", json.dumps(s3.options()))
        url = "s3://bucket/job"
        for args in (
            ("inspect", url),
            ("verify", url),
            ("verify", f"{url}@1"),
            ("diff", f"{url}@0", url),
            ("export", url, f"{tmp_path}/out"),
            ("export", url, f"{tmp_path}/dcp", "--to", "dcp"),
            ("import", f"{tmp_path}/dcp", "s3://bucket/new", *options),
            ("gc", url, "--keep-last", "1", "--grace", "0s"),
        ):
            with_options = args if options[0] in args else (*args, *options)
            if args[0] == "import":  # from a local folder: the options are those of S3
                continue
            status, out, err = command(capsys, *with_options)
            assert (status, err) == (0, ""), (args, out, err)
            assert "test-secret" not in out
        status, _, err = command(capsys, "inspect", "s3://gone/job", *options)
        assert status == 2
        assert "test-secret" not in err
        from safetensors.torch import load_file

        name = "net.ebc.embedding_bags.user"
        assert torch.equal(load_file(tmp_path / "out" / f"{name}.safetensors")["weight"], root.weights[2][name])
