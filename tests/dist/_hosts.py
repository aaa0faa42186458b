"""Two "hosts" on one machine: network namespaces with a wire between; each process in one sees its own /dev/shm."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.dist._jobs import ROOT


def why_no_hosts() -> str:
    """Why this machine cannot play two hosts; empty if it can."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if missing := [tool for tool in ("ip", "unshare", "mount") if shutil.which(tool) is None]:
        return f"needs {', '.join(missing)}"
    probe = subprocess.run(["unshare", "-n", "-m", "true"], capture_output=True, text=True, check=False)
    return "" if probe.returncode == 0 else f"no namespaces here: {probe.stderr.strip()}"


class Host:
    """One of them. ``address``: that the other reaches it by."""

    def __init__(self, name: str, device: str, address: str, out: Path) -> None:
        self.name, self.device, self.address, self._out = name, device, address, out
        self.launchers: list[subprocess.Popen[bytes]] = []

    def launch(
        self,
        options: Sequence[str],
        env: dict[str, str] | None = None,
        launcher: Sequence[str] = ("torch.distributed.run",),
    ) -> subprocess.Popen[bytes]:
        """Start a launcher, on a host that has just booted: its /dev/shm is empty. Its output goes to a file.

        launcher: a module, and what comes before the options.
        """
        inner = f'mount -t tmpfs tmpfs /dev/shm && exec {sys.executable} -m "$@"'
        command = ["ip", "netns", "exec", self.name, "unshare", "-m", "sh", "-c", inner, "sh", *launcher, *options]
        variables = os.environ | {
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": self.device,
        }
        with (self._out / f"{self.name}-{len(self.launchers)}.log").open("wb") as log:
            process = subprocess.Popen(command, env=variables | (env or {}), stdout=log, stderr=subprocess.STDOUT)
        self.launchers.append(process)
        return process

    def kill(self) -> None:
        """Every process on it, at once."""
        listed = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        for pid in map(int, listed.stdout.split()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for launcher in self.launchers:
            launcher.wait(timeout=10)

    def log(self) -> str:
        return "\n".join(p.read_text(errors="replace") for p in sorted(self._out.glob(f"{self.name}-*.log")))


@contextmanager
def two_hosts(out: Path) -> Iterator[list[Host]]:
    """Gone afterwards, with every process on them."""
    tag = f"cpr{os.getpid() % 100000}"
    hosts = [Host(f"{tag}{i}", f"{tag}v{i}", f"10.77.0.{i + 1}", out) for i in (0, 1)]
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
        first, second = hosts
        _ip(
            "link",
            "add",
            first.device,
            "netns",
            first.name,
            "type",
            "veth",
            "peer",
            second.device,
            "netns",
            second.name,
        )
        for host in hosts:
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.device)
            _ip("-n", host.name, "link", "set", host.device, "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
        yield hosts
    finally:
        for host in hosts:
            with suppress(subprocess.CalledProcessError):
                host.kill()
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True, check=False)


def wait_for(what: Callable[[], bool], seconds: float, told: Callable[[], str]) -> None:
    """Poll until it is so. AssertionError with what ``told`` says if it is not in time."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, told()
        time.sleep(0.05)


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True)
