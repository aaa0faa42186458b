"""Runs a function on W real processes with a deadline and brings back what each rank returned, or its traceback.

    results = run_ranks(check, 2, "row_wise")        # check(rank, world, "row_wise") on two fresh processes

The ranks are forked from a fork server that has imported torch, torchrec and Lightning once, so that a job costs tenths
of a second instead of five. Their environment looks as under torchrun, with a store that this process hosts: rank 0
can die without taking it along. ``fn`` and its arguments are pickled, so ``fn`` lives at the top of a test module.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from typing import Any

import torch.distributed as dist

PRELOAD = ["torch", "torchrec", "torchrec.distributed", "pytorch_lightning", "lightning_cpr"]
GRACE_S = 5.0

_context = get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)


@dataclass
class Outcome:
    """What became of one rank: a value, or a traceback, or only an exit code (negative: the signal that ended it)."""

    rank: int
    value: Any = None
    error: str | None = None
    exitcode: int | None = None
    finished: bool = False


class RanksFailedError(AssertionError):
    """Some rank raised, died or missed the deadline. ``outcomes`` has them all, the message every traceback."""

    def __init__(self, outcomes: Sequence[Outcome], reason: str) -> None:
        self.outcomes = list(outcomes)
        lines = [reason]
        for outcome in outcomes:
            state = "returned" if outcome.finished and outcome.error is None else f"exit code {outcome.exitcode}"
            lines.append(f"--- rank {outcome.rank}: {state}\n{outcome.error or ''}")
        super().__init__("\n".join(lines))


def init_gloo(timeout_s: float = 30.0) -> None:
    """Joins the process group of a `run_ranks` job, for tests without a Trainer."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))


def run_ranks(
    fn: Callable[..., Any], world: int, *args: Any, timeout: float = 60.0, env: dict[str, str] | None = None
) -> list[Any]:
    """``[fn(rank, world, *args) for each rank]``. Raises `RanksFailedError` if a rank did not return in time."""
    outcomes = rank_outcomes(fn, world, *args, timeout=timeout, env=env)
    if not all(o.finished and o.error is None for o in outcomes):
        raise RanksFailedError(outcomes, f"{fn.__name__} did not return on every one of {world} ranks")
    return [o.value for o in outcomes]


def rank_outcomes(
    fn: Callable[..., Any], world: int, *args: Any, timeout: float = 60.0, env: dict[str, str] | None = None
) -> list[Outcome]:
    """As `run_ranks`, but tells what became of each rank instead of raising: for tests that kill or fail a rank.

    Once a rank has raised or died the others get ``GRACE_S`` to end by themselves. Every process is gone on return.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    outcomes = [Outcome(rank) for rank in range(world)]
    processes, pipes = [], {}
    job = uuid.uuid4().hex
    try:
        for rank in range(world):
            receiver, sender = _context.Pipe(duplex=False)
            variables = dict(os.environ) | _rank_env(rank, world, store.port, job) | (env or {})
            payload = pickle.dumps((fn, args))
            process = _context.Process(target=_child, args=(rank, world, variables, payload, sender), daemon=True)
            process.start()
            sender.close()
            processes.append(process)
            pipes[receiver] = rank
        _collect(pipes, outcomes, time.monotonic() + timeout)
    finally:
        for outcome, process in zip(outcomes, processes, strict=False):
            process.join(2.0 if outcome.finished else 0.1)
            if process.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                process.join()
            outcome.exitcode = process.exitcode
        for receiver in pipes:
            receiver.close()
        del store
    return outcomes


def _collect(pipes: dict[Any, int], outcomes: list[Outcome], deadline: float) -> None:
    waiting = dict(pipes)
    while waiting and (left := deadline - time.monotonic()) > 0:
        for ready in connection.wait(list(waiting), timeout=left):
            outcome = outcomes[waiting.pop(ready)]
            try:
                outcome.value, outcome.error = pickle.loads(ready.recv_bytes())
                outcome.finished = True
            except EOFError:
                outcome.error = "(died without a traceback)"
            if outcome.error is not None:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    for rank in waiting.values():
        outcomes[rank].error = "(still running at the deadline, killed)"


def _rank_env(rank: int, world: int, port: int, job: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # Lightning would else set two threads for one rank; OpenMP threads spin against the other ranks'.
        "OMP_NUM_THREADS": "1",
    }


def _child(rank: int, world: int, variables: dict[str, str], payload: bytes, sender: Any) -> None:
    import torch

    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(1)
    try:
        fn, args = pickle.loads(payload)
        reply = pickle.dumps((fn(rank, world, *args), None))
    except BaseException:
        reply = pickle.dumps((None, traceback.format_exc()))
    sender.send_bytes(reply)
    sender.close()
    if dist.is_initialized():
        dist.destroy_process_group()
