from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch

from lightning_cpr.spec import Shard, ShardSpec
from lightning_cpr.store import BackgroundWriter, LocalKeyValue, RankPart, SaveIO, SaveReport, Storage, save
from lightning_cpr.store.stage import Stager
from tests.unit.store.helpers import ROW, save_spec, table, threads


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_thousand_saves_do_not_grow_memory_nor_threads(storage: Storage) -> None:
    t = table("a", 2000, 16, (ROW,))
    shard = Shard(ShardSpec("a", 0, 2000, 0, 16, owner=0), t.weight, t.states)
    stager, writer, g = Stager(), BackgroundWriter[SaveReport](), torch.Generator().manual_seed(0)
    sizes: list[int] = []
    base = ""
    for step in range(1000):
        rows = torch.unique(torch.randint(0, 2000, (300,), generator=g))
        whole = step % 50 == 0
        spec = save_spec([t], step) if whole else save_spec([t], step, parent=base, inherit="base")
        blocks = stager.stage([shard], None if whole else {shard.spec: rows})
        io = SaveIO(storage, LocalKeyValue(), partial(int, 0), timeout_s=20)
        assert writer.submit(partial(save, io, spec, RankPart(0, blocks, codecs={"a": "aint4"}))) is not None
        future = writer.wait(20)
        assert future is not None
        base = future.result().path if whole else base
        sizes.append(resident())
    assert max(sizes[200:]) - sizes[200] < 8e6
    assert stager.nbytes == shard.weight.nbytes + shard.states["sum"].nbytes
    assert not threads()
