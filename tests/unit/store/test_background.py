from __future__ import annotations

import threading
import time
from functools import partial

import pytest
import torch

from lightning_cpr.errors import CommitError, ManifestError
from lightning_cpr.store import BackgroundWriter, LocalKeyValue, RankPart, SaveIO, Storage, newest, read_table, save
from tests.unit.store.helpers import save_spec, table, threads, whole


def test_one_save_in_flight_the_next_is_skipped_and_counted(storage: Storage) -> None:
    gate = threading.Event()
    t = table("a", 50, 4)
    writer: BackgroundWriter[object] = BackgroundWriter()
    io = SaveIO(storage, LocalKeyValue(), partial(int, 0), lambda point, step: point == "pre_write" and gate.wait(20))  # type: ignore[arg-type, return-value]
    future = writer.submit(partial(save, io, save_spec([t], 1), RankPart(0, whole([t]))))
    assert future is not None
    assert writer.submit(lambda: pytest.fail("ran")) is None
    assert writer.skipped == 1
    assert writer.poll() is None
    assert writer.wait(0.01) is None
    gate.set()
    assert writer.wait(20) is future
    assert newest(storage).require().step == 1
    assert writer.poll() is None
    assert threads() == set()
    assert writer.submit(lambda: 3) is not None
    finished = writer.close(20)
    assert finished is not None
    assert finished.result() == 3
    assert writer.close(0) is None


def test_live_tensors_may_change_after_staging(storage: Storage) -> None:
    """What a save owns is its own copy: training on while it is written changes nothing in it."""
    t = table("a", 50, 4)
    before = t.weight.clone()
    gate = threading.Event()
    io = SaveIO(storage, LocalKeyValue(), partial(int, 0), lambda point, step: point == "pre_write" and gate.wait(20))  # type: ignore[arg-type, return-value]
    writer: BackgroundWriter[object] = BackgroundWriter()
    writer.submit(partial(save, io, save_spec([t], 1), RankPart(0, whole([t]))))
    t.weight.add_(1)
    gate.set()
    assert writer.wait(20) is not None
    assert torch.equal(read_table(storage, newest(storage).require(), "a")[0], before)


@pytest.mark.parametrize("error", [RuntimeError("r"), KeyboardInterrupt("k"), SystemExit("s")])
def test_any_error_surfaces_as_a_cpr_error_with_its_cause(error: BaseException) -> None:
    def fail() -> None:
        raise error

    writer: BackgroundWriter[None] = BackgroundWriter()
    writer.submit(fail)
    future = writer.wait(20)
    assert future is not None
    with pytest.raises(CommitError, match=f"a background save failed: {type(error).__name__}") as info:
        future.result()
    assert info.value.__cause__ is error


def test_our_errors_come_as_they_are() -> None:
    error = ManifestError("m")

    def fail() -> None:
        raise error

    writer: BackgroundWriter[None] = BackgroundWriter()
    writer.submit(fail)
    future = writer.wait(20)
    assert future is not None
    assert future.exception() is error


def test_close_cancels_a_save_that_takes_too_long(storage: Storage) -> None:
    t = table("a", 2000, 4, ())
    cancel = threading.Event()
    # Each put waits for the cancel, so that the save cannot end before it.
    storage.intercept = lambda path, buffers: cancel.wait(20) and buffers  # type: ignore[assignment, return-value]
    io = SaveIO(storage, LocalKeyValue(), partial(int, 0), chunk_bytes=1600, cancel=cancel)
    writer: BackgroundWriter[object] = BackgroundWriter(cancel)
    writer.submit(partial(save, io, save_spec([t], 1), RankPart(0, whole([t]))))
    finished = writer.close(0.05, grace=20)
    assert finished is not None
    assert "was cancelled" in str(finished.exception())
    assert newest(storage).manifest is None


def test_close_gives_up_on_a_stuck_save_in_time() -> None:
    gate = threading.Event()
    writer: BackgroundWriter[object] = BackgroundWriter()
    writer.submit(partial(gate.wait, 30))
    started = time.monotonic()
    with pytest.raises(CommitError, match=r"still hangs 0.2 s after close"):
        writer.close(0.1, grace=0.1)
    assert time.monotonic() - started < 5
    gate.set()
    assert writer.wait(20) is not None
