"""Parsing and running a command line: verbs, signals, and exit codes."""

from __future__ import annotations

import argparse
import difflib
import io
import os
import signal
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from slimrt.cli.habits import VERB_HABITS
from slimrt.cli.parser import Parser
from slimrt.cli.verbs import VERBS

_EPILOG = """\
Flags may be set in the environment: --cache-type by SLIMRT_CACHE_TYPE, MODEL by SLIMRT_MODEL; the command line wins.
Results go to stdout, everything else to stderr. Exit code: 0 done, 1 error, 2 wrong usage, 130 Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns its exit code."""
    _prepare_streams()
    _raise_on_signals()
    args: argparse.Namespace | None = None
    try:
        try:
            args = _read(sys.argv[1:] if argv is None else argv)
            from slimrt.plumbing.notes import heard

            with heard(args.quiet):
                return int(args.run(args))
        finally:
            sys.stdout.flush()  # so that a full disk or closed pipe is an error here, not at the interpreter's exit
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `slimrt ... | head`: the reader has closed the pipe
        return 141
    except Exception as error:
        if (args is not None and args.verbose >= 2) or os.environ.get("SLIMRT_DEBUG"):
            import traceback

            traceback.print_exc()
        from slimrt.cli.common import complain

        complain(error)
        return 1
    finally:
        _discard_output()


def whole_parser() -> Parser:
    """The parser with all verbs and their flags, for completion and man pages."""
    parser = _top()
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")
    for name, verb in VERBS.items():
        _add_flags(verbs.add_parser(name, help=verb.help, **_description(name)), name)
    return parser


def verb_parser(name: str) -> Parser:
    """The parser of one verb's flags and arguments."""
    return _add_flags(Parser(prog=f"slimrt {name}", **_description(name)), name)


def _read(words: Sequence[str]) -> argparse.Namespace:
    """Parse and check a command line. SystemExit: wrong usage, or --help or --version."""
    if words and words[0] in VERBS:
        parser = verb_parser(words[0])
        args = parser.read(words[1:])
        for check in args.checks:
            check(args)
        return args
    parser = _top()
    width = max(map(len, VERBS))
    listed = "\n".join(f"  {name:<{width}}  {verb.help}" for name, verb in VERBS.items())
    parser.epilog = f"verbs:\n{listed}\n\nslimrt VERB --help shows a verb's flags, with examples.\n\n{_EPILOG}"
    parser.usage = "slimrt VERB [flags]"
    if words and words[0] in ("-h", "--help", "--version"):
        parser.parse_args(words[:1])
    parser.refuse(_no_verb(words))


def _no_verb(words: Sequence[str]) -> str:
    """The error message for a command line without a known verb."""
    if not words:
        return f"which verb? {', '.join(VERBS)} (see slimrt --help)"
    word = words[0]
    if word in VERB_HABITS:
        return f"there is no verb {word}; type: {VERB_HABITS[word]}"
    if word.startswith("-") or Path(word).exists():
        return f"the verb comes first: slimrt generate {word} ..., or another of {', '.join(VERBS)}"
    nearest = difflib.get_close_matches(word, [*VERBS, *VERB_HABITS], n=1, cutoff=0.6)
    named = VERB_HABITS.get(nearest[0], f"slimrt {nearest[0]}") if nearest else ""
    hint = f" (did you mean {named}?)" if named else ""
    return f"there is no verb {word}{hint}; there are {', '.join(VERBS)}"


def _top() -> Parser:
    parser = Parser(prog="slimrt", description="A transformer runtime whose context memory is a choice.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    return parser


def _description(name: str) -> dict[str, Any]:
    verb = VERBS[name]
    examples = "".join(f"\n  {example}" for example in verb.examples)
    return {"description": f"{verb.help[0].upper()}{verb.help[1:]}.", "epilog": f"examples:{examples}\n\n{_EPILOG}"}


def _add_flags(parser: Parser, name: str) -> Parser:
    """Import a verb's module, and add its flags."""
    from slimrt.cli.common import Flags

    module, flags = import_module(f"slimrt.cli.{name}"), Flags(parser)
    module.add_flags(flags)
    parser.set_defaults(run=module.run, usage_error=parser.error, checks=flags.checks)
    parser.usage = flags.usage()
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from slimrt.core import __version__

        print(f"slimrt {__version__}")
        parser.exit()


def _prepare_streams() -> None:
    """Replace streams that the caller closed (`slimrt ... >&-`) by the null device, a stdout by one that is opened for
    reading, so that a result is not lost in silence; and write what the encoding of an output stream lacks as '?'."""
    if sys.stdin is None:
        nothing = io.FileIO(os.devnull)
        nothing.name = "<stdin>"  # for messages
        sys.stdin = io.TextIOWrapper(io.BufferedReader(nothing))
    sys.stdout = sys.stdout or open(os.open(os.devnull, os.O_RDONLY), "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _discard_output() -> None:
    """Redirect stdout to the null device if it cannot be written: else the interpreter reports it again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _raise_on_signals() -> None:
    """Make SIGTERM and SIGHUP end the program by an exception, so that partial files are removed."""
    if threading.current_thread() is not threading.main_thread():  # signal handlers can only be set there
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # unless ignored, as by nohup
            signal.signal(number, _end)


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
