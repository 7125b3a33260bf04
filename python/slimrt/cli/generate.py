"""slimrt generate: continue a prompt."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slimrt.cache.config import kinds
from slimrt.cache.planner import whole_blocks
from slimrt.cli.common import Flags, model_source, note, open_model, print_json, sampling_arguments
from slimrt.generation.generate import Stream
from slimrt.modelfile.source import ModelSource
from slimrt.plumbing.files import check_target, decode_text
from slimrt.plumbing.units import format_bytes
from slimrt.results import Generation
from slimrt.runtime.kinds import continues_texts
from slimrt.runtime.session import Session, read_header

HELP = "continue a text"


def add_flags(flags: Flags) -> None:
    flags.model()
    flags.add("-p", "--prompt", metavar="TEXT", help="the text to continue (else -f, else stdin)")
    flags.add("-f", "--file", metavar="FILE", help="a file with the text to continue")
    flags.add("-n", "--n-predict", type=int, default=128, metavar="N", help="tokens at most; -1: until the end or the "
              "context is full (default: %(default)s)")  # fmt: skip
    flags.sampling()
    flags.add("--ignore-eos", action="store_true", help="never choose an end token")
    flags.add("--no-display-prompt", "--no-echo", action="store_true", help="print only what is generated")
    flags.add("--save-session", metavar="FILE", help="keep the context in a file afterwards")
    flags.add("--load-session", metavar="FILE", help="continue a kept context; the prompt is added to it")
    flags.engine()
    flags.output()


def run(args: argparse.Namespace) -> int:
    source = model_source(args)
    continues_texts(source)
    if args.save_session:
        _check_session_file(Path(args.save_session), source)
    prompt = _prompt(args)
    kept = read_header(args.load_session)["tokens"] if args.load_session else []
    ids = kept + source.tokenizer.encode(prompt, add_special_tokens=False) if kept else source.prompt_ids(prompt)
    with open_model(args, source, args.ctx or enough_context(source, len(ids), args.n_predict)) as model:
        session = None
        if args.load_session:
            session = model.load_session(args.load_session)
        elif args.save_session:
            session = model.session()
        options = sampling_arguments(args) | {"max_tokens": args.n_predict, "ignore_eos": args.ignore_eos}
        stream = model.stream(ids, session=session, **options)
        code = _print(args, prompt, stream)
        result = stream.result
        if session is not None and args.save_session and code == 0:
            _save(session, [*ids, *result.tokens], model.n_ctx, args.save_session)
    if result.truncated:
        note(args, f"slimrt: the context of {model.n_ctx} tokens is full; {source.more_context(model.n_ctx)}")
    if args.verbose:
        note(args, timings_line(result))
    return code


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


def _save(session: Session, tokens: list[int], n_ctx: int, path: str) -> None:
    """Keep the whole text: the last token was chosen but not computed, unless the context is full."""
    left = tokens[session.length : n_ctx]
    if left:
        session.append(left, last_only=True)
    session.save(path)
