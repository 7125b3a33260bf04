"""Decode and prefill speed beside llama.cpp (llama-cpp-python), interleaved in one run.

    python benchmarks/decode.py --shape smollm2-1.7b --threads 2 --json benchmarks/results/<date>-decode.json

Each engine lives in a process of its own, and the processes take turns, repetition by repetition, so that what the
machine does in between hits both. The pure-read control is measured in every turn: weights read in a second of decode
over it is how close to the limit an engine is. Without llama-cpp-python the rival's rows are left out and the table
says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path

import models
import numpy as np


def slimrt_steps(path: Path, threads: int, n_ctx: int) -> tuple[Callable[[list[int]], None], Callable[[], None]]:
    """(append tokens and compute the last logits, empty the context) of slimrt, kv f16."""
    from slimrt import _core

    engine = _core.Engine(str(path), n_ctx=n_ctx, n_threads=threads, cache="kv")
    sequence = engine.new_sequence()

    def append(tokens: list[int]) -> None:
        engine.append([(sequence, np.array(tokens, np.int32))])

    return append, lambda: engine.truncate(sequence, 0)


def llama_steps(path: Path, threads: int, n_ctx: int) -> tuple[Callable[[list[int]], None], Callable[[], None]]:
    """The same of llama.cpp, f16 KV."""
    import llama_cpp

    llama = llama_cpp.Llama(str(path), n_ctx=n_ctx, n_threads=threads, n_threads_batch=threads, verbose=False)
    return llama.eval, llama.reset


ENGINES = {"slimrt": slimrt_steps, "llama.cpp": llama_steps}


def worker(name: str, path: Path, args: argparse.Namespace, pipe: Connection) -> None:
    """Answers every message with {"prefill": tok/s, "decode": tok/s} of one turn."""
    append, reset = ENGINES[name](path, args.threads, args.prompt + args.tokens + 1)
    prompt = np.random.default_rng(1).integers(0, 1000, args.prompt).tolist()
    append(prompt[:4])  # touches every weight once
    while pipe.recv():
        reset()
        start = time.perf_counter()
        append(prompt)
        prefill = args.prompt / (time.perf_counter() - start)
        reset()
        append(prompt[:1])
        start = time.perf_counter()
        for token in range(args.tokens):
            append([token])
        pipe.send({"prefill": prefill, "decode": args.tokens / (time.perf_counter() - start)})


def measure(path: Path, args: argparse.Namespace, names: list[str]) -> dict[str, dict[str, list[float]]]:
    """tok/s of each engine and turn, and the read bandwidth (GB/s) beside them."""
    from slimrt import _core

    context = multiprocessing.get_context("spawn")
    pipes = {}
    for name in names:
        pipes[name], end = context.Pipe()
        context.Process(target=worker, args=(name, path, args, end), daemon=True).start()
    rows: dict[str, dict[str, list[float]]] = {name: {"prefill": [], "decode": [], "read": []} for name in names}
    for turn in range(args.turns):
        for name in names if turn % 2 == 0 else reversed(names):
            pipes[name].send(True)
            result = pipes[name].recv() | {"read": _core.read_bandwidth(args.threads)}
            for key, value in result.items():
                rows[name][key].append(value)
    for pipe in pipes.values():
        pipe.send(False)
    return rows


def weight_bytes(path: Path, shape: models.Shape) -> int:
    """Bytes of weights that a decode step reads: all but an untied embedding."""
    from slimrt import _core

    file = _core.GgufFile(str(path))
    skipped = 0 if shape.tied else file.tensor_bytes("token_embd.weight")
    return sum(file.tensor_bytes(name) for name in file.tensors()) - skipped


def report(rows: dict[str, dict[str, list[float]]], size: int) -> str:
    """A Markdown table: medians (least - most), weights read a second beside the pure-read control, ratios."""
    lines = ["| engine | prefill tok/s | decode tok/s | weights GB/s | pure read GB/s |", "|---|---|---|---|---|"]
    for name, row in rows.items():
        cells = [f"{statistics.median(v):.2f} ({min(v):.2f} - {max(v):.2f})" for v in (row["prefill"], row["decode"])]
        gbs = statistics.median(row["decode"]) * size / 1e9
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {gbs:.1f} | {statistics.median(row['read']):.1f} |")
    if len(rows) == 2:
        for key in ("prefill", "decode"):
            ratios = [a / b for a, b in zip(rows["slimrt"][key], rows["llama.cpp"][key], strict=True)]
            lines.append(f"\n{key}: slimrt / llama.cpp = {statistics.median(ratios):.2f} (median of paired turns)")
    else:
        lines.append("\nllama-cpp-python is not installed: no rival (pip install '.[bench]')")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(models.SHAPES), default="smollm2-1.7b")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prefill")
    parser.add_argument("--tokens", type=int, default=24, help="tokens decoded from depth 1")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shape = models.SHAPES[args.shape]
    path = models.make(shape)
    names = [n for n in ENGINES if n == "slimrt" or importlib.util.find_spec("llama_cpp")]
    rows = measure(path, args, names)
    size = weight_bytes(path, shape)
    print(f"{path.name}, {size / 1e9:.2f} GB of weights a step, {args.threads} threads, {platform.processor()}")
    print(report(rows, size))
    if args.json:
        settings = {key: str(value) for key, value in vars(args).items()}
        result = {"date": str(date.today()), "machine": machine(), "settings": settings, "rows": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {args.json}", file=sys.stderr)


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    from slimrt import _core

    model = next((x.split(":")[1].strip() for x in _lines("/proc/cpuinfo") if x.startswith("model name")), "unknown")
    return {"cpu": model, "device": str(_core.cpu_info()["isa"]), "system": platform.platform()}


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


if __name__ == "__main__":
    main()
