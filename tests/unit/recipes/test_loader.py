from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from recipes import loader as loader_module
from recipes.batch import Columns
from recipes.criteo import CriteoDataModule
from recipes.errors import DataError
from recipes.loader import Deal, IndexedSource, ResumableLoader, Source
from tests.unit.recipes.lines import samples, write


class Numbers(IndexedSource):
    """Sample i holds id i + 1, in an order of each epoch."""

    tables: ClassVar[dict[str, int]] = {"cat_0": 10_000}

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def order(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng(epoch).permutation(self.rows)

    def take(self, rows: NDArray[np.int64]) -> Columns:
        return Columns(np.zeros((len(rows), 1), np.float32), rows + 1, np.zeros(len(rows), np.float32))


class Unsized(Numbers):
    """The same, but its length shows only at the end."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.rows = None
        self._inner = Numbers(rows)

    def columns(self, deal: Deal, epoch: int) -> Iterator[Columns]:
        return self._inner.columns(deal, epoch)


@given(st.integers(0, 200), st.integers(1, 5), st.integers(1, 9), st.integers(1, 4), st.booleans())
def test_ranks_and_workers_share_without_overlap_or_loss(
    rows: int, world: int, batch: int, workers: int, keep: bool
) -> None:
    seen: list[int] = []
    shapes = []
    for rank in range(world):
        steps: dict[int, tuple[int, int, int]] = {}
        for worker in range(workers):
            deal = Deal(rank, world, batch, worker, workers, keep)
            for step in range(deal.first, deal.steps(rows), deal.stride):
                assert step not in steps
                steps[step] = deal.own(step, rows)
        assert sorted(steps) == list(range(Deal(rank, world, batch, keep_rest=keep).steps(rows)))
        seen += [i for start, stop, _ in steps.values() for i in range(start, stop)]
        shapes.append([stop - start + padding for _, (start, stop, padding) in sorted(steps.items())])
    whole = rows if keep else rows // (world * batch) * world * batch
    assert sorted(seen) == list(range(whole))
    assert all(shape == shapes[0] for shape in shapes)
    assert all(0 < size <= batch for size in shapes[0])


@pytest.mark.parametrize("source", [Numbers(64), Unsized(64)])
@pytest.mark.parametrize("taken", [0, 1, 7, 15])
def test_resume_continues_with_the_next_batch(source: Source, taken: int) -> None:
    full = ResumableLoader(source, 4)
    first, second = [samples(b) for b in full], [samples(b) for b in full]
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(64))
    assert first != second

    stopped = ResumableLoader(source, 4)
    batches = iter(stopped)
    assert [samples(next(batches)) for _ in range(taken)] == first[:taken]
    resumed = ResumableLoader(source, 4)
    resumed.load_state_dict(stopped.state_dict())
    assert [samples(b) for b in resumed] == first[taken:]
    assert [samples(b) for b in resumed] == second


@pytest.mark.parametrize("source", [Numbers(64), Unsized(64)])
def test_seek_goes_on_in_the_epoch_as_the_loader_that_read_it_all(source: Source) -> None:
    """What Lightning and a live recovery call: set_epoch, seek, iter, and set_epoch once more."""
    full = ResumableLoader(source, 4)
    full.set_epoch(2)
    batches = [samples(b) for b in full]
    fresh = ResumableLoader(source, 4)
    fresh.set_epoch(2)
    fresh.seek(11)
    iterator = iter(fresh)
    fresh.set_epoch(2)
    assert [samples(b) for b in iterator] == batches[11:]
    assert fresh.state_dict() == full.state_dict()


def test_seek_reads_nothing_of_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    take = Numbers.take
    monkeypatch.setattr(Numbers, "take", lambda self, rows: read.extend(rows.tolist()) or take(self, rows))
    loader = ResumableLoader(Numbers(64), 4)
    loader.seek(15)
    assert list(chain(*(samples(b) for b in loader))) == read == Numbers(64).order(0)[60:].tolist()


def test_state_after_the_last_batch_is_the_next_epoch() -> None:
    loader = ResumableLoader(Numbers(8), 4)
    batches = iter(loader)
    next(batches)
    assert loader.state_dict() == {"epoch": 0, "samples": 4, "rows": 8}
    next(batches)
    assert loader.state_dict() == {"epoch": 1, "samples": 0, "rows": 8}


def test_a_position_of_another_epoch_is_void() -> None:
    loader = ResumableLoader(Numbers(8), 2)
    loader.load_state_dict({"epoch": 3, "samples": 4, "rows": 8})
    loader.set_epoch(3)
    assert len(list(loader)) == 2
    loader.load_state_dict({"epoch": 3, "samples": 4, "rows": 8})
    loader.set_epoch(4)
    assert list(chain(*(samples(b) for b in loader))) == Numbers(8).order(4).tolist()


def test_a_consumer_that_runs_ahead_says_what_it_trained() -> None:
    trained = 0
    loader = ResumableLoader(Numbers(40), 4, progress=lambda: trained)
    batches = iter(loader)
    ahead = [samples(next(batches)) for _ in range(5)]
    trained = 3
    resumed = ResumableLoader(Numbers(40), 4)
    resumed.load_state_dict(loader.state_dict())
    assert samples(next(iter(resumed))) == ahead[3]


@pytest.mark.parametrize("files", [1, 3])
def test_workers_change_neither_order_nor_resume(tmp_path: Path, files: int) -> None:
    for i in range(files):
        write(tmp_path / f"day_{i}", 60 // files, start=i * 60 // files)

    def make(workers: int) -> ResumableLoader:
        data = CriteoDataModule(
            str(tmp_path), 1000, "day_*", val="day_0", test="day_0", batch_size=4, num_workers=workers
        )
        return data.train_dataloader()

    plain = [samples(b) for b in make(0)]
    assert plain == [list(range(i, i + 4)) for i in range(0, 60, 4)]
    stopped = make(2)
    batches = iter(stopped)
    assert [samples(next(batches)) for _ in range(4)] == plain[:4]
    resumed = make(1)
    resumed.load_state_dict(stopped.state_dict())
    assert [samples(b) for b in resumed] == plain[4:]


def test_ranks_share_and_another_world_size_continues(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def batches(rank: int, world: int, size: int, state: dict[str, int] | None, count: int | None) -> tuple[set, dict]:
        monkeypatch.setattr(loader_module, "rank_and_world", lambda: (rank, world))
        loader = ResumableLoader(Numbers(48), size)
        if state is not None:
            loader.load_state_dict(state)
        seen = set()
        for number, batch in enumerate(loader, 1):
            seen.update(samples(batch))
            if number == count:
                break
        return seen, loader.state_dict()

    before = [batches(rank, 2, 4, None, 3) for rank in range(2)]
    assert before[0][1] == before[1][1] == {"epoch": 0, "samples": 24, "rows": 48}
    after = [batches(rank, 3, 4, before[0][1], None)[0] for rank in range(3)]
    assert set.union(*(seen for seen, _ in before)) | set.union(*after) == set(range(48))
    assert sum(map(len, after)) == 24
    assert not caplog.records
    batches(0, 5, 4, before[0][1], None)
    assert "4 are repeated" in caplog.text


def test_other_data_is_refused() -> None:
    with pytest.raises(DataError, match=r"48 samples.*has 64"):
        ResumableLoader(Numbers(64), 4).load_state_dict({"epoch": 0, "samples": 4, "rows": 48})


def test_the_length_is_that_of_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "rank_and_world", lambda: (1, 2))
    assert len(ResumableLoader(Numbers(50), 4)) == 6
    assert len(ResumableLoader(Numbers(50), 4, keep_rest=True)) == 7
    with pytest.raises(TypeError, match="only after reading"):
        len(ResumableLoader(Unsized(50), 4))
