# SPDX-License-Identifier: Apache-2.0
"""Attention alone, at decode: one query a sequence over random cached rows, in GB/s of cache beside a pure read.

Rows in shuffled blocks, from memory where a cell's MB are more than the caches hold; timed in C++. Every cell is a
median of repetitions that take turns with the other cells', each round with the control beside it, so that ratios hold
on a machine that others use.

    python benchmarks/attention.py --threads 2 --tokens 16384 65536
    python benchmarks/attention.py --types f16 q8 --sparse-threshold 0.001 --sharpness 4
    python benchmarks/attention.py --tokens 4096 --scores plain bias cap
    python benchmarks/attention.py --modes kv x --shapes mha25-64 --types q8 --tokens 4096 16384
    python benchmarks/attention.py --modes kv k k+r --shapes mha-64 mha-96 mha-128 mha12-64 --tokens 4096 16384
    python benchmarks/attention.py --modes k k+r --types q8 --residual q4/4 --isas avx512 avx2
"""

from __future__ import annotations

import argparse
import json
from statistics import median

import machine

from slimrt import _core

# query heads, KV heads, head_dim
SHAPES = {
    "mha-64": (32, 32, 64), "mha-96": (32, 32, 96), "mha-128": (32, 32, 128), "mha12-64": (12, 12, 64),
    "mha8-64": (8, 8, 64), "mha25-64": (25, 25, 64),
    "gqa-128": (32, 8, 128),
}  # fmt: skip
MODES = ("kv", "k", "k+r", "x")  # whose rows are read; all but kv up to U, whole rows by weights, before W_KV or W_V
SCORES = {"plain": {}, "bias": {"biased": True}, "cap": {"score_cap": 30.0}}  # what is done to them before the softmax
TYPES = ("f32", "f16", "bf16", "q8", "fp8_e4m3", "fp8_e5m2", "q4")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["mha-64", "mha-128", "gqa-128"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["kv"], help="k+r: with a residual")
    parser.add_argument(
        "--residual", default="/8", metavar="[TYPE]/PART",
        help="of k+r, of the rows' type if no other, such a part as wide (default: /8; as converted for q8: q4/4)",
    )  # fmt: skip
    parser.add_argument("--types", nargs="+", choices=TYPES, default=["f16", "q8"])
    parser.add_argument("--scores", nargs="+", choices=SCORES, default=["plain"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768], help="cached, of each sequence")
    parser.add_argument("--sequences", type=int, default=1, help="in one call")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isas", nargs="+", default=["cpu"], help="default: the best of the CPU")
    parser.add_argument("--repetitions", type=int, default=10, help="a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sparse-threshold", type=float, default=0.0)
    parser.add_argument("--sharpness", type=float, default=1.0, help="standard deviation of the scores")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def measure(
    args: argparse.Namespace, shape: str, mode: str, type_name: str, tokens: int, scores: str, isa: str
) -> dict:
    _, kv_heads, head_dim = SHAPES[shape]
    residual, _, part = args.residual.partition("/")
    rank, rest = (kv_heads * head_dim // int(part), residual or type_name) if mode == "k+r" else (0, type_name)
    seconds, size, skipped = _core.ops.time_attention(
        *SHAPES[shape], type_name, rest, tokens, args.sequences, args.sharpness, args.sparse_threshold,
        args.repetitions, absorbed=mode != "kv", wide=mode == "x", isa=isa, n_threads=args.threads, rank=rank,
        **SCORES[scores],
    )  # fmt: skip
    control = _core.read_bandwidth(args.threads)
    return {"seconds": median(seconds), "bytes": size, "skipped": skipped, "control": control}


def main() -> None:
    args = arguments()
    access = machine.access_rows_as_measured(args.threads)
    cells = [
        (shape, mode, t, n, scores, isa)
        for shape in args.shapes
        for n in args.tokens
        for t in args.types
        for mode in args.modes
        for scores in args.scores
        for isa in args.isas
    ]
    rounds = [{cell: measure(args, *cell) for cell in cells} for _ in range(args.rounds)]
    rows = []
    for cell in cells:
        shape, mode, type_name, tokens, scores, isa = cell
        first_mode = (shape, args.modes[0], *cell[2:])
        first_scores, first_isa = (*cell[:4], args.scores[0], isa), (*cell[:5], args.isas[0])
        runs = [r[cell] for r in rounds]
        rows.append(
            {
                "shape": shape, "mode": mode, "type": type_name, "tokens": tokens, "scores": scores, "isa": isa,
                "MB": runs[0]["bytes"] / 1e6,
                "us": 1e6 * median(r["seconds"] for r in runs),
                "GB/s": median(r["bytes"] / r["seconds"] for r in runs) / 1e9,
                "control GB/s": median(r["control"] for r in runs),
                "ratio": median(r["bytes"] / r["seconds"] / 1e9 / r["control"] for r in runs),
                f"x {args.modes[0]}": median(r[first_mode]["seconds"] / r[cell]["seconds"] for r in rounds),
                "x first": median(r[cell]["seconds"] / r[first_scores]["seconds"] for r in rounds),
                f"x {args.isas[0]}": median(r[first_isa]["seconds"] / r[cell]["seconds"] for r in rounds),
                "skipped": runs[0]["skipped"],
            }
        )  # fmt: skip
    if args.json:
        said = {"threads": args.threads, "access": access, "residual": args.residual}
        print(json.dumps(machine.describe() | said | {"rows": rows}, indent=1))
        return
    print("  ".join(f"{name:>12}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value:12.2f}" if isinstance(value, float) else f"{value:>12}" for value in row.values()))


if __name__ == "__main__":
    main()
