"""What a version made of handed-over rows says: how complete it is, what is charged, rates and counters, the place."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_cpr._lightning import pl
from lightning_cpr.job.reshard import charge_lost, complete_steps, scalars_now
from lightning_cpr.job.state import end_of_batch, to_plain
from lightning_cpr.policy.ledger import Charge, Ledger, Loss
from lightning_cpr.recovery.election import Decision
from lightning_cpr.recovery.handover import Offer, Take
from lightning_cpr.recovery.stash import Key, Stash
from lightning_cpr.spec import ShardSpec
from lightning_cpr.store.manifest import Manifest, ShardRecord

LEFT, RIGHT = ShardSpec("t", 0, 50, 0, 8, owner=0), ShardSpec("t", 50, 50, 0, 8, owner=1)
NONE, COPIED = ShardSpec("u", 0, 0, 0, 8, owner=1), ShardSpec("v", 0, 3, 0, 4, owner=1, replicated=True)
PLAN = [LEFT, RIGHT, NONE, COPIED]


def take(lost: tuple[int, ...], steps: dict[int, int]) -> Take:
    key = Key("run", "config", "plan", "agent")
    offers = {o: Offer("a", Stash(key, 2, "x", 2, o, 7, step, (), (0, 0, ""))) for o, step in steps.items()}
    return Take(Decision(max(steps.values()), 0, lost, ()), offers, {}, True)


def version(*shards: ShardRecord) -> Manifest:
    """Of step 20, 200 samples, mixed since the exact step 16, 150 samples."""
    return Manifest(
        "run", "v", 1, 20, 200, "delta", "mixed", 2, 0.0, "", "", (), shards, (), (), {"chain": {"exact": [16, 150]}}
    )


def test_each_shard_is_as_complete_as_its_source() -> None:
    # The newest version has another plan still: the lost shard is as complete as the oldest of those it was in.
    columns = [ShardSpec("t", 0, 100, 0, 4, owner=0), ShardSpec("t", 0, 100, 4, 4, owner=1)]
    parent = version(ShardRecord(columns[0], 18), ShardRecord(columns[1], 16), ShardRecord(COPIED, 20))
    assert complete_steps(PLAN, take((1,), {0: 23}), parent) == {LEFT: 23, RIGHT: 16, NONE: 20, COPIED: 23}
    apart = version(ShardRecord(ShardSpec("t", 0, 50, 0, 8, owner=3), 7), ShardRecord(RIGHT, 19))
    assert complete_steps(PLAN, take((1,), {0: 23}), apart)[RIGHT] == 19
    assert complete_steps(PLAN, take((), {0: 23, 1: 22}), apart) == {LEFT: 23, RIGHT: 22, NONE: 22, COPIED: 23}


def test_the_lost_owners_alone_are_charged_and_nobody_twice() -> None:
    ledger = Ledger(800)
    complete = {LEFT: 23, RIGHT: 16, NONE: 20, COPIED: 23}
    assert charge_lost(ledger, 230, version(), complete, [], 3) == (ledger, None)
    after, event = charge_lost(ledger, 230, version(), complete, [1], 3)
    assert event == Charge(230, (Loss(0, 0, 230), Loss(1, 400, 150), Loss(2, 0, 230)))
    assert after.lost == 400 * (230 - 150)
    # Whatever the new ranks lose next is counted from here.
    assert [after.last_recovery(rank) for rank in range(3)] == [230] * 3


def test_tables_that_shared_their_rates_have_the_donors() -> None:
    """The donor has "a"; "b", "c" and "d" are lost; a survivor a step of the schedule behind has "e", "f"."""
    saved = {"a": {"iter": 20, "lr": 0.1}, "b": {"iter": 19, "lr": 0.1}, "c": {"iter": 20, "lr": 0.5}, "d": {}}
    saved |= {"e": {"iter": 20, "lr": 0.1}, "f": {"iter": 20, "lr": 0.9}}
    known = {"a": {"iter": 23, "lr": 0.07}, "e": {"iter": 22, "lr": 0.08}, "f": {"iter": 22, "lr": 0.8}}
    assert scalars_now(saved, known, {"a"}, 3) == {
        "a": {"iter": 23, "lr": 0.07},
        "b": {"iter": 22, "lr": 0.07},
        "c": {"iter": 23, "lr": 0.5},
        "d": {},
        "e": {"iter": 22, "lr": 0.07},
        "f": {"iter": 22, "lr": 0.8},
    }


BATCHES = 5


class Loops:
    """The loops of a Trainer that trains, by hand: what Lightning counts when."""

    def __init__(self) -> None:
        trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
        self.fit = trainer.fit_loop
        self.progress = self.fit.epoch_loop.batch_progress
        self.optimizer = self.fit.epoch_loop.automatic_optimization.optim_progress.optimizer
        self.fit.epoch_progress.increment_ready()
        self.fit.epoch_progress.increment_started()

    def begin(self, last: bool = False) -> None:
        self.progress.is_last_batch = last
        self.progress.increment_ready()
        self.progress.increment_started()
        self.optimizer.step.increment_ready()
        self.optimizer.zero_grad.increment_ready()
        self.optimizer.zero_grad.increment_started()

    def train(self) -> None:
        self.optimizer.zero_grad.increment_completed()
        self.optimizer.step.increment_completed()
        self.progress.increment_processed()

    def end(self) -> None:
        self.progress.increment_completed()
        self.fit.epoch_loop._batches_that_stepped += 1

    def next_epoch(self) -> None:
        self.fit.epoch_progress.increment_processed()
        self.fit.epoch_progress.increment_completed()
        self.fit.epoch_progress.increment_ready()
        self.fit.epoch_progress.increment_started()
        for progress in (self.progress, self.optimizer):
            progress.reset_on_run()

    @property
    def state(self) -> dict[str, Any]:
        return to_plain({"fit_loop": self.fit.state_dict()})


def trained(batches: int) -> Loops:
    loops = Loops()
    for batch in range(batches):
        loops.begin()
        loops.train()
        if batch < batches - 1:
            loops.end()
    return loops


@pytest.mark.parametrize("where", ["after its hooks", "between", "in the next", "in the epoch's last"])
def test_the_place_inside_a_batch_becomes_the_end_of_the_one_before(where: str) -> None:
    loops = trained(BATCHES)
    saved = loops.state
    if where != "after its hooks":
        loops.end()
    if where.startswith("in"):
        loops.begin(last=where == "in the epoch's last")
    told = loops.state
    end_of_batch(told)
    assert told == saved


def test_the_place_in_an_epochs_first_batch_becomes_the_epochs_start() -> None:
    loops = trained(BATCHES)
    loops.end()
    loops.next_epoch()
    start = loops.state
    loops.begin()
    told = loops.state
    end_of_batch(told)
    assert told == start


def test_the_place_at_an_epochs_end_stays() -> None:
    loops = trained(BATCHES - 1)
    loops.end()
    loops.begin(last=True)
    loops.train()
    for _ in range(2):  # at the batch's end, at the epoch's end
        told = loops.state
        end_of_batch(told)
        assert told == loops.state
        loops.end()
