"""What a killed process has lost is estimated from what it told last."""

from __future__ import annotations

import pytest

from lightning_cpr.saving.update_counts import CountBoard, Lost, UpdateCounts
from lightning_cpr.store.kv import LocalKeyValue
from lightning_cpr.store.manifest import Manifest

RUN = "run.000000.00000000000"


def version(step: int) -> Manifest:
    name = f"{RUN}{step}.x"
    return Manifest(
        "run", name, 0, step, 8 * step, "delta", "mixed", 2, 0.0, "", "", tables=(), shards=(), files=(), blobs=()
    )


@pytest.fixture
def board() -> CountBoard:
    board, counts = CountBoard(LocalKeyValue(), "job/root"), UpdateCounts(2.5)
    for step, lacking in ((2, 70), (4, 30), (6, 11)):
        counts = counts.with_version(version(step).version, lacking)
    board.tell(1, counts)
    return board


def test_the_batches_since_the_version_and_what_it_lacks(board: CountBoard) -> None:
    assert board.estimate([Lost(1, 0)], version(6), step=9, samples=72) == round(11 + 3 * 2.5)
    assert board.estimate([Lost(1, 0)], version(4), step=9, samples=72) == round(30 + 5 * 2.5)
    # of the newest two versions it is known what they lack
    assert board.estimate([Lost(1, 0)], version(2), step=9, samples=72) == round(7 * 2.5)
    assert board.estimate([Lost(1, 0)], version(6), step=6, samples=48) == 11


def test_nothing_is_lost_twice(board: CountBoard) -> None:
    """The owner recovered after the version: what it lost then was counted then."""
    assert board.estimate([Lost(1, 56)], version(6), step=9, samples=72) == round(2 * 2.5)


def test_owners_add_up_and_an_unknown_one_makes_the_sum_unknown(board: CountBoard) -> None:
    assert board.estimate([Lost(1, 0), Lost(0, 0)], version(6), step=9, samples=72) is None
    board.tell(0, UpdateCounts(1.0))
    assert board.estimate([Lost(1, 0), Lost(0, 0)], version(6), step=9, samples=72) == round(11 + 3 * 2.5 + 3)
    assert CountBoard(None, "").estimate([Lost(1, 0)], version(6), step=9, samples=72) is None
    assert CountBoard(LocalKeyValue(), "other").of(1) is None


def test_counts_survive_their_json() -> None:
    counts = UpdateCounts(1 / 3).with_version("v", 5)
    assert UpdateCounts.from_json(counts.to_json().encode()) == counts
