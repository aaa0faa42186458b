"""Parts of live recovery that need no second process."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_cpr import CPRCallback
from lightning_cpr.errors import ConfigError
from lightning_cpr.live import account
from lightning_cpr.live.batch import BatchStart
from lightning_cpr.live.early_read import EarlyRead
from lightning_cpr.live.state import why_not
from lightning_cpr.recovery.election import Decision, Holding
from lightning_cpr.recovery.guardian import modules_note, note_modules
from lightning_cpr.recovery.live import Recovery
from lightning_cpr.recovery.membership import Timeouts
from lightning_cpr.store.kv import LocalKeyValue
from lightning_cpr.store.storage import Storage
from tests.unit.store.test_reader import save_one, table


def fake_trainer(module: nn.Module) -> Any:
    loop = SimpleNamespace(_results={})
    return SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=loop), lightning_module=module)


class BrokenSync(MeanMetric):
    """The others are gone when it synchronises."""

    def _sync_dist(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Connection closed by peer")


def test_a_metric_whose_sync_broke_is_as_it_was_when_the_batch_began() -> None:
    metric = BrokenSync(dist_sync_on_step=True, distributed_available_fn=lambda: True)
    metric._to_sync = True
    metric.update(torch.tensor(3.0))
    start = BatchStart(fake_trainer(nn.ModuleList([metric])))
    drawn = torch.rand(3)
    with pytest.raises(RuntimeError, match="closed by peer"):
        metric(torch.tensor(5.0))
    start.put_back()
    metric._sync_dist = lambda *args, **kwargs: None  # type: ignore[method-assign]
    metric.update(torch.tensor(5.0))
    assert (float(metric.weight), metric._update_count) == (2.0, 2)
    assert metric.compute() == 4.0
    start.put_back()
    assert torch.equal(torch.rand(3), drawn)


def test_running_statistics_count_a_batch_once() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    before = {name: value.clone() for name, value in module.named_buffers()}
    start = BatchStart(fake_trainer(module))
    module(torch.rand(4, 3))
    assert not torch.equal(module[1].running_mean, before["1.running_mean"])
    start.put_back_dense()
    for name, value in module.named_buffers():
        assert torch.equal(value, before[name])


def test_a_stuck_rank_is_replaced_before_the_others_give_up() -> None:
    with pytest.raises(ConfigError, match="stuck rank"):
        Timeouts(announce=20, free=20).check()


def test_a_spare_is_told_what_can_be_imported(tmp_path: Path) -> None:
    note_modules(str(tmp_path), 3)
    names = json.loads(modules_note(str(tmp_path), 3).read_text())
    assert {"torch", "lightning_cpr.recovery.guardian", __name__} <= set(names)
    assert "__main__" not in names
    assert [p.name for p in tmp_path.iterdir()] == ["modules-3.json"]


def test_a_job_goes_on_without_a_spare_where_its_note_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """E.g. on a full disk."""
    note_modules(str(tmp_path / "gone"), 3)
    assert "rank 3 has no warm spare" in caplog.text


def test_what_was_read_ahead_counts_once_and_for_its_own_version_only(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    old = table("a", 200, 8)
    first = save_one(storage, [old], 1)

    def read() -> tuple[EarlyRead, Tensor]:
        shard = old.shard(0, 200, 0, 8, fill=7.0)
        return EarlyRead(storage, [shard]), shard.weight

    early, weight = read()
    report = early.take(first.path)
    assert report is not None
    assert report.bytes_read == first.files[0].bytes
    assert torch.equal(weight, old.weight)
    assert early.take(first.path) is None
    early, _ = read()
    assert early.take("manifests/another") is None
    assert early.take(first.path) is None


def test_the_phases_told_are_those_of_the_slowest_rank() -> None:
    holdings = (Holding(0, 10, 5), Holding(1, 11, None), Holding(2, 12, 4))
    decision = Decision(step=5, donor=0, lost=(1,), behind=(2,))
    seconds = [
        {"detect": 0.1, "meet": 1.0, "form": 0.2, "rebind": 0.1, "dense": 0.1, "restore": 2.0},
        {"start": 0.3, "build": 0.4, "meet": 0.0, "form": 0.2, "rebind": 0.1, "dense": 0.3, "restore": 1.0},
        {"detect": 0.2, "meet": 0.9, "form": 0.2, "rebind": 0.1, "dense": 0.1, "restore": 2.1},
    ]
    kv, died_at = LocalKeyValue(), account.time.time() - 10
    recoveries = [Recovery(1, rank, decision, holdings, seconds[rank], died_at=died_at) for rank in range(3)]
    told, *_ = [account.Rejoined(recovery, kv) for recovery in recoveries]
    assert (told.stepped(5), told.stepped(6)) == (False, True)
    fields = told.fields()
    assert fields.pop("first_step_s") < 10 <= fields.pop("total_s") < 20
    assert fields == {
        "detect_s": 0.2, "rendezvous_s": 1.2, "replacement_start_s": 0.3, "replacement_build_s": 0.4,
        "rebuild_s": 0.4, "restore_s": 2.1,
    }  # fmt: skip
    cut = account.Cut({0: 7, 2: 0}, {0: 80, 2: 64})
    recovery = Recovery(1, 0, decision, holdings, {})
    assert account.cut_fields(recovery, cut) == {
        "double_row_updates": 7, "left_out_by": [2], "missing_row_updates_by": [2]
    }  # fmt: skip
    assert account.skipped_samples(recovery, cut) == {2: 64}


def test_several_callbacks_that_save_are_not_recovered_in_place() -> None:
    hooks = [CPRCallback("one"), object(), CPRCallback("two")]
    assert "versions of its own: one, two" in why_not(
        cast(Any, SimpleNamespace(lightning_module=None)), torch.nn.Module(), hooks
    )
