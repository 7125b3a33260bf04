"""The slimrt command: one file a verb."""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
from collections.abc import Sequence

from slimrt import __version__
from slimrt.cli import chat, convert, doctor, generate, inspect, plan
from slimrt.cli.common import Flags, coloured
from slimrt.errors import SlimrtError

VERBS = (generate, chat, convert, inspect, plan, doctor)

_EPILOG = (
    "Every flag has a twin in the environment: --cache-type is SLIMRT_CACHE_TYPE, MODEL is SLIMRT_MODEL; the flag "
    "wins. Results go to stdout, everything else to stderr. Exit code: 0 done, 1 error, 2 wrong usage, 130 Ctrl-C."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that is not UTF-8 gets '?', not an exception
            stream.reconfigure(errors="replace")
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `slimrt ... | head`: the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if args.verbose >= 2 or os.environ.get("SLIMRT_DEBUG"):
            traceback.print_exc()
        print(f"{coloured('slimrt: error:', 'red', sys.stderr)} {_sentence(error)}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slimrt", description="A transformer runtime whose context memory is a choice.", epilog=_EPILOG
    )
    parser.add_argument("--version", action="version", version=f"slimrt {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb in VERBS:
        name = verb.__name__.rpartition(".")[2]
        one = verbs.add_parser(name, help=verb.HELP, description=f"{verb.HELP}.", epilog=_EPILOG)
        one.set_defaults(run=verb.run, usage_error=one.error)
        verb.add_flags(Flags(one))
    return parser


def _sentence(error: Exception) -> str:
    """What went wrong, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, MemoryError) and not str(error):
        return "out of memory"
    if isinstance(error, (SlimrtError, OSError, ValueError, MemoryError)):
        return " ".join(str(error).split())
    return f"{type(error).__name__}: {error} (a fault in slimrt; -vv shows where)"
