"""Products of one token beside the pure read of the same bytes: memory accessed as usual, and as was measured here.

    python benchmarks/access.py --json benchmarks/results/$(date +%F)-access.json

Each type's matrices lie in a file, mapped as a model's are, and are far larger than the caches. Read, usual and
measured access take turns; shares of the read are medians over the turns, each beside the read of its own turn. The
access is measured by the same code as at a first load (slimrt.core.tune), before the turns; its own share of the read,
in pages of 4 KiB, is one of CPU time, which others at work on the machine disturb less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from linear import held
from machine import describe

from slimrt import _core, core

TYPES = ["q8_0", "q4_k", "q5_k", "q6_k", "f16", "bf16"]


def measure(kind: str, raw: np.ndarray, args: argparse.Namespace, threads: int) -> dict[str, object]:
    """One row of the table."""
    started = time.perf_counter()
    found = core.tune(kind, args.isa, threads)
    took = time.perf_counter() - started
    ways = {"read": "usual", "usual": "usual", "measured": f"{kind}={found['best']}"}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(args.turns):
        for way, access in ways.items():
            os.environ["SLIMRT_ACCESS"] = access
            tokens = 0 if way == "read" else 1
            seconds[way] += _core.ops.time_linear(raw, kind, args.rows, args.cols, tokens, args.isa, threads, 1)
    del os.environ["SLIMRT_ACCESS"]
    shares = {
        way: statistics.median(read / one for read, one in zip(seconds["read"], seconds[way], strict=True))
        for way in ("usual", "measured")
    }
    return {
        "type": kind,
        "isa": args.isa,
        "threads": threads,
        "read GB/s": raw.size / statistics.median(seconds["read"]) / 1e9,
        "usual": shares["usual"],
        "measured": shares["measured"],
        "best of all turns": min(seconds["read"]) / min(seconds["measured"]),
        "access": found["best"],
        "gain": found["gain"],
        "measured, by CPU time": found["read_share"],
        "seconds to measure": took,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--isa", default=_core.cpu_info()["isa"])
    parser.add_argument("--rows", type=int, default=2048, help="of one matrix")
    parser.add_argument("--cols", type=int, default=4096, help="of one matrix")
    parser.add_argument("--megabytes", type=int, default=256, help="of matrices together")
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    print("| type | threads | read GB/s | usual / read | measured / read | by CPU time | access | gain |")
    print("|---|---|---|---|---|---|---|---|")
    for type_name in args.types:
        kind, bytes_ = held(type_name, args.rows, args.cols, args.megabytes)
        with tempfile.TemporaryFile() as file:
            file.write(bytes_)
            file.flush()
            raw = np.memmap(file, np.uint8, "r")
            for threads in args.threads:
                row = measure(kind, raw, args, threads)
                rows.append(row)
                print(
                    f"| {kind} | {threads} | {row['read GB/s']:.1f} | {row['usual']:.2f} | {row['measured']:.2f} | "
                    f"{row['measured, by CPU time']:.2f} | {row['access']} | {row['gain']:.2f} |"
                )
                sys.stdout.flush()
    if args.json:
        args.json.write_text(json.dumps(describe() | {"rates": rates(), "rows": rows}, indent=1) + "\n")


def rates() -> dict[str, float]:
    """What item by item bounds the machine: GB/s of reading, multiply-adds in registers of one thread, in 1e9."""
    read = {f"read GB/s, {n} threads": core.read_bandwidth(n) for n in (1, core.cpu_info()["default_threads"])}
    return read | {f"{kind} GMAC/s": _core.ops.dot_peak(kind, core.cpu_info()["isa"]) for kind in ("q8_0", "f32")}


if __name__ == "__main__":
    main()
