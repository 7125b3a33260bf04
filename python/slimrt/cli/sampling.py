"""Flags of sampling and constraints, and their translation to options of Model.generate."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from slimrt.cli.flags import Adder, Collect
from slimrt.cli.values import bias, count, not_empty, positive, real, seed, whole
from slimrt.generation.options import DRY_SEQUENCE_BREAKERS
from slimrt.plumbing.files import decode_text


class SamplingFlags(Adder):
    """Adds the flags of sampling."""

    def n_predict(self, default: int) -> None:
        """The flag for the length of a text."""
        self.add(
            "-n",
            "--n-predict",
            "--predict",
            "--max-tokens",
            type=whole(-1),
            default=default,
            metavar="N",
            help="tokens at most; -1: until the end or the context is full (default: %(default)s)",
        )

    def sampling(self, *, temp: float = 0.8, num_beams: int | None = 1, beams: str = argparse.SUPPRESS) -> None:
        """Flags of sampling. temp, num_beams: defaults. beams: help text of --num-beams."""
        self.group("choice of tokens")
        self.add(
            "--temp", "--temperature", type=real(0), default=temp, metavar="T", help="0: greedy (default: %(default)s)"
        )
        self.add("--top-k", type=count, default=40, metavar="K", help="0: all (default: %(default)s)")
        self.add("--top-p", type=real(0, 1), default=0.95, metavar="P", help="1: all (default: %(default)s)")
        self.add("--min-p", type=real(0, 1), default=0.05, metavar="P", help="0: all (default: %(default)s)")
        self.add(
            "--typical-p", "--typical", type=real(0, 1), default=1.0, metavar="P", help="1: all (default: %(default)s)"
        )
        self.add("--repeat-penalty", type=real(0), default=1.0, metavar="R", help="1: none (default: %(default)s)")
        self.add("--frequency-penalty", type=real(), default=0.0, metavar="F", help="0: none (default: %(default)s)")
        self.add("--presence-penalty", type=real(), default=0.0, metavar="F", help="0: none (default: %(default)s)")
        self.add(
            "--repeat-last-n",
            type=whole(-1),
            default=64,
            metavar="N",
            help="tokens, prompt included, that the penalties look at; -1: all (default: %(default)s)",
        )
        self.add(
            "-l",
            "--logit-bias",
            action=Collect,
            type=bias,
            default=[],
            metavar="ID=VALUE",
            help="add to a token's logit; -inf: never choose it; may be repeated",
        )
        self.add(
            "--dry-multiplier",
            type=real(0),
            default=0.0,
            metavar="M",
            help="DRY: penalty of what goes on with a repetition; 0: none (default: %(default)s)",
        )
        self.add(
            "--dry-base",
            type=real(1),
            default=1.75,
            metavar="B",
            help="what it grows by with each token of the repetition (default: %(default)s)",
        )
        self.add(
            "--dry-allowed-length", type=count, default=2, metavar="N", help="beyond so many (default: %(default)s)"
        )
        self.add(
            "--dry-penalty-last-n",
            type=whole(-1),
            default=-1,
            metavar="N",
            help="tokens, prompt included, that it looks at; -1: all (default: %(default)s)",
        )
        self.add(
            "--dry-sequence-breaker",
            action=Collect,
            default=list(DRY_SEQUENCE_BREAKERS),
            metavar="TEXT",
            help="no repetition goes across it; may be repeated; none: nothing breaks one (default: a line's end, "
            ': " and *)',
        )
        self.add(
            "--top-n-sigma",
            "--top-nsigma",
            type=real(0),
            default=0.0,
            metavar="N",
            help="standard deviations of the logits below the largest that are left; 0: all (default: %(default)s)",
        )
        self.add(
            "--xtc-probability",
            type=real(0, 1),
            default=0.0,
            metavar="P",
            help="XTC: how often the top choices are "
            "left out but for the last of them; 0: never (default: %(default)s)",
        )
        self.add(
            "--xtc-threshold",
            type=real(0, 1),
            default=0.1,
            metavar="P",
            help="probability of a top choice (default: %(default)s)",
        )
        self.add(
            "--mirostat",
            type=count,
            default=0,
            metavar="N",
            help="2: a bound of the surprise in place of top-k, top-p and the like; 0: none (default: %(default)s)",
        )
        self.add(
            "--mirostat-ent",
            type=real(0),
            default=5.0,
            metavar="BITS",
            help="surprise it aims at, tau (default: %(default)s)",
        )
        self.add(
            "--mirostat-lr",
            type=real(0),
            default=0.1,
            metavar="R",
            help="how fast it learns, eta (default: %(default)s)",
        )
        self.add(
            "--stop",
            action=Collect,
            type=not_empty,
            default=[],
            metavar="TEXT",
            help="end before this text; may be repeated",
        )
        self.add("-s", "--seed", type=seed, metavar="N", help="makes the text reproducible")
        self.add("--num-beams", type=positive, default=num_beams, metavar="N", help=beams)

    def constraints(self) -> None:
        """Flags of constrained decoding."""
        self.group("structured output (one of these; needs the extra grammar)")
        self.add("-j", "--json-schema", "-jf", "--json-schema-file", dest="json_schema", twin=False,
                 metavar="FILE|TEXT", help="JSON of this schema; {}: any")  # fmt: skip
        self.add("--grammar", "--grammar-file", dest="grammar", twin=False, metavar="FILE|TEXT", help="texts of this "
                 "grammar, in Lark's form or llama.cpp's (GBNF)")  # fmt: skip
        self.add("--regex", twin=False, metavar="TEXT", help="what matches this regular expression as a whole")
        self.add("--choice", action=Collect, type=not_empty, twin=False, metavar="TEXT", help="one of these texts; "
                 "given once for each")  # fmt: skip


def constraint_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The flags of constraints() as options of Model.generate. OSError, ValueError: a file cannot be read."""
    given = {"json_schema": args.json_schema, "grammar": args.grammar}
    read = {name: value if value is None or _is_text(value) else _text_of(value) for name, value in given.items()}
    return read | {"regex": args.regex, "choice": args.choice}


def _is_text(value: str) -> bool:
    """Whether a value is a schema or grammar itself, not the name of a file."""
    return value.lstrip().startswith(("{", "true")) or "::=" in value or "start:" in value


def _text_of(name: str) -> str:
    return decode_text(Path(name).read_bytes(), name)


def sampling_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The flags of sampling() as options of Model.generate."""
    return {
        "temperature": args.temp,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "typical_p": args.typical_p,
        "repeat_penalty": args.repeat_penalty,
        "frequency_penalty": args.frequency_penalty,
        "presence_penalty": args.presence_penalty,
        "repeat_last_n": args.repeat_last_n,
        "logit_bias": dict(args.logit_bias),
        "dry_multiplier": args.dry_multiplier,
        "dry_base": args.dry_base,
        "dry_allowed_length": args.dry_allowed_length,
        "dry_penalty_last_n": args.dry_penalty_last_n,
        "dry_sequence_breakers": [] if args.dry_sequence_breaker == ["none"] else args.dry_sequence_breaker,
        "top_n_sigma": args.top_n_sigma,
        "xtc_probability": args.xtc_probability,
        "xtc_threshold": args.xtc_threshold,
        "mirostat": args.mirostat,
        "mirostat_tau": args.mirostat_ent,
        "mirostat_eta": args.mirostat_lr,
        "stop": args.stop,
        "seed": args.seed,
        "num_beams": args.num_beams,
    }
