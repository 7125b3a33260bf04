"""slimrt convert: write a GGUF file that loads with its cache mode at once."""

from __future__ import annotations

import argparse

import slimrt
from slimrt.cli.common import Flags, print_json, show_progress

HELP = "write a GGUF file folded for a cache mode, with a report for each layer"


def add_flags(flags: Flags) -> None:
    flags.parser.add_argument("source", metavar="SRC", help="a GGUF file or a Hugging Face directory")
    flags.add("-o", "--out", required=True, metavar="OUT", help="the file to write")
    flags.add("--cache", metavar="MODE", help="fold for this mode; without it nothing is folded")
    flags.add("--cache-type", default="f16", metavar="TYPE", help="the type to judge the fold for (default: f16)")
    types = "f32, f16, bf16, q8_0, q4_0, q4_k, q4_k_m, q5_k, q6_k"
    flags.add("--outtype", metavar="TYPE", help=f"type of the weights: {types}; default: as they are")
    flags.add("--calibration", metavar="FILE", help="text to measure on")
    flags.add("--verify", nargs="?", const="", metavar="TEXTFILE", help="compare the result with kv on a text")
    flags.output()


def run(args: argparse.Namespace) -> int:
    report = slimrt.convert(
        args.source,
        args.out,
        cache=args.cache,
        cache_type=args.cache_type,
        outtype=args.outtype,
        calibration=args.calibration,
        verify=args.verify,
        progress=show_progress(args),
    )
    if args.json:
        print_json(report.to_dict())
    else:
        print(report.table())
    return 0
