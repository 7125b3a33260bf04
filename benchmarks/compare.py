"""slimrt beside llama.cpp: decode, prefill and batches at depths, interleaved in one run.

    python benchmarks/compare.py --weights q8_0 q4_k_m --tests decode@0 decode@4096 prefill@0 --json out.json

Every contestant (an engine with its settings) is a process of its own; they take turns, so that what the machine does
in between hits all of them, and the pure-read control is measured after each figure. Results are added to the JSON file
cell by cell; report.py prints its table again. README.md here has the commands for everything.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import converted
import engines
import machine
import models
import numpy as np
import report

PREFILL = 512  # tokens
TESTS = ("decode", "prefill", "batch8", "tiling")


@dataclass(frozen=True)
class Cell:
    """One place of the table. Depth: tokens cached before the measurement, of each sequence.

    decode: one token at a time. prefill: 512 tokens. batch8: a token of each of 8 sequences at a time, beside one
    sequence alone. tiling: decode at a depth that was tiled, and at one where every token was computed.
    """

    shape: models.Shape
    weights: str
    test: str
    depth: int

    @property
    def name(self) -> str:
        return f"{self.shape.name} {self.weights} {self.test}@{self.depth}"

    @property
    def n_seqs(self) -> int:
        return 8 if self.test == "batch8" else 1

    @property
    def filled(self) -> int:
        """The depth that is filled: a decode starts after one token at least."""
        return self.depth if self.test == "prefill" else max(self.depth, 1)


@dataclass(frozen=True)
class Contestant:
    name: str
    engine: str
    settings: dict[str, Any]
    load: engines.Load


def contestants(cell: Cell, args: argparse.Namespace, folder: Path) -> Iterator[Contestant]:
    """Every engine and setting that has a turn in a cell."""
    path = str(models.make(cell.shape, cell.weights))
    n_ctx = cell.filled + (PREFILL if cell.test == "prefill" else args.steps + 1)
    found: list[tuple[str, dict[str, Any], str]] = []
    for one in args.slimrt:
        cache = converted.Cache.of(one, cell.shape)
        residual = {"rank": cache.rank, "residual_type": cache.residual_type} if cache.rank else {}
        folded = str(models.make(cell.shape, cell.weights, cache=cache))
        found.append(("slimrt", {"cache": cache.mode, "type": cache.type, **residual}, folded))
    for type in args.rival if importlib.util.find_spec("llama_cpp") else ():
        for flash in (True,) if type == "q8_0" else (False, True):  # V of q8_0 needs flash attention
            for unified in (False, True) if cell.n_seqs > 1 else (True,):
                for n_ubatch in args.ubatch:
                    settings = {"type": type, "flash": flash, "n_ubatch": n_ubatch, "unified": unified}
                    found.append(("llama.cpp", settings | {"repack": not args.no_repack}, path))
    for i, (engine, settings, file) in enumerate(found):
        name = report.contestant_name(engine, settings, several=cell.n_seqs > 1)
        load = engines.Load(file, cell.shape, n_ctx, cell.n_seqs, args.threads)
        base = folder / f"{i}.npy" if cell.filled else None
        yield Contestant(name, engine, settings, replace(load, base=base))
        if cell.test == "tiling":
            yield Contestant(f"{name}, every token computed", engine, settings, replace(load, real=True))


def decode(engine: engines.Engine, cell: Cell, n: int, args: argparse.Namespace) -> tuple[float, int]:
    """(tok/s of all n sequences together, steps); at least 2 steps, then until the time is up."""
    engine.append([7], n)  # what is paid once is not counted
    engine.rewind(cell.filled)
    start, steps, seconds = time.perf_counter(), 0, 0.0
    while steps < 2 or (steps < args.steps and seconds < args.seconds):
        engine.append([7 + steps], n)
        steps += 1
        seconds = time.perf_counter() - start
    engine.rewind(cell.filled)
    return n * steps / seconds, steps


def measure(engine: engines.Engine, cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    """One turn: tok_s, and what belongs to it."""
    if cell.test == "prefill":
        tokens = engines.prompt(PREFILL, seed=2)
        start = time.perf_counter()
        engine.append(tokens, 1)
        seconds = time.perf_counter() - start
        engine.rewind(cell.filled)
        return {"tok_s": PREFILL / seconds}
    alone, steps = decode(engine, cell, 1, args)
    if cell.n_seqs == 1:
        return {"tok_s": alone, "steps": steps}
    together, steps = decode(engine, cell, cell.n_seqs, args)
    return {"tok_s": together, "steps": steps, "tok_s_alone": alone}


def work(one: Contestant, cell: Cell, args: argparse.Namespace, pipe: Connection) -> None:
    """The process of a contestant: loads and fills, then answers every message with a turn, until it is None."""
    try:
        engine = engines.ENGINES[one.engine](one.load, one.settings)
        engine.fill(cell.filled)
        logits = engine.append([7], 1)[0]  # and every weight was touched
        engine.rewind(cell.filled)
        facts = {"cache_bytes": engine.cache_bytes, "private_bytes": machine.anonymous_bytes()}
        pipe.send(facts | {"logits": logits})
        while pipe.recv():
            pipe.send(measure(engine, cell, args))
        engine.close()
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {error}"})


class Worker:
    """A contestant's process, started when it is needed."""

    def __init__(self, one: Contestant, cell: Cell, args: argparse.Namespace):
        self._arguments = (one, cell, args)
        self._process: Any = None
        self.path = one.load.path
        self.facts: dict[str, Any] = {}

    @property
    def running(self) -> bool:
        return self._process is not None

    def turn(self) -> dict[str, Any]:
        """tok_s and what belongs to it, or an error."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, end = context.Pipe()
            self._process = context.Process(target=work, args=(*self._arguments, end), daemon=True)
            self._process.start()
            end.close()
            self.facts |= self._answer()
            if "error" in self.facts:
                self.stop()
                return self.facts
        self._pipe.send(True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        try:
            return dict(self._pipe.recv())
        except EOFError:
            self._process.join()
            return {"error": f"its process ended with code {self._process.exitcode} (out of memory?)"}

    def stop(self) -> None:
        if self._process is None:
            return
        try:
            self._pipe.send(None)
        except OSError:
            pass  # it has ended
        self._process.join()
        self._process = None


def run_cell(cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    """All turns of one cell, as the JSON file holds them."""
    from slimrt import _core

    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        entries = list(contestants(cell, args, Path(folder)))
        workers = {one.name: Worker(one, cell, args) for one in entries}
        for one in entries:
            results[one.name] = {"engine": one.engine, "settings": one.settings, "turns": []}
        try:
            for turn in range(args.turns):
                for one in entries if turn % 2 == 0 else entries[::-1]:
                    worker, result = workers[one.name], results[one.name]
                    if "error" in result:
                        continue
                    figure = worker.turn()
                    if not may_stay(worker, list(workers.values()), args.memory):
                        worker.stop()  # and is loaded anew for its next turn
                    if "error" in figure:
                        result["error"] = figure["error"]
                    else:
                        result["turns"].append(figure | {"read_gbs": _core.read_bandwidth(args.threads)})
                    said = figure.get("error") or f"{figure['tok_s']:.2f} tok/s"
                    print(f"{cell.name}, turn {turn + 1}, {one.name}: {said}", file=sys.stderr, flush=True)
        finally:
            for worker in workers.values():
                worker.stop()
    add_facts(entries, workers, results)
    settings = {"threads": args.threads, "turns": args.turns, "steps": args.steps, "seconds": args.seconds}
    return {
        "shape": cell.shape.name,
        "weights": cell.weights,
        "test": cell.test,
        "depth": cell.depth,
        "date": datetime.now().isoformat(timespec="seconds"),
        "settings": settings | {"prefill": PREFILL, "base": engines.BASE},
        "weight_bytes": models.bytes_read(cell.shape, cell.weights),
        "multiply_adds": models.multiply_adds(cell.shape, PREFILL, cell.depth),
        "contestants": results,
    }


def add_facts(entries: list[Contestant], workers: dict[str, Worker], results: dict[str, dict[str, Any]]) -> None:
    """What each process told, and how its logits correlate with those of the first one with the same tokens."""
    first: dict[bool, Any] = {}
    for one in entries:
        facts = dict(workers[one.name].facts)
        logits = facts.pop("logits", None)
        if logits is not None and one.settings.get("cache") in (None, "kv"):  # k has a random W_KV here
            wanted = first.setdefault(one.load.real, logits)
            facts["logits_agree"] = float(np.corrcoef(logits, wanted)[0, 1])
        results[one.name] |= facts


def may_stay(worker: Worker, all: list[Worker], gigabytes: float) -> bool:
    """Whether a contestant may stay loaded, with room for the largest other one beside those that stay."""
    sizes = [one.facts.get("private_bytes", 0) for one in all]
    loaded = sum(size for one, size in zip(all, sizes, strict=True) if one.running)
    mapped = Path(worker.path).stat().st_size  # one copy in the page cache for all
    return loaded + max(sizes) + mapped < gigabytes * 1e9


def parse_test(text: str) -> tuple[str, int]:
    """("decode", 4096) from decode@4096."""
    test, _, depth = text.partition("@")
    if test not in TESTS or not depth.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not one of {', '.join(TESTS)} and @DEPTH, such as decode@4096")
    if int(depth) > engines.BASE and int(depth) % engines.BASE:
        raise argparse.ArgumentTypeError(f"a depth beyond {engines.BASE} is a multiple of it; got {depth}")
    return test, int(depth)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=sorted(models.SHAPES), default=["smollm2-1.7b"])
    parser.add_argument("--weights", nargs="+", choices=sorted(models.WEIGHTS), default=["q8_0"])
    parser.add_argument("--tests", nargs="+", type=parse_test, default=[("decode", 0)], metavar="TEST@DEPTH")
    parser.add_argument("--slimrt", nargs="*", default=["kv:f16"], metavar="MODE:TYPE[:RESIDUAL/PART]", help="caches")
    parser.add_argument("--rival", nargs="*", default=["f16", "bf16", "q8_0"], help="llama.cpp's types of K and V")
    parser.add_argument("--ubatch", nargs="+", type=int, default=[512], help="llama.cpp's tokens of one graph")
    parser.add_argument("--no-repack", action="store_true", help="llama.cpp reads its weights in place")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16, help="tokens decoded in a turn, at most")
    parser.add_argument("--seconds", type=float, default=4.0, help="of decoding in a turn, about")
    parser.add_argument("--memory", type=float, default=14.0, help="GB that may stay loaded at once")
    parser.add_argument("--json", type=Path, help="results are added to this file")
    return parser.parse_args()


def main() -> None:
    args = parse()
    here = machine.describe()
    data = report.gathered(args.json, here["machine"])
    if args.rival and not importlib.util.find_spec("llama_cpp"):
        print("llama-cpp-python is not installed: no rival (README.md here says how)", file=sys.stderr)
    done = []
    for shape in args.shapes:
        for weights in args.weights:
            for test, depth in args.tests:
                cell = Cell(models.SHAPES[shape], weights, test, depth)
                data["cells"][cell.name] = run_cell(cell, args) | {"versions": here["versions"]}
                done.append(cell.name)
                if args.json:
                    args.json.write_text(json.dumps(data, indent=1) + "\n")
    print(report.table({name: data["cells"][name] for name in done}, every=True))


if __name__ == "__main__":
    main()
