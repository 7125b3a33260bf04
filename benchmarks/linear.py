"""Speed of single weight products, timed inside C++, beside the pure read of the same bytes.

    python benchmarks/linear.py --types q8_0 q4_k f16 --tokens 1 8 512 --threads 1 2

Each type's matrices together are far larger than the caches and hold random codes; they lie in memory as models' do,
q4_k as q4_k_r16, say. GB/s counts the weights' bytes once
a product, whatever the number of tokens; they are accessed as is measured to be fastest for one. GMAC/s counts
multiply-adds, to be held against the dot products that the type's arithmetic makes in registers. Medians over
interleaved turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import gguf
import machine
import numpy as np

from slimrt import _core, core
from slimrt.machine import tuned

# Where a block keeps its float16 numbers; the rest may be any bits.
HALVES = {"q4_0": (0,), "q8_0": (0,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}
PLAIN = {"f32": 4, "f16": 2, "bf16": 2}


def held(type_name: str, rows: int, cols: int, megabytes: int) -> tuple[str, np.ndarray]:
    """The type in which the CPU holds matrices of a file's type, and some such, as bytes."""
    raw = weights(type_name, rows, cols, megabytes)
    side_by_side = f"{type_name}_r16" in core.cpu_info()["access_kinds"]
    return _core.ops.interleave(type_name, raw, cols) if side_by_side else (type_name, raw)


def weights(type_name: str, rows: int, cols: int, megabytes: int) -> np.ndarray:
    """Random matrices one after the other, as bytes of a file; at least one."""
    rng = np.random.default_rng(0)
    if type_name in PLAIN:
        row = cols * PLAIN[type_name]
    else:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name.upper()]]
        row = cols // block * size
    n_rows = max(1, (megabytes << 20) // (rows * row)) * rows
    if type_name in PLAIN:
        values = rng.standard_normal((rows, cols), np.float32)
        some = {"f32": values, "f16": values.astype(np.float16)}.get(type_name)
        if some is None:
            some = (values.view(np.uint32) >> 16).astype(np.uint16)
        return np.tile(some.reshape(-1).view(np.uint8), n_rows // rows)
    raw = rng.integers(0, 256, (n_rows, cols // block, size), dtype=np.uint8)
    scale = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    for at in HALVES[type_name]:
        raw[:, :, at : at + 2] = scale
    return raw.reshape(-1)


def measure(type_name: str, args: argparse.Namespace) -> list[dict[str, object]]:
    """One row for each ISA, number of threads and of tokens; tokens 0 is the pure read."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name.upper()]]
    matrix = args.rows * args.cols // block * size
    type_name, raw = held(type_name, args.rows, args.cols, args.megabytes)
    cases = [(isa, n, t) for isa in args.isas for n in args.threads for t in (0, *args.tokens)]
    seconds: dict[tuple[str, int, int], list[float]] = {case: [] for case in cases}
    access = {(isa, n): tuned([type_name], n, isa=isa)[type_name].best for isa, n, _ in cases}
    for _ in range(args.turns):
        for case in cases:
            isa, n_threads, tokens = case
            core.set_access(f"{type_name}={access[isa, n_threads]}")
            # Many tokens are limited by arithmetic: few matrices tell.
            part = raw if tokens <= 16 else raw[: 2 * matrix]
            times = _core.ops.time_linear(part, type_name, args.rows, args.cols, tokens, isa, n_threads, 1)
            seconds[case].append(times[0] / (part.size // matrix))
    rows = []
    for (isa, n_threads, tokens), times in seconds.items():
        s = statistics.median(times)
        rows.append(
            {"type": type_name, "isa": isa, "threads": n_threads, "tokens": tokens, "microseconds": s * 1e6}
            | {"access": access[isa, n_threads]}
            | {"GB/s": matrix / s / 1e9, "GMAC/s": args.rows * args.cols * tokens / s / 1e9}
            | {"least": min(times) * 1e6, "most": max(times) * 1e6}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*PLAIN, *HALVES]
    parser.add_argument("--types", nargs="+", choices=names, default=names)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4, 8, 16, 512])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--isas", nargs="+", default=[_core.cpu_info()["isa"]])
    parser.add_argument("--rows", type=int, default=2048, help="of one matrix")
    parser.add_argument("--cols", type=int, default=8192, help="of one matrix")
    parser.add_argument("--megabytes", type=int, default=512, help="of matrices together")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = []
    for type_name in args.types:
        for isa in args.isas:
            peak = _core.ops.dot_peak(type_name, isa)
            print(f"\n{type_name}, {isa}: dot products in registers, one thread: {peak:.0f} GMAC/s")
            found.append({"type": type_name, "isa": isa, "threads": 1, "peak GMAC/s": peak})
        print("\n| type | isa | threads | tokens | us | GB/s | GMAC/s |\n|---|---|---|---|---|---|---|")
        for row in measure(type_name, args):
            found.append(row)
            what = row["tokens"] or "read"
            print(
                f"| {row['type']} | {row['isa']} | {row['threads']} | {what} | {row['microseconds']:.0f} "
                f"({row['least']:.0f} - {row['most']:.0f}) | {row['GB/s']:.1f} | {row['GMAC/s']:.1f} |"
            )
            sys.stdout.flush()
    if args.json:
        args.json.write_text(json.dumps(machine.describe() | {"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
