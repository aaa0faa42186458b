"""The guardian: one per rank, started by torchrun in place of the script; it runs the trainer and replaces it.

    torchrun -> guardian (this file: standard library only, one thread)
                  |- trainer  (child.py, runs the user's script)
                  `- spare    (the same, has imported everything, waits on a pipe)

A trainer that a signal ended is replaced: the spare gets the rank, or a new process does. torchrun sees no failure. A
trainer that ends with an exit code has ended by itself: the guardian ends with the same code, and what comes next is
torchrun's decision. Children die with the guardian (``PR_SET_PDEATHSIG``), and with their own heartbeat.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import mmap
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

log = logging.getLogger("lightning_cpr.guardian")

HEARTBEAT_FD_ENV = "LIGHTNING_CPR_HEARTBEAT_FD"
JOB_DIR_ENV = "LIGHTNING_CPR_JOB_DIR"
STORE_ENV = "LIGHTNING_CPR_STORE"
"""Set where it is not torchrun's own, with several hosts: ``host:port`` of the store in which the trainers meet."""
HANG_TIMEOUT_ENV = "LIGHTNING_CPR_HANG_TIMEOUT"
SPARES_ENV = "LIGHTNING_CPR_SPARES"
"""What a guardian tells its trainers: its options."""
EXIT_STEP_DOWN = 75
"""A trainer's exit code for: live recovery failed, take the next step down (EX_TEMPFAIL)."""
GRACE_S = 25.0
_POLL_S = 0.25
_BEAT_AT, _ASKED_AT, _OVER_AT = 0, 8, 16
"""Doubles in the heartbeat's page: the child's last beat, whether it shall end, 1 + exit code once its script has."""
_START_AT, TOKEN_BYTES = 24, 16
"""There too: the token of the job's start, of ASCII letters and digits, zeros until the trainer has it."""
_CHILD = str(Path(__file__).resolve().with_name("child.py"))
_NOTE = "user-error.json"
_REPLACEABLE = {
    signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGSYS
}  # fmt: skip
_NUMBERS = set(signal.Signals)
_SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


@dataclass(frozen=True)
class Budget:
    """At most ``replacements`` within any ``window`` seconds."""

    replacements: int = 10
    window: float = 3600.0


DEFAULT_BUDGET = Budget()


@dataclass(frozen=True)
class Verdict:
    """What to do about a trainer that ended.

    ``code``: the guardian's own exit code, unless it replaces. ``own_error``: the script failed by itself, and would
    again.
    """

    act: Literal["replace", "end"]
    code: int
    reason: str
    own_error: bool = False


def judge(returncode: int, replaced_at: Sequence[float], now: float, budget: Budget, started: bool = True) -> Verdict:
    """Decide about a trainer that ended (negative ``returncode``: the signal), replaced at these times before.

    ``started``: it had met the other ranks, so that they know whom a replacement replaces.
    """
    if returncode == 0:
        return Verdict("end", 0, "finished")
    if returncode == EXIT_STEP_DOWN:
        return Verdict("end", returncode, "live recovery failed; the next step down is torchrun's restart")
    if returncode - 128 in _NUMBERS:
        return Verdict("end", returncode, f"left after {signal.Signals(returncode - 128).name}")
    if returncode > 0:
        return Verdict("end", returncode, "an error in its own code, not a lost peer", own_error=True)
    name = signal.Signals(-returncode).name if -returncode in _NUMBERS else f"signal {-returncode}"
    if -returncode not in _REPLACEABLE:
        return Verdict("end", 128 - returncode, f"ended by {name}")
    if not started:
        reason = f"killed by {name} while the job started; the next step down is torchrun's restart"
        return Verdict("end", EXIT_STEP_DOWN, reason)
    recent = [t for t in replaced_at if now - t < budget.window]
    if len(recent) >= budget.replacements:
        reason = f"killed by {name}, after {len(recent)} replacements in {budget.window:g} s: the budget is spent"
        return Verdict("end", EXIT_STEP_DOWN, f"{reason}; the next step down is torchrun's restart")
    return Verdict("replace", 0, f"killed by {name}")


class Child:
    """A trainer, or a spare that can become one."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        control, self._control = os.pipe()
        self._beat_fd = os.memfd_create("cpr-heartbeat")
        os.ftruncate(self._beat_fd, mmap.PAGESIZE)
        self._beat = mmap.mmap(self._beat_fd, mmap.PAGESIZE)
        self.process = subprocess.Popen(
            [sys.executable, "-u", _CHILD, f"--control={control}", *preload],
            env=os.environ | {HEARTBEAT_FD_ENV: str(self._beat_fd)},
            pass_fds=(control, self._beat_fd),
            process_group=0,  # signals of torchrun reach it through the guardian only
            preexec_fn=_die_with_parent,  # safe: this process has one thread
        )
        os.close(control)

    def assign(self, **order: object) -> None:
        """Tell it what to run; its heartbeat counts from its next beat on. A dead one is noticed as one that ended."""
        struct.pack_into("d", self._beat, _BEAT_AT, 0.0)
        try:
            os.write(self._control, json.dumps(order).encode() + b"\n")
        except BrokenPipeError:
            log.warning("child %d ended before it got its order", self.process.pid)

    def silent_for(self, now: float) -> float | None:
        """Seconds since its last heartbeat; None before the first."""
        (last,) = struct.unpack_from("d", self._beat, _BEAT_AT)
        return now - last if last else None

    def start(self) -> str:
        """The token of the start, which this trainer has agreed on with its peers (`recovery.start`); "" before."""
        (told,) = struct.unpack_from(f"{TOKEN_BYTES}s", self._beat, _START_AT)
        return bytes(told).rstrip(b"\0").decode()

    def exit_code(self) -> int:
        """How it ended (negative: the signal). A signal after the script's own end is an abort on the way out."""
        (told,) = struct.unpack_from("d", self._beat, _OVER_AT)
        if self.process.returncode < 0 and told:
            log.warning("trainer %d got %s after its script had ended", self.process.pid, -self.process.returncode)
            return int(told) - 1
        return int(self.process.returncode)

    def end(self, grace: float = 0.0) -> int:
        """SIGTERM, then after ``grace`` seconds SIGKILL. Returns the exit code.

        A Python signal handler does not run inside a collective, so the heartbeat's page says it too.
        """
        if self.process.poll() is None and grace > 0:
            self.process.terminate()
            for asked in (1, 2):
                struct.pack_into("d", self._beat, _ASKED_AT, asked)
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(grace / 2)
            if self.process.returncode is None:
                log.warning("trainer %d is still there after %g s of grace", self.process.pid, grace)
        self.process.kill()
        code = self.process.wait()
        self.release()
        return code

    def release(self) -> None:
        """Close what the guardian holds of it."""
        if not self._beat.closed:
            os.close(self._control)
            self._beat.close()
            os.close(self._beat_fd)


class Guardian:
    """Runs one rank until it has finished or cannot be helped.

    Its spare starts once the trainer has noted what it has imported, see `note_modules`: not before, for the spare's
    imports would slow the trainer's own start.

    Args:
        order: what the trainer runs: script, args, module.
        preload: arguments of a spare: what it imports.
        hang_timeout: seconds without a heartbeat after which a trainer counts as dead; 0: never.
        grace: seconds that a trainer has to end after SIGTERM.
    """

    def __init__(
        self,
        order: dict[str, object],
        rank: int,
        preload: Sequence[str] = (),
        spares: int = 1,
        budget: Budget = DEFAULT_BUDGET,
        hang_timeout: float = 30.0,
        grace: float = GRACE_S,
    ) -> None:
        self._order = order
        self._rank = rank
        self._preload = preload
        self._spares = spares
        self._budget = budget
        self._hang_timeout = hang_timeout
        self._grace = grace
        self._replaced_at: list[float] = []
        self._start = ""  # nobody can join a start without its token
        self._trainer = Child()
        self._spare: Child | None = None
        self._spare_is_warm = False
        self._modules = modules_note(os.environ.get(JOB_DIR_ENV, ""), rank)

    def run(self) -> int:
        """Returns the exit code."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        self._trainer.assign(**self._order)
        try:
            while True:
                if (caught := self._wait()) is not None:
                    log.warning("rank %d: %s, passed on to the trainer", self._rank, caught.name)
                    code = self._trainer.end(self._grace)
                    return code if code >= 0 else 128 - code
                self._start = self._start or self._trainer.start()
                code = self._trainer.exit_code()
                verdict = judge(code, self._replaced_at, time.monotonic(), self._budget, bool(self._start))
                if verdict.act == "end":
                    if verdict.own_error:
                        note_user_error(
                            os.environ.get(JOB_DIR_ENV), self._rank, f"exit code {verdict.code}", verdict.code
                        )
                    level = logging.ERROR if verdict.code else logging.INFO
                    log.log(level, "rank %d: trainer %d: %s", self._rank, self._trainer.process.pid, verdict.reason)
                    return verdict.code
                self._replace(verdict.reason)
        finally:
            self._trainer.end()
            if self._spare is not None:
                self._spare.end()

    def _wait(self) -> signal.Signals | None:
        """Until the trainer has ended (None), or this process is asked to end (the signal)."""
        process = self._trainer.process
        while process.poll() is None:
            info = signal.sigtimedwait(_SIGNALS, _POLL_S)
            if info is not None and info.si_signo != signal.SIGCHLD:
                return signal.Signals(info.si_signo)
            silent = self._trainer.silent_for(time.monotonic())
            if silent is None:
                continue
            if self._spare is None and self._spares > 0 and self._modules.exists():
                self._spare = Child([f"--modules={self._modules}", *self._preload])
                self._spare_is_warm = False
            elif self._spare is not None and not self._spare_is_warm and self._spare.silent_for(0.0) is not None:
                self._spare_is_warm = True
                log.info("rank %d: spare %d is warm", self._rank, self._spare.process.pid)
            if 0 < self._hang_timeout < silent:
                log.error("rank %d: trainer %d is silent for %.0f s: ending it", self._rank, process.pid, silent)
                process.kill()
                process.wait()
        return None

    def _replace(self, reason: str) -> None:
        old, spare, died_at = self._trainer, self._spare, time.time()
        old.release()
        self._modules.unlink(missing_ok=True)
        self._replaced_at.append(time.monotonic())
        if spare is not None and spare.process.poll() is not None:
            log.warning("rank %d: its spare is dead", self._rank)
            spare.release()
            spare = None
        self._trainer, self._spare = spare or Child(), None
        kind = "new process" if spare is None else "warm spare" if self._spare_is_warm else "spare (still importing)"
        log.warning(
            "rank %d: trainer %d %s; %s %d takes over",
            self._rank,
            old.process.pid,
            reason,
            kind,
            self._trainer.process.pid,
        )
        self._trainer.assign(**self._order, replaces=reason, died_at=died_at, start=self._start)


def tell_start(token: str) -> None:
    """Called by a guardian's child: it has agreed on this token of the start with its peers."""
    if (page := heartbeat_page()) is not None:
        struct.pack_into(f"{TOKEN_BYTES}s", page, _START_AT, token.encode())


def tell_over(code: int) -> None:
    """Called by a guardian's child: its script has ended, with this exit code."""
    if (page := heartbeat_page()) is not None:
        struct.pack_into("d", page, _OVER_AT, code + 1)


def heartbeat_page() -> mmap.mmap | None:
    """The page that a guardian shares with its child (`Child`), for the child; None without a guardian."""
    fd = os.environ.get(HEARTBEAT_FD_ENV)
    return None if fd is None else mmap.mmap(int(fd), mmap.PAGESIZE)


def beat(page: mmap.mmap) -> int:
    """Tell the guardian that this child runs. Returns what it wants: 0 nothing, 1 end, 2 half of the grace is over."""
    struct.pack_into("d", page, _BEAT_AT, time.monotonic())
    return int(struct.unpack_from("d", page, _ASKED_AT)[0])


def _die_with_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _LIBC.prctl(1, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)


_LIBC = ctypes.CDLL(None)


def modules_note(job_dir: str, rank: int) -> Path:
    """Where `note_modules` of this rank writes."""
    return Path(job_dir, f"modules-{rank}.json")


def note_modules(job_dir: str | None, rank: int) -> None:
    """Say what this trainer has imported, now that it trains: its spare imports the same, lazy imports included.

    Where that cannot be written there is no spare, which is logged: no reason for a job to end.
    """
    if job_dir:
        names = [name for name, module in list(sys.modules.items()) if _is_importable(name, module)]
        note = modules_note(job_dir, rank)
        try:
            note.with_suffix(".new").write_text(json.dumps(names))
            note.with_suffix(".new").rename(note)
        except OSError as error:
            log.warning("rank %d has no warm spare, a replacement must import everything first: %s", rank, error)


def _is_importable(name: str, module: object) -> bool:
    spec = getattr(module, "__spec__", None)
    return name != "__main__" and getattr(spec, "name", None) == name


def note_user_error(job_dir: str | None, rank: int, error: str, code: int, report: str = "") -> None:
    """Leave a note that the user's code failed, for `user_error_before`. The first note stands.

    ``report``: the content of torchrun's error file.
    """
    if job_dir:
        told = {"rank": rank, "error": error, "code": code, "report": report}
        with suppress(FileExistsError), open(Path(job_dir, _NOTE), "x") as file:
            json.dump(told, file)


def user_error_before(job_dir: str | None) -> int | None:
    """The exit code of an error of the user's code that ended an earlier attempt on this host, None if there was none.

    Such an error comes back on each attempt. torchrun cannot be told, so each later attempt ends at once, with it.
    """
    note = Path(job_dir or "", _NOTE)
    if not job_dir or not note.exists():
        return None
    told = json.loads(note.read_text())
    log.error("not started again: rank %s ended with %s", told["rank"], told["error"])
    if "TORCHELASTIC_ERROR_FILE" in os.environ and told["report"]:
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(told["report"])
    return int(told["code"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="guardian")
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--preload", default="")
    parser.add_argument("--max-replacements", type=int, default=Budget.replacements)
    parser.add_argument("--window", type=float, default=Budget.window)
    parser.add_argument("--hang-timeout", type=float, default=30.0)
    parser.add_argument("--module", action="store_true")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="[lightning-cpr] %(message)s")
    if (code := user_error_before(os.environ.get(JOB_DIR_ENV))) is not None:
        return code
    preload = [module for module in options.preload.split(",") if module]
    if not options.module:
        preload = ["--script", options.script, *preload]
    os.environ |= {HANG_TIMEOUT_ENV: str(options.hang_timeout), SPARES_ENV: str(options.spares)}
    guardian = Guardian(
        order={"script": options.script, "args": options.args, "module": options.module},
        rank=int(os.environ["RANK"]),
        preload=preload,
        spares=options.spares,
        budget=Budget(options.max_replacements, options.window),
        hang_timeout=options.hang_timeout,
    )
    return guardian.run()


if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder: its modules must not be importable by their bare names
    sys.exit(main())
