"""slimrt bench: prefill and decode speed on this machine, at chosen depths and in chosen cache modes."""

from __future__ import annotations

import argparse
import csv
import io
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from slimrt import core
from slimrt.cache.config import CacheChoice, check_cache, row_type
from slimrt.cache.placement import placed
from slimrt.cache.planner import BLOCK, Planner, memory_limit_bytes, require_together, whole_blocks
from slimrt.cli.common import (
    Flags,
    as_json,
    cache_arguments,
    caches_to_compare,
    model_source,
    note,
    output_format,
    show_progress,
    write_out,
)
from slimrt.cli.values import count, is_cache, is_number, lower, positive
from slimrt.info import Info, LayerInfo, Plan
from slimrt.modelfile.source import ModelSource
from slimrt.plumbing import progress
from slimrt.plumbing.files import check_target
from slimrt.runtime.kinds import continues_texts
from slimrt.runtime.runtime import Runtime, load

_BASE = 512  # tokens really computed to fill a depth; greater depths repeat their rows
_FORMATS = ("md", "csv", "json")
_READ_MIB = 256  # read to measure the memory bandwidth: far more than any CPU cache


def add_flags(flags: Flags) -> None:
    flags.model()
    flags.add("-p", "--n-prompt", type=count, default=512, metavar="N", help="tokens of a prefill; 0: no prefill (512)")
    flags.add("-n", "--n-gen", type=count, default=32, metavar="N", help="tokens of a decode; 0: no decode (32)")
    flags.add(
        "-d",
        "--depths",
        goes_on=is_number,
        default="0",
        metavar="N,...",
        help="tokens in the cache before each test (default: 0)",
    )
    flags.add("-r", "--repetitions", type=positive, default=5, metavar="N", help="of each test (default: %(default)s)")
    flags.add(
        "--compare",
        twin=False,
        type=lower,
        goes_on=is_cache,
        metavar="MODE[:TYPE],...",
        help="caches to compare in turns, such as kv:f16,k+r:q8; in place of --cache",
    )
    flags.add("--format", "--output-format", twin=False, choices=_FORMATS, help="default: what -o ends in, else md")
    flags.add("-o", "--output", twin=False, metavar="FILE", help="write it there; default: stdout")
    flags.engine()
    flags.output()


def run(args: argparse.Namespace) -> int:
    form = output_format(args, _FORMATS)
    if args.output is not None:
        check_target(Path(args.output))
    depths = _depths(args)
    if not args.n_prompt and not args.n_gen:
        args.usage_error("nothing to measure: -p and -n are both 0")
    source = model_source(args)
    continues_texts(source)
    choices = _choices(args)
    for choice in choices:
        check_cache(source, choice)
    n_ctx = _context(args, max(depths), source.n_ctx_limit)
    bench, code = Bench(args, source, n_ctx), 0
    try:
        bench.load(choices)
        if n_ctx > source.n_ctx_train:
            note(args, f"slimrt: {n_ctx} tokens are beyond the {source.n_ctx_train} of training: this measures "
                 "speed, not quality")  # fmt: skip
        with progress.bar(progress.wanted(show_progress(args)), bench.turns(depths), "bench", " turn") as update:
            for depth in depths:
                bench.measure(depth, update)
    except KeyboardInterrupt:  # show the results so far
        code = 130
    if any(result.tok_s for result in bench.results):  # else it was interrupted before the first result
        write_out(args.output, _text(bench, form))
    return code


@dataclass
class Result:
    """One test of one cache at one depth; lists have one value for each repetition. read_gb_s: the memory bandwidth,
    measured after each."""

    cache: str
    type: str
    test: str
    tokens: int
    depth: int
    bytes_per_step: float | None  # weights and cache that a decode step reads
    tok_s: list[float] = field(default_factory=list)
    read_gb_s: list[float] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """The values to output; gb_s and read_share for decode only, deviation for several repetitions only."""
        mean, read = statistics.fmean(self.tok_s), statistics.fmean(self.read_gb_s)
        gb_s = None if self.bytes_per_step is None else self.bytes_per_step * mean / 1e9
        return {
            "cache": self.cache,
            "type": self.type,
            "test": self.test,
            "tokens": self.tokens,
            "depth": self.depth,
            "tok_s": mean,
            "deviation": statistics.stdev(self.tok_s) if len(self.tok_s) > 1 else None,
            "repetitions": len(self.tok_s),
            "gb_s": gb_s,
            "read_gb_s": read,
            "read_share": None if gb_s is None else gb_s / read,
        }


class Bench:
    """The caches to compare, all loaded, and the results so far."""

    def __init__(self, args: argparse.Namespace, source: ModelSource, n_ctx: int):
        self.source = source
        self.n_ctx = n_ctx
        self.results: list[Result] = []
        self.info: Info
        self._args = args
        self._loaded: list[tuple[CacheChoice, Runtime]] = []
        self._done = 0
        self._random = np.random.default_rng(0)

    def load(self, choices: list[CacheChoice]) -> None:
        """Load all caches at once, so that they can take turns. WontFitError: they do not fit together."""
        args = self._args
        planner = Planner.of(self.source, args.memory_limit, 1, args.batch_size or 512, args.threads, args.device)
        planner = placed(planner, choices, self.n_ctx)
        if len(choices) > 1:
            advice = "Compare fewer, or lower the largest depth (-d)"
            require_together([planner.sizes(choice, self.n_ctx) for choice in choices], planner.limit, advice)
        limit = 0 if args.memory_limit is None else memory_limit_bytes(args.memory_limit)
        for choice in choices:
            shown = show_progress(args)
            one = load(
                self.source,
                choice,
                planner,
                n_ctx=self.n_ctx,
                memory_limit=limit,
                show_progress=shown,
                calibration=args.calibration,
            )
            if one.huge_pages:
                one.huge_pages.finish()  # what is measured is a model that has worked for a while
            self._loaded.append((choice, one))
            self.info = one.info

    def turns(self, depths: list[int]) -> int:
        return len(depths) * len(self._loaded) * int(self._args.repetitions)

    def measure(self, depth: int, update: progress.Update) -> None:
        """Run all tests of all caches at one depth; the caches take turns in each repetition."""
        args = self._args
        turns = [
            (runtime, self._fill(runtime, depth), self._tests(choice, runtime, depth))
            for choice, runtime in self._loaded
        ]
        for repetition in range(args.repetitions):
            for runtime, sequence, results in turns if repetition % 2 == 0 else turns[::-1]:
                for result in results:
                    tok_s = self._time(runtime, sequence, result)
                    result.read_gb_s.append(core.read_bandwidth(self.info["n_threads"], _READ_MIB))
                    result.tok_s.append(tok_s)
                self._done += 1
                update(self._done, 0)
        for runtime, sequence, _ in turns:
            with runtime.use() as engine:
                engine.free_sequence(sequence)

    def _tests(self, choice: CacheChoice, runtime: Runtime, depth: int) -> list[Result]:
        args = self._args
        layers = runtime.info["layers"]
        cache = "/".join(sorted({layer["mode"] for layer in layers}))
        type = "/".join(sorted({row_type(layer) for layer in layers}))
        tests = []
        if args.n_prompt:
            tests.append(Result(cache, type, "prefill", args.n_prompt, depth, None))
        if args.n_gen:
            tests.append(Result(cache, type, "decode", args.n_gen, depth, self._step_bytes(choice, depth)))
        self.results += tests
        return tests

    def _step_bytes(self, choice: CacheChoice, depth: int) -> float:
        """Bytes that a decode step reads, averaged over a test: the weights, and the rows that attention reads: of a
        layer with a sliding window those in it, of one whose rows age each at its level, and of one that reads another
        layer's rows those once more.

        The first token of an empty sequence, which reads other weights in folded modes, is counted like the others;
        folded weights that several layers share count once.
        """
        # n_ctx=1: a step reads one row of the RoPE table, whose size grows with the context
        memory = core.plan(self.source.file, n_ctx=1, **choice.arguments(self.source))
        file = self.source.file
        held = {name: file.tensor_bytes(name) for name in file.tensors()}
        in_memory = {name: size for name, (_, size) in core.held(file).items()}
        held |= in_memory
        looked_up = ["position_embd.weight", "per_layer_token_embd.weight"]
        looked_up += ["token_embd.weight"] if "output.weight" in held else []
        unread = sum(_prefill_only(self.source, held, memory, layer) for layer in set(self.source.owners))
        unread += sum(held.get(name, 0) for name in looked_up)
        unread += _idle_experts(file, in_memory, self.info["architecture"])
        weights = memory["mapped"] + memory["weights"] + memory["derived"] - unread
        return weights + (self._rows(choice, depth + 1) + self._rows(choice, depth + self._args.n_gen)) / 2

    def _rows(self, choice: CacheChoice, tokens: int) -> int:
        """Bytes of the rows that the last of so many tokens reads, its own included, in all layers."""
        file, arch = self.source.file, self.info["architecture"]
        key, usual = f"{arch}.attention.sliding_window", core.architectures()[arch].usual_window
        window = int(file.value(key)) if key in file.keys() else usual or tokens

        def layers(n_ctx: int) -> list[LayerInfo]:
            return core.plan(file, n_ctx=n_ctx, n_batch=1, **choice.arguments(self.source))["layers"]

        if tokens <= window:
            sizes = [layer["bytes_held"] for layer in layers(tokens)]
        else:
            long = window + 4 * BLOCK  # a layer with a window keeps whole blocks around it, but not as many as this
            sizes = [
                layer["bytes_per_token"] * window if wide["max_rows"] < long else layer["bytes_held"]
                for layer, wide in zip(layers(tokens), layers(long), strict=True)
            ]
        return sum(sizes[owner] for owner in self.source.owners)

    def _fill(self, runtime: Runtime, depth: int) -> int:
        """A new sequence of `depth` tokens. It also touches all weights once."""
        with runtime.use() as engine:
            sequence = engine.new_sequence()
            self._lengthen(engine, sequence, depth)
        return sequence

    def _lengthen(self, engine: core.Engine, sequence: int, depth: int) -> None:
        """Extend an empty sequence to `depth` tokens."""
        if base := min(depth, _BASE):
            engine.append([(sequence, self._tokens(base))])
        if depth > base:
            engine.tile(sequence, depth // BLOCK * BLOCK)
        if depth > engine.length(sequence):
            engine.append([(sequence, self._tokens(depth - engine.length(sequence)))])
        engine.append([(sequence, self._tokens(1))])
        engine.truncate(sequence, depth)

    def _time(self, runtime: Runtime, sequence: int, result: Result) -> float:
        """Tokens per second of one repetition; the sequence has its previous length afterwards."""
        tokens = self._tokens(result.tokens)
        items = [tokens] if result.test == "prefill" else np.split(tokens, len(tokens))
        with runtime.use() as engine:
            start = time.perf_counter()
            for item in items:
                engine.append([(sequence, item)])
            seconds = time.perf_counter() - start
            again = not engine.can_truncate(sequence, result.depth)  # a sliding window has dropped rows
            engine.truncate(sequence, 0 if again else result.depth)
            if again:
                self._lengthen(engine, sequence, result.depth)
        return result.tokens / seconds

    def _tokens(self, n: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return self._random.integers(0, self.info["n_vocab"], n, np.int32)


def _idle_experts(file: core.GgufFile, held: Mapping[str, int], architecture: str) -> int:
    """Bytes of the experts that one token does not use; 0 without experts. held: bytes in memory by tensor."""
    if f"{architecture}.expert_count" not in file.keys():
        return 0
    experts = int(file.value(f"{architecture}.expert_count"))
    idle = experts - int(file.value(f"{architecture}.expert_used_count"))
    return sum(size for name, size in held.items() if "_exps." in name) * idle // experts


def _prefill_only(source: ModelSource, held: Mapping[str, int], info: Plan, layer: int) -> float:
    """Bytes of a layer's weights that decoding does not read. held: bytes in memory by tensor. info: from core.plan."""
    kv_width, q_width = info["n_kv_heads"] * info["head_dim"], info["n_heads"] * info["head_dim"]
    mode = source.modes()[info["layers"][layer]["mode"]]
    folded = {fold.suffix: 4 * fold.rows * fold.cols for fold in mode.folds}  # float32, if not stored in the file
    fused, size = f"blk.{layer}.attn_qkv.weight", 0.0
    for suffix in (one.suffix for one in mode.unread):
        if f"blk.{layer}.{suffix}" in held:
            size += held[f"blk.{layer}.{suffix}"]
        elif suffix in folded:
            size += folded[suffix]
        else:
            size += held[fused] * kv_width / (q_width + 2 * kv_width)
    return size


def _depths(args: argparse.Namespace) -> list[int]:
    try:
        depths = sorted({int(one) for one in args.depths.split(",")})
    except ValueError:
        args.usage_error(f"-d takes whole numbers separated by commas, got '{args.depths}'")
    if depths[0] < 0:
        args.usage_error(f"a depth must not be negative, got {depths[0]}")
    return depths


def _choices(args: argparse.Namespace) -> list[CacheChoice]:
    """The caches to measure: of --compare, else of --cache."""
    return [CacheChoice.of(**cache_arguments(args))] if args.compare is None else caches_to_compare(args)


def _context(args: argparse.Namespace, depth: int, limit: int | None) -> int:
    """The context needed for the largest depth, in whole blocks. limit: ModelSource.n_ctx_limit. ValueError: --ctx is
    smaller."""
    needed = depth + max(args.n_prompt, args.n_gen, 1)
    if args.ctx is not None and args.ctx < needed:
        grows = "raise it, or " if limit is None or needed <= limit else ""
        raise ValueError(
            f"a depth of {depth} and {needed - depth} tokens after it need a context of {needed}, --ctx is {args.ctx}: "
            f"{grows}lower -d, -p or -n"
        )
    return int(args.ctx or whole_blocks(needed))


def _text(bench: Bench, form: str) -> str:
    rows = [result.row() for result in bench.results if result.tok_s]
    if form == "json":
        info = {key: bench.info.get(key) for key in ("architecture", "device", "n_threads", "n_ctx")}
        return as_json({"model": str(bench.source.path)} | info | {"results": rows}) + "\n"
    if form == "md":
        return _markdown(bench, rows) + "\n"
    out = io.StringIO()
    writer = csv.DictWriter(out, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _markdown(bench: Bench, rows: list[dict[str, Any]]) -> str:
    info = bench.info
    lines = [
        f"{bench.source.name}: {info['architecture']}, {info['device']}\n",
        "| cache | test | depth | tok/s | GB/s | of the read bandwidth |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        decode = row["gb_s"] is not None
        gb_s = f"{row['gb_s']:.1f}" if decode else "-"
        share = f"{100 * row['read_share']:.0f} % of {row['read_gb_s']:.1f} GB/s" if decode else "-"
        speed = f"{row['tok_s']:.2f}" + ("" if row["deviation"] is None else f" ± {row['deviation']:.2f}")
        cells = (f"{row['cache']} {row['type']}", f"{row['test']} {row['tokens']}", row["depth"], speed, gb_s, share)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    if any(row["read_share"] is not None and row["read_share"] > 1 for row in rows):
        lines.append("\nover 100 %: some of what a step reads lies in the CPU's caches, which are faster than memory")
    return "\n".join(lines)
