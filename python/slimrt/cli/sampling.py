"""Flags of sampling and constraints, and their translation to options of Model.generate."""

from __future__ import annotations

import argparse
from typing import Any

from slimrt.cli.flags import Adder, Collect
from slimrt.cli.values import bias, count, not_empty, positive, real, seed, whole
from slimrt.generation.options import DRY_SEQUENCE_BREAKERS
from slimrt.plumbing.files import read_text


class SamplingFlags(Adder):
    """Adds the flags of sampling."""

    def n_predict(self, default: int, own: bool = False) -> None:
        """The flags for the length of a text. own: the default is only for models whose own settings do not say it."""
        self.add("-n", "--n-predict", "--predict", "--max-tokens", type=whole(-1), default=None if own else default,
                 metavar="N", help="most tokens to generate; -1: until the end or the context is full "
                 f"(default: {'what the model says, else ' if own else ''}{default})")  # fmt: skip
        self.add("--min-tokens", type=count, metavar="N", help="no end before so many (default: what the model says, "
                 "else 0)")  # fmt: skip

    def parallel(self, most: int) -> None:
        """The flag for the size of a batch. most: texts that are decoded together by default."""
        self.add("-np", "--parallel", type=positive, metavar="N", help="texts decoded together; default: all, at most "
                 f"{most}")  # fmt: skip

    def sampling(self, *, temp: float = 0.8, num_beams: int | None = 1, beams: str = argparse.SUPPRESS) -> None:
        """Flags of sampling. temp, num_beams: defaults. beams: help text of --num-beams."""
        self.group("sampling")
        self.add(
            "--temp", "--temperature", type=real(0), default=temp, metavar="T", help="0: greedy (default: %(default)s)"
        )
        self._truncation()
        self._penalties()
        self._dry()
        self._mirostat()
        self.add("-l", "--logit-bias", action=Collect, type=bias, default=[], metavar="ID=VALUE", help="add to a "
                 "token's logit; -inf: never choose it; may be repeated")  # fmt: skip
        self.add("--stop", action=Collect, type=not_empty, default=[], metavar="TEXT", help="stop before this text; "
                 "may be repeated")  # fmt: skip
        self.add("-s", "--seed", type=seed, metavar="N", help="seed of the random numbers; default: a new one")
        self.add("--num-beams", type=positive, default=num_beams, metavar="N", help=beams)

    def _truncation(self) -> None:
        """Flags that limit which tokens are sampled from."""
        self.add("--top-k", type=count, default=40, metavar="K", help="0: off (default: %(default)s)")
        self.add("--top-p", type=real(0, 1), default=0.95, metavar="P", help="1: off (default: %(default)s)")
        self.add("--min-p", type=real(0, 1), default=0.05, metavar="P", help="0: off (default: %(default)s)")
        self.add("--typical-p", "--typical", type=real(0, 1), default=1.0, metavar="P", help="1: off (default: "
                 "%(default)s)")  # fmt: skip
        self.add("--top-n-sigma", "--top-nsigma", type=real(0), default=0.0, metavar="N", help="keep logits within N "
                 "standard deviations of the largest; 0: off (default: %(default)s)")  # fmt: skip
        self.add("--xtc-probability", type=real(0, 1), default=0.0, metavar="P", help="XTC: probability of removing "
                 "all top choices but the least likely; 0: off (default: %(default)s)")  # fmt: skip
        self.add("--xtc-threshold", type=real(0, 1), default=0.1, metavar="P", help="least probability of a top choice "
                 "(default: %(default)s)")  # fmt: skip

    def _penalties(self) -> None:
        """Flags of penalties of tokens that were there before."""
        self.add("--repeat-penalty", type=real(0), default=1.0, metavar="R", help="1: off (default: %(default)s)")
        self.add("--frequency-penalty", type=real(), default=0.0, metavar="F", help="0: off (default: %(default)s)")
        self.add("--presence-penalty", type=real(), default=0.0, metavar="F", help="0: off (default: %(default)s)")
        self.add("--repeat-last-n", type=whole(-1), default=64, metavar="N", help="window of these penalties in "
                 "tokens, prompt included; -1: all tokens (default: %(default)s)")  # fmt: skip
        self.add("--no-repeat-ngram-size", type=count, metavar="N", help="no N tokens in a row come twice; 0: off "
                 "(default: what the model says, else 0)")  # fmt: skip

    def _dry(self) -> None:
        """Flags of the DRY sampler, which penalises tokens that would extend a repetition."""
        self.add("--dry-multiplier", type=real(0), default=0.0, metavar="M", help="DRY: penalty of a token that would "
                 "extend a repetition; 0: off (default: %(default)s)")  # fmt: skip
        self.add("--dry-base", type=real(1), default=1.75, metavar="B", help="factor by which it grows with each "
                 "further token of the repetition (default: %(default)s)")  # fmt: skip
        self.add("--dry-allowed-length", type=count, default=2, metavar="N", help="repeated tokens from which on it "
                 "applies (default: %(default)s)")  # fmt: skip
        self.add("--dry-penalty-last-n", type=whole(-1), default=-1, metavar="N", help="window in which repetitions "
                 "are found, in tokens, prompt included; -1: all tokens (default: %(default)s)")  # fmt: skip
        self.add("--dry-sequence-breaker", action=Collect, default=list(DRY_SEQUENCE_BREAKERS), metavar="TEXT",
                 help="text that ends a repetition; may be repeated; none: no such text (default: a newline, : \" "
                 "and *)")  # fmt: skip

    def _mirostat(self) -> None:
        """Flags of Mirostat."""
        self.add("--mirostat", type=count, default=0, metavar="N", help="2: Mirostat 2.0, in place of top-k, top-p and "
                 "the like; 0: off (default: %(default)s)")  # fmt: skip
        self.add("--mirostat-ent", type=real(0), default=5.0, metavar="BITS", help="its target surprise, tau "
                 "(default: %(default)s)")  # fmt: skip
        self.add("--mirostat-lr", type=real(0), default=0.1, metavar="R", help="its learning rate, eta (default: "
                 "%(default)s)")  # fmt: skip

    def length_penalty(self, own: bool = False) -> None:
        """The flag for the length penalty of beam search. own: as n_predict's."""
        self.add("--length-penalty", type=real(), default=None if own else 1.0, metavar="P", help="beam search: a "
                 "text's score is divided by its length to this power (default: "
                 f"{'what the model says, else ' if own else ''}1)")  # fmt: skip

    def constraints(self) -> None:
        """Flags of constrained decoding."""
        self.group("structured output (one of these; needs the extra grammar)")
        self.add("-j", "--json-schema", "-jf", "--json-schema-file", dest="json_schema", twin=False,
                 type=not_empty, metavar="FILE|TEXT", help="JSON of this schema; {}: any JSON")  # fmt: skip
        self.add("--grammar", "--grammar-file", dest="grammar", twin=False, type=not_empty, metavar="FILE|TEXT",
                 help="text of this grammar, in Lark's form or llama.cpp's (GBNF)")  # fmt: skip
        self.add("--regex", twin=False, metavar="TEXT", help="text that matches this regular expression as a whole")
        self.add("--choice", action=Collect, type=not_empty, twin=False, metavar="TEXT", help="one of these texts; "
                 "repeated for each")  # fmt: skip


def constraint_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The flags of constraints() as options of Model.generate. OSError, ValueError: a file cannot be read."""
    given = {"json_schema": args.json_schema, "grammar": args.grammar}
    read = {name: value if value is None or _is_text(value) else read_text(value) for name, value in given.items()}
    return read | {"regex": args.regex, "choice": args.choice}


def _is_text(value: str) -> bool:
    """Whether a value is a schema or grammar itself, not the name of a file."""
    return value.lstrip().startswith(("{", "true")) or "::=" in value or "start:" in value


def sampling_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The flags of sampling() as options of Model.generate."""
    return {
        "min_tokens": args.min_tokens,
        "no_repeat_ngram_size": args.no_repeat_ngram_size,
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
