from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from lightning_cpr.errors import StorageError
from lightning_cpr.saving.compaction import BackgroundCompaction, Finished
from lightning_cpr.store import LocalKeyValue, Manifest, SaveIO, Storage, list_versions
from lightning_cpr.store.compact import read_factor
from tests.unit.store.helpers import Table, table, threads
from tests.unit.store.test_compact import chain, holds

DEADLINE_S = 20.0


@pytest.fixture
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storage]:
    yield Storage(str(tmp_path_factory.mktemp("root")))
    assert not threads()


def made(storage: Storage, policy: str = "consecutive") -> tuple[BackgroundCompaction, dict[str, int], Table, Manifest]:
    """Of a chain that holds its rows 1.5 times; the dict has the job's epoch."""
    rows = table("a", 2000, 8)
    last = chain(storage, [rows], 4)
    assert read_factor(last) > 1.4
    epoch = {"now": 0}
    io = SaveIO(storage, LocalKeyValue(), partial(epoch.__getitem__, "now"))
    return BackgroundCompaction(io, policy), epoch, rows, last


def test_a_long_chain_is_compacted_and_what_follows_is_told(storage: Storage) -> None:
    compaction, _, rows, last = made(storage)
    compaction.consider(last)
    done = compaction.poll(DEADLINE_S)
    assert isinstance(done, Finished)
    assert (done.before, done.after) == (read_factor(last), 1.0)
    holds(storage, done.compaction.manifest, [rows])
    assert compaction.ready is not None
    assert compaction.ready.apply(last.files) == done.compaction.manifest.files
    compaction.consider(last)  # the next save moves it: no second time
    assert compaction.poll(DEADLINE_S) is None
    assert len(list_versions(storage)) == 6


@pytest.mark.parametrize("policy", ["intermittent", "one_shot", "full"])
def test_other_policies_are_left_alone(storage: Storage, policy: str) -> None:
    compaction, _, _, last = made(storage, policy)
    compaction.consider(last)
    assert compaction.poll(DEADLINE_S) is None
    assert compaction.ready is None


def test_a_failure_is_told_and_leaves_the_chain(storage: Storage) -> None:
    compaction, _, rows, last = made(storage)

    def full(path: str, buffers: object) -> object:
        raise OSError(28, "No space left on device")

    storage.intercept = full  # type: ignore[assignment]
    compaction.consider(last)
    assert isinstance(compaction.poll(DEADLINE_S), StorageError)
    assert compaction.ready is None
    storage.intercept = None
    holds(storage, last, [rows])
    compaction.consider(last)  # the next commit tries again
    assert isinstance(compaction.poll(DEADLINE_S), Finished)


def test_a_recovery_or_the_end_of_the_job_gives_it_up_silently(storage: Storage) -> None:
    compaction, epoch, rows, last = made(storage)
    epoch["now"] = 1
    compaction.consider(last)
    assert compaction.poll(DEADLINE_S) is None
    epoch["now"] = 0
    compaction.close()
    compaction.consider(last)
    assert compaction.poll(DEADLINE_S) is None
    assert compaction.ready is None
    assert [ref.version for ref in list_versions(storage)][:1] == [last.version]
    holds(storage, last, [rows])
