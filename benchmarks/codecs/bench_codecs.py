"""Bytes, error and speed of the row codecs beside FBGEMM's row-wise operators, on the same rows in the same run.

    python benchmarks/codecs/bench_codecs.py --json benchmarks/codecs/results.json

Each repeat times both, in alternating order; a ratio is the median of the per-repeat ratios, so that what else the
machine does falls on both. Times are CPU seconds of the one thread. GB/s are of float32 rows, encoded or decoded, at
the median time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import fbgemm_gpu  # noqa: F401
import torch
from torch import Tensor

from lightning_cpr.store.codec import Codec, get_codec

OPS = torch.ops.fbgemm
PEERS = {"int8": 8, "aint4": 4, "aint3": 3, "aint2": 2}


def peer(bits: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    if bits == 8:
        return OPS.FloatToFused8BitRowwiseQuantized, OPS.Fused8BitRowwiseQuantizedToFloat
    stored = (
        4 if bits == 3 else bits
    )  # the operators pack 3 bit codes like 4 bit ones: beside 3 bits stands the 4 bit op
    return (
        lambda rows: OPS.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, stored),
        lambda packed: OPS.FusedNBitRowwiseQuantizedSBHalfToFloat(packed, stored),
    )


def greedy(rows: Tensor, bits: int, num_bins: int, ratio: float) -> Tensor:
    """The paper's search written plainly over the rows: the least squared error of each row."""
    levels = 2**bits - 1

    def error(low: Tensor, high: Tensor) -> Tensor:
        step = ((high - low) / levels)[:, None]
        codes = ((rows - low[:, None]) / step).round_().clamp_(0, levels)
        return codes.mul_(step).add_(low[:, None]).sub_(rows).square_().sum(dim=1)

    low, high = rows.amin(dim=1), rows.amax(dim=1)
    step, best = (high - low) / num_bins, error(low, high)
    for _ in range(int(num_bins * ratio)):
        raised, lowered = error(low + step, high), error(low, high - step)
        up = raised <= lowered
        low, high = torch.where(up, low + step, low), torch.where(up, high, high - step)
        best = torch.minimum(best, torch.minimum(raised, lowered))
    return best


def seconds(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def alternate(ours: Callable[[], object], theirs: Callable[[], object], repeats: int) -> tuple[float, float, float]:
    """Median seconds of either, and the median of their ratios (theirs / ours: above 1, ours is faster)."""
    ours(), theirs()
    pairs = []
    for repeat in range(repeats):
        if repeat % 2:
            pairs.append((seconds(ours), seconds(theirs)))
        else:
            pairs.append((seconds(theirs), seconds(ours))[::-1])
    return (
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(b / a for a, b in pairs),
    )


def measure(codec: Codec, rows: Tensor, repeats: int) -> dict[str, float | str]:
    size, cols = rows.nbytes / 1e9, rows.shape[1]
    parts = codec.encode(rows)
    back = codec.decode(parts, cols, rows.dtype)
    result: dict[str, float | str] = {
        "codec": codec.name,
        "bytes_a_row": sum(part.nbytes for part in parts.values()) / len(rows),
        "l2_error": float((back - rows).norm()),
        "rows_that_do_not_fit": int((~codec.fits(rows)).sum()),
        "fits_gb_s": size / statistics.median(seconds(lambda: codec.fits(rows)) for _ in range(repeats)),
    }
    bits = PEERS.get(codec.name)
    encode, decode = peer(bits) if bits else (lambda r: r.half(), lambda p: p.float())
    packed = encode(rows)
    ours, theirs, ratio = alternate(lambda: codec.encode(rows), lambda: encode(rows), repeats)
    result |= {"encode_gb_s": size / ours, "peer_encode_gb_s": size / theirs, "encode_ratio": ratio}
    ours, theirs, ratio = alternate(lambda: codec.decode(parts, cols, rows.dtype), lambda: decode(packed), repeats)
    result |= {"decode_gb_s": size / ours, "peer_decode_gb_s": size / theirs, "decode_ratio": ratio}
    result |= {
        "peer": f"fbgemm {4 if bits == 3 else bits} bit" if bits else "Tensor.half",
        "peer_bytes_a_row": packed.nbytes / len(rows),
        "peer_l2_error": float((decode(packed) - rows).norm()),
    }
    if bits in (2, 3, 4):
        block = rows[:4096]
        walk = seconds(lambda: greedy(block, bits, 45 if bits == 4 else 25, 0.6))
        walked = greedy(rows[:20000], bits, 45 if bits == 4 else 25, 0.6).sum().sqrt()
        result |= {
            "greedy_walk_gb_s": block.nbytes / 1e9 / walk,
            "l2_error_over_greedy": float((back[:20000] - rows[:20000]).norm() / walked),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--cols", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = torch.randn(args.rows, args.cols, generator=torch.Generator().manual_seed(0)) * 0.05
    names = ["fp16", *PEERS]
    report = {
        "rows": args.rows,
        "cols": args.cols,
        "repeats": args.repeats,
        "threads": 1,
        "clock": "CPU seconds of the thread",
        "device": "cpu",
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {name: version(name) for name in ("torch", "fbgemm-gpu-cpu")},
        "load_average": os.getloadavg()[0],
        "results": [measure(get_codec(name), rows, args.repeats) for name in names],
    }
    for r in report["results"]:
        print(
            f"{r['codec']:6s} {r['bytes_a_row']:6.1f} B/row ({r['peer_bytes_a_row']:.1f})  "
            f"L2 {r['l2_error']:8.3f} ({r['peer_l2_error']:.3f})  "
            f"encode {r['encode_gb_s']:6.2f} GB/s ({r['peer_encode_gb_s']:.2f}; ratio {r['encode_ratio']:.2f})  "
            f"decode {r['decode_gb_s']:6.2f} GB/s ({r['peer_decode_gb_s']:.2f}; ratio {r['decode_ratio']:.2f})"
        )
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.processor())


if __name__ == "__main__":
    main()
