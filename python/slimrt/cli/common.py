"""What the verbs share: flags and their twins in the environment, tables, colours."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeVar

from slimrt.cache.config import CacheConfig, CacheOptions
from slimrt.errors import SlimrtError
from slimrt.model import Model
from slimrt.modelfile.source import ModelSource
from slimrt.modes import AUTO, CACHE_TYPES, RESIDUAL_MODE
from slimrt.plumbing.tables import table as table

Number = TypeVar("Number")
_COLOURS = {"red": "31", "green": "32", "dim": "2"}


class Collect(argparse.Action):
    """A list of what the flag is given each time, in place of its default; argparse's "append" adds to the default."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        so_far = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [values] if so_far is self.default else [*so_far, values])


def _no_layers(_: str) -> NoReturn:
    raise argparse.ArgumentTypeError("a model is on one device as a whole: choose it with --device cpu or cuda")


class Flags:
    """Adds flags to a parser; each takes its default from SLIMRT_NAME in the environment, if that is set."""

    def __init__(self, parser: argparse.ArgumentParser):
        self.parser = parser

    def add(self, *names: str, **settings: Any) -> None:
        action = self.parser.add_argument(*names, **settings)
        self._take_twin(action, names)

    def _take_twin(self, action: argparse.Action, names: Sequence[str]) -> None:
        twin = "SLIMRT_" + max(names, key=len).lstrip("-").replace("-", "_").upper()
        value = os.environ.get(twin)
        if not value:
            return
        action.required = False
        if isinstance(action.const, bool):
            const = action.const
            action.type = lambda text: const if self._switch(twin, text) else not const
            action.default = value
        elif isinstance(action.default, int) and action.nargs == 0:  # a count
            action.default = int(value) if value.isdecimal() else int(self._switch(twin, value))
        elif isinstance(action, Collect):
            action.default = [self._converted(twin, action, value)]
        else:  # argparse converts it, and complains about it, as if it had been typed, but for the choices
            action.type = action.type or _choice(action.choices)
            action.default = value

    def _converted(self, twin: str, action: argparse.Action, value: str) -> Any:
        """What the type of a flag makes of a variable; wrong usage if it takes offence."""
        if not callable(action.type):
            return value
        try:
            return action.type(value)
        except argparse.ArgumentTypeError as error:
            self.parser.error(f"{twin}: {error}")

    def _switch(self, twin: str, value: str) -> bool:
        """What a variable says of a flag without a value; wrong usage if that is neither yes nor no."""
        known = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)
        if value.lower() not in known:
            self.parser.error(f"{twin} is '{value}'; it may be {', '.join(known)}")
        return known[value.lower()]

    def output(self) -> None:
        """The flags of every verb."""
        self.add("--json", action="store_true", help="print the result as JSON")
        self.add("-v", "--verbose", action="count", default=0, help="say more on stderr; -vv: tracebacks too")
        self.add("-q", "--quiet", action="store_true", help="nothing on stderr but errors")
        self.add("--no-progress", action="store_true", help="no progress bars")

    def model(self) -> None:
        self.parser.add_argument("positional", metavar="MODEL", nargs="?", help="a GGUF file, Hugging Face "
                                 "directory or whisper.cpp's ggml-*.bin")  # fmt: skip
        self.add("-m", "--model", metavar="MODEL", help="the same as a flag")

    def engine(self) -> None:
        """What a model is loaded, or planned, with."""
        self.add("-t", "--threads", type=positive, metavar="N", help="default: the physical (or big) cores")
        self.add("-c", "--ctx", type=positive, metavar="N", help="tokens of context")
        self.add("--device", default="auto", help="cpu (which auto is), cuda or cuda:N")
        self.add("-ngl", "--n-gpu-layers", type=_no_layers, help=argparse.SUPPRESS)
        self.add(
            "--cache",
            default="auto",
            metavar="MODE",
            help="kv, k, k+r, v, x, xr, kivi, lowrank, latent, with types as in k+r:q8 or k+r:q8:64:q4 (mode:type:rank:"
            "residual type), or of the last two levels as in lowrank:q2@0.5+q4*0.1+sinks=4 (TYPE_K/TYPE_V@PART*SHARE, "
            "oldest first), or one a layer with commas between; fastest: of kv and what the file says what is "
            "fastest here and fits; default: what the file says, else kv (beside an encoder x where its rows are no "
            "wider)",
        )
        self.add(
            "--cache-type",
            default="auto",
            metavar="TYPE",
            help=f"{', '.join(CACHE_TYPES)}; default: what the file says, else f16",
        )
        self.add("--cache-type-k", metavar="TYPE", help="of K, where it differs")
        self.add("--cache-type-v", metavar="TYPE", help="of V, where it differs")
        self.add("--rank", type=count, metavar="N", help="width of the residual of mode k+r; 0: none")
        self.add("--residual-type", metavar="TYPE", help="of the residual of mode k+r")
        self.add(
            "--cross",
            default="auto",
            metavar="MODE",
            help="what an encoder's output leaves behind: kv, k, e, e1; default: what the file says, else e "
            "where layers read no more bytes of it than of kv",
        )
        self.add("--cross-type", default="auto", metavar="TYPE", help="of its rows, as --cache-type")
        self.add("--n-source", type=count, default=0, metavar="N", help="most rows of it, tokens of a source text; "
                 "default: the model's own")  # fmt: skip
        self.add("--allow-lossy", action="store_true", help="insist on a mode that loses over 5 %% of V in a layer")
        self.add(
            "--calibration",
            metavar="FILE",
            help="a text like what the model is to read, for modes that fold while loading; default: a built-in one",
        )
        self.add(
            "--sparse-threshold", type=share, default=0.0, metavar="P", help="attention weight that may be skipped"
        )
        self.add(
            "--sparse-delta",
            type=share_or_auto,
            default=0.0,
            metavar="D",
            help="the same in modes k, k+r, x and xr by squares: root of their sum; auto: what the file says",
        )
        self.add("--memory-limit", metavar="SIZE", help="such as 6GiB; default: what the machine has available")

    def sampling(self, *, temp: float = 0.8, num_beams: int | None = 1, beams: str = "only 1 is supported") -> None:
        """How tokens are chosen; temp, num_beams: the defaults. beams: what --num-beams says of itself."""
        self.add("--temp", type=float, default=temp, metavar="T", help="temperature; 0: greedy (default: %(default)s)")
        self.add("--top-k", type=int, default=40, metavar="K", help="0: all (default: %(default)s)")
        self.add("--top-p", type=float, default=0.95, metavar="P", help="1: all (default: %(default)s)")
        self.add("--min-p", type=float, default=0.05, metavar="P", help="0: all (default: %(default)s)")
        self.add("--typical-p", "--typical", type=float, default=1.0, metavar="P", help="1: all (default: %(default)s)")
        self.add("--repeat-penalty", type=float, default=1.0, metavar="R", help="1: none (default: %(default)s)")
        self.add("--frequency-penalty", type=float, default=0.0, metavar="F", help="0: none (default: %(default)s)")
        self.add("--presence-penalty", type=float, default=0.0, metavar="F", help="0: none (default: %(default)s)")
        self.add("--repeat-last-n", type=int, default=64, metavar="N", help="tokens, prompt included, that the "
                 "penalties look at; -1: all (default: %(default)s)")  # fmt: skip
        self.add("--logit-bias", action=Collect, type=bias, default=[], metavar="ID=VALUE", help="add to a token's "
                 "logit; -inf: never choose it; may be repeated")  # fmt: skip
        self.add("--stop", action=Collect, default=[], metavar="TEXT", help="end before this text; may be repeated")
        self.add("--seed", type=int, metavar="N", help="makes the text reproducible")
        self.add("--num-beams", type=int, default=num_beams, metavar="N", help=beams)


def positive(text: str) -> int:
    """A whole number above zero, for argparse."""
    value = _integer(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def count(text: str) -> int:
    """A whole number, 0 included, for argparse."""
    value = _integer(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {value}")
    return value


def share(text: str) -> float:
    """A number from 0 up to, but not, 1, for argparse."""
    value = parsed(float, text, "a number")
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 1, got {text}")
    return value


def share_or_auto(text: str) -> float | str:
    """The same, or "auto"."""
    return AUTO if text == AUTO else share(text)


def bias(text: str) -> tuple[int, float]:
    """A token id and what is added to its logit, for argparse."""
    token, _, value = text.partition("=")
    what = "a token id and a number, such as 42=-1.5 or 42=-inf"
    return parsed(int, token, what), parsed(float, value, what)


def parsed(kind: Callable[[str], Number], text: str, what: str) -> Number:
    """A value from a text, for argparse, which says what it must be."""
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be {what}, got '{text}'") from None


def _integer(text: str) -> int:
    return parsed(int, text, "a whole number")


def _choice(choices: Iterable[str] | None) -> Callable[[str], str] | None:
    """Takes what is among the choices; None: anything goes."""
    if choices is None:
        return None
    known = list(choices)

    def one_of(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"invalid choice: '{text}' (choose from {', '.join(known)})")
        return text

    return one_of


def show_progress(args: argparse.Namespace) -> bool | None:
    """None: when stderr is a terminal."""
    return False if args.quiet or args.no_progress else None


def model_path(args: argparse.Namespace) -> Path:
    """The model that was named, by position, flag or environment; wrong usage if none or two were."""
    if args.positional and args.model and args.model not in (args.positional, os.environ.get("SLIMRT_MODEL")):
        args.usage_error("give one model, as MODEL or with -m")
    path = args.positional or args.model
    if not path:
        args.usage_error("which model? give MODEL, -m MODEL or SLIMRT_MODEL")
    return Path(path)


def model_source(args: argparse.Namespace) -> ModelSource:
    """The model at that path. Errors as ModelSource."""
    return ModelSource(model_path(args), show_progress=show_progress(args))


def cache_arguments(args: argparse.Namespace) -> CacheOptions:
    """The cache among the flags of engine(), as slimrt.Model and CacheChoice.of take it."""
    return {
        "cache": args.cache.split(",") if "," in args.cache else args.cache,
        "cache_type": args.cache_type,
        "cache_type_k": args.cache_type_k,
        "cache_type_v": args.cache_type_v,
        "rank": args.rank,
        "residual_type": args.residual_type,
        "sparse_threshold": args.sparse_threshold,
        "sparse_delta": args.sparse_delta,
        "cross": args.cross,
        "cross_type": args.cross_type,
        "n_source": args.n_source,
        "allow_lossy": args.allow_lossy,
    }


def cache_for_comparison(arguments: CacheOptions, cache: str) -> CacheOptions:
    """The arguments for one cache of several: a rank and residual type only for one that may have them."""
    config = CacheConfig.parse(cache)
    no_residual: CacheOptions = {} if config.mode == RESIDUAL_MODE else {"rank": None, "residual_type": None}
    return {**arguments, "cache": config, **no_residual}


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The flags of engine() but the context, as slimrt.Model and slimrt.plan take them."""
    return {
        "device": args.device,
        **cache_arguments(args),
        "memory_limit": args.memory_limit,
        "n_threads": args.threads,
        "progress": show_progress(args),
    }


def open_model(args: argparse.Namespace, source: ModelSource, n_ctx: int, n_seqs: int = 1) -> Model:
    """The model with the flags of engine()."""
    return Model(
        source,
        n_ctx=n_ctx,
        n_seqs=n_seqs,
        calibration=args.calibration,
        verbose=args.verbose > 0,
        **engine_arguments(args),
    )


def sampling_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The flags of sampling(), as Model.generate takes them."""
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
        "stop": args.stop,
        "seed": args.seed,
        "num_beams": args.num_beams,
    }


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2)


def print_json(value: Any) -> None:
    print(as_json(value))


def note(args: argparse.Namespace, message: str) -> None:
    """Says something on stderr, unless asked to be quiet."""
    if not args.quiet:
        print(coloured(message, "dim", sys.stderr), file=sys.stderr)


def complain(error: Exception) -> None:
    """Says on stderr what went wrong."""
    print(f"{coloured('slimrt: error:', 'red', sys.stderr)} {sentence(error)}", file=sys.stderr)


def sentence(error: Exception) -> str:
    """What went wrong, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, MemoryError) and not str(error):
        return "out of memory"
    if isinstance(error, (SlimrtError, OSError, ValueError, MemoryError)):
        return " ".join(str(error).split())
    return f"{type(error).__name__}: {error} (a fault in slimrt; -vv shows where)"


def coloured(text: str, colour: str, stream: TextIO) -> str:
    """Text in a colour, where there is a terminal that may show it (https://no-color.org)."""
    if os.environ.get("NO_COLOR") or not stream.isatty():
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"
