"""CPRCheckpointIO: Lightning's own checkpoints (`ModelCheckpoint`, ``save_checkpoint``, ``ckpt_path``) as versions.

A checkpoint is a self-contained exact base. The file that Lightning names *is* the manifest, so ``exists``, ``-v1``
suffixes and symbolic links work; its chunks lie beside it under
``cpr-chunks/<version>/``: whoever copies the file copies that folder too. Every rank saves and loads.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from lightning_cpr._lightning import CheckpointIO
from lightning_cpr.errors import CorruptShardError, IncompatiblePlanError, ManifestError, UnsupportedError
from lightning_cpr.guard import STOCK_STRATEGY
from lightning_cpr.job.job import Job
from lightning_cpr.report.progress import Report, progress_bar
from lightning_cpr.saving.saver import Progress, RunId, rank_part, save_spec
from lightning_cpr.spec import RowBlock, Shard
from lightning_cpr.store.blob import JOB_BLOB, rank_blob
from lightning_cpr.store.commit import save
from lightning_cpr.store.find import Version, find_version
from lightning_cpr.store.reader import ReadReport, read_into
from lightning_cpr.store.save import SaveIO
from lightning_cpr.store.stage import live_blocks
from lightning_cpr.store.storage import Storage, relative_to
from lightning_cpr.store.versions import load_manifest, newest, remove
from lightning_cpr.tables.dense import load_dense_state
from lightning_cpr.tables.scalars import load_fused_scalars
from lightning_cpr.tables.shards import local_shards, table_specs

log = logging.getLogger(__name__)

VERSION_KEY = "lightning_cpr_version"
"""Where a loaded checkpoint names the version that the strategy reads the tables from."""


class CPRCheckpointIO(CheckpointIO):
    """Reads and writes versions for a Trainer with `TorchRecStrategy`, which brings one by itself.

    Args:
        storage_options: for fsspec, e.g. credentials of a bucket.
        timeout_s: how long a rank waits for the others in a save.

    All ranks call `save_checkpoint` and `load_checkpoint`; `remove_checkpoint` is rank 0's. A save waits until the
    version is committed and raises on every rank if any rank failed; the previous checkpoint then stands.
    """

    def __init__(self, storage_options: Mapping[str, Any] | None = None, timeout_s: float = 600.0) -> None:
        self.storage_options = storage_options
        self.timeout_s = timeout_s
        self._job: Job | None = None
        self._run: RunId | None = None

    def attach(self, job: Job) -> None:
        """Called by the strategy once the model is sharded."""
        self._job, self._run = job, None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Save this rank's shards and state; returns when the version is committed.

        Raises:
            CommitError: a rank failed; every rank gets the first cause.
            UnsupportedError: the Trainer's strategy is not `TorchRecStrategy`.
        """
        if self._job is None:
            raise UnsupportedError(STOCK_STRATEGY.format(strategy="the Trainer's strategy"))
        job = self._job
        self._run = self._run or RunId.of(job, job.incarnation)
        folder, name = relative_to(os.fspath(path))
        storage = Storage(folder, storage_options or self.storage_options)
        at = Progress(job.trainer.fit_loop.total_batch_idx + 1, int(checkpoint.get("lightning_cpr_samples", 0)))
        spec = save_spec(job, self._run, 0, at, job.broadcast(secrets.token_hex(4)), path=name)
        io = SaveIO(storage, job.kv, epoch=lambda: 0, timeout_s=self.timeout_s)
        with progress_bar(f"saving {name}", shown=job.rank == 0) as report:
            part = rank_part(job, checkpoint, _reported(live_blocks(job.owned), job.owned, report), at.step)
            save(io, spec, part)

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Lightning's checkpoint, without the tables: `TorchRecStrategy` reads those into the live shards.

        Safe whatever ``weights_only`` says: versions hold tensors and plain values only.
        """
        job = self._job
        if job is None:
            return load_state(find_version(path, self.storage_options), rank=0, world_size=1)
        return load_sound(job, self._agreed(job, path))

    def _agreed(self, job: Job, path: Any) -> Version:
        """Rank 0 finds the version; the others take the same, however the storage changes meanwhile."""

        def find() -> tuple[str, str, tuple[str, ...] | None]:
            version = find_version(path, self.storage_options)
            return version.storage.root, version.manifest.path, version.refused

        root, manifest, refused = job.from_rank_0(find)
        storage = Storage(root, self.storage_options)
        return job.together(lambda: Version(storage, load_manifest(storage, manifest), refused))

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint: the manifest first, then its chunks. One that is not there is no error."""
        folder, name = relative_to(os.fspath(path))
        storage = Storage(folder, self.storage_options)
        if storage.exists(name):
            remove(storage, name)

    @staticmethod
    def load_model(
        model: torch.nn.Module, path: str, storage_options: Mapping[str, Any] | None = None, strict: bool = True
    ) -> torch.nn.Module:
        """Load a version into an unsharded model on one device, for serving or a notebook; returns the model.

        Raises:
            IncompatiblePlanError: tables or dense weights do not fit, or are on meta. No tensor was changed.
        """
        version = find_version(path, storage_options)
        if meta := sorted(name for name, tensor in model.state_dict().items() if tensor.is_meta):
            raise IncompatiblePlanError(
                f"{', '.join(meta)}: on the meta device, which holds no values to load into. Make them first, e.g. with"
                ' to_empty(device="cpu") on their module'
            )
        restore_tables(version, model, strict=strict, with_states=False)
        load_dense_state(model, version.blob(JOB_BLOB)["state_dict"], strict=strict)
        return model


def _reported(blocks: Iterable[RowBlock], shards: Sequence[Shard], report: Report) -> Iterator[RowBlock]:
    """The blocks, with a report of those that have been taken."""
    total = sum(t.nbytes for shard in shards for t in (shard.weight, *shard.states.values()))
    done = 0
    for block in blocks:
        yield block
        done += sum(t.nbytes for t in (block.weight, *block.states.values()))
        report(done, total)


def load_state(version: Version, rank: int, world_size: int) -> dict[str, Any]:
    """The checkpoint of a rank: what all ranks share, with its own loops, and the version to read the tables from."""
    checkpoint = version.blob(JOB_BLOB)
    if "pytorch-lightning_version" not in checkpoint:
        raise IncompatiblePlanError(
            f"{version.name} was imported: it holds tables and dense weights, no state of a Trainer. Begin a new root"
            " and take them over with lightning_cpr.warm_start.warm_start"
        )
    if version.manifest.world_size == world_size:
        own = version.blob(rank_blob(rank))
        checkpoint |= {"loops": own["loops"], "rng": own["rng"]}
    elif "loops" in checkpoint:
        log.warning(
            "%s was saved by %d ranks and is loaded by %d: random streams start anew, and the loader starts its epoch"
            " over unless it can place itself", version.name, version.manifest.world_size, world_size,
        )  # fmt: skip
        checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)
    checkpoint[VERSION_KEY] = version
    return checkpoint


def load_sound(job: Job, version: Version) -> dict[str, Any]:
    """`load_state` on every rank. Where ``version`` was chosen as the newest and is damaged, of the one before it."""
    while True:
        try:
            return job.together(partial(load_state, version, job.rank, job.world_size))
        except CorruptShardError as error:
            version = version_before(job, version, error)


def version_before(job: Job, version: Version, damage: CorruptShardError) -> Version:
    """The newest exact version of a root that is not refused yet; ``damage`` where a version was asked for by name.

    Raises:
        ManifestError: no sound version is left.
    """
    if version.refused is None:
        raise damage
    log.error("%s is damaged, the version before it is used: %s", version.name, damage)
    storage, run_id, refused = version.storage, version.manifest.run_id, (*version.refused, version.manifest.path)

    def find() -> str:
        manifest = newest(storage, run_id=run_id, exclude=refused).manifest
        if manifest is None:
            raise ManifestError(f"{storage.root}: no sound version is left, the oldest failed with: {damage}")
        return manifest.path

    path = job.from_rank_0(find)
    return job.together(lambda: Version(storage, load_manifest(storage, path), refused))


def restore_tables(
    version: Version,
    model: torch.nn.Module,
    optimizers: Any = (),
    *,
    strict: bool = True,
    with_states: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> ReadReport:
    """Read a version's rows into the live shards of a model, under whatever plan it has.

    Raises:
        IncompatiblePlanError: tables are missing or left over (``strict``), or shapes or states differ; lists all.
            No tensor was changed.
    """
    saved = {spec.fqn for spec in version.manifest.tables}
    wanted = set(table_specs(model, optimizers))
    problems = [f"it has no table {fqn}" for fqn in sorted(wanted - saved)]
    problems += [f"its table {fqn} is not in the model" for fqn in sorted(saved - wanted)]
    if problems and strict:
        raise IncompatiblePlanError(f"{version.name} does not fit the model: {'; '.join(problems)}")
    if problems:
        log.warning("%s does not fit the model, the rest is restored: %s", version.name, "; ".join(problems))
    shards = local_shards(model, optimizers)
    report = read_into(
        version.storage,
        version.manifest,
        [shard for shard in shards if shard.spec.table in saved],
        with_states=with_states,
        progress=progress,
    )
    if with_states:
        load_fused_scalars(model, version.scalars(), optimizers)
    return report


def restore_soundest(
    job: Job, checkpoint: dict[str, Any], model: torch.nn.Module, optimizers: Any, *, strict: bool
) -> bool:
    """`restore_tables` on every rank, from the version that ``checkpoint`` came with, or, where that was chosen as the
    newest and is damaged, from the one before it: then ``checkpoint`` becomes that one's. Returns whether it did.

    Raises:
        IncompatiblePlanError: on every rank, if they fit the model on none. No tensor was changed.
        CorruptShardError: on every rank, if the version was asked for by name.
    """
    changed = False
    while True:
        version: Version = checkpoint[VERSION_KEY]
        try:
            with progress_bar(f"restoring {version.name}", shown=job.rank == 0) as report:
                job.together(partial(restore_tables, version, model, optimizers, strict=strict, progress=report))
            return changed
        except CorruptShardError as error:
            older = load_sound(job, version_before(job, version, error))
            checkpoint.clear()
            checkpoint.update(older)
            changed = True
