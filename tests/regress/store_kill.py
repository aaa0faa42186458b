"""``python -m tests.regress.store_kill ROOT RANK``: saves step 5 with two ranks, then, for each point, starts a save of
step 10 in a process of its own that is killed with SIGKILL when that rank comes to the point. Prints, as JSON, for each
point the signal, the newest step, the versions passed over and what lies in the root.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial

import fsspec
import torch
from fsspec.implementations.dirfs import DirFileSystem

from lightning_cpr.store import LocalKeyValue, RankPart, SaveIO, Storage, newest, read_table
from lightning_cpr.store.save import POINTS
from tests.unit.store.helpers import files_of, save_ranks, save_spec, table

Points = Callable[[str, int], None]


def main(root: str, rank: int) -> None:
    torch.set_num_threads(1)
    t = table("a", 100, 8)
    report = {}
    for point in POINTS:
        # The root is given as a wrapped file system, which passes no transaction down.
        storage = Storage(point, fs=DirFileSystem(path=root, fs=fsspec.filesystem("file")))
        kv = LocalKeyValue()

        def kill(name: str, step: int, point: str = point) -> None:
            if name == point and step == 10:
                os.kill(os.getpid(), signal.SIGKILL)

        def save_step(step: int, storage: Storage = storage, kv: LocalKeyValue = kv, kill: Points = kill) -> None:
            parts = [RankPart(r, [t.block(torch.arange(100).chunk(2)[r])]) for r in range(2)]
            ios = [SaveIO(storage, kv, partial(int, 0), timeout_s=20) for _ in range(2)]
            ios[rank] = SaveIO(storage, kv, partial(int, 0), kill, timeout_s=20)
            save_ranks(ios, save_spec([t], step, 2), parts)

        save_step(5)
        if (pid := os.fork()) == 0:
            t.weight += 1
            save_step(10)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        found = newest(storage)
        weight, _ = read_table(storage, found.require(), "a")
        report[point] = {
            "signal": os.WTERMSIG(status),
            "step": found.require().step,
            "sound": torch.equal(weight, t.weight + (1 if found.require().step == 10 else 0)),
            "skipped": [problem.path for problem in found.skipped],
            "files": sorted(files_of(f"{root}/{point}")),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
