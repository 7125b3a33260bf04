"""slimrt imatrix: measure what each weight is multiplied by."""

from __future__ import annotations

import argparse

import slimrt
from slimrt.cli.common import Flags, beside_model, model_name, print_json, show_progress
from slimrt.cli.values import file_name, positive, threads


def add_flags(flags: Flags) -> None:
    flags.twins = False  # as of slimrt convert: the contents of a file must not depend on the environment
    flags.model()
    flags.parser.add_argument("text", metavar="FILE", nargs="*", help="a UTF-8 text (else -f, else a built-in one)")
    flags.add("-f", "--file", metavar="FILE", help="FILE as a flag")
    flags.add("-o", "--output", "--out", required=True, type=file_name, metavar="OUT",
              help="the file to write")  # fmt: skip
    flags.add("--force", action="store_true", help="replace OUT where it exists")
    flags.add("-c", "--ctx", "--ctx-size", type=positive, metavar="N", help="tokens of a chunk; chunks do not see each "
              "other (default: 512, or the model's context)")  # fmt: skip
    flags.add("--chunks", type=positive, metavar="N", help="at most so many chunks (default: all of the text)")
    flags.twins = True
    flags.add("-t", "--threads", type=threads, metavar="N", help="CPU threads; default: one per physical (or big) core")
    flags.output()


def run(args: argparse.Namespace) -> int:
    texts = [*beside_model(args, args.text), *([] if args.file is None else [args.file])]
    if len(texts) > 1:
        args.usage_error("give one text: FILE, or -f FILE")
    report = slimrt.imatrix(
        model_name(args),
        args.output,
        *texts,
        chunk=args.ctx,
        chunks=args.chunks,
        n_threads=args.threads,
        progress=show_progress(args),
        overwrite=args.force,
    )
    if args.json:
        print_json(report.to_dict())
    else:
        print(report)
    return 0
