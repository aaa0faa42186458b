"""S09 (NVFlare PR5011, pytorch PR2883): no space halfway through a save."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_cpr.errors import CommitError, StorageError
from lightning_cpr.store import Storage, newest, read_table
from tests.unit.store.helpers import files_of, save_one, table


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {made.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_the_error_names_it_and_the_version_before_stands(small_disk: Path) -> None:
    storage, t = Storage(str(small_disk)), table("a", 8000, 15)
    old = save_one(storage, [t], 1)
    before = files_of(small_disk)
    big = table("a", 50_000, 15)
    with pytest.raises(CommitError, match=r"No space left on device; no space left: free space") as info:
        save_one(storage, [big], 2, chunk_bytes=300_000)
    cause = info.value.__cause__
    assert isinstance(cause, StorageError)
    assert cause.errno == errno.ENOSPC
    assert files_of(small_disk) == before
    found = newest(storage)
    assert found.require() == old
    assert found.skipped == ()
    assert torch.equal(read_table(storage, old, "a")[0], t.weight)
