"""Runs a script under ``lightning-cpr run`` in its own process group and reads what its ranks wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = "import sys; from lightning_cpr.recovery.launch import run; run(sys.argv[1:])"


@dataclass
class Job:
    """A job that has ended. ``logs``: the JSON lines of each process, by (rank, pid)."""

    code: int
    stderr: str
    logs: dict[tuple[int, int], list[dict[str, Any]]]

    def events(self, rank: int, event: str) -> list[dict[str, Any]]:
        """All events of one kind of one rank, in order, each with its ``pid``."""
        found = [
            e | {"pid": pid} for (r, pid), log in self.logs.items() if r == rank for e in log if e["event"] == event
        ]
        return sorted(found, key=lambda e: e["time"])

    def pids(self, rank: int) -> list[int]:
        """The processes of a rank, oldest first."""
        return [e["pid"] for e in self.events(rank, "start")]


def run_job(
    script: Path,
    out: Path,
    args: Sequence[str],
    options: Sequence[str],
    timeout: float,
    launch: Sequence[str] = (sys.executable, "-c", LAUNCH),
) -> Job:
    """Run a job to its end. Raises TimeoutExpired, with nothing left running, if it takes longer.

    launch: what comes before the options; ``lightning-cpr run`` if nothing else is said.
    """
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    command = [*launch, *options, str(script), "--out", str(out), *args]
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        _, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=30)
        process.kill()
        process.communicate()
        raise
    return Job(process.returncode, stderr, read_logs(out))


def read_logs(out: Path) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """What the processes of a job have written so far, by (rank, pid)."""
    logs = {}
    for path in sorted(out.glob("*.jsonl")):
        rank, pid = path.stem.split("-")
        lines = path.read_text().splitlines(keepends=True)
        logs[int(rank), int(pid)] = [json.loads(line) for line in lines if line.endswith("\n")]
    return logs


def still_running(out: Path) -> list[str]:
    """The command lines of processes that have ``out`` among their arguments or belong to a job of it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if str(out) in line:
                    found.append(line)
    return found
