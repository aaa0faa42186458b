"""The saves of a running job: announced when they are due, begun, and what became of them."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable

from lightning_cpr._lightning import pl
from lightning_cpr.errors import CommitError, CPRError
from lightning_cpr.job.job import Job
from lightning_cpr.policy.due import Due, Moment, due
from lightning_cpr.policy.ledger import Ledger
from lightning_cpr.recovery.election import LostPeerError
from lightning_cpr.saving.chain import next_content
from lightning_cpr.saving.compaction import Finished
from lightning_cpr.saving.controller import Controller
from lightning_cpr.saving.saver import BackgroundSaves, Committed, Progress, SavePlan
from lightning_cpr.saving.settings import Settings

log = logging.getLogger(__name__)

_LOOK_S = 0.25
RETRY_S = 300.0
"""After the first failure; four times as long after each further one."""


class SaveCycle:
    """One callback's saves on one rank. Rank 0 decides, by its controller; the others do what it announces.

    counts: of the callback, counted up here. emit: writes an event. started: when training began, by
    ``time.monotonic()``. closed: when the newest save that closed a cycle was taken. saved_step: of the newest save
    that holds all rows of a step, -1 if there is none.
    """

    def __init__(
        self,
        settings: Settings,
        job: Job,
        saves: BackgroundSaves,
        controller: Controller,
        emit: Callable[..., None],
        counts: dict[str, int],
        started: float,
    ) -> None:
        self._settings, self._job, self.saves, self._controller = settings, job, saves, controller
        self._emit, self._counts, self.started = emit, counts, started
        self.closed: Moment | None = None
        self._prioritised: Moment | None = None
        self.saved_step = -1
        self._stall = 0.0  # since the last version that is exact
        self._writes_priority = False  # the newest save begun
        self._failed_at: float | None = None  # since no save was begun

    def now(self, step: int) -> Moment:
        return Moment(step, time.monotonic() - self.started)

    def reset(self, step: int, rewound: bool) -> None:
        """A recovery has changed rows; the next save cannot be left out. rewound: all went back to ``step``."""
        self.saved_step, self._stall = -1, 0.0
        if rewound:
            self.closed = self._prioritised = self.now(step)

    def bits(self, base: bool) -> int | None:
        """Per weight of the next save, by rank 0's word."""
        return self._controller.bits(base) if self._job.rank == 0 else None

    def announce_next(self, step: int, epoch: int) -> None:
        """Rank 0: what all do at the end of the next batch, ``step``."""
        if self.saves.failed_in_a_row >= self._settings.max_failed_saves:
            cause = f"{self.saves.failed_in_a_row} saves in a row failed, the first with: {self.saves.first_failure}"
            self.saves.announce(SavePlan(step, "", stop=cause), epoch)
            return
        now = self.now(step)
        what = due(self._controller.schedule, now, self.closed, self._prioritised) or self._again()
        if what is None:
            return
        if self.saves.busy:
            if what != "priority" and self._writes_priority:
                return  # it stays due, and begins when that one has ended: else no cycle might ever be closed
            self._note(what == "priority", now)
            self._counts["skipped"] += 1
            self._emit("save_skipped", step=step, due=what, skipped=self._counts["skipped"])
        else:
            nonce = f"{self._job.incarnation}-{step}-{self._counts['commits']}"
            self.saves.announce(self._plan(step, nonce, what), epoch)

    def _again(self) -> Due | None:
        """A save that failed is made up for after a while, and not only when the next one is due."""
        wait = RETRY_S * 4 ** (self.saves.failed_in_a_row - 1)
        return "close" if self._failed_at is not None and time.monotonic() >= self._failed_at + wait else None

    def _plan(self, step: int, nonce: str, what: Due) -> SavePlan:
        """Rank 0: what a save of this step holds. After two failures in a row it builds on nothing that may be gone."""
        chain, settings = self.saves.chain, self._settings
        rebase = self.saves.failed_in_a_row >= 2
        content = next_content(chain, what, settings.incremental, settings.exact_close, rebase)
        return SavePlan(step, nonce, content, chain.version, self.bits(content.kind == "base"))

    def _note(self, priority: bool, at: Moment) -> None:
        if priority:
            self._prioritised = at
        else:
            self.closed = at

    def do_announced(self, trainer: pl.Trainer, at: Progress, epoch: int, ledger: Ledger) -> None:
        """Begin the save that was announced for this step, if one was.

        Raises:
            CommitError: too many saves have failed in a row; holds the first cause.
        """
        self.take(self.saves.poll())
        self.take_compaction(self.saves.poll_compaction())
        self.saves.count_batch()
        plan = self.saves.announced(at.step, epoch)
        if plan is None:
            return
        if plan.stop:
            raise CommitError(plan.stop)
        if trainer.fit_loop.epoch_loop._should_accumulate():
            return  # inside a window there are gradients that no version holds; it stays due
        if self.saves.busy:
            # Rank 0 saw its save committed before it announced this one; this rank's thread needs an instant more.
            self.take(self.saves.poll(self._settings.timeout_s))
        self.start(trainer, plan, at, ledger)

    def start(self, trainer: pl.Trainer, plan: SavePlan, at: Progress, ledger: Ledger) -> None:
        """Stage the save of a plan and let it be written behind training."""
        started = time.monotonic()
        self._failed_at, self._writes_priority = None, plan.content.rows == "priority"
        self._watch_lookups(plan, at.step)
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        planner = self._controller.state.to_json() if self._job.rank == 0 else None
        self.saves.start(plan, at, checkpoint, planner, ledger.to_json())
        stall = time.monotonic() - started
        content, exact_close = plan.content, self._settings.exact_close
        if content.consistency == "exact" or not exact_close:
            self.saved_step = at.step
        self._note(content.rows == "priority" and exact_close, self.now(at.step))
        self._stall += stall
        self._controller.stood_still(stall)
        self._emit(
            "save_started", step=at.step, kind=content.kind, consistency=content.consistency, rows=content.rows,
            bits=plan.bits, stall_s=round(stall, 6),
        )  # fmt: skip

    def _watch_lookups(self, plan: SavePlan, step: int) -> None:
        tracker = self.saves.tracker
        lost = tracker.hooks_lost()
        if not lost:
            return
        self._job.refresh()
        tracker.settle(plan.committed)
        tracker.adopt(self._job.owned)
        self._counts["hooks_lost"] += 1
        log.warning("the lookups of %s were replaced: all rows count as changed", ", ".join(lost))
        self._emit("hooks_lost", step=step, tables=lost, hooks_lost=self._counts["hooks_lost"])

    def take(self, outcome: Committed | CPRError | None) -> None:
        """Count and report what became of a save."""
        if isinstance(outcome, Committed):
            self._counts["commits"] += 1
            manifest = outcome.manifest
            if manifest is None:
                return
            own = f"/{manifest.version}/"
            self._emit(
                "save_committed", step=manifest.step, epoch=manifest.epoch, version=manifest.version,
                kind=manifest.kind, consistency=manifest.consistency, samples=manifest.samples,
                bytes=sum(f.bytes for f in manifest.stored if own in f.path),
                rows=sum(f.rows for f in manifest.files if own in f.path),
                raw_rows=outcome.report.part.raw_rows, seconds=round(outcome.report.seconds, 6),
            )  # fmt: skip
            if manifest.consistency == "exact":
                self._controller.saved(self._stall)
                self._stall = 0.0
        elif outcome is not None:
            self._counts["failed"] += 1
            self.saved_step, self._failed_at = -1, time.monotonic()
            log.error("a save failed, training goes on: %s", outcome)
            self._emit("save_failed", error=str(outcome).partition("\n")[0], failed=self._counts["failed"])

    def take_compaction(self, outcome: Finished | CPRError | None) -> None:
        """Count and report what became of a compaction."""
        if isinstance(outcome, Finished):
            done = outcome.compaction
            self._counts["compactions"] += 1
            self._emit(
                "compacted", step=done.manifest.step, version=done.manifest.version, bytes=done.bytes_written,
                bytes_read=done.bytes_read, rows=done.rows_copied, before=round(outcome.before, 4),
                after=round(outcome.after, 4), seconds=round(outcome.seconds, 6),
            )  # fmt: skip
        elif outcome is not None:
            self._counts["compactions_failed"] += 1
            log.error("a compaction failed, the chain stays long: %s", outcome)
            self._emit(
                "compaction_failed", error=str(outcome).partition("\n")[0], failed=self._counts["compactions_failed"]
            )

    def wait(self) -> None:
        """Until the save in flight stands or has failed."""
        if self.saves.busy:
            self.take(self._outcome(self._settings.timeout_s))

    def _outcome(self, timeout_s: float) -> Committed | CPRError | None:
        """Of the save in flight; None if it has not ended in time.

        Raises:
            LostPeerError: a rank of it is gone.
        """
        deadline = time.monotonic() + timeout_s
        while (outcome := self.saves.poll(_LOOK_S)) is None and self.saves.busy and time.monotonic() < deadline:
            if self._job.lost_peer:
                raise LostPeerError("a rank was lost while the others waited for a save")
        return outcome

    def flush(self, trainer: pl.Trainer, at: Progress, ledger: Ledger) -> None:
        """Save what is not saved yet, and wait until it is committed. A collective.

        Raises:
            CommitError: it failed, or has not ended in time.
            LostPeerError: a rank of it is gone.
        """
        self.wait()
        # By rank 0's word: of a failed commit the others may know or not.
        if not self._job.broadcast(at.step != self.saved_step):
            return
        nonce = f"{self._job.incarnation}-end{secrets.token_hex(4)}"
        self.start(trainer, self._job.from_rank_0(lambda: self._plan(at.step, nonce, "close")), at, ledger)
        # The save gives up by itself after as long; a moment more, so that its own error is seen.
        outcome = self._outcome(self._settings.timeout_s + 1)
        self.take(outcome)
        if outcome is None:
            raise CommitError(f"the last save, of step {at.step}, has not ended after {self._settings.timeout_s:g} s")
        if isinstance(outcome, CPRError):
            raise outcome
