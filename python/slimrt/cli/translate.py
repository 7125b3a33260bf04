"""slimrt translate: translation with T5, NLLB, Marian and their kin."""

from __future__ import annotations

import argparse

from slimrt.cli import text2text
from slimrt.cli.common import Flags

_NUM_BEAMS = 4


def add_flags(flags: Flags) -> None:
    text2text.add_flags(flags, what="translate", usual_beams=str(_NUM_BEAMS), task=_languages)


def _languages(flags: Flags) -> None:
    flags.add("--source", metavar="LANGUAGE", help="by the model's own name: English (T5), eng_Latn (NLLB), en_XX "
              "(mBART), en (M2M100)")  # fmt: skip
    flags.add("--target", metavar="LANGUAGE", help="such as German, deu_Latn, de_DE, de; or fra (Marian, which sees "
              "the source); without either the text goes in as it is")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    if args.source is not None and args.target is None:
        args.usage_error("--source needs --target")
    return text2text.transform(args, text2text.texts(args), _NUM_BEAMS, source=args.source, target=args.target)
