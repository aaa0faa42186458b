"""Faults: what is refused, what a seed draws, what fires where and how often, and the YAML form."""

from __future__ import annotations

import copy
import errno
import itertools
import pickle
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser

from lightning_cpr import CPRCallback, Fault, FaultInjector, ParityConfig
from lightning_cpr.errors import ConfigError, FaultInjectedError
from lightning_cpr.faults import RandomFaults
from lightning_cpr.spec import Shard, ShardSpec


def trainer_at(step: int, world_size: int = 2, rank: int = 0) -> Any:
    return SimpleNamespace(
        fit_loop=SimpleNamespace(total_batch_idx=step - 1), world_size=world_size, global_rank=rank,
        estimated_stepping_batches=1000,
    )  # fmt: skip


def on_rank(injector: FaultInjector, rank: int) -> FaultInjector:
    injector.setup(trainer_at(1, rank=rank), None, "fit")  # type: ignore[arg-type]
    return injector


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "explode", "rank": 0, "step": 1}, "allowed are wipe, kill, hang"),
        ({"kind": "kill", "rank": 0, "step": 1, "point": "lunch"}, "allowed are forward, backward"),
        ({"kind": "kill", "rank": -1, "step": 1}, "rank and seconds start at 0, steps at 1"),
        ({"kind": "kill", "rank": 0, "step": 0}, "steps at 1"),
        ({"kind": "wipe", "rank": 0, "step": 1, "point": "forward"}, "batch_end"),
    ],
)
def test_bad_faults_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Fault(**arguments)


def test_a_rank_beyond_the_job_is_refused() -> None:
    with pytest.raises(ConfigError, match="this job has 2 ranks"):
        FaultInjector().wipe(2, 5).on_train_start(trainer_at(1), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("distribution", "shape"), [("exponential", 1.0), ("gamma", 2.0), ("weibull", 0.7)])
def test_random_schedules_have_the_stated_mean_and_repeat(distribution: Any, shape: float) -> None:
    schedule = RandomFaults(50.0, distribution, shape, seed=3).schedule(world_size=4, max_steps=100_000)
    gaps = [b.step - a.step for a, b in itertools.pairwise(schedule)]
    assert statistics.fmean(gaps) == pytest.approx(50, rel=0.1)
    assert {fault.rank for fault in schedule} == {0, 1, 2, 3}
    assert schedule == RandomFaults(50.0, distribution, shape, seed=3).schedule(4, 100_000)
    assert schedule != RandomFaults(50.0, distribution, shape, seed=4).schedule(4, 100_000)


def test_a_fault_fires_once_on_its_rank_at_its_point_and_is_counted() -> None:
    injector = on_rank(FaultInjector().raise_(1, 3, "backward").raise_(0, 3, "backward"), 1)
    injector.on_before_backward(trainer_at(2))
    injector.on_train_batch_start(trainer_at(3))
    with pytest.raises(FaultInjectedError, match="step 3, point backward, rank 1"):
        injector.on_before_backward(trainer_at(3))
    injector.on_before_backward(trainer_at(3))
    assert injector.fired == [Fault("raise", 1, 3, "backward")]
    assert (injector.count("raise"), injector.count("kill")) == (1, 0)


def test_another_attempt_of_the_job_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    injector = on_rank(FaultInjector([Fault("raise", 0, 1, "forward")]), 0)
    injector.on_train_batch_start(trainer_at(1))
    assert injector.fired == []


def test_every_rank_hears_of_a_wipe_and_the_struck_one_loses_rows_and_states() -> None:
    shards = [
        Shard(ShardSpec("t", 0, 4, 0, 2, owner=1), torch.ones(4, 2), {"sum": torch.ones(4)}),
        Shard(ShardSpec("dp", 0, 4, 0, 2, owner=1, replicated=True), torch.ones(4, 2)),
    ]
    events: list[dict[str, Any]] = []
    for rank, lost in ((0, False), (1, True)):
        injector = on_rank(FaultInjector().wipe(1, 5), rank)
        injector.connect(lambda event, **told: events.append({"event": event, **told}), lambda: shards)
        injector.on_train_batch_end(trainer_at(5))
        assert (injector.take_wiped(), injector.take_wiped()) == ([1], [])
        assert bool((shards[0].weight >= 1000).all()) is lost
        assert bool((shards[0].states["sum"] >= 1000).all()) is lost
    assert torch.equal(shards[1].weight, torch.ones(4, 2))
    assert events == [{"event": "fault", "kind": "wipe", "step": 5, "point": "batch_end"}]


def test_a_wipe_that_no_callback_or_several_could_restore_is_refused_on_every_rank() -> None:
    for rank in (0, 1):
        for connected in (False, True):
            injector = on_rank(FaultInjector([Fault("kill", 0, 9)]), rank)
            if connected:  # as each of two callbacks does
                injector.connect(lambda *_, **__: None, None)
            injector.on_train_start(trainer_at(0), None)  # type: ignore[arg-type]
            injector.wipe(1, 5)
            with pytest.raises(ConfigError, match="exactly one CPRCallback"):
                injector.on_train_start(trainer_at(0), None)  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match="exactly one CPRCallback"):
                injector.on_train_batch_end(trainer_at(5))
            assert injector.fired == []


def test_storage_faults_strike_the_first_file_of_their_save() -> None:
    data = bytes(range(16))
    injector = on_rank(FaultInjector().torn_write(0, 5).bit_flip(0, 6).disk_full(0, 7), 0)
    assert injector.intercept("chunks/a", [data]) == [data]
    injector.at_point("pre_write", 5)
    assert injector.intercept("events.jsonl", [data]) == [data]
    assert injector.intercept("chunks/a", [data[:4], data[4:]]) == [data[:8]]
    assert injector.intercept("chunks/b", [data]) == [data]
    injector.at_point("pre_write", 6)
    (flipped,) = injector.intercept("chunks/a", [data])
    assert sum(bin(a ^ b).count("1") for a, b in zip(bytes(flipped), data, strict=True)) == 1
    injector.at_point("pre_write", 7)
    with pytest.raises(OSError, match="No space left") as caught:
        injector.intercept("chunks/a", [data])
    assert caught.value.errno == errno.ENOSPC
    assert [f.kind for f in injector.fired] == ["torn_write", "bit_flip", "disk_full"]


def test_from_yaml() -> None:
    parser = ArgumentParser()
    parser.add_subclass_arguments(FaultInjector, "injector")
    text = """
injector:
  class_path: lightning_cpr.FaultInjector
  init_args:
    faults: [{kind: wipe, rank: 1, step: 20}, {kind: kill, rank: 0, step: 30, point: pre_commit}]
    random: {mtbf_steps: 500, distribution: gamma, shape: 2.0}
"""
    injector = parser.instantiate_classes(parser.parse_string(text)).injector
    assert injector.faults == [Fault("wipe", 1, 20), Fault("kill", 0, 30, "pre_commit")]
    assert injector.random == RandomFaults(500, "gamma", 2.0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda injector: pickle.loads(pickle.dumps(injector))])
def test_a_copy_has_the_schedule_and_fires_it(copied: Any) -> None:
    injector = FaultInjector().slow(0, 3, 0.0).kill(rank=1, step=5)
    injector.connect(lambda *_, **__: None, list)
    twin = copied(injector)
    assert twin.faults == injector.faults
    twin.at_point("pre_write", 3)
    assert bytes(twin.intercept("chunk", [b"rows"])[0]) == b"rows"
    assert (twin.count("slow"), injector.count("slow")) == (1, 0)


@pytest.mark.parametrize(("attempt", "wiped"), [("0", [1]), ("1", [])])
def test_a_restarted_job_is_not_wiped_again(attempt: str, wiped: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
    injector = FaultInjector().wipe(rank=1, step=3)
    injector.connect(lambda *_, **__: None, list)
    trainer: Any = SimpleNamespace(fit_loop=SimpleNamespace(total_batch_idx=2))
    injector.on_train_batch_end(trainer)
    assert injector.take_wiped() == wiped


def test_parity_from_yaml() -> None:
    parser = ArgumentParser()
    parser.add_subclass_arguments(CPRCallback, "callback")
    text = """
callback:
  class_path: lightning_cpr.CPRCallback
  init_args: {root: somewhere, parity: {k: 8, m: 2, every_n_steps: 4}}
"""
    callback = parser.instantiate_classes(parser.parse_string(text)).callback
    assert callback.settings.parity == ParityConfig(k=8, m=2, every_n_steps=4)
