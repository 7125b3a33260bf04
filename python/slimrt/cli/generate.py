"""slimrt generate: continue a prompt."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slimrt.cache.config import kinds
from slimrt.cache.planner import whole_blocks
from slimrt.cli.common import Flags, model_source, note, open_model, print_json
from slimrt.cli.sampling import sampling_arguments
from slimrt.cli.values import count, positive, real, whole
from slimrt.generation.generate import Stream
from slimrt.generation.options import Options
from slimrt.model import Model
from slimrt.modelfile.source import ModelSource
from slimrt.plumbing.files import check_target, decode_text
from slimrt.plumbing.units import format_bytes
from slimrt.results import Generation
from slimrt.runtime.kinds import continues_texts
from slimrt.runtime.session import Session, read_header


def add_flags(flags: Flags) -> None:
    flags.model()
    flags.add("-p", "--prompt", twin=False, metavar="TEXT", help="the text to continue (else -f, else stdin)")
    flags.add("-f", "--file", twin=False, metavar="FILE", help="a file with the text to continue")
    flags.n_predict(128)
    flags.sampling(beams="search for the likeliest text, so many beginnings at a time; 1: choose token by token")
    flags.add("--length-penalty", type=real(), default=1.0, metavar="P", help="power of the length that beams are "
              "compared by (default: %(default)s)")  # fmt: skip
    flags.add("--early-stopping", action="store_true", help="end the search with the first --num-beams texts")
    flags.add("--answers", type=positive, default=1, metavar="N", help="texts to make of the prompt, each with a "
              "seed of its own; of beams the likeliest (default: %(default)s)")  # fmt: skip
    flags.add(
        "--logprobs", type=count, default=0, metavar="N", help="with --json: the N likeliest tokens in each place"
    )
    flags.add("--context-shift", action="store_true", help="go on in a full context without its older half")
    flags.add("--keep", type=whole(-1), default=0, metavar="N", help="tokens of the prompt that such a shift keeps; "
              "-1: all (default: %(default)s)")  # fmt: skip
    flags.add("--ignore-eos", action="store_true", help="never choose an end token")
    flags.add("--no-display-prompt", "--no-echo", action="store_true", help="print only what is generated")
    flags.add("--save-session", twin=False, metavar="FILE", help="keep the context in a file afterwards")
    flags.add("--load-session", twin=False, metavar="FILE", help="continue a kept context; the prompt is added to it")
    flags.engine()
    flags.output()


def run(args: argparse.Namespace) -> int:
    source = model_source(args)
    continues_texts(source)
    _check_usage(args)
    if args.save_session:
        _check_session_file(Path(args.save_session), source)
    prompt = _prompt(args)
    kept = read_header(args.load_session)["tokens"] if args.load_session else []
    ids = kept + source.tokenizer.encode(prompt, add_special_tokens=False) if kept else source.prompt_ids(prompt)
    options = _options(args)
    Options(**options)  # what does not go together is said before the model is loaded
    n_ctx = args.ctx or enough_context(source, len(ids), args.n_predict)
    with open_model(args, source, n_ctx, n_seqs=max(args.answers, args.num_beams)) as model:
        if _several(args):
            results = model.generate(ids, n=args.answers, **options)
            _print_answers(args, prompt, results)
            _notes(args, source, model, results)
            return 0
        session = None
        if args.load_session:
            session = model.load_session(args.load_session)
        elif args.save_session:
            session = model.session()
        stream = model.stream(ids, session=session, **options)
        code = _print(args, prompt, stream)
        result = stream.result
        if session is not None and args.save_session and code == 0:
            _save(session, [*ids, *result.tokens], result.shifted, args.save_session)
        _notes(args, source, model, [result])
    return code


def _several(args: argparse.Namespace) -> bool:
    """Whether texts are known only when they are done."""
    return bool(args.answers > 1 or args.num_beams > 1)


def _check_usage(args: argparse.Namespace) -> None:
    if args.logprobs and not args.json:
        args.usage_error("--logprobs are part of the result as JSON: give --json too")
    if _several(args) and (args.load_session or args.save_session):
        args.usage_error("a session continues one text: it does not go with --answers or --num-beams")


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """As Model.generate takes them."""
    return sampling_arguments(args) | {
        "max_tokens": args.n_predict,
        "ignore_eos": args.ignore_eos,
        "length_penalty": args.length_penalty,
        "early_stopping": args.early_stopping,
        "logprobs": args.logprobs,
        "on_overflow": "shift" if args.context_shift else "error",
        "n_keep": args.keep,
    }


def _notes(args: argparse.Namespace, source: ModelSource, model: Model, results: Sequence[Generation]) -> None:
    if any(one.truncated for one in results):
        note(args, f"slimrt: the context of {model.n_ctx} tokens is full; {source.more_context(model.n_ctx)}; "
             "--context-shift goes on without the oldest")  # fmt: skip
    if shifted := max(one.shifted for one in results):
        note(args, f"slimrt: the context of {model.n_ctx} tokens was full: {shifted} older ones were dropped")
    if args.verbose:
        for one in results:
            note(args, timings_line(one))


def _print_answers(args: argparse.Namespace, prompt: str, results: Sequence[Generation]) -> None:
    """One text, or several with an empty line between."""
    if args.json:
        records = [one.to_dict() for one in results]
        print_json({"prompt": prompt} | ({"answers": records} if args.answers > 1 else records[0]))
    else:
        shown = "" if args.no_display_prompt else prompt
        print("\n\n".join(shown + one.text for one in results))


def _check_session_file(target: Path, source: ModelSource) -> None:
    check_target(target)
    if target.exists() and any(target.samefile(file) for file in source.file.paths):
        raise ValueError(f"--save-session {target} would replace the model; name another file")


def enough_context(source: ModelSource, n_prompt: int, n_predict: int) -> int:
    """The context for a prompt and what it is continued with, in whole blocks, at most the trained one."""
    if n_predict < 0:
        return source.n_ctx()
    return min(whole_blocks(max(n_prompt + n_predict, 1)), source.n_ctx_train)


def timings_line(result: Generation) -> str:
    """Speed and size of one generation, for people."""
    usage, timings, cache = result.usage, result.timings, result.cache
    computed = usage.prompt_tokens - usage.cached_tokens
    skipped = f", {cache.skipped:.0%} of rows not read" if cache.skipped else ""
    held = f"cache {format_bytes(cache.bytes)} ({kinds(cache.layers())}{skipped})"
    return (
        f"slimrt: first token after {timings.ttft:.3f} s; "
        f"prefill {computed} tokens, {timings.prefill_tok_s:.1f} tok/s; "
        f"decode {usage.completion_tokens} tokens, {timings.decode_tok_s:.1f} tok/s; "
        f"{held}; seed {result.seed}; {result.finish_reason}"
    )


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None and args.file is not None:
        args.usage_error("give -p or -f, not both")
    if args.prompt is not None:
        return str(args.prompt)
    if args.file is None and sys.stdin.isatty():
        args.usage_error("what to continue? give -p TEXT, -f FILE, or pipe a text in")
    data = Path(args.file).read_bytes() if args.file is not None else sys.stdin.buffer.read()
    return decode_text(data, args.file or "stdin").removesuffix("\n")  # the one that an editor or echo put there


def _print(args: argparse.Namespace, prompt: str, stream: Stream) -> int:
    """Print the text as it comes; returns the exit code."""
    code = 0
    if not args.json and not args.no_display_prompt:
        print(prompt, end="", flush=True)
    with stream:
        try:
            for piece in stream:
                if not args.json:
                    print(piece, end="", flush=True)
        except KeyboardInterrupt:
            code = 130
    if args.json:
        print_json({"prompt": prompt} | stream.result.to_dict())
    else:
        print(flush=True)
    return code


def _save(session: Session, tokens: list[int], shifted: int, path: str) -> None:
    """Keep the whole text, without what was shifted out of the context: the last token was chosen but not computed,
    unless the context is full."""
    left = tokens[session.length + shifted :][: session.runtime.n_ctx - session.length]
    if left:
        session.append(left, last_only=True)
    session.save(path)
