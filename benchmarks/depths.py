"""What a decode step takes against the tokens cached: a picture of what compare.py measured at several depths.

python benchmarks/depths.py benchmarks/results/2026-11-23-lowrank-speed.json --out speed.png
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="the JSON file of compare.py")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps: dict[str, dict[int, float]] = defaultdict(dict)  # contestant -> depth -> milliseconds
    for cell in json.loads(args.results.read_text())["cells"].values():
        for name, one in cell["contestants"].items():
            if cell["test"] == "decode" and one.get("turns"):
                steps[name][cell["depth"]] = 1e3 / median(turn["tok_s"] for turn in one["turns"])
    figure, axes = pyplot.subplots(figsize=(9, 6))
    for name, by_depth in steps.items():
        depths = sorted(by_depth)
        axes.plot(depths, [by_depth[depth] for depth in depths], marker="o", label=name)
    axes.set(xlabel="tokens cached", ylabel="milliseconds a step", title=args.results.stem, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
