"""slimrt generate: continue a prompt."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from slimrt.cache.config import kinds
from slimrt.cache.planner import whole_blocks
from slimrt.cli.common import Flags, model_source, note, open_model, print_json, sampling_arguments
from slimrt.cli.flags import Collect
from slimrt.cli.values import positive
from slimrt.generation.generate import Stream
from slimrt.modelfile.source import ModelSource
from slimrt.plumbing.files import check_target, decode_text
from slimrt.plumbing.units import format_bytes
from slimrt.results import Generation
from slimrt.runtime.kinds import continues_texts
from slimrt.runtime.session import Session, read_header

_AT_ONCE = 8  # texts decoded together where the user does not say
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


def add_flags(flags: Flags) -> None:
    flags.model()
    flags.add("-p", "--prompt", twin=False, action=Collect, metavar="TEXT", help="the text to continue (else -f, else "
              "stdin); several are one batch")  # fmt: skip
    flags.add("-f", "--file", twin=False, metavar="FILE", help="a file with the text to continue")
    flags.add("-e", "--escape", action="store_true", help="\\n and \\t in -p are a line's end and a tab")
    flags.n_predict(128)
    flags.add("-np", "--parallel", type=positive, metavar="N", help="texts decoded together; default: all, at most "
              f"{_AT_ONCE}")  # fmt: skip
    flags.sampling()
    flags.add("--ignore-eos", action="store_true", help="never choose an end token")
    flags.add("--no-display-prompt", "--no-echo", action="store_true", help="print only what is generated")
    flags.add("--save-session", twin=False, metavar="FILE", help="keep the context in a file afterwards")
    flags.add("--load-session", twin=False, metavar="FILE", help="continue a kept context; the prompt is added to it")
    flags.engine()
    flags.output()


def run(args: argparse.Namespace) -> int:
    source = model_source(args)
    continues_texts(source)
    if args.save_session:
        _check_session_file(Path(args.save_session), source)
    prompts = _prompts(args)
    if len(prompts) > 1:
        return _several(args, source, prompts)
    prompt = prompts[0]
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
        note(args, f"slimrt: the context of {model.n_ctx} tokens is full; --ctx makes it larger")
    if args.verbose:
        note(args, timings_line(result))
    return code


def _several(args: argparse.Namespace, source: ModelSource, prompts: Sequence[str]) -> int:
    """Continue some prompts as a batch, and print what comes of each, with an empty line between."""
    ids = [source.prompt_ids(prompt) for prompt in prompts]
    n_ctx = args.ctx or max(enough_context(source, len(one), args.n_predict) for one in ids)
    options = sampling_arguments(args) | {"max_tokens": args.n_predict, "ignore_eos": args.ignore_eos}
    with open_model(args, source, n_ctx, n_seqs=args.parallel or min(len(ids), _AT_ONCE)) as model:
        results = model.generate(ids, **options)
    if args.json:
        print_json([{"prompt": prompt} | one.to_dict() for prompt, one in zip(prompts, results, strict=True)])
    else:
        shown = [""] * len(prompts) if args.no_display_prompt else prompts
        print("\n\n".join(prompt + one.text for prompt, one in zip(shown, results, strict=True)))
    if cut := sum(one.truncated for one in results):
        note(args, f"slimrt: {cut} of {len(results)} texts fill the context of {n_ctx} tokens; --ctx makes it larger")
    if args.verbose:
        for one in results:
            note(args, timings_line(one))
    return 0


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


def _prompts(args: argparse.Namespace) -> list[str]:
    if args.prompt is not None and args.file is not None:
        args.usage_error("give -p or -f, not both")
    if args.prompt is not None:
        if len(args.prompt) > 1 and (args.save_session or args.load_session):
            args.usage_error("a session goes on with one text: give one -p")
        return [_unescaped(one) for one in args.prompt] if args.escape else args.prompt
    if args.file is None and sys.stdin.isatty():
        args.usage_error("what to continue? give -p TEXT, -f FILE, or pipe a text in")
    data = Path(args.file).read_bytes() if args.file is not None else sys.stdin.buffer.read()
    return [decode_text(data, args.file or "stdin").removesuffix("\n")]  # the one that an editor or echo put there


def _unescaped(text: str) -> str:
    """What llama.cpp makes of a backslash and a letter."""
    return re.sub(r"\\([nrt\\'\"])", lambda found: _ESCAPES.get(found[1], found[1]), text)


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
