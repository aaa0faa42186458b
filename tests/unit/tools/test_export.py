"""export and import: what comes out loads without this package, and what goes in is the same."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

from lightning_cpr.store import Storage, newest, read_table
from lightning_cpr.store.find import find_version
from lightning_cpr.tools.tensorfile import TensorFile
from tests.unit.store.helpers import ROW, save_one, table
from tests.unit.tools.helpers import DENSE, Root, command, make_root

Capsys = pytest.CaptureFixture[str]
USER, ITEM = "net.ebc.embedding_bags.user", "net.ebc.embedding_bags.item"


def same(root: Root, fqn: str, tensors: dict[str, torch.Tensor]) -> None:
    t = next(t for t in root.tables if t.spec.fqn == fqn)
    assert tensors.keys() == {"weight", *t.states}
    assert torch.equal(tensors["weight"], t.weight)
    for name, state in t.states.items():
        assert torch.equal(tensors[name], state)


def test_safetensors(storage: Storage, capsys: Capsys, tmp_path: Path) -> None:
    root, out = make_root(storage), tmp_path / "out"
    status, said, _ = command(capsys, "export", root.path, str(out))
    assert status == 0
    assert "2 tables and 2 dense tensors" in said
    assert {p.name for p in out.iterdir()} == {*(f"{n}.safetensors" for n in (USER, ITEM, "dense")), "export.json"}
    for fqn in (USER, ITEM):
        same(root, fqn, load_file(out / f"{fqn}.safetensors"))
    dense = load_file(out / "dense.safetensors")
    assert all(torch.equal(dense[name], value) for name, value in DENSE.items())
    assert json.loads((out / "export.json").read_text())["rows"] == {USER: 200, ITEM: 30}
    status, _, err = command(capsys, "export", root.path, str(out))
    assert (status, "not empty" in err) == (2, True)


def test_torch_loads_in_a_python_without_this_package(storage: Storage, capsys: Capsys, tmp_path: Path) -> None:
    root, out = make_root(storage), tmp_path / "out"
    assert command(capsys, "export", f"{root.path}@1", str(out), "--to", "torch", "--table", "user")[0] == 0
    (file,) = out.glob("*.pt")
    code = (
        "import sys, torch; sys.modules['lightning_cpr'] = None; t = torch.load(sys.argv[1], weights_only=True);"
        "print(sorted(t), tuple(t['weight'].shape), t['weight'].double().sum().item(), t['sum'].stride())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(file)], capture_output=True, text=True, timeout=120, check=True
    )
    expected = root.weights[1][USER].double().sum().item()
    assert run.stdout == f"['sum', 'weight'] (200, 8) {expected} (1,)\n"
    assert torch.equal(torch.load(file, weights_only=True)["weight"], root.weights[1][USER])


def test_dcp_round_trip(storage: Storage, capsys: Capsys, tmp_path: Path) -> None:
    root, out = make_root(storage), tmp_path / "out"
    assert command(capsys, "export", root.path, str(out), "--to", "dcp")[0] == 0
    loaded = {"model": {f"{USER}.weight": torch.zeros(200, 8)},
              "optim": {"state": {f"{ITEM}.weight": {"item.momentum1": torch.zeros(30)}}}}  # fmt: skip
    dcp.load(loaded, checkpoint_id=out, no_dist=True)
    assert torch.equal(loaded["model"][f"{USER}.weight"], root.tables[0].weight)
    assert torch.equal(loaded["optim"]["state"][f"{ITEM}.weight"]["item.momentum1"], root.tables[1].states["sum"])
    status, said, _ = command(capsys, "import", str(out), f"{tmp_path}/new", "--step", "7")
    assert status == 0
    assert "2 tables, 230 rows, 2 dense tensors" in said
    version = find_version(f"{tmp_path}/new")
    assert (version.manifest.step, version.manifest.kind) == (7, "base")
    for t in root.tables[:1]:
        weight, states = read_table(version.storage, version.manifest, t.spec.fqn)
        assert torch.equal(weight, t.weight)
        assert torch.equal(states["sum"], t.states["sum"])
        assert version.manifest.table(t.spec.fqn).optimizer == "rowwise_adagrad"
    dense = version.blob("job.pt")["state_dict"]
    assert all(torch.equal(dense[name], value) for name, value in DENSE.items())
    assert command(capsys, "verify", f"{tmp_path}/new")[0] == 0
    status, _, err = command(capsys, "import", str(out), f"{tmp_path}/new")
    assert (status, "choose a new root" in err) == (2, True)


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_only_changed_rows(to: str, storage: Storage, capsys: Capsys, tmp_path: Path) -> None:
    root, out = make_root(storage), tmp_path / "out"
    status, *_ = command(capsys, "export", root.path, str(out), "--since", "1", "--to", to)
    assert status == 0
    for t in root.tables:
        fqn = t.spec.fqn
        file = next(out.glob(f"{fqn}.*"))
        found = load_file(file) if to == "safetensors" else torch.load(file, weights_only=True)
        rows = torch.nonzero((root.weights[1][fqn] != t.weight).any(dim=1))[:, 0]
        assert torch.equal(found["rows"], rows)
        assert torch.equal(rows, torch.arange(2, t.spec.rows, 5))
        assert torch.equal(found["weight"], t.weight[rows])
        assert torch.equal(found["sum"], t.states["sum"][rows])
    patched = root.weights[1][USER].clone()
    if to == "safetensors":
        found = load_file(out / f"{USER}.safetensors")
        patched[found["rows"]] = found["weight"]
        assert torch.equal(patched, root.tables[0].weight)
    status, *_ = command(capsys, "export", f"{root.path}@2", f"{tmp_path}/none", "--since", "2")
    assert status == 0
    assert load_file(tmp_path / "none" / f"{USER}.safetensors")["weight"].shape == (0, 8)
    assert command(capsys, "export", root.path, f"{tmp_path}/x", "--since", "1", "--to", "dcp")[0] == 2


def test_a_damaged_version_is_not_exported(storage: Storage, capsys: Capsys, tmp_path: Path) -> None:
    root = make_root(storage)
    path = Path(root.path) / root.versions[0].files[0].path
    raw = path.read_bytes()
    path.write_bytes(raw[:-8] + b"\xff" * 8)
    status, _, err = command(capsys, "export", root.path, f"{tmp_path}/out")
    assert status == 2
    assert "does not match its hash" in err
    assert list((tmp_path / "out").iterdir()) == []
    assert command(capsys, "export", root.path, f"{tmp_path}/out", "--table", "nope")[0] == 2


def test_a_table_is_streamed(tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    monkeypatch.setattr("lightning_cpr.store.stream.TableReader.slab_rows", lambda self, slab_bytes=0: 5000)
    t = table("m.embedding_bags.big", 100_000, 32, (ROW,), dtype=torch.bfloat16)
    save_one(storage, [t], 0)
    asked: list[int] = []
    empty = torch.empty

    def watched(*shape: object, **kwargs: object) -> torch.Tensor:
        made = empty(*shape, **kwargs)  # type: ignore[call-overload]
        asked.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty", watched)
    tracemalloc.start()
    assert command(capsys, "export", storage.root, f"{tmp_path}/out")[0] == 0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    monkeypatch.undo()
    assert max(asked) <= 5000 * 64
    assert peak < 4_000_000 < t.weight.nbytes
    found = load_file(tmp_path / "out" / "m.embedding_bags.big.safetensors")
    assert torch.equal(found["weight"], t.weight)
    assert torch.equal(found["sum"], t.states["sum"])


def test_tensor_files_leave_nothing_behind_and_map_any_width(tmp_path: Path) -> None:
    shapes = {
        "a": (torch.uint8, (3,)),
        "b": (torch.float64, (2, 2)),
        "c": (torch.bfloat16, (0, 4)),
        "d": (torch.bool, ()),
    }
    file = TensorFile(tmp_path / "x.safetensors", shapes)
    with pytest.raises(RuntimeError), file:
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with file:
        file.write("a", 1, torch.tensor([5, 6], dtype=torch.uint8))
        file.write("b", 0, torch.eye(2, dtype=torch.float64))
        file.write("d", 0, torch.tensor(True))
    for found in (file.mapped(), load_file(tmp_path / "x.safetensors")):
        assert found["a"].tolist() == [0, 5, 6]
        assert torch.equal(found["b"], torch.eye(2, dtype=torch.float64))
        assert (found["c"].shape, found["d"].item()) == ((0, 4), True)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("import builtins; builtins.cpr_was_here = True",))


def dcp_folder(root: Root, capsys: Capsys, tmp_path: Path) -> Path:
    out = tmp_path / "dcp"
    assert command(capsys, "export", root.path, str(out), "--to", "dcp")[0] == 0
    return out


def test_hostile_checkpoints_are_refused(storage: Storage, capsys: Capsys, tmp_path: Path) -> None:
    import builtins

    out = dcp_folder(make_root(storage), capsys, tmp_path)
    meta, data = out / ".metadata", out / "__0_0.distcp"
    good, rows = meta.read_bytes(), data.read_bytes()
    found = dcp.FileSystemReader(out).read_metadata()

    def refused(text: str) -> None:
        status, _, err = command(capsys, "import", str(out), f"{tmp_path}/new")
        assert status == 2, err
        assert text in err
        assert err.count("\n") == 1
        assert not hasattr(builtins, "cpr_was_here")
        assert newest(Storage(f"{tmp_path}/new")).manifest is None

    for raw in (b"", good[:100], b"\x80\x04junk", pickle.dumps([1]), good[:-40] + b"\xff" * 40):
        meta.write_bytes(raw)
        refused(".metadata cannot be read")
    meta.write_bytes(pickle.dumps({"x": Evil()}))
    refused("builtins.exec has no place")
    key = f"model.{USER}.weight"
    index = next(i for i in found.storage_data if i.fqn == key)
    info = found.storage_data[index]
    for path, text in (
        ("../../etc/passwd", "no object name"),
        ("/etc/passwd", "no object name"),
        ("gone", "not exist"),
    ):
        found.storage_data[index] = type(info)(path, info.offset, info.length)
        meta.write_bytes(pickle.dumps(found))
        refused(text)
    found.storage_data[index] = type(info)(info.relative_path, info.offset, 1 << 50)
    meta.write_bytes(pickle.dumps(found))
    refused("cut off")
    found.storage_data[index] = info
    real = found.state_dict_metadata[key].size
    found.state_dict_metadata[key].size = torch.Size([1 << 40, 8])
    meta.write_bytes(pickle.dumps(found))
    refused("shape [200] in 1 pieces for a table [1099511627776, 8]")
    found.state_dict_metadata[key].size = real
    meta.write_bytes(good)
    data.write_bytes(rows[: len(rows) // 3])
    refused("cut off")
    import io

    buffer = io.BytesIO()
    torch.save(Evil(), buffer)
    evil = buffer.getvalue()
    data.write_bytes(rows[: info.offset] + evil + rows[info.offset + len(evil) :])
    found.storage_data[index] = type(info)(info.relative_path, info.offset, len(evil))
    meta.write_bytes(pickle.dumps(found))
    refused("is no plain tensor")
    data.write_bytes(rows)
    meta.write_bytes(good)
    assert command(capsys, "import", str(out), f"{tmp_path}/new")[0] == 0


def test_an_export_that_cannot_be_written_says_so(storage: Storage, capsys: Capsys, tmp_path: Path) -> None:
    root = make_root(storage)
    (tmp_path / "file").write_text("")
    status, _, err = command(capsys, "export", root.path, f"{tmp_path}/file")
    assert (status, err.count("\n")) == (2, 1)
    assert command(capsys, "export", root.path, "s3://bucket/out")[0] == 2
