"""The CUDA backend on the GPU at hand: checks it, measures it, writes JSON; one run of at most so many minutes.

    python benchmarks/gpu.py --json benchmarks/results/DATE-gpu.json

Attention alone at achieved TB/s beside the device's own copy rate (bytes read plus written over time), mode kv and the
absorbed K-only of mode k in turns, beside the best kernel of PyTorch's scaled_dot_product_attention where torch is
installed; products with weights at decoding; decoding end to end of models with random weights; and Whisper's
cross-attention, mode e in turns with kv. Parts come in the order of what is wanted most; what the time does not
suffice for is listed as left out, and what fails as failed: nothing stops the rest. slimrt must have been built with
CUDA (--build does it with CMake, in build/gpu, for the device at hand; the minutes count from then on).
Needs what slimrt needs, and --build nvcc, CMake and nanobind; where nothing can be installed, take along the wheels of
gguf, nanobind and nanobind-backend. Rows of less than some 200 MB are partly read from the L2: their rates may exceed
the copy's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import gpu_models
import gpu_torch
import machine
import models
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
TURNS, CALLS = 3, 20
STEPS = 24  # of decoding; the first four are left out
Row = dict[str, Any]

# name of a cache: absorbed, type
CACHES = {
    "kv bf16": (False, "bf16"),
    "k bf16": (True, "bf16"),
    "kv fp8": (False, "fp8_e4m3"),
    "k fp8": (True, "fp8_e4m3"),
    "kv q8": (False, "q8"),
    "k q8": (True, "q8"),
}
# heads, head_dim, tokens, sequences: what is asked first, then the rest of the grid
ATTENTION = [(32, 128, n, batch) for n, batch in ((65536, 1), (131072, 1), (65536, 8), (32768, 1))]
N_FIRST = len(ATTENTION)
ATTENTION += [(32, 128, 131072, 8)]
ATTENTION += [(h, dk, 65536, 1) for h, dk in ((32, 96), (64, 128), (20, 64))]
ATTENTION += [(32, 128, 4096, 1), (32, 128, 16384, 1), (32, 128, 4096, 64), (32, 128, 16384, 8), (32, 128, 65536, 16)]


class Clock:
    """Seconds left of the run."""

    def __init__(self, minutes: float):
        self._end = time.monotonic() + 60 * minutes

    def left(self) -> float:
        return self._end - time.monotonic()


def copy_rate() -> float:
    """TB/s that a copy of 1 GiB reads and writes."""
    from slimrt import _core

    size = 1 << 30
    return 2 * size / statistics.median(_core.ops.time_copy(size, 5, 4, "cuda")) / 1e12


def attention_rows(clock: Clock, left_out: list[str], shapes: Sequence[tuple[int, ...]]) -> Iterator[Row]:
    """Medians of interleaved turns; a turn is CALLS calls on rows made anew."""
    from slimrt import _core

    for heads, dim, n, batch in shapes:
        shape = {"heads": heads, "head_dim": dim, "tokens": n, "sequences": batch}
        needed = 4 * n * batch * heads * dim  # bf16 K and V
        if clock.left() < 20 or needed > _core.available_memory("cuda") * 0.8:
            left_out.append(f"attention {shape}")
            continue
        seconds: dict[str, list[float]] = {name: [] for name in CACHES}
        sizes, copies, rival = {}, [], []
        for _ in range(TURNS):
            for name, (absorbed, type) in CACHES.items():
                taken, sizes[name], _ = _core.ops.time_attention(
                    heads, heads, dim, type, type, n, batch, repetitions=3, calls=CALLS, absorbed=absorbed, isa="cuda"
                )
                seconds[name].append(min(taken))
            rival.append(gpu_torch.attention_seconds(heads, dim, n, batch, CALLS))
            copies.append(copy_rate())
        rate = statistics.median(copies)
        row: Row = {"what": "attention", **shape, "copy_tb_s": rate, "turns": TURNS}
        for name in CACHES:
            taken = statistics.median(seconds[name])
            row[name] = {"seconds": taken, "bytes": sizes[name], "tb_s": sizes[name] / taken / 1e12}
            row[name]["of_copy"] = row[name]["tb_s"] / rate
        if all(rival):
            row["torch bf16"] = {
                "seconds": statistics.median(r["seconds"] for r in rival),
                "kernel": rival[0]["kernel"],
            }
        yield row


def product_rows(clock: Clock, left_out: list[str]) -> Iterator[Row]:
    """Weights of 4096 x 4096 at decoding, in GB far beyond the L2: TB/s; and at 512 tokens: TFLOP/s."""
    import blocks
    import gguf

    from slimrt import _core

    rows = cols = 4096
    for type in ("f16", "bf16", "q8_0", "q4_0", "q4_k", "q6_k"):
        if clock.left() < 15:
            left_out.append(f"products {type}")
            continue
        one = blocks.random_rows(gguf.GGMLQuantizationType[type.upper()], np.random.default_rng(0), rows, cols)
        weights = np.tile(np.ascontiguousarray(one).view(np.uint8).reshape(-1), 64)
        for tokens in (1, 4, 512):
            taken = statistics.median(
                _core.ops.time_linear(weights, type, rows, cols, tokens, isa="cuda", n_threads=1, passes=7)[2:]
            )
            yield {
                "what": "products", "type": type, "tokens": tokens, "seconds": taken / 64,
                "tb_s": weights.nbytes / taken / 1e12, "tflop_s": 2 * 64 * rows * cols * tokens / taken / 1e12,
            }  # fmt: skip


def decode_seconds(path: Path, cache: str, type: str, depth: int) -> Row:
    """A sequence of `depth` tokens, made by tiling a short prefill; seconds of a step."""
    from slimrt import _core

    engine = _core.Engine(str(path), n_ctx=depth + 64, cache=cache, cache_type_k=type, cache_type_v=type, device="cuda")
    for warm in (False, True):  # the first prompt loads kernels
        sequence = engine.new_sequence()
        start = time.perf_counter()
        engine.append([(sequence, np.arange(1024, dtype=np.int32) % 1000 + 3)])
        prefill = time.perf_counter() - start
        if not warm:
            engine.free_sequence(sequence)
    engine.tile(sequence, depth)
    taken = []
    for step in range(STEPS):
        start = time.perf_counter()
        engine.append([(sequence, np.array([3 + step], np.int32))])
        taken.append(time.perf_counter() - start)
    memory = engine.memory()
    return {
        "seconds": statistics.median(taken[4:]), "prefill_1024": prefill,
        "cache_bytes": depth * memory["cache_bytes_per_token"], "weights_bytes": memory["weights"],
    }  # fmt: skip


def decode_rows(clock: Clock, left_out: list[str]) -> Iterator[Row]:
    for shape, depth, pairs in (
        (gpu_models.PHI3_MINI_128K, 131072 - 64, (("kv", "q8"), ("k", "q8"))),
        (gpu_models.LLAMA_7B, 65536, (("kv", "bf16"), ("k", "bf16"), ("kv", "q8"), ("k", "q8"))),
        (gpu_models.LLAMA_7B, 16384, (("kv", "bf16"), ("k", "bf16"), ("kv", "q8"), ("k", "q8"))),
    ):
        if clock.left() < 20:
            left_out.append(f"decoding {shape.name} at {depth}")
            continue
        path = gpu_models.make_folded(shape)
        turns = [{f"{cache} {type}": decode_seconds(path, cache, type, depth) for cache, type in pairs} for _ in "ab"]
        best = {name: min((turn[name] for turn in turns), key=lambda row: row["seconds"]) for name in turns[0]}
        yield {"what": "decoding", "model": shape.name, "depth": depth, "copy_tb_s": copy_rate(), **best}


def whisper_step(path: Path, cross: str, batch: int) -> Row:
    from slimrt import _core

    engine = _core.Engine(
        str(path), n_ctx=64, n_seqs=batch, cross=cross, cross_type="f16", cache="kv", cache_type_k="f16",
        cache_type_v="f16", device="cuda",
    )  # fmt: skip
    d, sequences = engine.info()["d_model"], [engine.new_sequence() for _ in range(batch)]
    states = np.random.default_rng(0).standard_normal((1500, d), np.float32)
    start = time.perf_counter()
    engine.encode([(s, states) for s in sequences], encoded=True)
    logits = engine.append([(s, np.array([1, 2, 3, 4], np.int32)) for s in sequences])
    first = time.perf_counter() - start
    taken = []
    for _ in range(STEPS):
        tokens = logits.argmax(1).astype(np.int32)
        start = time.perf_counter()
        logits = engine.append([(s, tokens[i : i + 1]) for i, s in enumerate(sequences)])
        taken.append(time.perf_counter() - start)
    rows = engine.info()["cross"]["bytes_per_row"]
    return {"first_token": first, "step": statistics.median(taken[4:]), "cross_bytes": 1500 * rows * batch}


def whisper_rows(clock: Clock, left_out: list[str]) -> Iterator[Row]:
    """The difference of two steps is cross-attention's: all else is the same."""
    for batch in (8, 64):
        if clock.left() < 20:
            left_out.append(f"whisper, batch {batch}")
            continue
        path = gpu_models.make_whisper_large()
        turns = [{cross: whisper_step(path, cross, batch) for cross in ("e", "kv")} for _ in range(2)]
        best = {cross: min((turn[cross] for turn in turns), key=lambda row: row["step"]) for cross in ("e", "kv")}
        yield {"what": "whisper-large-v3", "batch": batch, **best}


PARTS: list[Callable[[Clock, list[str]], Iterator[Row]]] = [
    partial(attention_rows, shapes=ATTENTION[:N_FIRST]),
    decode_rows,
    whisper_rows,
    product_rows,
    partial(attention_rows, shapes=ATTENTION[N_FIRST:]),  # making their rows takes minutes
]


def checks(minutes: float) -> Row:
    """The tests of the CUDA backend, and compute-sanitizer over a model; at most so long in all."""
    clock = Clock(minutes)
    models_on_device = str(ROOT / "tests" / "test_cuda.py")
    kernels = [str(path) for path in sorted((ROOT / "tests").glob("test_kernels*.py"))]
    pytest = [sys.executable, "-m", "pytest", "-q", "--maxfail=30", "-k"]
    sanitizer = ["compute-sanitizer", "--error-exitcode", "9"]
    found: Row = {}
    for name, command in {
        "tests": [*pytest, "cuda", models_on_device, *kernels],
        **{
            tool: [*sanitizer, "--tool", tool, *pytest, "test_every_mode and llama_mha and f16", models_on_device]
            for tool in ("memcheck", "racecheck", "synccheck")
        },
    }.items():
        try:
            limit = max(clock.left(), 1)
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, cwd=ROOT)
            found[name] = {"exit": done.returncode, "end": (done.stdout + done.stderr)[-600:]}
        except subprocess.TimeoutExpired as error:
            said = error.stdout or ""  # bytes, whatever was asked for
            found[name] = {"exit": None, "end": f"{error}: {said.decode() if isinstance(said, bytes) else said}"[-600:]}
        except FileNotFoundError as error:
            found[name] = {"exit": None, "end": str(error)[:300]}
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    return found


def build() -> None:
    """build/gpu, and there a package of links to the sources with its module, for this process and those it starts."""
    folder = ROOT / "build" / "gpu"
    cmake = ["cmake", "-S", ROOT, "-B", folder, "-DSLIMRT_CUDA=ON", "-DSKBUILD_PROJECT_VERSION=0.0.0+gpu"]
    cmake.append("-DSLIMRT_CUDA_ARCHS=native")
    subprocess.run([*cmake, f"-DPython_EXECUTABLE={sys.executable}"], check=True, stdout=sys.stderr)
    subprocess.run(["cmake", "--build", folder, "--parallel"], check=True, stdout=sys.stderr)
    package = folder / "package" / "slimrt"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir(parents=True)
    for path in (*(ROOT / "python" / "slimrt").iterdir(), *folder.glob("_core*.so")):
        if path.suffix != ".so" or path.parent == folder:
            (package / path.name).symlink_to(path)
    sys.path.insert(0, str(package.parent))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(package.parent), *filter(None, [os.environ.get("PYTHONPATH")])])


def show(row: Row) -> None:
    """One line of what is most asked for."""
    named = {k: v for k, v in row.items() if isinstance(v, dict)}
    plain = {k: v for k, v in row.items() if not isinstance(v, dict) and k != "turns"}
    print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in plain.items()))
    for name, figures in named.items():
        parts = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items()]
        print(f"    {name:<14} {'  '.join(parts)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--build", action="store_true", help="with CMake first")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.build:
        build()
    clock = Clock(args.minutes)
    from slimrt import _core

    devices, why_none = _core.cuda_devices()
    if not devices:
        print(f"gpu.py: no CUDA device: {why_none}", file=sys.stderr)
        return 1
    report: Row = {"date": datetime.now().date().isoformat(), "device": devices[0], **machine.describe()}
    report["shapes"] = [shape.name for shape in models.SHAPES.values()]
    report["copy_tb_s"] = copy_rate()
    report["checks"] = {} if args.no_checks else checks(args.minutes / 4)
    report["rows"], report["left_out"], report["failed"] = [], [], []

    def keep() -> None:
        if args.json:  # what there is survives whatever comes next
            args.json.write_text(json.dumps(report, indent=1))

    for part in PARTS:
        try:
            for row in part(clock, report["left_out"]):
                report["rows"].append(row)
                show(row)
                keep()
        except Exception as error:  # of a run that may be the only one
            report["failed"].append(f"{getattr(part, '__name__', 'attention_rows')}: {type(error).__name__}: {error}")
            print("failed:", report["failed"][-1], file=sys.stderr, flush=True)
            keep()
    print("left out:", ", ".join(report["left_out"]) or "nothing")
    return int(bool(report["failed"]) or any(check["exit"] for check in report["checks"].values()))


if __name__ == "__main__":
    sys.exit(main())
