"""Decode speed of cache modes kv and k at several depths, in turns in one process.

    python benchmarks/cache_modes.py --shape smollm2-1.7b --depths 0 1024 4096

W_KV is random here: speed does not depend on its values. A depth is reached by a real prefill.
"""

from __future__ import annotations

import argparse
import statistics
import time

import models
import numpy as np

from slimrt import _core


def open_engine(path: str, shape: models.Shape, mode: str, n_ctx: int, threads: int) -> _core.Engine:
    """An engine in this cache mode, f16 rows."""
    width = shape.d_model // shape.n_heads * shape.n_kv_heads
    w_kv = np.random.default_rng(0).standard_normal((width, width), np.float32) / np.float32(width**0.5)
    derived = {f"blk.{i}.attn_kv.weight": w_kv for i in range(shape.n_layers)} if mode == "k" else None
    return _core.Engine(path, n_ctx=n_ctx, n_threads=threads, cache=mode, derived=derived)


def decode(engine: _core.Engine, sequence: int, tokens: int) -> float:
    """tok/s of so many steps; the sequence is as long as before afterwards."""
    length, token = engine.length(sequence), np.array([7], np.int32)
    start = time.perf_counter()
    for _ in range(tokens):
        engine.append([(sequence, token)])
    seconds = time.perf_counter() - start
    engine.truncate(sequence, length)
    return tokens / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(models.SHAPES), default="smollm2-1.7b")
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 1024, 4096])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8)
    args = parser.parse_args()
    shape = models.SHAPES[args.shape]
    path = str(models.make(shape))
    n_ctx = max(args.depths) + args.tokens + 1
    engines = {mode: open_engine(path, shape, mode, n_ctx, args.threads) for mode in ("kv", "k")}
    sequences = {mode: engine.new_sequence() for mode, engine in engines.items()}
    print("| depth | kv tok/s | k tok/s | k / kv | cache kv MiB | cache k MiB |\n|---|---|---|---|---|---|")
    for depth in sorted(args.depths):
        for mode, engine in engines.items():
            missing = max(depth, 1) - engine.length(sequences[mode])
            engine.append([(sequences[mode], np.arange(missing, dtype=np.int32) % 1000)])
        turns = [{m: decode(e, sequences[m], args.tokens) for m, e in engines.items()} for _ in range(args.turns)]
        speed = {mode: statistics.median(turn[mode] for turn in turns) for mode in engines}
        ratio = statistics.median(turn["k"] / turn["kv"] for turn in turns)
        sizes = {m: depth * e.memory()["cache_bytes_per_token"] / 2**20 for m, e in engines.items()}
        cells = (depth, f"{speed['kv']:.2f}", f"{speed['k']:.2f}", f"{ratio:.2f}")
        print("|", *(f"{c} |" for c in (*cells, f"{sizes['kv']:.0f}", f"{sizes['k']:.0f}")), flush=True)


if __name__ == "__main__":
    main()
