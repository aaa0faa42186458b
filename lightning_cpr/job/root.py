"""The root of a callback when a job starts: which run lies there, may this job go on with it, and from where."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from lightning_cpr._lightning import pl, rank_zero_info
from lightning_cpr.checkpoint_io import VERSION_KEY, Version, load_sound
from lightning_cpr.errors import ForeignRunError
from lightning_cpr.job.job import Job
from lightning_cpr.job.run import Run
from lightning_cpr.policy.ledger import Ledger
from lightning_cpr.saving.saver import RunId
from lightning_cpr.saving.settings import Resume
from lightning_cpr.store.manifest import FOLDER, same_rows
from lightning_cpr.store.storage import Storage
from lightning_cpr.store.versions import fence, load_manifest, newest, newest_epoch


@dataclass(frozen=True)
class Found:
    """path: of the manifest to resume from. run_id: of the run to go on with. foreign: why the root may not be used."""

    path: str | None = None
    run_id: str | None = None
    foreign: str = ""


def find_run(storage: Storage, run: RunId, resume: Resume) -> Found:
    """What lies in a root, seen by a job that is ``run``: one of that name is its own, of an earlier fit."""
    found = newest(storage)
    manifest = found.manifest
    if manifest is None:
        return Found(foreign=found.why if found.skipped else "")
    if resume == "never" and manifest.run_id != run.run_id:
        return Found(foreign=f"it holds run {manifest.run_id} at step {manifest.step}, and resume='never'")
    if manifest.config_fingerprint != run.config_fingerprint:
        return Found(foreign=f"its run {manifest.run_id} has other tables or another model than this job")
    if manifest.plan_fingerprint != run.plan_fingerprint and resume != "reshard":
        return Found(
            foreign=f"its run {manifest.run_id} has another sharding plan or world size than this job (a job whose"
            " number of ranks may change says CPRCallback(resume='reshard'))"
        )
    return Found(manifest.path, manifest.run_id)


def take_up(job: Job, storage: Storage, run: Run, found: Found, loaded: Version | None) -> None:
    """Go on with the run of ``loaded``, which is a version of this root, or else with the one that was found here, or
    begin one: ``run`` gets its name and a new epoch, and earlier ones are fenced off. Where a ``ckpt_path`` from
    elsewhere was loaded, the root's own run goes on with that: a root holds one run. A collective.

    Raises:
        ForeignRunError: what was found here is not to be gone on with.
    """
    run_id = loaded.manifest.run_id if loaded is not None else found.run_id
    if run_id is not None:
        run.id = run.named(run_id)
        run.epoch = job.from_rank_0(lambda: newest_epoch(storage, run_id)) + 1
    elif found.foreign:
        raise ForeignRunError(
            f"{storage.root} cannot be used: {found.foreign}. Choose an empty root; then go on from that run with"
            f" trainer.fit(..., ckpt_path={storage.root!r}), which reshards where it must, or, where tables differ,"
            " take rows over with lightning_cpr.warm_start (docs/saving.md)."
        )
    else:
        run.epoch = 0
        rank_zero_info(f"CPRCallback begins run {run.id.run_id} in {storage.root}, which holds none yet")
    run.owner = job.from_rank_0(lambda: secrets.token_hex(8))
    if not run.ledger.total_elements:
        run.ledger = Ledger(sum(s.elements for s in job.plan if not s.replicated))
    if job.rank == 0:
        job.kv.set("epoch", str(run.epoch))
    if run.epoch:
        job.from_rank_0(lambda: fence(storage, run.id.run_id, run.epoch, run.owner))
    job.trainer.strategy.barrier("lightning_cpr.take_up")


def resume_from(trainer: pl.Trainer, job: Job, storage: Storage, path: str, state_key: str) -> None:
    """Let Lightning restore from a version, as it does for a ``ckpt_path``; one that the user gives replaces it."""
    version = job.together(lambda: Version(storage, load_manifest(storage, path), refused=()))
    checkpoint = load_sound(job, version)
    version = checkpoint[VERSION_KEY]
    rank_zero_info(f"CPRCallback resumes from {version.name}, step {version.manifest.step}")
    rename_state(trainer, storage, state_key, checkpoint)
    connector = trainer._checkpoint_connector
    other = connector._loaded_checkpoint.get(VERSION_KEY)
    if other is None or other.manifest.step < version.manifest.step:
        connector._loaded_checkpoint = checkpoint


def rename_state(trainer: pl.Trainer, storage: Storage, state_key: str, checkpoint: dict[str, Any]) -> None:
    """Find a callback's state in a version of its root that was saved when the root had another name."""
    version, states = checkpoint.get(VERSION_KEY), checkpoint.get("callbacks") or {}
    if version is None or version.storage.root != storage.root or state_key in states:
        return
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    known = {callback.state_key for callback in callbacks}
    other = [key for key in states if key.startswith("CPRCallback[") and key not in known]
    if len(other) == 1:
        states[state_key] = states.pop(other[0])


def is_version_of(storage: Storage, version: Version | None) -> bool:
    """Whether a version is one of this root's; a checkpoint of Lightning's that lies there is not."""
    return (
        version is not None and version.storage.root == storage.root and version.manifest.path.startswith(f"{FOLDER}/")
    )


def has_newer(storage: Storage, run_id: str, version: Version) -> bool:
    """Whether the run has newer versions than this, of a future that it has turned away from: the user went back by
    name, or the newest priority saves were of a crashed job.
    """
    found = newest(storage, None, run_id).manifest
    return found is None or same_rows(found.version) != same_rows(version.manifest.version)
