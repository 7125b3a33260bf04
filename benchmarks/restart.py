"""A long beginning that another start of the server had computed: the first token after it from disk, and without.

    python benchmarks/restart.py --tokens 4096 --json out.json

`slimrt serve --prefix-dir` computes a prompt, ends, starts again and is asked for the same prompt. Files are in the
system's page cache then, as those of a recent text are. Each turn has prompts and a folder of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

import loads
import machine
import models
import report
from client import complete
from servers import Server, Setup

from slimrt import _core


def first_token(setup: Setup, settings: dict[str, Any], ids: list[int], folder: str) -> dict[str, float]:
    """Seconds until it, and tokens that were not computed."""
    server = Server("slimrt", settings | {"flags": ["--prefix-dir", folder, "--prefix-disk", "8GiB"]}, setup)
    try:
        with server.turn():
            answer = asyncio.run(complete(server.port, ids, 1, reuse=True))
    finally:
        server.stop()
    if not answer.whole:
        raise SystemExit(f"not answered: {answer.error}")
    return {"first": answer.first, "cached": answer.cached}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(models.SHAPES), default="smollm2-1.7b")
    parser.add_argument("--weights", choices=sorted(models.WEIGHTS), default="q8_0")
    parser.add_argument("--slimrt", nargs="+", default=["kv:f16"], metavar="MODE:TYPE", help="cache modes and types")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shape = models.SHAPES[args.shape]
    setup = Setup(models.make(shape, args.weights, words=True), 1, args.tokens + 64, True, 0, args.threads)
    here = machine.describe()
    data = report.gathered(args.json, here["machine"])
    for one in args.slimrt:
        mode, _, type = one.partition(":")
        turns = []
        for seed in range(args.turns):
            ids = loads.Prompts(shape.n_vocab, seed).ids(args.tokens)
            with tempfile.TemporaryDirectory() as folder:
                computed, loaded = (first_token(setup, {"cache": mode, "type": type}, ids, folder) for _ in range(2))
            turns.append({"computed": computed, "from_disk": loaded, "share": loaded["first"] / computed["first"]})
            turns[-1] |= {"read_gbs": _core.read_bandwidth(args.threads), "load_average": os.getloadavg()[0]}
            print(f"{one}: {json.dumps(turns[-1])}", file=sys.stderr, flush=True)
        cell = {"date": datetime.now().isoformat(timespec="seconds"), "versions": here["versions"], "turns": turns}
        data["cells"][f"{shape.name} {args.weights} {one}, {args.tokens} tokens"] = cell
        middle = sorted(turns, key=lambda turn: turn["share"])[len(turns) // 2]
        print(f"{one}: {middle['computed']['first']:.2f} s computed, {middle['from_disk']['first']:.2f} s from disk: "
              f"{middle['share']:.3f}")  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
