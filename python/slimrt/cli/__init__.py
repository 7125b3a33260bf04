"""The slimrt command: one file a verb."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence

from slimrt import __version__
from slimrt.cli import (
    bench,
    chat,
    convert,
    doctor,
    forecast,
    generate,
    inspect,
    perplexity,
    plan,
    text2text,
    transcribe,
    translate,
)
from slimrt.cli.common import Flags, complain
from slimrt.plumbing.notes import shown

VERBS = (
    generate,
    chat,
    transcribe,
    translate,
    text2text,
    forecast,
    convert,
    inspect,
    plan,
    perplexity,
    bench,
    doctor,
)

_EPILOG = (
    "Every flag has a twin in the environment: --cache-type is SLIMRT_CACHE_TYPE, MODEL is SLIMRT_MODEL; the flag "
    "wins. Results go to stdout, everything else to stderr. Exit code: 0 done, 1 error, 2 wrong usage, 130 Ctrl-C."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns its exit code."""
    _prepare_streams()
    _unwind_when_told_to_end()
    args: argparse.Namespace | None = None
    try:
        try:
            args = _parser().parse_args(argv)
            with shown(not args.quiet):
                return int(args.run(args))
        finally:
            sys.stdout.flush()  # what a pipe or a disk does not take must be told now, not by the interpreter's exit
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `slimrt ... | head`: the reader has what it wanted
        return 141
    except Exception as error:
        if (args is not None and args.verbose >= 2) or os.environ.get("SLIMRT_DEBUG"):
            traceback.print_exc()
        complain(error)
        return 1
    finally:
        _drop_unwritten_output()


def _prepare_streams() -> None:
    """Gives a stream that the caller closed (`slimrt ... >&-`) the null device, and one that is not UTF-8 a '?'."""
    sys.stdin = sys.stdin or open(os.devnull)
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _drop_unwritten_output() -> None:
    """Sends what stdout would not take to the null device, or the interpreter complains of it again when it exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unwind_when_told_to_end() -> None:
    """Lets SIGTERM and SIGHUP end the program as an exception does, so that no partial file stays behind."""
    if threading.current_thread() is not threading.main_thread():  # only there can signals be handled
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup's choice is kept
            signal.signal(number, _end)


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


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
