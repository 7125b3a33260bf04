# SPDX-License-Identifier: Apache-2.0
"""Attention at decode with softmax weights of trained models: kv and k+r in q8, dense and with a budget, V heads.

A model reads a text; the weights that late queries of its heads give to the text, over all layers, are tiled to
--tokens and replayed as scores on random rows of another shape (as a bias, with queries of zeros). Rows are larger than
the caches in all; timed in C++; every cell is a median of rounds in which all cells take turns, beside a pure read.
--made: of such shares of the rows a head needs nothing, of the others alike, which lie together by 64 or anywhere.

    python benchmarks/patterns.py --models models/tale-llama.gguf models/tale-hard.gguf --shapes mha-64 mha-128
    python benchmarks/patterns.py --made 0.5 0.9 0.99 --deltas 0.001
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

import machine
import numpy as np

from slimrt import _core
from slimrt.core import Engine, GgufFile
from slimrt.folding.attention import Attention
from slimrt.folding.heads import kept_rows
from slimrt.folding.rotation import Rotation
from slimrt.folding.weights import LayerWeights
from slimrt.folding.window import Window
from slimrt.modelfile.gguf import read_gguf
from slimrt.tokenizer.gguf import read_fields
from slimrt.tokenizer.tokenizer import Tokenizer

SHAPES = {"mha-64": (32, 64), "mha-96": (32, 96), "mha-128": (32, 128), "mha12-64": (12, 64)}
TEXT = Path(__file__).parent.parent / "models" / "heldout.txt"
KEEPING = 4  # one head in so many keeps V
RUN = 64  # rows that lie together


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", type=Path, default=[])
    parser.add_argument("--made", nargs="+", type=float, default=[], metavar="SHARE", help="of rows without weight")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["mha-64", "mha-128"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384])
    parser.add_argument("--deltas", type=float, nargs="+", default=[0.005, 0.01, 0.02])
    parser.add_argument("--threshold", type=float, default=0.03, help="of kv")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=5, help="a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def recorded(path: Path, n_heads: int) -> np.ndarray:
    """Softmax weights of n_heads pairs of a head and a late query, those that attend to the fewest rows first
    [n_heads, rows]."""
    file = GgufFile(str(path))
    model = read_gguf(file)
    attention = Attention.of(model)
    n = min(model.size("context_length"), 2048)
    ids = Tokenizer.from_gguf_fields(read_fields(file)).encode(TEXT.read_text(encoding="utf-8"))[:n]
    engine = Engine(file, n_ctx=n, cache="kv", cache_type_k="f32", cache_type_v="f32")
    inputs = engine.attention_inputs(np.array(ids, np.int32))
    found = []
    for layer in range(attention.n_layers):
        own = attention.in_layer(layer)
        window = Window(LayerWeights(model, own, layer), Rotation.of(model, own, n), inputs[layer])
        late = np.flatnonzero(window.queries >= 3 * n // 4)
        rows = window.queries[late].min() + 1  # of all of them the same number, those before the first one's
        found += [p[late, :rows] for p in window.softmax_weights()]
    heads = np.array(found)  # [layers x heads, queries, rows]
    queries = np.linspace(0, heads.shape[1] - 1, -(-n_heads // len(heads))).astype(int)
    weights = heads[:, queries].reshape(-1, heads.shape[2])[:n_heads]
    weights /= weights.sum(axis=1, keepdims=True)
    return weights[np.argsort(kept_rows(weights), kind="stable")]


def made(share: float, together: int, n_heads: int, n: int) -> np.ndarray:
    """Weights of which such a share is nothing to speak of, rows of each head by so many together [n_heads, n]. The
    newest rows are needed: what a budget is a share of is known from them on."""
    needed = np.random.default_rng(1).random((n_heads, -(-n // together))) >= share
    needed = np.repeat(needed, together, axis=1)[:, :n]
    needed[:, -RUN:] = True
    weights = np.where(needed, 1.0, 1e-6)
    return weights / weights.sum(axis=1, keepdims=True)


def scores(weights: np.ndarray, n: int) -> np.ndarray:
    """Their logarithms, tiled [heads, n + 1]; the last column is not read."""
    tiled = np.tile(weights, (1, -(-n // weights.shape[1])))[:, :n]
    floor = np.log(np.maximum(tiled, 1e-30))
    return np.ascontiguousarray(np.pad(floor, ((0, 0), (0, 1))), np.float32)


def timed(args: argparse.Namespace, heads: int, dim: int, n: int, bias: np.ndarray, **given) -> tuple[float, float]:
    """Microseconds of a call, and the share of rows it skips."""
    seconds, _, skipped = _core.ops.time_attention(
        heads, heads, dim, "q8", "q8", n, loud=0.0, repetitions=args.repetitions, isa="cpu", n_threads=args.threads,
        bias=bias[:heads] if given.get("absorbed") else bias[-heads:], **given,
    )  # fmt: skip
    return 1e6 * median(seconds), skipped


def cells(args: argparse.Namespace, heads: int, dim: int, n: int, bias: np.ndarray) -> dict[str, tuple[float, float]]:
    """One turn of all. Of V heads, the last ones: what the others read is as wide as ever, and a call for each part."""
    rank, keeping = heads * dim // 8, heads // KEEPING
    slim = heads - keeping
    found = {
        "kv": timed(args, heads, dim, n, bias),
        "kv sparse": timed(args, heads, dim, n, bias, sparse_threshold=args.threshold),
        "k+r": timed(args, heads, dim, n, bias, absorbed=True, rank=rank),
    }
    kept = timed(args, keeping, dim, n, bias, sparse_threshold=args.threshold)
    for delta in args.deltas:
        found[f"k+r delta {delta}"] = timed(args, heads, dim, n, bias, absorbed=True, rank=rank, sparse_delta=delta)
        rest = timed(args, slim, dim, n, bias, absorbed=True, rank=rank + keeping * dim, sparse_delta=delta)
        found[f"k+r delta {delta}, V heads"] = (rest[0] + kept[0], (rest[1] * slim + kept[1] * keeping) / heads)
    return found


def main() -> None:
    args = arguments()
    access = machine.access_rows_as_measured(args.threads)
    rows = []
    for shape in args.shapes:
        heads, dim = SHAPES[shape]
        for n in args.tokens:
            patterns = {path.stem: recorded(path, heads) for path in args.models}
            for share in args.made:
                for name, together in {"together": RUN, "anywhere": 1}.items():
                    patterns[f"{share} {name}"] = made(share, together, heads, n)
            for pattern, weights in patterns.items():
                bias = scores(weights, n)
                turns = [cells(args, heads, dim, n, bias) for _ in range(args.rounds)]
                control = median(_core.read_bandwidth(args.threads) for _ in range(3))
                for name in turns[0]:
                    rows.append(
                        {
                            "pattern": pattern, "shape": shape, "tokens": n, "cell": name,
                            "us": median(turn[name][0] for turn in turns),
                            "skipped": turns[0][name][1],
                            "of kv": median(turn[name][0] / turn["kv"][0] for turn in turns),
                            "of kv sparse": median(turn[name][0] / turn["kv sparse"][0] for turn in turns),
                            "control GB/s": control,
                        }
                    )  # fmt: skip
    if args.json:
        print(json.dumps(machine.describe() | {"threads": args.threads, "access": access, "rows": rows}, indent=1))
        return
    for row in rows:
        print("  ".join(f"{value:10.3f}" if isinstance(value, float) else f"{value:>26}" for value in row.values()))


if __name__ == "__main__":
    main()
