"""A start goes on with what was handed over, unless Lightning restores something else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_cpr.checkpoint_io import VERSION_KEY
from lightning_cpr.job.start import Start


class Left:
    """What another process left, with what became of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def adopt(self) -> None:
        self.calls.append("adopt")

    def close(self) -> None:
        self.calls.append("close")


def start() -> Any:
    storage, nothing = SimpleNamespace(root="/job"), SimpleNamespace()
    made: Any = Start
    return made(nothing, nothing, storage, nothing, nothing, nothing, "CPRCallback[/job]", True)


def version(path: str) -> Any:
    manifest = SimpleNamespace(path=path)
    return SimpleNamespace(storage=SimpleNamespace(root="/elsewhere"), manifest=manifest)


def test_rows_are_taken_from_memory_when_lightning_restores_what_was_handed_over() -> None:
    begun, left = start(), Left()
    begun._taken = left
    begun.loads(SimpleNamespace(callbacks=[]), {VERSION_KEY: None})
    assert (left.calls, begun._taken) == (["adopt"], left)


def test_a_ckpt_path_is_worth_more_than_what_was_handed_over(caplog: pytest.LogCaptureFixture) -> None:
    begun, left = start(), Left()
    begun._taken = left
    begun.loads(SimpleNamespace(callbacks=[]), {VERSION_KEY: version("manifests/1.json")})
    assert (left.calls, begun._taken) == (["close"], None)
    assert "a ckpt_path is given" in caplog.text


@pytest.mark.parametrize(("loaded", "serves"), [("made.json", True), ("other.json", False), (None, False)])
def test_a_version_made_of_what_was_handed_over_counts_once_and_only_if_it_was_loaded(
    loaded: str | None, serves: bool, caplog: pytest.LogCaptureFixture
) -> None:
    begun, made = start(), SimpleNamespace(path="made.json")
    begun._resharded = made
    assert begun._made(None if loaded is None else version(loaded)) is (made if serves else None)
    assert begun._made(version("made.json")) is None
    assert ("another version than the one made" in caplog.text) is not serves
