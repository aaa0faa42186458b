"""``make bench``: every benchmark at its small size, one after the other. ``python -m benchmarks NAME ...`` runs some.

Each benchmark prints its ratios beside its peer's figures and can write JSON; the full sizes are in their READMEs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SMALL: dict[str, list[str]] = {
    "codecs": ["benchmarks/codecs/bench_codecs.py"],
    "restore_chain": ["-m", "benchmarks.restore_chain", "--rounds", "3"],
    "write_bandwidth": ["-m", "benchmarks.write_bandwidth", "--small"],
    "restored_accuracy": ["-m", "benchmarks.restored_accuracy", "--small"],
    "stall": ["-m", "benchmarks.stall", "--small"],
    "parity": ["-m", "benchmarks.parity", "--rows", "50000", "--steps", "64", "--out", "{out}/parity.json"],
    "recovery": ["-m", "benchmarks.recovery.run", "--worlds", "2", "--repeats", "1"],
    "tracking": ["-m", "benchmarks.tracking", "--rounds", "8", "--out", "{out}/tracking.json"],
    "cpr_paper": ["-m", "benchmarks.cpr_paper", "--small", "--out", "{out}/cpr_paper"],
}


def main() -> None:
    names = sys.argv[1:] or list(SMALL)
    unknown = sorted(set(names) - set(SMALL))
    if unknown:
        raise SystemExit(f"no benchmark {', '.join(unknown)}: there are {', '.join(SMALL)}")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    failed = []
    with tempfile.TemporaryDirectory() as out:
        for name in names:
            print(f"== {name}", flush=True)
            started = time.monotonic()
            command = [sys.executable, *(part.format(out=out) for part in SMALL[name])]
            done = subprocess.run(command, cwd=ROOT, env=env, check=False)
            print(f"== {name}: exit {done.returncode}, {time.monotonic() - started:.0f} s", flush=True)
            if done.returncode:
                failed.append(name)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
