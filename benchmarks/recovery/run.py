"""Times from SIGKILL of rank 1 to the first step that every rank has finished after it. Writes ``results.json``.

    python -m benchmarks.recovery.run --worlds 2 4 --mb 39 390 --repeats 3

Ways: ``spare`` (live, warm spare), ``cold`` (live, a new process), ``restart`` (torchrun restarts the job, which reads
the version; the tables' random values are not drawn), ``handover`` (the same, but survivors' rows come from shared
memory), ``stock`` (plain torchrun restarts it, TorchRec draws the tables'
random values, each rank reads its own `torch.save` file). Ways alternate; the kill comes at a random moment. Survivors
must open no table file, and the replacement must read at most 1.05 times its shards.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.recovery import STOCK_STEP, TABLES, WIDTH

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("job.py")
CPR = "import sys; from lightning_cpr.recovery.launch import run; run(sys.argv[1:])"
TORCHRUN = "import sys; from torch.distributed.run import main; main(sys.argv[1:])"
WAYS = {
    "spare": (CPR, ["--spares=1", "--max-restarts=0"]),
    "cold": (CPR, ["--spares=0", "--max-restarts=0"]),
    "restart": (CPR, ["--spares=0", "--max-replacements=0", "--max-restarts=1", "--monitor-interval=0.1"]),
    "handover": (CPR, ["--spares=0", "--max-replacements=0", "--max-restarts=1", "--monitor-interval=0.1"]),
    "stock": (TORCHRUN, ["--max-restarts=1", "--monitor-interval=0.1"]),
}
LIVE = ("spare", "cold")


def events(out: Path) -> list[dict[str, Any]]:
    found = []
    for path in out.glob("*.jsonl"):
        rank, pid = map(int, path.stem.split("-"))
        for line in path.read_text().splitlines():
            found.append(json.loads(line) | {"rank": rank, "pid": pid})
    return sorted(found, key=lambda e: e["time"])


def wait_for(condition: Callable[[], Any], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(condition)
        time.sleep(0.05)
    return value


def memory(pid: int) -> tuple[float, float]:
    """(RSS, PSS) of a process in MB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines if line.startswith(("Rss", "Pss:"))}
    return sizes["Rss"], sizes["Pss"]


def saved(out: Path, way: str, world: int) -> bool:
    """Whether there is something to restore from."""
    if way == "stock":
        return sum(e["event"] == "step" and e["step"] > STOCK_STEP for e in events(out)) >= world
    log = out / "root" / "events.jsonl"
    return log.exists() and '"event":"save_committed"' in log.read_text()


def measure(way: str, world: int, mb: int, seed: int) -> dict[str, Any]:
    rows = int(mb * 1e6 * world / TABLES / (4 * WIDTH + 4))
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    launch, options = WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        command = [sys.executable, "-c", launch, f"--nproc-per-node={world}", *options, str(JOB)]
        log = (out / "log").open("w")
        started = [*command, "--out", folder, "--rows", str(rows), "--way", way]
        job = subprocess.Popen(started, env=env, stderr=log, stdout=log, text=True)
        try:
            wait_for(lambda: sum(e["event"] == "step" for e in events(out)) > 10 * world, 180)
            wait_for(lambda: saved(out, way, world), 180)
            spare = None
            if way == "spare":
                wait_for(lambda: (out / "log").read_text().count("is warm") == world, 60)
                line = next(x for x in (out / "log").read_text().splitlines() if "is warm" in x)
                spare = memory(int(line.split("spare ")[1].split()[0]))
            time.sleep(random.Random(seed).uniform(0.5, 1.5))
            victim = next(e["pid"] for e in events(out) if e["event"] == "start" and e["rank"] == 1)
            killed = time.time()
            os.kill(victim, signal.SIGKILL)

            def all_stepped() -> dict[int, float] | None:
                seen = [e for e in events(out) if e["time"] > killed]
                new = next((e["time"] for e in seen if e["event"] == "start"), None)
                if new is None:
                    return None
                first = {e["rank"]: e["time"] for e in reversed(seen) if e["event"] == "step" and e["time"] > new}
                return first if len(first) == world else None

            first = wait_for(all_stepped, 240)
            told = {"seconds": max(first.values()) - killed, "spare_mb": spare}
            seen = [e for e in events(out) if e["time"] > killed]
            if way in ("restart", "handover"):
                log_text = (out / "root" / "events.jsonl").read_text()
                assert ('"handed_over":[0' in log_text) == (way == "handover"), log_text
            return told | (live(seen, out) if way in LIVE else restarted(seen, killed, world, max(first.values())))
        finally:
            job.terminate()
            job.wait(60)
            log.close()


def live(seen: list[dict[str, Any]], out: Path) -> dict[str, Any]:
    """Phases, and what the ranks read."""
    restored = [e for e in seen if e["event"] == "restored"]
    (fresh,) = [e for e in restored if e["lost"]]
    kept = [e for e in restored if not e["lost"]]
    size = next(e["bytes"] for e in seen if e["event"] == "built" and e["pid"] == fresh["pid"])
    assert all(e["opened"] == 0 for e in kept), kept
    assert size <= fresh["fetched"] <= 1.05 * size, (fresh, size)
    log = (out / "root" / "events.jsonl").read_text().splitlines()
    rejoined = next(json.loads(line) for line in log if '"event":"rejoined"' in line)
    phases = {name[:-2]: value for name, value in rejoined.items() if name.endswith("_s")}
    return {"phases": phases, "read_ratio": fresh["fetched"] / size, "survivors_opened": 0}


def restarted(seen: list[dict[str, Any]], killed: float, world: int, first: float) -> dict[str, Any]:
    """Phases of the slowest rank: until its process was made, had imported, had its model, its rows, its first step."""
    last = {name: max(e["time"] for e in seen if e["event"] == name) for name in ("start", "built", "training")}
    made = max(e["began"] for e in seen if e["event"] == "start")
    moments = [killed, made, last["start"], last["built"], last["training"], first]
    names = ("relaunch", "imports", "build", "restore", "first_step")
    return {"phases": {n: b - a for n, a, b in zip(names, moments[:-1], moments[1:], strict=True)}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worlds", type=int, nargs="+", default=[2])
    parser.add_argument("--mb", type=int, nargs="+", default=[39])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--out", type=Path, default=None, help="results are added to this file")
    options = parser.parse_args()
    results = json.loads(options.out.read_text()) if options.out and options.out.exists() else []
    for world in options.worlds:
        for mb in options.mb:
            for repeat in range(options.repeats):
                for way in options.ways:
                    told = {"way": way, "world": world, "mb": mb, **measure(way, world, mb, repeat)}
                    results.append(told)
                    print(json.dumps(told), flush=True)
                    if options.out:
                        options.out.write_text(json.dumps(results, indent=1))
            for way in options.ways:
                times = [r["seconds"] for r in results if (r["way"], r["world"], r["mb"]) == (way, world, mb)]
                spread = f"{statistics.median(times):.2f} s [{min(times):.2f}-{max(times):.2f}]"
                print(f"{way:8} {world} ranks {mb} MB a rank: median {spread}")


if __name__ == "__main__":
    main()
