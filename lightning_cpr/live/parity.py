"""Parity in a running Trainer: which rows a step is about to change, when exchanges are due, and what is reported.

Rows are kept by a thread, from their lookup on; the backward of the batch waits for it where it reaches that lookup,
which is right before fbgemm updates them. An exchange is due at the end of a step: inside the strategy's step where a
lost process is replaced in place (`live.step_back`), else in ``on_train_batch_end``, before the callbacks of the user.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from lightning_cpr._lightning import Callback, pl
from lightning_cpr.errors import RecoveryError
from lightning_cpr.faults import FaultInjector
from lightning_cpr.job.job import Job
from lightning_cpr.job.samples import batch_size, batches_trained
from lightning_cpr.live.parity_report import ParityReport
from lightning_cpr.live.rows_behind import RowsBehind, may_come_behind
from lightning_cpr.recovery.election import LostPeerError
from lightning_cpr.recovery.parity.agree import RankState, agree
from lightning_cpr.recovery.parity.ahead import Coming
from lightning_cpr.recovery.parity.channel import Channel, open_channel
from lightning_cpr.recovery.parity.config import ParityConfig
from lightning_cpr.recovery.parity.degraded import REFUSED
from lightning_cpr.recovery.parity.exchanges import Point
from lightning_cpr.recovery.parity.keeper import ParityKeeper
from lightning_cpr.recovery.plan import Source
from lightning_cpr.spec import ShardSpec
from lightning_cpr.tables.lookup import Looked, LookupHook, Then, by_shard

log = logging.getLogger(__name__)


class ParityGuard(Callback):
    """One rank's parity in one fit: a `live.step_back.StepGuard`, and a source of rows for recoveries.

    Args:
        samples: trained so far, over all ranks, without the batch in progress.
        emit: writes an event.
        counts: the callback's, of which ``parity_mismatches`` and ``parity_refused`` are counted here.
        timeout_s: the longest wait for the other ranks.
    """

    def __init__(
        self,
        config: ParityConfig,
        samples: Callable[[], int],
        emit: Callable[..., Any],
        counts: dict[str, int],
        timeout_s: float,
    ) -> None:
        self.config = config
        self._samples = samples
        self._emit = emit
        self._counts = counts
        self._timeout_s = timeout_s
        self._keeper: ParityKeeper | None = None
        self._hook: LookupHook | None = None
        self._hosts: list[str] = []
        self._dense: list[ShardSpec] = []
        self._prefix = ""
        self._channels = 0
        self._batch = (0, 0)  # the step in progress, its samples
        self._restart = ""
        self._report = ParityReport(emit, self._numbers)
        self._replaced = False  # a process was, in the recovery under way
        self._whole = True  # as far as the keeper of before knew
        self._behind: RowsBehind | None = None

    @property
    def active(self) -> bool:
        """Whether this rank keeps parity at all: it never began, or broke for good, where not."""
        return self._keeper is not None

    @property
    def protected(self) -> bool:
        """Whether a lost shard would come back."""
        return self._keeper is not None and self._keeper.protected

    @property
    def memory_bytes(self) -> int:
        """Host memory that parity takes of this rank."""
        return 0 if self._keeper is None else self._keeper.memory_bytes

    @property
    def whole(self) -> bool:
        """Whether this rank holds all its rows: not while they come back behind the training."""
        return self._whole if self._keeper is None else self._keeper.whole

    # Set-up

    def start(self, job: Job, injector: FaultInjector | None, prefix: str, step: int) -> None:
        """Begin to protect the job's shards as they are now. Collective.

        Args:
            prefix: of the keys of this epoch's channels, never used before.

        Raises:
            ConfigError: parity is not possible with so few ranks.
        """
        self._job, self._injector = job, injector
        hosts: list[str] = [""] * job.world_size
        dist.all_gather_object(hosts, f"{socket.gethostname()}/{job.trainer.node_rank}")
        self._renew(prefix, hosts)
        self._begin(step, "the run begins")

    def rejoin(self, job: Job, injector: FaultInjector | None, prefix: str, donor: int, lost: bool) -> None:
        """After a live recovery's group stands: take part in the new epoch; a replacement makes its keeper. Collective.

        Rows come back by `bring_back`, or from elsewhere; then `restart`.
        """
        self._job, self._injector = job, injector
        told: list[Any] = [self._hosts if self.active else None]
        dist.broadcast_object_list(told, src=donor)
        if told[0] is None:
            self._drop()
        elif lost:
            self._renew(prefix, told[0])
        self._prefix, self._channels, self._replaced = prefix, 0, True
        live = job.trainer.strategy.live  # type: ignore[attr-defined]
        if live is not None:
            live.guard = self if self.active else None

    def new_epoch(self, prefix: str) -> None:
        """A recovery among living ranks begins."""
        self._prefix, self._channels, self._replaced = prefix, 0, False

    def restart(self, step: int, reason: str) -> None:
        """Rows were changed by other means than steps: encode them anew. At the same step on every rank."""
        if self.active:
            self._begin(step, reason)

    def restart_after_step(self, reason: str) -> None:
        """`restart` at the end of the step in progress. On every rank."""
        self._restart = reason

    def _renew(self, prefix: str, hosts: Sequence[str]) -> None:
        """A keeper of the shards of now."""
        self._drop()
        job = self._job
        self._prefix, self._channels, self._hosts = prefix, 0, list(hosts)
        self._keeper = ParityKeeper(
            self.config, job.shards, job.specs, job.plan, hosts, job.rank, self._open_channel, self._probe
        )
        self._dense = [s.spec for s in job.shards if not s.spec.replicated and not job.specs[s.spec.table].row_sparse]
        self._hook = LookupHook(job.module, self._look)

    def _begin(self, step: int, reason: str) -> None:
        keeper, self._restart = self._required, ""
        self._report.begin()
        keeper.start(step, self._samples())
        self._touch_dense()
        self._tell(step, reason)
        live = self._job.trainer.strategy.live  # type: ignore[attr-defined]
        if live is not None and live.enabled:
            live.guard = self

    @property
    def _required(self) -> ParityKeeper:
        if self._keeper is None:
            raise RecoveryError("parity is not running on this rank")
        return self._keeper

    def _open_channel(self) -> Channel:
        self._channels += 1
        store = dist.PrefixStore(f"{self._prefix}/{self._channels}", self._job.kv)  # type: ignore[arg-type]
        return open_channel(store, self._job.rank, self._job.world_size, timedelta(seconds=self._timeout_s))

    def _probe(self, point: str, exchange: int) -> None:
        if self._injector is not None and self._keeper is not None:
            self._injector.at_point(f"exchange_{point}", self._keeper.step_of(exchange))

    def _drop(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            self._whole = keeper.whole
            self._note_refusal(keeper)
            keeper.abort()
            keeper.close()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._behind is not None:
            self._behind.remove()
            self._behind = None

    # Upkeep

    def _look(self, looked: Looked) -> Then | None:
        if self._keeper is None or not looked.total:
            return None
        coming = self._keeper.look_ahead(looked.values, lambda: ((spec, ids) for spec, ids, _ in by_shard([looked])))
        return partial(self._touch, coming)

    def _touch(self, coming: Coming) -> None:
        if self._keeper is None:
            return
        try:
            self._keeper.before_step(coming)
        except RecoveryError as error:
            if self._in_place:
                raise
            self._give_up(batches_trained(self._job.trainer), error)

    def _touch_dense(self) -> None:
        """Tables whose steps may change any row."""
        if self._keeper is not None and self._dense:
            self._keeper.before_step(dict.fromkeys(self._dense))

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._keeper is None:
            return
        step = batches_trained(trainer)
        self._batch = (step + 1, batch_size(batch) * trainer.world_size)
        if self._hook is not None and not self._hook.intact():
            # A reshard: on every rank, between two steps. The shards of before are no more.
            if self._keeper.degraded is not None:
                self._whole = False
                raise RecoveryError(
                    "the tables were sharded anew before all rows of a replacement were back: they hold what no "
                    "training made. The job starts again. Call CPRCallback.wait_for_rows() on all ranks first"
                )
            self._job.refresh()
            self._renew(f"{self._prefix}/{step}", self._hosts)
            self._begin(step, "the tables were sharded anew")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Where no process is replaced in place; the strategy's step has done it there."""
        if self._keeper is None:
            return
        try:
            if not self._in_place:
                self.end_step(batches_trained(trainer))
            if self._injector is not None:  # a wipe takes rows that are here, and whose exchange has read them
                self._keeper.let_rows_change()
                if self._injector.wipes_due(trainer):
                    self._keeper.wait_for_rows()
            if trainer.is_last_batch:
                self._keeper.wait_for_rows()
        except RecoveryError as error:
            if self._in_place:
                raise
            self._give_up(batches_trained(trainer), error)

    @property
    def _in_place(self) -> bool:
        """Whether a lost process is replaced in place, for which the strategy's step ends exchanges."""
        live = self._job.trainer.strategy.live  # type: ignore[attr-defined]
        return live is not None and bool(live.enabled)

    def _give_up(self, step: int, error: RecoveryError) -> None:
        """Go on without parity. The job's own collectives will tell whether a rank is gone."""
        self._counts["parity_broken"] += 1
        log.error("parity is off from here on: %s", error)
        self._drop()
        self._tell(step, str(error))

    def end_step(self, step: int) -> None:
        keeper = self._required
        keeper.after_step(step, self._samples_after(step))
        progress = self._job.trainer.fit_loop.epoch_loop.batch_progress
        module = self._job.module
        if progress.is_last_batch or not module.automatic_optimization:
            # A batch that the loop has left can be run again only within its epoch, and by its closure.
            keeper.join()
        found = keeper.mismatches
        if found:
            self._counts["parity_mismatches"] += found
            self._emit("parity_mismatch", step=step, pieces=found, parity_mismatches=self._counts["parity_mismatches"])
        if found or self._restart:
            self._begin(step, self._restart or f"{found} pieces did not match their members")
        self._touch_dense()
        if self._behind is not None and self._behind.ended(step):
            self._behind = None
        self._tell(step, "")
        self._report.log(self._job.trainer, step)

    def _samples_after(self, step: int) -> int:
        current, size = self._batch
        return self._samples() + (size if step == current else 0)

    # Failure

    def hold(self) -> tuple[RankState, dict[int, int]] | None:
        if self._keeper is None:
            return None
        state, steps = self._keeper.hold()
        self._note_refusal(self._keeper)
        if not self._keeper.whole:
            rank = self._job.rank
            raise RecoveryError(f"another process was lost before all rows of rank {rank}, a replacement, were back")
        return None if self.config.every_n_steps > 1 else (state, steps)

    def go_back(self, exchange: int) -> None:
        self._required.stand_at(exchange)
        self._touch_dense()

    def wait_for_rows(self) -> None:
        if self._keeper is not None:
            self._keeper.wait_for_rows()

    def abort(self) -> None:
        if self._keeper is not None:
            self._keeper.abort()

    def offer(self, failed: Sequence[int]) -> Source | None:
        """What parity could bring the failed ranks' shards back to. Collective; None on all ranks or on none."""
        if not self.active:
            return None
        try:
            self._required.join()
        except RecoveryError as error:  # a process died: the exchange is broken off, and agreed on below
            log.warning("parity: %s", error)
        state, points = self._required.standing()
        everybody: list[Any] = [None] * self._job.world_size
        dist.all_gather_object(everybody, (state, points))
        exchange = agree([told for told, _ in everybody], failed).exchange
        survivor = next(rank for rank in range(self._job.world_size) if rank not in failed)
        point: Point = everybody[survivor][1][exchange]
        return Source("parity", f"exchange {exchange}", point.step, point.samples, exact=True)

    def bring_back(self, failed: Sequence[int]) -> tuple[int, int]:
        """Rebuild the failed ranks' shards: (rows, bytes) of this rank. Collective.

        Those of a replacement may come back behind the training: rows count at once, bytes do not.

        Raises:
            LostPeerError: another rank is gone.
            RecoveryError: on all ranks: parity cannot, or its content is refused. Restore from the store, then
                `restart`.
        """
        keeper = self._required
        try:
            rebuilt = keeper.rebuild(failed, behind=self._replaced and may_come_behind(self._job, keeper, failed))
        except LostPeerError:
            keeper.abort()  # wakes the ranks that wait for this one
            raise
        except RecoveryError as error:
            self._refuse(error, failed=list(failed))
            raise
        self._touch_dense()
        if keeper.degraded is not None:
            self._behind = RowsBehind(self._job, keeper, keeper.degraded, self._emit, rebuilt.point.step, failed)
        self._tell(rebuilt.point.step, "lost parity is encoded anew")
        return sum(spec.rows for spec in rebuilt.restored), rebuilt.nbytes

    def _refuse(self, error: RecoveryError, **told: Any) -> None:
        self._counts["parity_refused"] += 1
        log.error("parity is not used: %s", error)
        self._emit("parity_refused", **told, error=str(error))

    def _note_refusal(self, keeper: ParityKeeper) -> None:
        """Once, if rows that were to come back behind the training were refused."""
        if keeper.degraded is not None and keeper.degraded.refused:
            keeper.degraded.refused = False
            self._refuse(RecoveryError(REFUSED))

    # Reports

    def _tell(self, step: int, reason: str) -> None:
        self._report.protection(self.protected, step, reason)

    def _numbers(self) -> dict[str, float]:
        return {} if self._keeper is None else self._keeper.metrics()

    def unhidden_s(self) -> float:
        """Seconds that steps were longer for parity, since it was encoded last."""
        return self._numbers().get("unhidden_s", 0.0)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._keeper is None:
            return
        if not trainer.interrupted:
            try:
                self._keeper.join()
            except LostPeerError as error:
                if self._keeper.degraded is not None:  # rows are missing
                    raise
                log.warning("parity: %s", error)  # training is over: nothing is left to protect
            self._emit("parity_summary", step=batches_trained(trainer), **self._numbers())
        self.close(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.close(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.close(trainer)

    def close(self, trainer: pl.Trainer) -> None:
        """End the exchange under way and the thread. The other ranks may be gone."""
        live = getattr(trainer.strategy, "live", None)
        if live is not None and live.guard is self:
            live.guard = None
        self._drop()
