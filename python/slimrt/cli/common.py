"""What the verbs share: flags and their environment variables, output, and error messages."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from errno import EBADF, EFBIG, ENOSPC
from functools import partial
from pathlib import Path
from typing import Any, TextIO, TypeVar

from slimrt.cache.config import CacheChoice, CacheConfig, CacheOptions
from slimrt.cache.planner import resolve_device
from slimrt.cli.sampling import SamplingFlags
from slimrt.cli.values import context, count, gpu_layers, lower, positive, share, share_or_auto, size, threads
from slimrt.errors import SlimrtError
from slimrt.generation.options import Options
from slimrt.model import Model
from slimrt.modelfile.source import ModelSource
from slimrt.modes import AGING, AUTO, CACHE_TYPES, CROSS_MODES, FASTEST, MODES, RESIDUAL_MODE, SPARED, cross_hint
from slimrt.plumbing.arguments import unknown
from slimrt.plumbing.files import read_text, written_beside
from slimrt.plumbing.notes import heard
from slimrt.plumbing.tables import table as table

Made = TypeVar("Made")
_COLOURS = {"red": "31", "green": "32", "dim": "2"}
_LLAMA_TYPE = re.compile(r"\bq[48]_0\b")
_LLAMA_TYPES = {
    "q8_0": "q8 here: 8 bits, with one scale for a head of a token and not for each 32 values",
    "q4_0": "q4 here: 4 bits, with a scale and a minimum for each 32 values",
}


class Flags(SamplingFlags):
    """Adds flags that several verbs have."""

    def output(self) -> None:
        """Flags of every verb."""
        self.group("output and messages")
        self.add("--json", action="store_true", help="print the result as JSON")
        self.add("-v", "--verbose", action="count", default=0, help="more messages on stderr; -vv: with tracebacks")
        self.add("-q", "--quiet", action="store_true", help="only errors on stderr")
        self.add("--no-progress", action="store_true", help="no progress bars")

    def model(self) -> None:
        """Flags that name the model; begins the group of the verb's own flags."""
        self.parser.add_argument("positional", metavar="MODEL", nargs="?", help="a GGUF file, Hugging Face "
                                 "directory, whisper.cpp's ggml-*.bin, or ORG/REPO[:FILE or TYPE]")  # fmt: skip
        self.group("model")
        self.add("-m", "--model", twin=False, metavar="MODEL", help="MODEL as a flag; or the environment "
                 "variable SLIMRT_MODEL")  # fmt: skip
        self.add("-hf", "-hfr", "--hf-repo", twin=False, metavar="ORG/REPO[:TYPE]", help="a model of the Hugging Face "
                 "Hub, downloaded once")  # fmt: skip
        self.add("-hff", "--hf-file", twin=False, metavar="FILE", help="the file of the repository")
        self.group("task")

    def draft(self) -> None:
        """The flag for a draft model."""
        self.add("-md", "--draft-model", "--model-draft", dest="draft_model", metavar="MODEL", help="speculative "
                 "decoding, where that is faster: a smaller model with the same tokenizer that drafts tokens; self: "
                 "the model itself, which attends to few rows of a long text for it")  # fmt: skip

    def allow_lossy(self) -> None:
        """The flag against the refusal of modes that lose much of V."""
        self.add("--allow-lossy", action="store_true", help="use a mode although it loses over 5 %% of V in a layer")

    def engine(self, *, encoder: bool = False, several: bool = False) -> None:
        """Flags for loading or planning a model. encoder: show those for encoders in --help. several: several texts are
        processed at once."""
        shown = None if encoder else argparse.SUPPRESS
        self.checks.append(check_cache_flags)
        self.group("machine and memory")
        self.add(
            "-t", "--threads", type=threads, metavar="N", help="CPU threads; default: one per physical (or big) core"
        )
        self.add("-c", "--ctx", "--ctx-size", type=context, metavar="N", help="context length in tokens")
        self.add("-b", "--batch-size", type=positive, metavar="N", help="most tokens in one step; default: 512")
        if several:
            self.add("--cache-tokens", type=positive, metavar="N", help="tokens that the cache holds, all texts "
                     "together; default: a full context for each")  # fmt: skip
        self.add("--device", type=lower, default="auto", help="cpu, cuda or cuda:N; or several, which share the "
                 "layers: cuda:0,cuda:1; default: cuda where the model fits, else cpu")  # fmt: skip
        self.add("-ngl", "--gpu-layers", "--n-gpu-layers", dest="gpu_layers", type=gpu_layers, metavar="N",
                 help="run the last N layers on CUDA, the others on the CPU; -1: all on CUDA")  # fmt: skip
        self.add("--memory-limit", type=size, metavar="SIZE", help="most memory to use, such as 6GiB; "
                 "default: what is available")  # fmt: skip
        self._cache(shown)

    def _cache(self, shown: str | None) -> None:
        """Flags of the cache. shown: in place of the help of those for encoders, if not None."""
        self.group("cache")
        self.add(
            "--cache",
            type=lower,
            default="auto",
            metavar="MODE",
            help=f"{', '.join(MODES)}; with types as in k+r:q8 or k+r:q8:64:q4 (mode:type:rank:residual type); of "
            f"{' and '.join(AGING)} with levels as in lowrank:q2@0.5+q4*0.1+sinks=4 (TYPE_K/TYPE_V@PART*SHARE, oldest "
            "first); or one for each layer, separated by commas; fastest: of kv and the file's modes that which is "
            "predicted to decode fastest here and fits; default: as the file says, else kv (beside an encoder x "
            "where its rows are no wider)",
        )
        self.add(
            "--cache-type",
            type=lower,
            default="auto",
            metavar="TYPE",
            help=f"element type of its rows: {', '.join(CACHE_TYPES)}; default: as the file says, else f16",
        )
        self.add("-ctk", "--cache-type-k", type=lower, metavar="TYPE", help="type of K, if it differs")
        self.add("-ctv", "--cache-type-v", type=lower, metavar="TYPE", help="type of V, if it differs")
        self.add("--rank", type=count, metavar="N", help="width of k+r's residual; 0: no residual")
        self.add("--residual-type", type=lower, metavar="TYPE", help="element type of k+r's residual")
        self.add(
            "--cross",
            type=lower,
            default="auto",
            metavar="MODE",
            help=shown
            or f"cache mode of cross-attention: {', '.join(CROSS_MODES)}; default: as the file says, else e where "
            "layers read no more bytes of it than of kv",
        )
        self.add("--cross-type", type=lower, default="auto", metavar="TYPE", help=shown or "element type "
                 "of its rows, as --cache-type")  # fmt: skip
        self.add("--n-source", type=count, default=0, metavar="N", help=shown or "most rows of the encoder's "
                 "output, such as tokens of a source text; default: the model's own")  # fmt: skip
        self.allow_lossy()
        self.add(
            "--calibration",
            metavar="FILE",
            help="calibration text for modes that are folded at load; default: a built-in one",
        )
        self.add(
            "--sparse-threshold",
            type=share,
            default=0.0,
            metavar="P",
            help="attention weight that decoding may skip, for each head",
        )
        self.add(
            "--sparse-delta",
            type=share_or_auto,
            default=0.0,
            metavar="D",
            help=f"the same for modes {', '.join(SPARED)}, as the root of the summed squares; auto: as the file says",
        )


def check_cache_flags(args: argparse.Namespace) -> None:
    """Refuse as wrong usage combinations of engine() flags that are wrong for every model."""
    native_types(args)
    _check_conflicts(args)
    with heard(args.quiet):
        args.device = from_flags(args, lambda: resolve_device(args.device, args.gpu_layers))
    known_cache(args, cache_arguments(args))


def _check_conflicts(args: argparse.Namespace) -> None:
    """Refuse as wrong usage a flag that another flag about the cache would override."""

    def typed(name: str) -> bool:
        value, twin = getattr(args, name), os.environ.get(f"SLIMRT_{name.upper()}", "")
        return value not in (None, AUTO, twin.lower())

    if getattr(args, "compare", None) is not None:
        if typed("cache"):
            args.usage_error("--compare names the caches that are measured: leave --cache out, or name its cache there")
        return
    configs = from_flags(args, lambda: [CacheConfig.parse(one) for one in args.cache.split(",")])
    for name in ("cache_type", "cache_type_k", "cache_type_v"):
        if typed(name) and all(config.type != AUTO for config in configs):
            args.usage_error(f"--cache {args.cache} says the type of its rows: leave --{name.replace('_', '-')} out")


def known_cache(args: argparse.Namespace, arguments: CacheOptions) -> CacheChoice:
    """The cache of these arguments; an unknown mode is wrong usage."""
    choice = from_flags(args, lambda: CacheChoice.of(**arguments))
    for config in choice.configs:
        if config.mode not in (AUTO, FASTEST, *MODES):
            known = (AUTO, *MODES, FASTEST)
            args.usage_error(unknown("cache mode", config.mode, known) + cross_hint(config.mode))
    return choice


def from_flags(args: argparse.Namespace, make: Callable[[], Made]) -> Made:
    """Call make(), a function of flags only; its errors are wrong usage."""
    try:
        return make()
    except (SlimrtError, ValueError) as error:
        args.usage_error(sentence(error))
        raise


def check_options(args: argparse.Namespace, options: dict[str, Any]) -> None:
    """Refuse as wrong usage options of generate that cannot be combined, whatever the model.

    Raises:
        UnsupportedError, GrammarError: an option that is never possible.
    """
    try:
        Options(**options)
    except SlimrtError:
        raise
    except ValueError as error:
        args.usage_error(sentence(error))


def native_types(args: argparse.Namespace) -> None:
    """Replace llama.cpp's names of cache types by ours, with a note about how they differ."""
    said = set[str]()
    for name in ("cache", "cache_type", "cache_type_k", "cache_type_v", "residual_type", "cross_type", "compare"):
        text = getattr(args, name, None)
        if text is not None:
            said |= set(_LLAMA_TYPE.findall(text))
            setattr(args, name, _LLAMA_TYPE.sub(lambda found: found[0].removesuffix("_0"), text))
    for one in sorted(said):
        note(args, f"slimrt: {one} is {_LLAMA_TYPES[one]}")


def read_input(name: str | None) -> str:
    """The text of a file, or of stdin (None or "-"). Errors as read_text."""
    return read_text(None if name == "-" else name)


def show_progress(args: argparse.Namespace) -> bool | None:
    """Whether to show progress bars; None: if stderr is a terminal."""
    return False if args.quiet or args.no_progress else None


def model_name(args: argparse.Namespace) -> str:
    """The model named by argument, flag or environment; none or several are wrong usage."""
    named = [one for one in (args.positional, args.model, args.hf_repo) if one]
    if len(named) > 1:
        args.usage_error("give one model, as MODEL, with -m or with -hf")
    if args.hf_file and not args.hf_repo:
        args.usage_error("-hff names a file of a repository: give that too, with -hf")
    if args.hf_repo:
        return f"hf://{args.hf_repo.partition(':')[0]}:{args.hf_file}" if args.hf_file else f"hf://{args.hf_repo}"
    name = named[0] if named else os.environ.get("SLIMRT_MODEL")
    if not name:
        args.usage_error("which model? give MODEL, -m MODEL or SLIMRT_MODEL")
    return str(name)


def beside_model(args: argparse.Namespace, inputs: Sequence[str]) -> list[str]:
    """The inputs of a verb besides its model. The first argument is MODEL, unless a flag names the model, or
    SLIMRT_MODEL does and the argument does not look like a model."""
    first = args.positional
    flagged = args.model or args.hf_repo
    if first is None or not (flagged or os.environ.get("SLIMRT_MODEL") and not _looks_like_model(first)):
        return list(inputs)
    args.positional = None
    return [first, *inputs]


def _looks_like_model(word: str) -> bool:
    return word.startswith("hf://") or word.endswith((".gguf", ".bin")) or os.path.isdir(word)


def model_source(args: argparse.Namespace) -> ModelSource:
    """The model that was named. Errors as ModelSource."""
    return ModelSource.of(model_name(args), show_progress(args))


def cache_arguments(args: argparse.Namespace) -> CacheOptions:
    """The cache flags of engine(), as arguments of slimrt.Model and CacheChoice.of."""
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


def caches_to_compare(args: argparse.Namespace) -> list[CacheChoice]:
    """The caches of --compare. What one does not specify comes from --cache-type etc.; rank and residual type only for
    modes that have a residual."""
    choices = []
    for text in args.compare.split(","):
        config = from_flags(args, partial(CacheConfig.parse, text))
        no_residual: CacheOptions = {} if config.mode == RESIDUAL_MODE else {"rank": None, "residual_type": None}
        choices.append(known_cache(args, {**cache_arguments(args), "cache": config, **no_residual}))
    return choices


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The flags of engine() without the context, as arguments of slimrt.Model and slimrt.plan."""
    return {
        "device": args.device,
        **cache_arguments(args),
        "memory_limit": args.memory_limit,
        "n_threads": args.threads,
        **({"n_batch": args.batch_size} if args.batch_size else {}),
        **({"cache_tokens": args.cache_tokens} if getattr(args, "cache_tokens", None) else {}),
        "progress": show_progress(args),
    }


def open_model(args: argparse.Namespace, source: ModelSource, n_ctx: int, n_seqs: int = 1) -> Model:
    """Load the model with the flags of engine()."""
    return Model(
        source,
        n_ctx=n_ctx,
        n_seqs=n_seqs,
        calibration=args.calibration,
        draft_model=getattr(args, "draft_model", None),
        verbose=args.verbose > 0,
        **engine_arguments(args),
    )


def output_format(args: argparse.Namespace, formats: Sequence[str]) -> str:
    """The format given by --json or --format, else by the suffix of -o, else the first. Wrong usage: they disagree, or
    -o is a format or "-", as in other programs."""
    if args.output in formats:
        args.usage_error(f"-o names what to write to; a format is --format {args.output}")
    if args.output == "-":
        args.usage_error("without -o the result goes to stdout: leave -o - out")
    if args.json and args.format not in (None, "json"):
        args.usage_error(f"--json and the format {args.format} do not go together")
    ending, asked = output_ending(args, formats), "json" if args.json else args.format
    if ending and asked and ending != asked:
        args.usage_error(f"-o {args.output} and the format {asked} do not go together")
    return asked or ending or formats[0]


def output_ending(args: argparse.Namespace, formats: Sequence[str]) -> str | None:
    """The format named by the suffix of the output file; None: there is no such file or suffix."""
    ending = Path(args.output).suffix[1:] if args.output and not os.path.isdir(args.output) else ""
    return ending if ending in formats else None


def write_out(target: str | None, text: str) -> None:
    """Write a result to stdout, or to a file, which is replaced atomically."""
    if target is None:
        print(text, end="")
        return
    with written_beside(Path(target)) as file:
        file.write_text(text, encoding="utf-8")


def as_json(value: Any) -> str:
    return json.dumps(_finite(value), ensure_ascii=False, indent=2, allow_nan=False)


def as_item(record: str) -> str:
    """Indent JSON by two spaces, as an item of a list that is written item by item. Not by textwrap.indent, which also
    splits at Unicode's other line separators, within strings."""
    return "  " + record.replace("\n", "\n  ")


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by null (such as the condition of a singular matrix)."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_json(value: Any) -> None:
    print(as_json(value))


def note(args: argparse.Namespace, message: str) -> None:
    """Print a note on stderr, unless --quiet."""
    if not args.quiet:
        print(coloured(message, "dim", sys.stderr), file=sys.stderr)


def complain(error: Exception) -> None:
    """Print an error on stderr."""
    print(f"{coloured('slimrt: error:', 'red', sys.stderr)} {sentence(error)}", file=sys.stderr)


def sentence(error: Exception) -> str:
    """An error as a message of one line."""
    if isinstance(error, OSError) and error.strerror:
        nameless = "stdout" if error.errno in (EBADF, EFBIG, ENOSPC) else ""  # files have names (plumbing/files.py)
        return f"{file}: {error.strerror}" if (file := error.filename or nameless) else error.strerror
    if isinstance(error, MemoryError) and not str(error):
        return "out of memory"
    if isinstance(error, (SlimrtError, OSError, ValueError, MemoryError)):
        return " ".join(str(error).split())
    return f"{type(error).__name__}: {error} (a fault in slimrt; -vv shows where)"


def coloured(text: str, colour: str, stream: TextIO) -> str:
    """Text in a colour, if the stream is a terminal and NO_COLOR is not set (https://no-color.org)."""
    if os.environ.get("NO_COLOR") or not stream.isatty():
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"
