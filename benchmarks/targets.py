"""What `--target-bytes` gains over one level for all layers: KL divergence of mode lowrank at several budgets.

    python benchmarks/targets.py --models models/tale-llama.gguf models/tale-hard.gguf models/tale-gqa.gguf

Beside each budget the best of ten levels that are the same in all layers and take no more bytes, known in hindsight.
The divergence from kv f32 is the geometric mean of windows of 512 and 1024 tokens (slimrt.compare_caches).
"""

from __future__ import annotations

import argparse
from math import exp, log
from pathlib import Path
from tempfile import TemporaryDirectory

import slimrt
from slimrt import core
from slimrt.folding import budget

TEXT = Path(__file__).parent.parent / "models" / "heldout.txt"
TIMES = (7, 6, 16 / 3, 5, 4.5, 4)  # fewer bytes a token than kv f16 has
UNIFORM = ("q2@0.5", "q2/q3@0.375", "q3/q2@0.5", "q3@0.375", "q3@0.5", "q3/q4@0.5", "q4/q3@0.375", "q4/q3@0.5",
           "q4@0.375", "q4@0.5")  # fmt: skip


def mean(of: list[float]) -> float:
    return exp(sum(map(log, of)) / len(of))


def divergence(file: Path, cache: str, tokens: int) -> float:
    def of_windows(size: int) -> float:
        found = slimrt.compare_caches(file, TEXT, [cache], window=size, max_tokens=tokens, progress=False)
        return found.rows[-1].kl_mean

    return mean([of_windows(512), of_windows(1024)])


def size(levels: str) -> float:
    """Bytes of the oldest rows, of one element of K and its part of V."""
    oldest = core.levels("lowrank", levels).of[0]
    k, v = (core.plane_bytes(one, 32, 1) / 32 for one in (oldest.type_k, oldest.type_v))
    return k + oldest.part * v


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--cache", default="lowrank", help="or auto: whose layers the budget is for")
    parser.add_argument("--times", nargs="+", type=float, default=TIMES, help="fewer bytes than kv f16 has")
    parser.add_argument("--scores", type=float, default=budget.SCORES, help="how often errors through K count")
    args = parser.parse_args()
    budget.SCORES = args.scores
    for model in args.models:
        uniform = {levels: divergence(model, f"lowrank:{levels}+q8*64", args.tokens) for levels in UNIFORM}
        print(f"{model.name}\n\n| times fewer | KL | best uniform | |\n|---|---|---|---|", flush=True)
        ratios = []
        for times in args.times:
            with TemporaryDirectory() as folder:
                file = Path(folder) / model.name
                slimrt.convert(model, file, cache=args.cache, target_bytes=f"{times:.6f}x", progress=False)
                found = divergence(file, "auto", args.tokens)
            best = min((levels for levels in UNIFORM if size(levels) * times <= 4), key=uniform.__getitem__)
            ratios.append(found / uniform[best])
            print(f"| {times:.3g} | {found:.1e} | {uniform[best]:.1e} | {best} |", flush=True)
        print(f"\ngeometric mean of the ratios: {mean(ratios):.2f}\n", flush=True)


if __name__ == "__main__":
    main()
