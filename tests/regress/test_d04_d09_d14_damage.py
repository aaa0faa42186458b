"""D04: one flipped bit loads silently. D09 (pytorch#156002): a save without one rank's table, no error.
D14 (pytorch/xla#7919): metadata present, a data file empty. As far as the store alone shows them.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_cpr.errors import CorruptShardError, ManifestError
from lightning_cpr.store import (
    LocalKeyValue,
    RankPart,
    SaveIO,
    Storage,
    list_versions,
    load_manifest,
    newest,
    read_into,
)
from tests.unit.store.helpers import files_of, save_one, save_ranks, save_spec, table


@pytest.mark.parametrize("part", ["weight.codes", "weight.low", "state.sum.values", "index", "rows", "manifest"])
def test_d04_a_flipped_bit_is_refused_before_any_target_changes(tmp_path: Path, part: str) -> None:
    storage, t = Storage(str(tmp_path)), table("a", 40, 4)
    save_one(storage, [t], 5)
    manifest = save_one(storage, [t], 10, codecs={"a": "int8"})
    path = tmp_path / (manifest.path if part == "manifest" else manifest.files[0].path)
    raw = bytearray(path.read_bytes())
    if part == "manifest":
        at = raw.index(b'"samples":') + 10
    else:
        header = int.from_bytes(raw[:8], "little")
        at = 8 + header + json.loads(raw[8 : 8 + header])[part]["data_offsets"][0]
    raw[at] ^= 1
    path.write_bytes(raw)
    shard = t.shard(0, 40, 0, 4, fill=3.0)
    with pytest.raises(CorruptShardError, match=path.name):
        read_into(storage, load_manifest(storage, manifest.path), [shard])
    assert bool((shard.weight == 3.0).all())
    assert bool((shard.states["sum"] == 3.0).all())
    # The last good version is used instead: at once if the manifest shows the damage, else once the rows were refused.
    assert newest(storage, exclude=[] if part == "manifest" else [manifest.path]).require().step == 5


def test_d09_a_rank_that_omits_its_table_commits_nothing(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    a, b = table("a", 100, 8), table("b", 7, 8)
    io = SaveIO(storage, LocalKeyValue(), partial(int, 0), timeout_s=20)
    parts = [RankPart(0, [a.block(torch.arange(100))]), RankPart(1, [])]
    outcomes = save_ranks([io, io], save_spec([a, b], 5, 2), parts)
    for outcome in outcomes:
        assert isinstance(outcome, ManifestError)
        assert "table b lacks rows [0, 7) of columns [0, 8)" in str(outcome)
    assert list_versions(storage) == []
    assert files_of(tmp_path) == {}


@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_d14_a_cut_shard_is_found_by_its_size(tmp_path: Path, keep: float) -> None:
    storage, t = Storage(str(tmp_path)), table("a", 100, 8)
    good = save_one(storage, [t], 5)
    bad = save_one(storage, [t], 10)
    path = tmp_path / bad.files[0].path
    path.write_bytes(path.read_bytes()[: int(bad.files[0].bytes * keep)])
    found = newest(storage)
    assert found.require() == good
    ((problem),) = found.skipped
    assert problem.path == bad.path
    assert f"(table a) has {int(bad.files[0].bytes * keep)} bytes, {bad.files[0].bytes} were written" in problem.message
    shard = t.shard(0, 100, 0, 8, fill=3.0)
    with pytest.raises(CorruptShardError, match="cut off"):
        read_into(storage, bad, [shard])
    assert bool((shard.weight == 3.0).all())
