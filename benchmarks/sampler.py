"""Time to choose a token from a row of logits, beside NumPy doing the same in float32; medians over interleaved turns.

    python benchmarks/sampler.py --vocab 151936 --rows 32 --threads 2

One row by core.Sampler on the caller's thread, and many by core.Engine.sample on the threads of a model (any will do:
its own vocabulary does not matter). NumPy sorts where there is something to sort for: it is the simplest correct
program, not a rival.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import machine
import numpy as np

from slimrt import core

ALL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
CASES: dict[str, dict[str, float]] = {
    "temperature 0": {"temperature": 0.0},
    "temperature 1, nothing else": ALL,
    "slimrt's defaults": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    "top_k 50": ALL | {"top_k": 50},
    "top_p 0.9": ALL | {"top_p": 0.9},
    "min_p 0.05": ALL | {"min_p": 0.05},
    "typical_p 0.9": ALL | {"typical_p": 0.9},
    "repeat_penalty 1.1": ALL | {"repeat_penalty": 1.1},
}
MODEL = Path(__file__).parent.parent / "models" / "tale-llama.gguf"


def by_numpy(logits: np.ndarray, options: dict[str, float], random: np.random.Generator) -> int:
    """What the sampler does but for typical_p and penalties, by a sort if there is a filter."""
    if options["temperature"] == 0:
        return int(logits.argmax())
    ids = np.arange(len(logits))
    if options["top_k"] or options["top_p"] < 1 or options["min_p"]:
        ids = np.argsort(-logits)[: int(options["top_k"]) or None]
        p = np.exp(logits[ids] - logits[ids[0]])
        n = int(np.searchsorted(np.cumsum(p), options["top_p"] * p.sum())) + 1
        ids = ids[:n][p[:n] >= options["min_p"]]
    p = np.cumsum(np.exp((logits[ids] - logits.max()) / np.float32(options["temperature"])), dtype=np.float64)
    return int(ids[min(np.searchsorted(p, random.random() * p[-1], "right"), len(ids) - 1)])


def measured(work: dict[str, Callable[[], object]], turns: int) -> dict[str, tuple[float, float]]:
    """Milliseconds of each, median and least, all once a turn."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(turns):
        for name, do in work.items():
            start = time.perf_counter()
            do()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: (statistics.median(each), min(each)) for name, each in times.items()}


def contestants(
    options: dict[str, float], logits: np.ndarray, engine: core.Engine, rng: np.random.Generator
) -> dict[str, Callable[[], object]]:
    samplers = [core.Sampler(seed=i, **options) for i in range(len(logits))]
    for sampler in samplers:
        sampler.accept(list(range(100)))
    found: dict[str, Callable[[], object]] = {
        "one row": lambda: samplers[0].sample(logits[0]),
        "rows": lambda: engine.sample(logits, samplers),
    }
    if not {"typical_p", "repeat_penalty"} & options.keys():
        found["NumPy"] = lambda: by_numpy(logits[0], options, rng)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--scale", type=float, default=2.5, help="standard deviation of the logits (default: 2.5)")
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((args.rows, args.vocab)) * args.scale).astype(np.float32)
    engine = core.Engine(args.model, n_ctx=32, n_threads=args.threads)
    print(f"{args.vocab} logits; ms, median (least) of {args.turns} turns\n")
    print(f"| | one row | {args.rows} rows, {args.threads} threads | NumPy, one row |\n|---|---|---|---|")
    found = []
    for name, options in CASES.items():
        ms = measured(contestants(options, logits, engine, rng), args.turns)
        found.append({"case": name} | {one: {"ms": each[0], "least": each[1]} for one, each in ms.items()})
        columns = [f"{ms[one][0]:.2f} ({ms[one][1]:.2f})" if one in ms else "" for one in ("one row", "rows", "NumPy")]
        print(f"| {name} | {' | '.join(columns)} |")
    if args.json:
        sizes = {name: getattr(args, name) for name in ("vocab", "rows", "threads", "turns", "scale")}
        args.json.write_text(json.dumps(machine.describe() | sizes | {"cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
