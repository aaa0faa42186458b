"""D11 (awsome-distributed-ai#190): a job killed in a save left a directory without metadata and resume died on it.
S05 (fsspec#1823): a ``dir://`` wrapper passes no transaction down, so half a snapshot was visible.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_cpr.store import Storage, clean_torn, newest, torn_versions
from tests.unit.store.helpers import save_one, table


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_at_each_point(tmp_path: Path, rank: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.regress.store_kill", str(tmp_path), str(rank)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert {point: found["signal"] for point, found in report.items()} == dict.fromkeys(report, 9)
    steps = {point: found["step"] for point, found in report.items()}
    assert steps == {"pre_write": 5, "mid_write": 5, "pre_commit": 5, "post_commit": 10}
    assert all(found["sound"] for found in report.values())
    # The torn save is named, and is no snapshot: no manifest, whatever files it left.
    (torn,) = report["pre_commit"]["skipped"]
    assert torn.startswith("chunks/run.000000.000000000010.")
    assert sum(name.startswith("manifests/") for name in report["pre_commit"]["files"]) == 1
    assert not [name for name in report["mid_write"]["files"] if "manifests/" in name and "-n1" in name]
    # After the next commit what it left is removed.
    storage = Storage(str(tmp_path / "pre_commit"))
    committed = save_one(storage, [table("a", 100, 8)], 15)
    assert [f"chunks/{version}" for version in clean_torn(storage, committed)] == [torn]
    assert torn_versions(storage) == []
    assert newest(storage).skipped == ()
