"""slimrt text2text: a text from another, with models of the T5 family."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slimrt.cli.common import Flags, model_source, note, open_model, positive, print_json, sampling_arguments
from slimrt.files import decode_text
from slimrt.results import Generation
from slimrt.text2text import Text2Text

HELP = "make a text of another, with the T5 family; several lines are one batch"
_AT_ONCE = 8  # texts decoded together where the user does not say


def add_flags(flags: Flags, *, what: str = "turn into another", num_beams: int | None = 1) -> None:
    flags.model()
    flags.add("-p", "--prompt", metavar="TEXT", help=f"the text to {what} (else -f, else stdin)")
    flags.add("-f", "--file", metavar="FILE", help="a file with a text on each line")
    flags.add("-n", "--n-predict", type=int, default=256, metavar="N", help="tokens at most; -1: until the end or the "
              "context is full (default: %(default)s)")  # fmt: skip
    flags.sampling(temp=0.0, num_beams=num_beams, beams="1: greedy, or what --temp says (default: "
                   f"{num_beams or '4 where nothing is drawn'})")  # fmt: skip
    flags.add("--length-penalty", type=float, default=1.0, metavar="P", help="power of the length that beams are "
              "compared by (default: %(default)s)")  # fmt: skip
    flags.add(
        "--parallel", type=positive, metavar="N", help=f"texts decoded together; default: all, at most {_AT_ONCE}"
    )
    flags.engine()
    flags.output()


def run(args: argparse.Namespace) -> int:
    return transform(args, texts(args))


def texts(args: argparse.Namespace) -> list[str]:
    """What -p, -f or stdin give: a text, or one on each line that is not empty."""
    if args.prompt is not None and args.file is not None:
        args.usage_error("give -p or -f, not both")
    if args.prompt is not None:
        return [str(args.prompt)]
    if args.file is None and sys.stdin.isatty():
        args.usage_error("which text? give -p TEXT, -f FILE, or pipe one in")
    data = Path(args.file).read_bytes() if args.file is not None else sys.stdin.buffer.read()
    lines = [line for line in decode_text(data, args.file or "stdin").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{args.file or 'stdin'}: no text in it")
    return lines


def transform(args: argparse.Namespace, sources: Sequence[str]) -> int:
    """Print what the model makes of each text, a line each."""
    options: dict[str, Any] = sampling_arguments(args) | {
        "max_tokens": args.n_predict,
        "length_penalty": args.length_penalty,
    }
    Text2Text(**options)  # what does not go together is said before the model is loaded
    at_once = args.parallel or min(len(sources), _AT_ONCE)
    with open_model(args, model_source(args), args.ctx or 0, n_seqs=at_once * args.num_beams) as model:
        results: list[Generation] = model.text2text(list(sources), **options)
    if args.json:
        records = [{"source": source} | one.to_dict() for source, one in zip(sources, results, strict=True)]
        print_json(records if len(records) > 1 else records[0])
    else:
        for one in results:
            print(" ".join(one.text.split("\n")) if len(results) > 1 else one.text)
    cut = sum(one.finish_reason in ("length", "context") for one in results)
    if cut:
        note(args, f"slimrt: {cut} of {len(results)} texts are cut off at {args.n_predict} tokens or a full context; "
             "-n and --ctx make room")  # fmt: skip
    return 0
