"""slimrt man: prints the manual page of all verbs and flags."""

from __future__ import annotations

import argparse

from slimrt.cli.common import Flags, print_json
from slimrt.cli.completion import shell_extra


def add_flags(flags: Flags) -> None:
    flags.output()


def run(args: argparse.Namespace) -> int:
    from slimrt.cli.command import whole_parser

    parser = whole_parser()
    vars(parser)["man_short_description"] = "a transformer runtime whose context memory is a choice"
    page = str(shell_extra("argparse_manpage.manpage").Manpage(parser))
    print_json({"man": page}) if args.json else print(page)
    return 0
