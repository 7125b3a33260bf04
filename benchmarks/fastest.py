"""Whether `--cache fastest` predicts which of kv q8 and k+r q8 decodes faster: its choice beside decoding with both.

    python benchmarks/fastest.py --json benchmarks/results/$(date +%F)-fastest.json

Each shape is a model of so many layers, folded as `slimrt convert` does it, that its rows are larger than the caches;
both caches decode in turns at the length, all of a layer's attention with what reads its rows, projections, and hardly
anything else. The prediction is made anew, by what this machine is measured to do first. wins: the measured choice is
the predicted one; a difference below 3 % is none.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import converted
import engines
import machine
import models

from slimrt import _core, core
from slimrt.cache.config import CacheChoice
from slimrt.cache.fastest import fastest
from slimrt.cache.planner import Planner
from slimrt.modelfile.source import ModelSource
from slimrt.modes import FASTEST

SHAPES = {"32x128": (32, 128), "32x64": (32, 64), "32x96": (32, 96), "12x64": (12, 64), "8x64": (8, 64)}
EQUAL = 1.03


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="heads and their width")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="of decoding in a turn, about")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def shape_of(name: str, least_tokens: int) -> models.Shape:
    """Rows of kv in q8 are twice as large as the caches, those of k+r nearly once."""
    heads, dim = SHAPES[name]
    layers = -(-int(core.cpu_info()["cache_bytes"]) // (heads * dim * least_tokens)) + 1
    return models.Shape(f"attention-{name}-{layers}layers", layers, heads * dim, heads, heads, 256, 1024, 1 << 17, True)


def predicted(path: Path, tokens: int, threads: int) -> dict[str, float]:
    """Milliseconds of a step's attention by the caches' names, as the choice has them at this length."""
    planner = Planner.of(ModelSource.of(path, show_progress=False), None, 1, 512, threads)
    choice = CacheChoice.of(FASTEST)
    return fastest(planner, choice, 2 * tokens, lambda _: "").times  # which is of half a context


def decoded(engine: engines.Engine, tokens: int, seconds: float) -> float:
    """Milliseconds of a step, by the median."""
    times: list[float] = []
    engine.append([7], 1)
    while len(times) < 3 or sum(times) < 1e3 * seconds:
        start = time.perf_counter()
        engine.append([7], 1)
        times.append(1e3 * (time.perf_counter() - start))
    engine.rewind(tokens)
    return median(times)


def measured(path: Path, shape: models.Shape, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """Of both caches in turns, with the control beside them."""
    load = engines.Load(str(path), shape, tokens + 4096, 1, args.threads)
    both = {f"{mode}:q8": engines.Slimrt(load, {"cache": mode, "type": "q8"}) for mode in ("kv", "k+r")}
    for engine in both.values():
        engine.fill(tokens)
    turns = [
        {name: decoded(engine, tokens, args.seconds) for name, engine in both.items()}
        | {"control": _core.read_bandwidth(args.threads)}
        for _ in range(args.turns)
    ]
    for engine in both.values():
        engine.close()
    found = {name: median(turn[name] for turn in turns) for name in turns[0]}
    return found | {"slower": median(turn["k+r:q8"] / turn["kv:q8"] for turn in turns)}


def cell(name: str, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    shape = shape_of(name, min(args.tokens))
    path = models.make(shape, cache=converted.Cache.of("k+r:q8", shape))
    times = predicted(path, tokens, args.threads)
    said = "kv" if times["kv:q8"] <= times["k+r:q8"] else "k+r"
    found = measured(path, shape, tokens, args)
    slower = found["slower"] if said == "k+r" else 1 / found["slower"]
    return {
        "shape": name, "tokens": tokens, "layers": shape.n_layers, "predicted": said,
        "predicted difference ms": times["k+r:q8"] - times["kv:q8"],
        "difference ms": found["k+r:q8"] - found["kv:q8"],
        "kv ms": found["kv:q8"], "k+r ms": found["k+r:q8"], "k+r / kv": found["slower"],
        "wins": slower <= EQUAL, "control GB/s": found["control"],
    }  # fmt: skip


def main() -> None:
    args = arguments()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SLIMRT_CACHE_DIR"] = folder  # nothing that was measured before
        for name in args.shapes:
            for tokens in args.tokens:
                rows.append(cell(name, tokens, args))
                if len(rows) == 1:
                    print("  ".join(f"{key:>12}" for key in rows[0]))
                values = (f"{v:.3g}" if isinstance(v, float) else str(v) for v in rows[-1].values())
                columns = zip(values, rows[0], strict=True)
                print("  ".join(f"{value:>{max(12, len(key))}}" for value, key in columns), flush=True)
    print(f"{sum(row['wins'] for row in rows)} of {len(rows)} choices are the faster cache")
    if args.json:
        said = {"threads": args.threads, "turns": args.turns}
        args.json.write_text(json.dumps(machine.describe() | said | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
