"""Hand-over: where a job cannot be mended in place, torchrun restarts its processes, and they take the rows of those
that survived from host shared memory (`recovery.stash`), with the dense part and the place in the run of the most
advanced one. Only the lost ranks' shards come from the store.

`leave` runs in the process that ends, on the error of a lost peer; `take_over` in the one that comes after it. Rows of
another plan than its own are made a version by `job.reshard`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cpr._lightning import pl
from lightning_cpr.checkpoint_io import VERSION_KEY
from lightning_cpr.errors import CorruptShardError, CPRError, RecoveryError
from lightning_cpr.job.job import Job
from lightning_cpr.job.samples import batches_trained
from lightning_cpr.job.state import drop_unplain_hparams, rng_state, to_plain
from lightning_cpr.live.loader import skip_batches, stand_at_batch
from lightning_cpr.recovery import stash as stashes
from lightning_cpr.recovery.election import is_lost_peer
from lightning_cpr.recovery.guardian import HEARTBEAT_FD_ENV
from lightning_cpr.recovery.handover import Offer, Take, choose
from lightning_cpr.recovery.host import SHM, host_id
from lightning_cpr.recovery.live import broadcast_bytes
from lightning_cpr.recovery.plan import RewindError
from lightning_cpr.recovery.stash import Key, Stash
from lightning_cpr.saving.saver import RunId
from lightning_cpr.store.blob import decode_blob, encode_blob
from lightning_cpr.store.storage import Storage
from lightning_cpr.store.versions import list_versions
from lightning_cpr.tables.replicas import load_replicated_state, replicated_state
from lightning_cpr.tables.scalars import fused_scalars, load_fused_scalars

log = logging.getLogger(__name__)

_PIECE = 32 << 20


def restart_is_left(env: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher will start this process again if it fails."""
    return int(env.get("TORCHELASTIC_RESTART_COUNT", 0)) < int(env.get("TORCHELASTIC_MAX_RESTARTS", 0))


def why_not(trainer: pl.Trainer) -> str:
    """Why the state of this Trainer cannot be handed over where it stands now; empty if it can."""
    if not restart_is_left():
        return "no restart is left"
    if not trainer.training:
        return f"it failed in {'the sanity check' if trainer.sanity_checking else 'validation'}"
    if _is_over(trainer):
        return "training is over, and a Trainer that has no batch left brings no rows back"
    if not trainer.lightning_module.automatic_optimization:
        return "manual optimization, whose broken batch may have stepped half of its optimizers"
    if trainer.accumulate_grad_batches != 1:
        return "accumulate_grad_batches, whose gradients are lost"
    return ""


def _is_over(trainer: pl.Trainer) -> bool:
    """Whether a Trainer that starts from this state trains no batch, so that no hook of training runs there."""
    loop, steps, epochs = trainer.fit_loop, trainer.max_steps, trainer.max_epochs
    done: int = loop.epoch_progress.current.processed  # type: ignore[attr-defined]
    over = epochs is not None and 0 <= epochs <= done
    return over or 0 <= steps <= loop.epoch_loop.global_step


def leave(trainer: pl.Trainer, job: Job, run: RunId, epoch: int, error: BaseException) -> Stash | None:
    """Leave this rank's rows and state in shared memory, if ``error`` is that of a lost peer. Runs no collective."""
    if not isinstance(error, RecoveryError) and not is_lost_peer(error):
        return None
    if reason := "everybody goes back" if isinstance(error, RewindError) else why_not(trainer):
        log.warning("rank %d hands nothing over (%s): a restart goes on from the store", job.rank, reason)
        return None
    shards = [shard for shard in job.shards if not shard.spec.replicated and shard.spec.owner == job.rank]
    step = batches_trained(trainer)
    try:
        key = _key(run)
        blob = _state(trainer, job)
        stash = stashes.leave(SHM, key, epoch, job.incarnation, job.world_size, job.rank, step, shards, blob)
    except CPRError as problem:
        log.error("rank %d hands nothing over, a restart goes on from the store: %s", job.rank, problem)
        return None
    log.warning(
        "rank %d left its rows after batch %d in shared memory for the restart (%.0f MB)",
        job.rank, step, stash.nbytes / 1e6,
    )  # fmt: skip
    return stash


def _state(trainer: pl.Trainer, job: Job) -> bytes:
    """Everything but this rank's rows. Loader states are left out: a batch that broke is ahead of them."""
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)
    drop_unplain_hparams(checkpoint, ("hyper_parameters", "datamodule_hyper_parameters"))
    progress = trainer.fit_loop.epoch_loop.batch_progress
    told = {
        "checkpoint": checkpoint,
        "replicas": replicated_state(job.module),
        "scalars": fused_scalars(job.module, trainer.optimizers),
        "rng": rng_state(),
        "inside": progress.current.ready > progress.current.processed,  # type: ignore[attr-defined]
        "plan": job.plan,
    }
    return encode_blob(to_plain(told))


def _key(run: RunId) -> Key:
    # A guardian stands between this process and torchrun's agent.
    agent = os.getppid()
    if HEARTBEAT_FD_ENV in os.environ:
        agent = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
    return Key(run.run_id, run.config_fingerprint, run.plan_fingerprint, stashes.agent_of(agent))


@dataclass
class Taken:
    """What a restart takes. told: the donor's state (`_state`). rngs, scalars: of all that left theirs, by owner and by
    table. files: open rows that this rank reads, by owner.
    """

    take: Take
    told: dict[str, Any]
    rngs: Mapping[int, dict[str, Any]]
    scalars: dict[str, Any]
    job: Job
    files: dict[int, int]

    @property
    def step(self) -> int:
        return self.take.decision.step

    def checkpoint(self) -> dict[str, Any]:
        """What Lightning resumes this rank from. Rows come with `adopt`."""
        checkpoint: dict[str, Any] = self.told["checkpoint"]
        donor = self.take.decision.donor
        rng = self.rngs.get(self.job.rank, self.rngs[donor])
        if self.told["inside"]:  # Lightning does not know yet whether the batch to come is the last
            checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"] = False
        return checkpoint | {VERSION_KEY: None, "rng": rng}

    def adopt(self) -> None:
        """Copy the rows into the live shards, from here or from a peer's host. Runs on all ranks together.

        Raises:
            RecoveryError: what lies there is not what the plan says.
        """
        job = self.job
        live = {
            (shard.spec, name): tensor
            for shard in job.shards
            for name, tensor in (("weight", shard.weight), *shard.states.items())
        }
        for owner, offer in sorted(self.take.sources.items()):
            reader = self.take.readers[owner]
            if reader == job.rank:
                for part, data in stashes.read(offer.stash, self.files[owner]):
                    if owner == job.rank:
                        _copy(_target(live, part), 0, data)
                    else:
                        _send(data, owner, job)
            elif owner == job.rank:
                for part in offer.stash.parts:
                    _receive(_target(live, part), part.nbytes, reader, job)
        load_replicated_state(job.module, self.told["replicas"])
        self.close()

    def close(self) -> None:
        for file in self.files.values():
            os.close(file)
        self.files = {}

    def stand(self, trainer: pl.Trainer) -> None:
        """Bring loops and loader to the batch to go on with. Called when training starts."""
        progress = trainer.fit_loop.epoch_loop.batch_progress
        if self.told["inside"]:
            stand_at_batch(trainer.fit_loop)
        elif not progress.is_last_batch:
            skip_batches(trainer.fit_loop, progress.current.ready)


def take_over(
    trainer: pl.Trainer, job: Job, storage: Storage, run: RunId, run_id: str | None, any_plan: bool
) -> Taken | None:
    """What the processes before these left in shared memory, if it is newer than what ``storage`` holds of the run
    ``run_id``; it is removed in any case. None: there is no version yet that could complete it. A collective.

    any_plan: also what they left under another plan (``Taken.take.resharded``), for `job.reshard`.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    if run_id is None:
        stashes.find(SHM, _key(run))
        return None
    ref = job.from_rank_0(lambda: list_versions(storage, run_id)[0])
    return _take(trainer, job, replace(run, run_id=run_id), (ref.epoch, ref.step), any_plan)


def _take(trainer: pl.Trainer, job: Job, run: RunId, newest: tuple[int, int], any_plan: bool) -> Taken | None:
    """newest: (epoch, step) of the newest version of the run."""
    found, whole = job.together(lambda: _find(_key(run), any_plan))
    everybody: list[Any] = [None] * job.world_size
    dist.all_gather_object(everybody, (host_id(), whole))
    offers = [Offer(host, stash) for host, mine in everybody for stash, _ in mine]
    rngs = {stash.owner: told["rng"] for _, mine in everybody for stash, told in mine}
    scalars = {fqn: values for _, mine in everybody for _, told in mine for fqn, values in told["scalars"].items()}
    taken = None
    if offers:
        try:
            chosen = choose(offers, [host for host, _ in everybody], newest, run.plan_fingerprint)
            taken = Taken(chosen, {}, rngs, scalars, job, job.together(lambda: _open(chosen, job.rank)))
        except RecoveryError as reason:
            log.warning("nothing is handed over, the job goes on from the store: %s", reason)
    trainer.strategy.barrier("handover")
    stashes.remove(found)  # what is open stays readable
    if taken is None:
        return None
    donor = taken.take.decision.donor
    reader, stash = taken.take.readers[donor], taken.take.sources[donor].stash
    blob = os.pread(taken.files[donor], stash.blob[1], stash.blob[0]) if reader == job.rank else None
    taken.told = decode_blob(broadcast_bytes(blob, reader, trainer.strategy.root_device), "a handed-over state")
    taken.scalars |= taken.told["scalars"]
    if chosen.resharded:
        return taken
    load_fused_scalars(job.module, taken.scalars, trainer.optimizers)
    if job.rank == 0:
        log.warning(
            "the rows of ranks %s are handed over, after batch %d; of ranks %s they come from the store",
            sorted(chosen.sources), taken.step, list(chosen.decision.lost),
        )  # fmt: skip
    return taken


def _find(key: Key, any_plan: bool) -> tuple[list[Stash], list[tuple[Stash, dict[str, Any]]]]:
    """What lies on this host, and the part that this process has found whole, with its random streams and scalars.

    The processes of a host share the work.
    """
    found, whole = stashes.find(SHM, key, any_plan), []
    for stash in found[int(os.environ["LOCAL_RANK"]) :: int(os.environ["LOCAL_WORLD_SIZE"])]:
        try:
            told = decode_blob(stashes.check(stash), stash.path.name)
            whole.append((stash, {name: told[name] for name in ("rng", "scalars")}))
        except CorruptShardError as error:
            log.error("refused: %s", error)
    return found, whole


def _open(chosen: Take, rank: int) -> dict[int, int]:
    with ExitStack() as stack:
        files = {}
        for owner, reader in chosen.readers.items():
            if reader == rank:
                files[owner] = os.open(chosen.sources[owner].stash.rows, os.O_RDONLY)
                stack.callback(os.close, files[owner])
        stack.pop_all()
    return files


def _target(live: Mapping[Any, Tensor], part: stashes.Part) -> Tensor:
    target = live.get((part.shard, part.name))
    if target is None or tuple(target.shape) != part.shape or str(target.dtype) != f"torch.{part.dtype}":
        raise RecoveryError(f"handed over: {part.shard.table}.{part.name} {part.shape}, which this plan does not have")
    return target


@torch.no_grad()
def _copy(target: Tensor, row: int, data: Tensor) -> None:
    """Bytes into whole rows of a tensor."""
    if data.numel():
        values = data.view(target.dtype).reshape(-1, *target.shape[1:])
        target[row : row + len(values)].copy_(values)


def _send(data: Tensor, owner: int, job: Job) -> None:
    device = job.trainer.strategy.root_device
    for start in range(0, len(data), _PIECE):
        dist.send(data[start : start + _PIECE].clone().to(device), owner)


def _receive(target: Tensor, nbytes: int, reader: int, job: Job) -> None:
    device = job.trainer.strategy.root_device
    whole = torch.empty(nbytes, dtype=torch.uint8)
    for start in range(0, nbytes, _PIECE):
        piece = torch.empty(min(_PIECE, nbytes - start), dtype=torch.uint8, device=device)
        dist.recv(piece, reader)
        whole[start : start + len(piece)].copy_(piece)
    _copy(target, 0, whole)
