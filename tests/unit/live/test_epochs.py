"""A recovery begins an epoch, also where there is no room to say so, but not in the place of another job."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_cpr.errors import ForeignRunError
from lightning_cpr.live.restorer import Restorer
from lightning_cpr.store.storage import Buffer, Storage
from lightning_cpr.store.versions import fence, newest_epoch


def restorer(storage: Storage, told: list[tuple[str, dict[str, Any]]]) -> Restorer:
    nothing: Any = None
    return Restorer(
        nothing, storage, "run", "ours", nothing, 1.0, lambda event, **more: told.append((event, more)), nothing
    )


def test_a_full_store_does_not_end_a_recovery(tmp_path: Path) -> None:
    def full(path: str, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        raise OSError(errno.ENOSPC, "No space left on device", path)

    storage, told = Storage(str(tmp_path)), list[tuple[str, dict[str, Any]]]()
    storage.intercept = full
    restorer(storage, told)._begin_epoch(1)
    assert [event for event, _ in told] == ["fence_failed"]
    assert "No space left" in told[0][1]["error"]
    assert newest_epoch(storage, "run") == -1


def test_another_jobs_epoch_ends_it(tmp_path: Path) -> None:
    storage, told = Storage(str(tmp_path)), list[tuple[str, dict[str, Any]]]()
    restorer(storage, told)._begin_epoch(1)
    restorer(storage, told)._begin_epoch(1)  # begun again after a failure within the recovery
    assert (newest_epoch(storage, "run"), told) == (1, [])
    fence(storage, "run", 2, "theirs")
    with pytest.raises(ForeignRunError, match="another job goes on with run run"):
        restorer(storage, told)._begin_epoch(2)
