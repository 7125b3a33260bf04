"""slimrt plan: what a model would take in memory, before it is loaded."""

from __future__ import annotations

import argparse
import sys

import slimrt
from slimrt.cache.config import kinds, row_type
from slimrt.cli.common import Flags, coloured, engine_arguments, model_source, print_json, table
from slimrt.cli.values import positive
from slimrt.modes import BASELINES
from slimrt.plumbing.units import format_bytes
from slimrt.results import EncoderRow, PlanResult, PlanRow


def add_flags(flags: Flags) -> None:
    flags.model()
    flags.add("-np", "--parallel", type=positive, default=1, metavar="N", help="texts at once (default: %(default)s)")
    flags.engine(encoder=True)
    flags.output()


def run(args: argparse.Namespace) -> int:
    result = slimrt.plan(model_source(args), n_ctx=args.ctx or 0, n_seqs=args.parallel, **engine_arguments(args))
    if args.json:
        print_json(result.to_dict())
    else:
        _print(result)
    return 0 if result.fits else 1


def _print(result: PlanResult) -> None:
    asked = result.asked
    beyond = ", more than makes sense" if result.n_ctx > result.n_ctx_train else ""
    print(f"{result.path}: context {result.n_ctx} of {result.n_ctx_train} trained{beyond}, {result.n_seqs} at once")
    head = ("cache", "type", "weights", "derived", "cache", "scratch", "total", "bytes/token", "largest ctx", "fits",
            "smaller than kv")  # fmt: skip
    rows = [
        (
            row.cache,
            ", ".join(sorted({row_type(layer) for layer in row.layers()})),
            format_bytes(row.mapped + row.weights),
            format_bytes(row.derived),
            format_bytes(row.cache_bytes),
            format_bytes(row.scratch),
            format_bytes(row.total),
            str(row.bytes_per_token),
            str(row.max_n_ctx),
            "too imprecise" if row.too_imprecise else "yes" if row.fits else "no",
            _smaller_from(row, result.n_ctx_train),
        )
        for row in (*result.rows, *(() if asked in result.rows else (asked,)))
    ]
    print(table(head, rows))
    for row in (*result.rows, *(() if asked in result.rows else (asked,))):
        if row.times_by_types not in (None, 1.0):  # the types of kv, f16, by any name
            print(_of_aging(row, result.n_ctx))
    for row in result.rows:
        if row.too_imprecise:
            print(f"{row.cache}: {row.too_imprecise}")
        elif row.too_imprecise is None:
            print(
                f"{row.cache}: what it loses was not looked at, which would take long: ask for it (--cache {row.cache})"
            )
    if asked.too_imprecise and asked not in result.rows:
        print(f"{asked.cache}: {asked.too_imprecise}")
    for mode, reason in result.refused:
        print(f"{mode}: not for this model: {reason}")
    if result.encoder:
        _print_encoder(result)
    refused = "is refused: too imprecise" if asked.too_imprecise else "" if asked.fits else "does not fit"
    verdict = coloured(refused, "red", sys.stdout) if refused else coloured("fits", "green", sys.stdout)
    print(f"{kinds(asked.layers())}: {format_bytes(asked.total)} {verdict} in {format_bytes(result.memory_limit)}")


def _smaller_from(row: PlanRow, n_ctx_train: int) -> str:
    """The context from which a cache takes less than kv, scratch and folded weights counted."""
    if row.cache in BASELINES:
        return "-"
    if row.smaller_from is None:
        return "never"
    return f"from {row.smaller_from}" + (", untrained" if row.smaller_from > n_ctx_train else "")


def _of_aging(row: PlanRow, n_ctx: int) -> str:
    """How small rows that age become, by two counts."""
    return (
        f"{kinds(row.layers())}: {row.times_by_types:.2f} times smaller than kv f16 by types and shares alone (as TALE "
        f"counts), {row.times_held:.2f} times with scales, sinks and newest rows: a text of "
        f"{n_ctx} tokens holds {format_bytes(row.held_bytes)}, and more is allocated"
    )


def _print_encoder(result: PlanResult) -> None:
    """Both attentions' caches beside the baseline: slim attention's table for encoder-decoders."""
    base = result.encoder[0]

    def times(part: str, row: EncoderRow) -> str:
        return f"{getattr(base, part) / getattr(row, part):.2f}x"

    head = ("", "self", "cross", "self bytes", "cross bytes", "smaller", "E not counted", "read a token", "fewer",
            "E on chip")  # fmt: skip
    rows = [
        (
            row.name,
            kinds(row.layers()),
            f"{row.cross} {row.cross_type}",
            format_bytes(row.self_bytes),
            format_bytes(row.cross_bytes),
            times("cache_bytes", row),
            times("uncounted", row),
            format_bytes(row.read),
            times("read", row),
            times("read_on_chip", row),
        )
        for row in result.encoder
    ]
    print(f"\nwith the encoder's output, {result.n_seqs} at once, full contexts\n{table(head, rows)}\n")
