"""``lightning-cpr run`` of one host, cheap: all processes of all jobs are forks of one that has imported everything.

What differs from the real one: guardians, trainers and spares are forked, not started, so that a "new process" is as
quick as a spare; and the part of torchrun is played by `agent` below. The rest, `guardian.main` and `child.main`, is
the real code. test_killed_process.py and test_live_fit.py each have a test with the real launcher.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_cpr.recovery import child, guardian
from tests.dist._jobs import ROOT, Job, read_logs

SCRIPTS = ("fit_job.py", "killed_job.py", "recovery_job.py")


class Zygote:
    """The process that everything is forked from. It imports once, and then runs one job after the other."""

    def __init__(self) -> None:
        env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.dist._forked"]
        self._process = subprocess.Popen(
            command, env=env, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(
        self,
        script: Path,
        out: Path,
        args: Sequence[str],
        world: int,
        max_restarts: int = 0,
        options: Sequence[str] = ("--spares=0",),
        timeout: float = 150,
    ) -> Job:
        """Run a job to its end; after ``timeout`` seconds it is killed, its code is -9. options: of guardians."""
        arguments = [*options, str(script), "--out", str(out), *args]
        log = out / "stderr"
        told = {"world": world, "restarts": max_restarts, "arguments": arguments, "log": str(log), "timeout": timeout}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        return Job(code, log.read_text(), read_logs(out))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


class Process:
    """The part of `subprocess.Popen` that the guardian uses, of a fork."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.005)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


def fork_child(command: Sequence[str], env: dict[str, str], **_: object) -> Process:
    """In place of the guardian's Popen."""
    if pid := os.fork():
        return Process(pid)
    guardian._die_with_parent()
    os.setpgid(0, 0)
    os.environ.update(env)
    sys.argv = list(command[command.index(guardian._CHILD) :])
    leave(child_main)


def child_main() -> int:
    child.show_log()
    child.main()
    return 0


def leave(main: object) -> None:
    """End this fork with what ``main`` returns, as an interpreter would."""
    code: object = 1
    try:
        code = main()  # type: ignore[operator]
    except SystemExit as e:
        code = e.code or 0
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(int(code) if isinstance(code, int) else 1)


def store_port() -> int:
    """The port of a store in a fork of its own, so that this process stays without threads."""
    import torch.distributed as dist

    read, write = os.pipe()
    if not os.fork():
        guardian._die_with_parent()
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write, f"{store.port}\n".encode())
        signal.pause()
    with os.fdopen(read) as told:
        return int(told.readline())


def agent(world: int, max_restarts: int, arguments: Sequence[str]) -> int:
    """What torchrun does for its workers on one host: start them, end all when one fails, start again."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store_port()), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "forked", "TORCHELASTIC_MAX_RESTARTS": str(max_restarts), "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
    }  # fmt: skip
    guardian.subprocess.Popen = fork_child  # type: ignore[assignment, misc]
    for attempt in range(max_restarts + 1):
        ranks = []
        for rank in range(world):
            if pid := os.fork():
                ranks.append(Process(pid))
                continue
            guardian._die_with_parent()
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(attempt)}
            leave(lambda: guardian.main(arguments))
        while all(rank.poll() in (None, 0) for rank in ranks) and any(rank.poll() is None for rank in ranks):
            time.sleep(0.02)
        codes = [rank.poll() for rank in ranks]
        for rank in ranks:
            rank.terminate()
        for rank in ranks:
            rank.wait()
        if not any(codes):
            return 0
    return 1


def run_agent(told: dict[str, Any]) -> int:
    """In a fork: one job, its output in a file."""
    guardian._die_with_parent()
    log = os.open(told["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    job_dir = tempfile.mkdtemp()  # no TemporaryDirectory: each fork would remove it when it ends
    os.environ[guardian.JOB_DIR_ENV] = job_dir
    try:
        return agent(told["world"], told["restarts"], told["arguments"])
    finally:
        shutil.rmtree(job_dir)


def main() -> None:
    sources = [Path(__file__).with_name(name).read_text() for name in SCRIPTS]
    child.warm_up([name for source in sources for name in child.imports_of(source)])
    child.warm_up(child.BASE_MODULES)
    for line in sys.stdin:
        told = json.loads(line)
        pid = os.fork()
        if not pid:
            leave(lambda told=told: run_agent(told))
        job = Process(pid)
        try:
            code = job.wait(told["timeout"])
        except subprocess.TimeoutExpired:
            job.kill()
            code = job.wait()
        print(code, flush=True)
    os._exit(0)  # all that it imported would take seconds to go


if __name__ == "__main__":
    main()
