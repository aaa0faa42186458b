"""X02 (torchsnapshot PR171, PR174): "metadata unreadable" did not say incomplete or wrong path."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_cpr.errors import ManifestError
from lightning_cpr.store import Storage, newest
from tests.unit.store.helpers import save_one, table


def test_x02_missing_empty_and_torn_folders_say_different_things(tmp_path: Path) -> None:
    missing, empty, torn, other = (tmp_path / name for name in ("missing", "empty", "torn", "other"))
    empty.mkdir()
    manifest = save_one(Storage(str(torn)), [table("a", 4, 2)], 1)
    (torn / manifest.path).unlink()
    other.mkdir()
    (other / "notes.txt").write_text("x")
    messages = {missing: "no such folder", empty: "is empty", torn: "unfinished first save", other: "other files"}
    for root, message in messages.items():
        found = newest(Storage(str(root)))
        assert found.manifest is None
        assert message in found.why
        assert str(root) in found.why
        with pytest.raises(ManifestError, match=message):
            found.require()
    assert len({newest(Storage(str(root))).why for root in messages}) == 4
