"""T10 (torchrec#2679): ``torch.load`` refuses ShardedTensor. Our chunks hold plain tensors, and no pickle at all."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch

from lightning_cpr.store import Storage
from tests.unit.store.helpers import ELEMENT, ROW, files_of, save_one, table


def test_t10_chunks_are_safetensors_and_manifests_json(tmp_path: Path) -> None:
    t = table("a", 30, 4, (ROW, ELEMENT))
    manifest = save_one(Storage(str(tmp_path)), [t], 1)
    for name in files_of(tmp_path):
        raw = (tmp_path / name).read_bytes()
        assert b"ShardedTensor" not in raw
        assert not raw.startswith((b"PK\x03\x04", b"\x80\x02"))
    plain = safetensors.torch.load_file(tmp_path / manifest.files[0].path)
    assert torch.equal(plain["weight.values"], t.weight)
    assert torch.equal(plain["state.sum.values"][:, 0], t.states["sum"])
    assert torch.equal(plain["state.exp_avg.values"], t.states["exp_avg"])
