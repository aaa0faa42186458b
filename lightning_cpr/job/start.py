"""How one callback's job starts: it goes on with what the processes before it left in shared memory, or from a version,
or it begins a run.

`Start.look` comes before Lightning restores anything, `Start.loads` when it restores, `Start.begin` when training
starts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from typing import Any

from lightning_cpr._lightning import pl
from lightning_cpr.checkpoint_io import VERSION_KEY, Version
from lightning_cpr.errors import CPRError
from lightning_cpr.job.handover import Taken, take_over
from lightning_cpr.job.job import Job
from lightning_cpr.job.reshard import Resharded, save_version
from lightning_cpr.job.root import Found, find_run, has_newer, is_version_of, rename_state, resume_from, take_up
from lightning_cpr.job.run import Run
from lightning_cpr.job.samples import batches_trained
from lightning_cpr.live.coordinator import RecoveryCoordinator
from lightning_cpr.policy.due import Moment
from lightning_cpr.saving.saver import Progress, SavePlan
from lightning_cpr.saving.settings import Settings
from lightning_cpr.store.storage import Storage

log = logging.getLogger(__name__)


class Start:
    """One rank's, of one fit. On a replacement, which joins a run that goes on, only `loads` is called.

    emit: writes an event. state_key: of the callback in a checkpoint. hands_over: whether rows may come from the
    processes before these.
    """

    def __init__(
        self,
        settings: Settings,
        job: Job,
        storage: Storage,
        run: Run,
        recovery: RecoveryCoordinator,
        emit: Callable[..., None],
        state_key: str,
        hands_over: bool,
    ) -> None:
        self._settings, self._job, self._storage, self._run = settings, job, storage, run
        self._recovery, self._emit = recovery, emit
        self._state_key, self._hands_over = state_key, hands_over
        self._found = Found()
        self._taken: Taken | None = None
        self._resharded: Resharded | None = None

    def look(self, trainer: pl.Trainer) -> None:
        """Find out what there is to go on from, and have Lightning restore that. A collective."""
        job, storage, run, resume = self._job, self._storage, self._run, self._settings.resume
        self._found = job.from_rank_0(lambda: find_run(storage, run.id, resume))
        taken = None
        if self._hands_over:
            taken = take_over(trainer, job, storage, run.id, self._found.run_id, any_plan=resume == "reshard")
        if taken is not None and not taken.take.resharded:
            self._taken = taken
            trainer._checkpoint_connector._loaded_checkpoint = taken.checkpoint()
            return
        if taken is not None:
            self._reshard(taken)
        if self._found.path is not None:
            path = self._found.path if self._resharded is None else self._resharded.path
            resume_from(trainer, job, storage, path, self._state_key)

    def _reshard(self, taken: Taken) -> None:
        """Make a version of what a job of another plan left; where that fails the newest exact one serves."""
        job, timeout_s = self._job, self._settings.timeout_s
        try:
            with closing(taken):
                self._resharded = save_version(taken, job, self._storage, self._state_key, timeout_s)
        except CPRError as error:
            log.error("nothing is handed over, the job goes on from the store: %s", error)
            counts = self._run.counts
            counts["failed"] += 1
            self._emit("save_failed", error=str(error).partition("\n")[0], failed=counts["failed"])

    def loads(self, trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
        """Lightning restores from ``checkpoint``. A collective where rows were handed over."""
        rename_state(trainer, self._storage, self._state_key, checkpoint)
        if self._taken is None:
            return
        if checkpoint[VERSION_KEY] is None:
            self._taken.adopt()
        else:
            log.warning("a ckpt_path is given: the job goes back to it, what was handed over is not used")
            self._taken.close()
            self._taken = None

    def begin(self, trainer: pl.Trainer, loaded: Version | None) -> None:
        """Everything is restored, the rows from ``loaded``; take up the run that it came from, or begin one.

        A collective.

        Raises:
            ForeignRunError: what was found in the root is not to be gone on with.
            RecoveryError: rows that were not handed over do not come back.
        """
        own = loaded if is_version_of(self._storage, loaded) else None
        take_up(self._job, self._storage, self._run, self._found, own)
        self._recovery.start()
        if self._taken is not None:
            self._go_on(trainer, self._taken)
        else:
            self._go_from(trainer, loaded, own)
        self._taken, self._recovery.whole = None, True

    def _go_on(self, trainer: pl.Trainer, taken: Taken) -> None:
        """The rows of those that survived are here; the others' come from the newest version."""
        taken.stand(trainer)
        at, handed = Progress(taken.step, self._run.samples), sorted(taken.take.sources)
        self._recovery.controller.trained(at.samples, 0.0, None)
        self._emit_started(at, handed_over=handed)
        self._recovery.complete(trainer, list(taken.take.decision.lost), at, handed)
        self._recovery.protect(at.step)

    def _go_from(self, trainer: pl.Trainer, loaded: Version | None, own: Version | None) -> None:
        """The rows are those of ``loaded``; own: if that is a version of this root."""
        at = Progress(batches_trained(trainer), self._run.samples)
        self._recovery.controller.trained(at.samples, 0.0, None)
        for path in own.refused or () if own is not None else ():
            self._emit("version_refused", version=path, error="damaged")
        how: dict[str, Any] = {"resumed_from": loaded.name if loaded is not None else None}
        made = self._made(own)
        if made is not None:
            how |= {"handed_over": made.handed, "resharded": True}
        self._emit_started(at, **how)
        if made is not None:
            self._recovery.resharded(trainer, made, at)
        self._recovery.protect(at.step)
        if own is not None:
            self._build_on(own, at)
            if not self._job.from_rank_0(lambda: has_newer(self._storage, self._run.id.run_id, own)):
                return
        self._save_at_once(trainer, at)
        if own is not None:
            # Until it stands, the newest version is one of the future that this run has turned away from.
            self._recovery.cycle.wait()

    def _made(self, own: Version | None) -> Resharded | None:
        """The version that was made of what was handed over, if that is the one that was loaded."""
        made, self._resharded = self._resharded, None
        if made is None or (own is not None and own.manifest.path == made.path):
            return made
        log.warning("the job goes on from another version than the one made of what was handed over: %s", made.path)
        return None

    def _build_on(self, own: Version, at: Progress) -> None:
        """The next saves hold what changes from this version on."""
        manifest, cycle = own.manifest, self._recovery.cycle
        self._job.together(lambda: self._recovery.store.holds(manifest))
        cycle.saved_step = manifest.step if manifest.consistency == "exact" else -1
        cycle.closed = Moment(at.step, 0.0)

    def _save_at_once(self, trainer: pl.Trainer, at: Progress) -> None:
        """So that there is a version to recover from before the first interval is over."""
        job, cycle = self._job, self._recovery.cycle
        plan = SavePlan(at.step, f"{job.incarnation}-{at.step}", bits=job.broadcast(cycle.bits(True)))
        cycle.start(trainer, plan, at, self._run.ledger)

    def _emit_started(self, at: Progress, **how: Any) -> None:
        self._emit(
            "run_started", run_id=self._run.id.run_id, epoch=self._run.epoch, step=at.step, samples=at.samples,
            world_size=self._job.world_size, total_elements=self._run.ledger.total_elements, **how,
        )  # fmt: skip
