from __future__ import annotations

import dataclasses
import hashlib
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_cpr.errors import ConfigError, CorruptShardError, ManifestError
from lightning_cpr.spec import ShardSpec, StateSpec, TableSpec
from lightning_cpr.store import manifest as module
from lightning_cpr.store.manifest import (
    BlobEntry,
    FileEntry,
    Manifest,
    ShardRecord,
    VersionRef,
    dump_manifest,
    manifest_path,
    new_version_id,
    parse_manifest,
    parse_manifest_path,
    seal,
    split_version,
)

VERSION = new_version_id("run", 2, 40, "abc")
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    names = draw(st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=3))
    kinds = draw(st.lists(st.sampled_from(["row", "element"]), max_size=2))
    states = tuple(StateSpec(f"s{i}", kind, draw(DTYPES)) for i, kind in enumerate(kinds))  # type: ignore[arg-type]
    tables = tuple(TableSpec(name, 100, 8, draw(DTYPES), "adagrad", states, draw(st.booleans())) for name in names)
    files = tuple(
        FileEntry(
            f"chunks/{VERSION}/r0-{i:05d}.safetensors", 1000, draw(st.sampled_from(names)), 5, 10, 20, 0, 8, "raw",
            {state.name: "raw" for state in states}, 90, "ab" * 32, 40,
        )
        for i in range(draw(st.integers(0, 3)) if names else 0)
    )  # fmt: skip
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner), max_leaves=5
    )
    return Manifest(
        run_id="run", version=VERSION, epoch=2, step=40, samples=draw(st.integers(0, 1 << 60)),
        kind=draw(st.sampled_from(["base", "delta"])), consistency=draw(st.sampled_from(["exact", "mixed"])),
        world_size=2, wall_time=draw(st.floats(0, 2e9)), config_fingerprint=draw(st.text()), plan_fingerprint="p",
        tables=tables, shards=tuple(ShardRecord(ShardSpec(n, 0, 100, 0, 8, 1), 30) for n in names), files=files,
        blobs=(BlobEntry("dense", f"chunks/{VERSION}/r0-dense.blob", 3, "cd" * 32),),
        planner=draw(st.dictionaries(st.text(), values, max_size=3)), ledger=draw(values),
        parent=draw(st.none() | st.text()), path="p.json",
    )  # fmt: skip


def small() -> Manifest:
    spec = TableSpec("t", 100, 8, torch.float32, "adagrad", (), True)
    file = FileEntry(
        f"chunks/{VERSION}/r0-00000.safetensors", 1000, "t", 100, 0, 100, 0, 8, "raw", {}, 90, "ab" * 32, 40
    )
    return Manifest(
        run_id="run", version=VERSION, epoch=2, step=40, samples=4, kind="base", consistency="exact", world_size=1,
        wall_time=1.5, config_fingerprint="", plan_fingerprint="", tables=(spec,), shards=(), files=(file,), blobs=(),
    )  # fmt: skip


@given(manifests())
def test_round_trip(manifest: Manifest) -> None:
    raw = dump_manifest(manifest)
    assert parse_manifest(raw, "p.json") == manifest
    assert json.loads(raw)["manifest"]["schema"] == 1


def test_every_flipped_byte_and_every_cut_is_seen() -> None:
    raw = dump_manifest(small())
    for at in range(len(raw)):
        broken = bytearray(raw)
        broken[at] ^= 4
        with pytest.raises((CorruptShardError, ManifestError), match=r"x\.json"):
            parse_manifest(broken, "x.json")
        with pytest.raises((CorruptShardError, ManifestError), match=r"x\.json"):
            parse_manifest(raw[:at], "x.json")


def test_newer_schema_says_so() -> None:
    body = json.loads(dump_manifest(small()))["manifest"]
    with pytest.raises(ManifestError, match=r"schema 2 is newer than 1.*upgrade"):
        parse_manifest(seal({**body, "schema": 2, "tables": "something else"}), "m")


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("path", "chunks/../../etc/passwd"), ("path", f"chunks/{VERSION}/.."), ("path", "/etc/passwd"),
        ("path", "chunks/other.000000.000000000001.n/x"), ("path", 7), ("table", "none such"), ("bytes", -1),
        ("bytes", 1.5), ("bytes", True), ("rows", 101), ("row_end", 101), ("row_start", -1), ("cols", 9),
        ("cols", 1 << 70), ("index_bytes", 2000), ("index_bytes", 0), ("state_codecs", {"sum": "raw"}), ("codec", None),
    ],
)  # fmt: skip
def test_hostile_file_entries_are_refused(where: str, value: object) -> None:
    body = json.loads(dump_manifest(small()))["manifest"]
    body["files"][0][where] = value
    with pytest.raises(ManifestError, match=r"malformed|no version id"):
        parse_manifest(seal(body), "m")


@pytest.mark.parametrize("body", [[], "text", None, {}, {"schema": 1}, {"schema": "1"}])
def test_other_bodies_are_refused(body: object) -> None:
    with pytest.raises(ManifestError):
        parse_manifest(seal(body), "m")


def test_foreign_objects_are_no_manifests() -> None:
    for raw in (b"PK\x03\x04" + bytes(500), b"{}", b'{"state_dict": 1}' * 30):
        with pytest.raises(ManifestError, match="no manifest of lightning_cpr"):
            parse_manifest(raw, "model.ckpt")
    with pytest.raises(CorruptShardError, match="is empty"):
        parse_manifest(b"", "model.ckpt")


def test_names_sort_by_step_and_parse_strictly() -> None:
    paths = [manifest_path(new_version_id("r", e, s, "n")) for e, s in [(0, 5), (3, 10), (0, 90), (1, 100)]]
    assert paths == sorted(paths)
    assert parse_manifest_path(paths[1]) == VersionRef(paths[1], "r", "r.000003.000000000010.n", 3, 10)
    good = manifest_path(VERSION)
    changes = [("manifests", "chunks"), ("-000002-", "-000003-"), ("-000002-", "-2-"), ("000000000040-", "40-")]
    changes += [(".json", ".json.tmp"), (".json", ""), ("manifests", "x/manifests"), ("0", "\u0660"), ("run", "a/b")]
    for old, new in changes:
        assert parse_manifest_path(good.replace(old, new)) is None, (old, new)


@pytest.mark.parametrize(
    ("run", "epoch", "step", "nonce"),
    [
        ("a/b", 0, 0, "n"), ("..", 0, 0, "n"), ("r", -1, 0, "n"), ("r", 0, -5, "n"), ("r", 0, 0, ""),
        ("r" * 65, 0, 0, "n"), ("r", 10**6, 0, "n"),
    ],
)  # fmt: skip
def test_version_ids_are_checked(run: str, epoch: int, step: int, nonce: str) -> None:
    with pytest.raises(ConfigError, match="no version id"):
        new_version_id(run, epoch, step, nonce)


def test_version_ids_carry_run_epoch_and_step() -> None:
    ref = split_version(VERSION)
    assert (ref.run_id, ref.epoch, ref.step) == ("run", 2, 40)
    with pytest.raises(ManifestError):
        split_version(VERSION + "\n")


def test_both_makers_of_digests_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    first = module.digest(b"abc")
    monkeypatch.setattr(module, "_OPENSSL", not module._OPENSSL)
    assert module.digest(b"abc") == first == hashlib.blake2b(b"abc").hexdigest()[:64]


def test_manifests_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        small().step = 3  # type: ignore[misc]
