"""A recovery begins an epoch, also where there is no room to say so, but not in the place of another job."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_cpr.errors import ForeignRunError
from lightning_cpr.live.epochs import Epochs
from lightning_cpr.store.kv import LocalKeyValue
from lightning_cpr.store.storage import Buffer, Storage
from lightning_cpr.store.versions import fence, newest_epoch


def epochs(storage: Storage, told: list[tuple[str, dict[str, Any]]]) -> Epochs:
    job, nothing = SimpleNamespace(rank=0, kv=LocalKeyValue(), from_rank_0=lambda work: work()), None
    made: Any = Epochs
    return made(job, storage, "run", "ours", nothing, 1.0, lambda event, **more: told.append((event, more)), nothing)


def test_a_full_store_does_not_end_a_recovery(tmp_path: Path) -> None:
    def full(path: str, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        raise OSError(errno.ENOSPC, "No space left on device", path)

    storage, told = Storage(str(tmp_path)), list[tuple[str, dict[str, Any]]]()
    storage.intercept = full
    epochs(storage, told).begin_in_new_group(1)
    assert [event for event, _ in told] == ["fence_failed"]
    assert "No space left" in told[0][1]["error"]
    assert newest_epoch(storage, "run") == -1


def test_another_jobs_epoch_ends_it(tmp_path: Path) -> None:
    storage, told = Storage(str(tmp_path)), list[tuple[str, dict[str, Any]]]()
    epochs(storage, told).begin_in_new_group(1)
    epochs(storage, told).begin_in_new_group(1)  # begun again after a failure within the recovery
    assert (newest_epoch(storage, "run"), told) == (1, [])
    fence(storage, "run", 2, "theirs")
    with pytest.raises(ForeignRunError, match="another job goes on with run run"):
        epochs(storage, told).begin_in_new_group(2)
