"""Times from SIGKILL of rank 1 to the first step that every rank has finished after it. Writes ``results.json``.

    python -m benchmarks.recovery.run --worlds 2 4 --mb 390 --repeats 3

Ways: ``spare`` (live, warm spare), ``cold`` (live, a new process), ``restart`` (torchrun restarts the job; nothing is
restored, so it is a lower bound for a restart from a version). Ways alternate; the kill comes at a random moment.
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
from pathlib import Path

from benchmarks.recovery.job import TABLES, WIDTH

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("job.py")
LAUNCH = "import sys; from lightning_cpr.recovery.launch import run; run(sys.argv[1:])"
WAYS = {
    "spare": ["--spares=1", "--max-restarts=0"],
    "cold": ["--spares=0", "--max-restarts=0"],
    "restart": ["--spares=0", "--max-replacements=0", "--max-restarts=1", "--monitor-interval=0.1"],
}


def events(out):
    found = []
    for path in out.glob("*.jsonl"):
        rank, pid = map(int, path.stem.split("-"))
        for line in path.read_text().splitlines():
            found.append(json.loads(line) | {"rank": rank, "pid": pid})
    return sorted(found, key=lambda e: e["time"])


def wait_for(condition, seconds):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(condition)
        time.sleep(0.02)
    return value


def memory(pid):
    """(RSS, PSS) of a process in MB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines if line.startswith(("Rss", "Pss:"))}
    return sizes["Rss"], sizes["Pss"]


def measure(way, world, mb, seed):
    rows = int(mb * 1e6 * world / TABLES / (4 * WIDTH + 4))
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        command = [sys.executable, "-c", LAUNCH, f"--nproc-per-node={world}", *WAYS[way], str(JOB)]
        log = (out / "log").open("w")
        job = subprocess.Popen([*command, "--out", folder, "--rows", str(rows)], env=env, stderr=log, text=True)
        try:
            wait_for(lambda: sum(e["event"] == "step" for e in events(out)) > 10 * world, 120)
            spare = None
            if way == "spare":
                wait_for(lambda: (out / "log").read_text().count("is warm") == world, 60)
                line = next(x for x in (out / "log").read_text().splitlines() if "is warm" in x)
                spare = memory(int(line.split("spare ")[1].split()[0]))
            time.sleep(random.Random(seed).uniform(0.5, 1.5))
            victim = next(e["pid"] for e in events(out) if e["event"] == "start" and e["rank"] == 1)
            killed = time.time()
            os.kill(victim, signal.SIGKILL)

            def all_stepped():
                new = next((e for e in events(out) if e["event"] == "start" and e["time"] > killed), None)
                steps = {
                    e["rank"]: e["time"]
                    for e in reversed(events(out))
                    if e["event"] == "step" and new and e["time"] > new["time"]
                }
                return steps if len(steps) == world else None

            first = wait_for(all_stepped, 120)
            restored = [e["seconds"] for e in events(out) if e["event"] == "restored" and e["pid"] != victim]
            return {"seconds": max(first.values()) - killed, "phases": restored, "spare_mb": spare}
        finally:
            job.terminate()
            job.wait(60)
            log.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mb", type=int, nargs="+", default=[390])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    options = parser.parse_args()
    results = []
    for world in options.worlds:
        for mb in options.mb:
            for repeat in range(options.repeats):
                for way in options.ways:
                    told = measure(way, world, mb, repeat)
                    results.append({"way": way, "world": world, "mb": mb, **told})
                    print(json.dumps(results[-1]), flush=True)
            for way in options.ways:
                times = [r["seconds"] for r in results if (r["way"], r["world"], r["mb"]) == (way, world, mb)]
                spread = f"{statistics.median(times):.2f} s [{min(times):.2f}-{max(times):.2f}]"
                print(f"{way:8} {world} ranks {mb} MB a rank: median {spread}")
    Path(__file__).with_name("results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
