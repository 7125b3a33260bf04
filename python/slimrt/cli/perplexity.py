"""slimrt perplexity: the perplexity of a text, and the KL divergence that each cache costs."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from slimrt.cache.config import kinds
from slimrt.cli.common import (
    Flags,
    beside_model,
    cache_arguments,
    caches_to_compare,
    engine_arguments,
    model_source,
    note,
    open_model,
    print_json,
    read_input,
    show_progress,
)
from slimrt.cli.values import is_cache, lower, not_empty, positive
from slimrt.measure.plots import check_plot, plot_front
from slimrt.measure.quality import compare_caches
from slimrt.modelfile.source import ModelSource
from slimrt.modelfile.text import file_ids
from slimrt.results import CacheComparison
from slimrt.runtime.kinds import continues_texts


def add_flags(flags: Flags) -> None:
    flags.model()
    flags.parser.add_argument("text", metavar="FILE|TEXT", nargs="*", help="a UTF-8 file, or a text with spaces in it "
                              "(else -f or -p, else stdin)")  # fmt: skip
    flags.add("-f", "--file", twin=False, type=not_empty, metavar="FILE", help="FILE as a flag")
    flags.add("-p", "--prompt", twin=False, metavar="TEXT", help="TEXT as a flag")
    flags.add("--stride", type=positive, metavar="N", help="tokens that each window but the first scores; default: "
              "half a window; not with --compare")  # fmt: skip
    flags.add("--compare", twin=False, type=lower, goes_on=is_cache, metavar="MODE[:TYPE[:RANK[:TYPE]]]", help="caches "
              "to compare with kv:f32 through cached decoding, such as kv:f16 k:f16 k+r:q8")  # fmt: skip
    flags.add("--prefix", twin=False, type=positive, metavar="N", help="with --compare: tokens of each window that "
              "are prefilled; default: a quarter")  # fmt: skip
    flags.add("--chunk", type=positive, default=1, metavar="N", help="with --compare: tokens fed at once after the "
              "prefix; those of a chunk see each other exactly (default: %(default)s)")  # fmt: skip
    flags.add("--tokens", type=positive, metavar="N", help="score the first N tokens only (the very first has "
              "no probability; with --compare neither do prefixes count); default: all")  # fmt: skip
    flags.add("--sequences", type=positive, metavar="N", help="with --compare: windows decoded together (default: 8)")
    flags.add("--plot", twin=False, metavar="FILE", help="with --compare: plot divergence over bytes (.png, .svg, "
              ".pdf; needs the extra plot)")  # fmt: skip
    flags.engine()
    flags.output()


def run(args: argparse.Namespace) -> int:
    text = _text(args)
    _check_usage(args)
    source = model_source(args)
    continues_texts(source)
    if args.compare is None:
        _plain(args, source, text)
    else:
        _compare(args, source, text)
    return 0


def _text(args: argparse.Namespace) -> str | Path:
    """The text to score: a path, or the text itself. A single argument is the text if a flag names the model."""
    given = [*beside_model(args, args.text), *(one for one in (args.file, args.prompt) if one is not None)]
    if len(given) > 1:
        args.usage_error("give one text: FILE or TEXT, -f FILE, or -p TEXT")
    if args.prompt is not None:
        return str(args.prompt)
    if given and args.file is None and " " in given[0] and not os.path.exists(given[0]):
        if re.search(r"\S\.\w{1,4}$", given[0]):  # a misspelt file name: else its words would be scored as the text
            raise FileNotFoundError(f"{given[0]}: no such file (a text that ends so is given with -p)")
        return str(given[0])
    if given and given[0] != "-":
        return Path(given[0])
    if not given and sys.stdin.isatty():
        args.usage_error("what to score? give FILE or TEXT after the model, -f FILE, -p TEXT, or pipe a text in")
    return read_input(None)


def _check_usage(args: argparse.Namespace) -> None:
    """Refuse flags of the other way of measuring."""
    if args.compare is None:
        flags = {"--prefix": args.prefix, "--plot": args.plot, "--sequences": args.sequences}
        flags["--chunk"] = None if args.chunk == 1 else args.chunk
    else:
        flags = {"--stride": args.stride, "--batch-size": args.batch_size}
    for flag, value in flags.items():
        if value is not None:
            args.usage_error(f"{flag} belongs to {'--compare' if args.compare is None else 'the plain perplexity'}")
    if args.plot is not None:
        check_plot(args.plot)


def _plain(args: argparse.Namespace, source: ModelSource, text: str | Path) -> None:
    """Print the perplexity over windows, each computed by one prefill."""
    limit = None if args.tokens is None else args.tokens + 1  # the first id has no probability: it is not scored
    tokenizer = source.tokenizer
    ids = file_ids(tokenizer, text, limit).tolist() if isinstance(text, Path) else tokenizer.encode(text)[:limit]
    with open_model(args, source, source.n_ctx(args.ctx or 0)) as model:
        value = model.perplexity(ids, stride=args.stride)
        window = min(model.n_ctx, len(ids))
        stride = args.stride or max(window // 2, 1)
        cache = kinds(model.info()["layers"])
    result = {"model": str(source.path), "perplexity": value, "tokens": len(ids) - 1, "window": window,
              "stride": stride, "cache": cache}  # fmt: skip
    if args.json:
        print_json(result)
        return
    print(f"perplexity {value:.4f}")
    cut = f", windows of {window} that score their last {stride} (the first: all)" if window < len(ids) else ""
    note(args, f"slimrt: {len(ids) - 1} token{'s' * (len(ids) != 2)}{cut}, cache {cache}; by prefill, which hides what "
         "a cache costs: --compare shows that")  # fmt: skip


def _compare(args: argparse.Namespace, source: ModelSource, text: str | Path) -> None:
    others = {*cache_arguments(args), "progress"}
    comparison = compare_caches(
        source,
        text,
        caches_to_compare(args),
        window=args.ctx or 0,
        prefix=args.prefix,
        chunk=args.chunk,
        max_tokens=args.tokens,
        sequences=args.sequences,
        calibration=args.calibration,
        progress=show_progress(args),
        **{key: value for key, value in engine_arguments(args).items() if key not in others},
    )
    if args.plot is not None:
        plot_front(comparison, args.plot)
    if args.json:
        print_json(comparison.to_dict())
    else:
        _print(args, comparison)


def _print(args: argparse.Namespace, comparison: CacheComparison) -> None:
    print(comparison.table())
    note(
        args,
        f"slimrt: {comparison.tokens} token{'s' * (comparison.tokens != 1)} in {comparison.windows} "
        f"window{'s' * (comparison.windows != 1)} of {comparison.window} at most, each decoded over the cache after a "
        f"prefix of {comparison.prefix}, {comparison.chunk} at a time; KL in nats; cache: bytes allocated for a "
        "window; W^: bytes of weights beyond those of kv; *: on the Pareto front of bytes and KL"
        + ("; refused without --allow-lossy" if any(row.too_imprecise for row in comparison.rows) else ""),
    )
