"""slimrt translate: translation with models of the T5 family."""

from __future__ import annotations

import argparse

from slimrt.cli import text2text
from slimrt.cli.common import Flags, from_flags
from slimrt.generation.options import PENALTIES
from slimrt.generation.text2text import prefixed

_NUM_BEAMS = 4


def add_flags(flags: Flags) -> None:
    text2text.add_flags(flags, what="translate", num_beams=None, task=_languages)


def _languages(flags: Flags) -> None:
    flags.add("--source", metavar="LANGUAGE", help="such as English: T5's own models are told 'translate English to "
              "German: '")  # fmt: skip
    flags.add("--target", metavar="LANGUAGE", help="such as German; with neither the text goes in as it is")


def run(args: argparse.Namespace) -> int:
    from_flags(args, lambda: prefixed("", args.source, args.target))
    if args.num_beams is None:
        penalised = any(getattr(args, name) != none for name, none in PENALTIES.items())
        args.num_beams = _NUM_BEAMS if args.temp == 0 and not penalised and not args.stop else 1
    texts = text2text.texts(args)
    told = [prefixed(one, args.source, args.target) if one.strip() else one for one in texts]
    return text2text.transform(args, told)
