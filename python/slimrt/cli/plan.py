"""slimrt plan: the memory that a model would take, before it is loaded."""

from __future__ import annotations

import argparse
import sys

import slimrt
from slimrt.cli.common import Flags, coloured, engine_arguments, model_source, print_json
from slimrt.cli.values import count, positive


def add_flags(flags: Flags) -> None:
    flags.model()
    flags.add(
        "-np", "--parallel", type=positive, default=1, metavar="N", help="texts decoded together (default: %(default)s)"
    )
    flags.add("--max-queue", type=count, metavar="N", help="include the memory of slimrt serve with so many waiting "
              "requests")  # fmt: skip
    flags.draft()
    flags.engine(encoder=True, several=True)
    flags.output()


def run(args: argparse.Namespace) -> int:
    result = slimrt.plan(
        model_source(args),
        n_ctx=args.ctx or 0,
        n_seqs=args.parallel,
        max_queue=args.max_queue,
        draft_model=args.draft_model,
        **engine_arguments(args),
    )
    if args.json:
        print_json(result.to_dict())
    else:
        print(result.table())
        verdict = coloured(result.verdict, "green" if result.fits else "red", sys.stdout)
        print(result.conclusion(verdict))
    return 0 if result.fits else 1
