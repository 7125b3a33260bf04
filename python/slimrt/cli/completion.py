"""slimrt completion: prints a shell's completion script."""

from __future__ import annotations

import argparse
import re
from importlib import import_module
from types import ModuleType
from typing import Any

from slimrt.cli.common import Flags, print_json
from slimrt.errors import UnsupportedError

_FILES = ("FILE", "FILE|TEXT", "TEXTFILE", "MODEL", "AUDIO", "CSV", "OUT", "PATH")  # metavars that take file names


def add_flags(flags: Flags) -> None:
    flags.parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")
    flags.output()


def run(args: argparse.Namespace) -> int:
    from slimrt.cli.command import whole_parser

    shtab = shell_extra("shtab")
    parser = whole_parser()
    _mark_files(parser, shtab.FILE)
    script = shtab.complete(parser, args.shell)
    if args.shell == "fish":  # flags such as -hf are "old style" options (-o) in fish; shtab writes them as short (-s)
        script = re.sub(r" -s (\w{2,})\b", r" -o \1", script)
    print_json({"shell": args.shell, "script": script}) if args.json else print(script)
    return 0


def shell_extra(module: str) -> ModuleType:
    """Import a module of the extra `shell`. UnsupportedError: it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        raise UnsupportedError(f"{module.partition('.')[0]} is missing: pip install 'slimrt[shell]'") from None


def _mark_files(parser: argparse.ArgumentParser, how: Any) -> None:
    """Make shtab complete file names for all flags and arguments that take them, in all verbs."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                _mark_files(one, how)
        elif action.metavar in _FILES:
            vars(action)["complete"] = how
