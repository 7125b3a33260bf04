"""slimrt translate: translation with T5, NLLB, Marian and their kin."""

from __future__ import annotations

import argparse

from slimrt.cli import text2text
from slimrt.cli.common import Flags
from slimrt.generation.options import PENALTIES

_NUM_BEAMS = 4


def add_flags(flags: Flags) -> None:
    text2text.add_flags(flags, what="translate", num_beams=None, task=_languages)


def _languages(flags: Flags) -> None:
    flags.add("--source", metavar="LANGUAGE", help="by the model's own name: English (T5), eng_Latn (NLLB), en_XX "
              "(mBART), en (M2M100)")  # fmt: skip
    flags.add("--target", metavar="LANGUAGE", help="such as German, deu_Latn, de_DE, de; or fra (Marian, which sees "
              "the source); without either the text goes in as it is")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    if args.source is not None and args.target is None:
        args.usage_error("--source needs --target")
    if args.num_beams is None:
        penalised = any(getattr(args, name) != none for name, none in PENALTIES.items())
        args.num_beams = _NUM_BEAMS if args.temp == 0 and not penalised and not args.stop else 1
    return text2text.transform(args, text2text.texts(args), source=args.source, target=args.target)
