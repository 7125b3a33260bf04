"""Two builds of slimrt beside each other: what a change costs or gains, interleaved in one run.

    python benchmarks/builds.py OLD NEW --tests decode@0 decode@4096 prefill@0 --json out.json
    python benchmarks/builds.py OLD NEW --caches kv:q8 --tests 8@16384    # steps of 8 tokens, as speculation makes
    python benchmarks/builds.py OLD NEW --weights f16 --measured f16 float_rows rows
    python benchmarks/builds.py OLD NEW --tests "" --whisper whisper-base.gguf --batch 8

OLD and NEW are folders that hold a package `slimrt` (a site-packages, or what `pip install --target` made). Each build
is a process of its own; they take turns, the order changes from turn to turn, and the pure-read control is measured
after each figure. The process that is started last may get the worse memory, so all is done twice, each build being the
first once. What is told is the median of the ratios of paired turns of either round, and their mean (geometric).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import numpy as np

BASE, PREFILL = 512, 512
Turn = Callable[[], float]  # seconds of a token, a prefill or a step


def decoder(path: str, test: str, depth: int, cache: str, steps: int, threads: int) -> Turn:
    from slimrt import _core

    mode, _, type = cache.partition(":")
    filled = depth if test == "prefill" else max(depth, 1)
    count, times = (PREFILL, 1) if test == "prefill" else (1 if test == "decode" else int(test), steps)
    n_ctx = filled + max(PREFILL, count * times)
    engine = _core.Engine(path, n_ctx=n_ctx, n_threads=threads, cache=mode, cache_type_k=type, cache_type_v=type)
    rng = np.random.default_rng(1)
    sequence = engine.new_sequence()
    if filled:
        engine.append([(sequence, rng.integers(0, 1000, min(filled, BASE), np.int32))])
    if filled > BASE:  # how fast rows are read does not depend on what they hold
        engine.tile(sequence, filled)
    tokens = rng.integers(0, 1000, (times, count), np.int32)

    def turn() -> float:
        start = time.perf_counter()
        for some in tokens:
            engine.append([(sequence, some)])
        seconds = (time.perf_counter() - start) / times
        engine.truncate(sequence, filled)
        return seconds

    turn()
    return turn


def whisper(path: str, batch: int, cross: str, steps: int, threads: int) -> Turn:
    from slimrt import _core

    mode, _, type = cross.partition(":")
    engine = _core.Engine(path, n_ctx=448, n_seqs=batch, n_threads=threads, cross=mode, cross_type=type, cache="kv")
    clip = np.random.default_rng(0).standard_normal((3000, 80), np.float32)
    sequences = [engine.new_sequence() for _ in range(batch)]
    (states,) = engine.encode([(sequences[0], clip)], states=True)
    engine.encode([(s, states) for s in sequences[1:]], encoded=True)
    for s in sequences:
        engine.append([(s, np.array([50258, 50259, 50359, 50363], np.int32))])

    def turn() -> float:
        start = time.perf_counter()
        for step in range(steps):
            engine.append([(s, np.array([100 + step], np.int32)) for s in sequences])
        seconds = (time.perf_counter() - start) / steps
        for s in sequences:
            engine.truncate(s, 4)
        return seconds

    turn()
    return turn


def work(job: dict[str, Any]) -> None:
    """A build's process: answers each line on stdin with a turn and the control."""
    from slimrt import _core

    threads = job["threads"]
    if kinds := job["measured"]:
        known = [kind for kind in kinds if kind in _core.cpu_info()["access_kinds"]]  # an older build has fewer
        best = {kind: _core.tune(kind, "", threads, 0.5)["best"] for kind in known}
        _core.set_access(",".join(f"{kind}={access}" for kind, access in best.items()))
    turn = whisper(**job["arguments"]) if job["kind"] == "whisper" else decoder(**job["arguments"])
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps({"seconds": turn(), "read_gbs": _core.read_bandwidth(threads)}), flush=True)


class Worker:
    def __init__(self, build: str, job: dict[str, Any]):
        command = [sys.executable, __file__, "--work", json.dumps(job)]
        environment = os.environ | {"PYTHONPATH": build}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self._process.stdout and self._process.stdin
        self._in, self._out = self._process.stdin, self._process.stdout
        if self._out.readline().strip() != "ready":
            raise SystemExit(f"{build}: its process ended with code {self._process.wait()}")

    def turn(self) -> dict[str, float]:
        print("turn", file=self._in, flush=True)
        return dict(json.loads(self._out.readline()))

    def stop(self) -> None:
        self._in.close()
        self._process.wait()


def compare(old: str, new: str, job: dict[str, Any], turns: int) -> dict[str, Any]:
    paths = {"old": old, "new": new}
    rounds = {f"{first} first": paired(paths, first, job, turns) for first in paths}
    speeds = [one["speed_of_new"] for one in rounds.values()]
    return {"speed_of_new": statistics.geometric_mean(speeds)} | rounds


def paired(paths: dict[str, str], first: str, job: dict[str, Any], turns: int) -> dict[str, Any]:
    builds = {name: Worker(paths[name], job) for name in sorted(paths, key=lambda name: name != first)}
    taken: dict[str, list[dict[str, float]]] = {"old": [], "new": []}
    for i in range(turns):
        for name in ("old", "new") if i % 2 == 0 else ("new", "old"):
            taken[name].append(builds[name].turn())
    for worker in builds.values():
        worker.stop()
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(taken["old"], taken["new"], strict=True)]
    return {"speed_of_new": statistics.median(ratios), "least": min(ratios), "most": max(ratios), "turns": taken}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", nargs="*", metavar="OLD NEW")
    parser.add_argument("--shape", choices=sorted(models.SHAPES), default="smollm2-1.7b")
    parser.add_argument("--weights", choices=sorted(models.WEIGHTS), default="q8_0")
    parser.add_argument("--tests", nargs="*", default=["decode@0"], metavar="decode@N|prefill@N|TOKENS@N")
    parser.add_argument("--caches", nargs="+", default=["kv:f16"], metavar="MODE:TYPE")
    parser.add_argument("--whisper", help="a Whisper GGUF, whose steps are measured too")
    parser.add_argument("--cross", default="e:q8")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--measured",
        nargs="*",
        metavar="KIND",
        help="what each build accesses as it measures is fastest: f16 float_rows",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(json.loads(args.work))
    if len(args.builds) != 2:
        parser.error("give two folders, each with a package slimrt")
    shared = {"steps": args.steps, "threads": args.threads}
    jobs: dict[str, dict[str, Any]] = {}
    for test in filter(None, args.tests):
        name, _, depth = test.partition("@")
        path = str(models.make(models.SHAPES[args.shape], args.weights))
        for cache in args.caches:
            arguments = {"path": path, "test": name, "depth": int(depth), "cache": cache} | shared
            jobs[f"{args.shape} {args.weights} {cache} {test}"] = {"kind": "decoder", "arguments": arguments}
    if args.whisper:
        arguments = {"path": args.whisper, "batch": args.batch, "cross": args.cross} | shared
        jobs[f"{Path(args.whisper).name} {args.cross} batch {args.batch}"] = {"kind": "whisper", "arguments": arguments}
    results = {}
    for name, job in jobs.items():
        results[name] = found = compare(
            *args.builds, job | {"threads": args.threads, "measured": args.measured or []}, args.turns
        )
        print(f"{name}: new is {found['speed_of_new']:.3f} times as fast as old", flush=True)
        for order in ("old first", "new first"):
            one = found[order]
            read = statistics.median(turn["read_gbs"] for turns in one["turns"].values() for turn in turns)
            print(f"    {order}: {one['speed_of_new']:.3f} ({one['least']:.3f} to {one['most']:.3f}); "
                  f"pure read {read:.1f} GB/s", flush=True)  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
