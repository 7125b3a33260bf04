"""slimrt generate: continue a prompt."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slimrt.cache.config import kinds
from slimrt.cache.planner import whole_blocks
from slimrt.cli.common import Flags, check_options, model_source, note, open_model, print_json, read_input
from slimrt.cli.flags import Collect
from slimrt.cli.sampling import constraint_arguments, sampling_arguments
from slimrt.cli.values import count, file_name, not_empty, positive, whole
from slimrt.generation.stream import Stream
from slimrt.modelfile.source import ModelSource
from slimrt.plumbing.units import format_bytes
from slimrt.results import Generation
from slimrt.runtime.kinds import continues_texts
from slimrt.runtime.session import Session
from slimrt.runtime.session_file import check_replaced, read_header

_AT_ONCE = 8  # texts decoded together by default
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


def add_flags(flags: Flags) -> None:
    flags.model()
    flags.add("-p", "--prompt", twin=False, action=Collect, metavar="TEXT", help="the text to continue (else -f, else "
              "stdin); several are one batch")  # fmt: skip
    flags.add("-f", "--file", twin=False, type=not_empty, metavar="FILE", help="a file with the text to continue")
    flags.add("-e", "--escape", action="store_true", help="\\n and \\t in -p are a newline and a tab")
    flags.n_predict(128)
    flags.add("--answers", type=positive, default=1, metavar="N", help="completions of each prompt, each with a seed "
              "of its own; of beam search the best N (default: %(default)s)")  # fmt: skip
    flags.parallel(_AT_ONCE)
    flags.add("--no-display-prompt", "--no-echo", action="store_true", help="print only what is generated")
    flags.add("--logprobs", type=count, default=0, metavar="N", help="with --json: the N likeliest tokens at each "
              "position")  # fmt: skip
    flags.add("--context-shift", action="store_true", help="when the context is full, drop its older half and go on")
    flags.add("--keep", type=whole(-1), default=0, metavar="N", help="tokens of the prompt that a context shift keeps; "
              "-1: all (default: %(default)s)")  # fmt: skip
    flags.add("--lookup", action="store_true", help="prompt lookup decoding: draft tokens from what the text repeats, "
              "where that is faster")  # fmt: skip
    flags.draft()
    flags.add("--save-session", twin=False, type=file_name, metavar="FILE", help="save the context in a file "
              "afterwards, after Ctrl-C too")  # fmt: skip
    flags.add("--force", twin=False, action="store_true", help="--save-session may replace a file that is no session")
    flags.add("--load-session", twin=False, type=not_empty, metavar="FILE", help="continue a saved context; the prompt "
              "is appended")  # fmt: skip
    flags.sampling(beams="beam search with so many beams; 1: none (default: %(default)s)")
    flags.length_penalty()
    flags.add("--early-stopping", action="store_true", help="stop beam search when --num-beams texts are complete")
    flags.add("--ignore-eos", action="store_true", help="never choose an end-of-sequence token")
    flags.constraints()
    flags.engine(several=True)
    flags.output()


def run(args: argparse.Namespace) -> int:
    source = model_source(args)
    continues_texts(source)
    prompts = _prompts(args)
    _check_usage(args, prompts)
    if args.save_session:
        check_replaced(Path(args.save_session), source.file.paths, args.force)
    options = _options(args)
    check_options(args, options)  # errors come before the model is loaded
    if _are_several(args, prompts):
        return _several(args, source, prompts, options)
    prompt = prompts[0]
    kept = read_header(args.load_session)["tokens"] if args.load_session else []
    ids = kept + source.tokenizer.encode(prompt, add_special_tokens=False) if kept else source.prompt_ids(prompt)
    with open_model(args, source, args.ctx or enough_context(source, len(ids), args.n_predict)) as model:
        session = None
        if args.load_session:
            session = model.load_session(args.load_session)
        elif args.save_session:
            session = model.session()
        stream = model.stream(ids, session=session, **options)
        code = _print(args, prompt, stream)
        result = stream.result
        if session is not None and args.save_session:
            if code == 0 or (session.length and session.length + result.shifted >= len(ids)):
                _save(session, [*ids, *result.tokens], result.shifted, args.save_session, args.force)
            else:
                note(args, f"slimrt: {args.save_session} is not written: Ctrl-C came before the text was computed")
    _notes(args, source, model.n_ctx, [result])
    return code


def _are_several(args: argparse.Namespace, prompts: Sequence[str]) -> bool:
    """Whether several texts are generated, which are printed when they are complete."""
    return len(prompts) > 1 or bool(args.answers > 1 or args.num_beams > 1)


def _check_usage(args: argparse.Namespace, prompts: Sequence[str]) -> None:
    if args.logprobs and not args.json:
        args.usage_error("--logprobs are part of the result as JSON: give --json too")
    if _are_several(args, prompts) and (args.load_session or args.save_session):
        args.usage_error("a session continues one text: give one -p, and no --answers or --num-beams")


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """The flags as options of Model.generate."""
    return (
        sampling_arguments(args)
        | constraint_arguments(args)
        | {
            "max_tokens": args.n_predict,
            "ignore_eos": args.ignore_eos,
            "length_penalty": args.length_penalty,
            "early_stopping": args.early_stopping,
            "logprobs": args.logprobs,
            "on_overflow": "shift" if args.context_shift else "error",
            "n_keep": args.keep,
            "lookup": args.lookup,
        }
    )


def _several(args: argparse.Namespace, source: ModelSource, prompts: Sequence[str], options: dict[str, Any]) -> int:
    """Continue prompts as a batch, each --answers times, and print the texts."""
    ids = [source.prompt_ids(prompt) for prompt in prompts]
    n_ctx = args.ctx or max(enough_context(source, len(one), args.n_predict) for one in ids)
    at_once = args.parallel or min(len(ids), _AT_ONCE)
    with open_model(args, source, n_ctx, n_seqs=at_once * max(args.answers, args.num_beams)) as model:
        answers = model.generate(ids, n=args.answers, **options)
    if args.json:
        records = [
            {"prompt": prompt}
            | (of_it[0].to_dict() if len(of_it) == 1 else {"answers": [one.to_dict() for one in of_it]})
            for prompt, of_it in zip(prompts, answers, strict=True)
        ]
        print_json(records if len(records) > 1 else records[0])
    else:
        shown = [""] * len(prompts) if args.no_display_prompt else prompts
        print("\n\n".join(prompt + one.text for prompt, of_it in zip(shown, answers, strict=True) for one in of_it))
    _notes(args, source, n_ctx, [one for of_it in answers for one in of_it])
    return 0


def _notes(args: argparse.Namespace, source: ModelSource, n_ctx: int, results: Sequence[Generation]) -> None:
    """Notes on a full context, and with -v on timings."""
    if cut := sum(one.truncated for one in results):
        of = f" in {cut} of {len(results)} texts" if len(results) > 1 else ""
        note(args, f"slimrt: the context of {n_ctx} tokens is full{of}; {source.more_context(n_ctx)}; "
             "--context-shift goes on without the oldest")  # fmt: skip
    if shifted := max(one.shifted for one in results):
        note(args, f"slimrt: the context of {n_ctx} tokens was full: {shifted} older ones were dropped")
    if args.verbose:
        for one in results:
            note(args, timings_line(one))


def enough_context(source: ModelSource, n_prompt: int, n_predict: int) -> int:
    """The context for a prompt and its continuation, in whole blocks, at most the trained one."""
    if n_predict < 0:
        return source.n_ctx()
    return min(whole_blocks(max(n_prompt + n_predict, 1)), source.n_ctx_train)


def timings_line(result: Generation) -> str:
    """Timings and cache size of a generation, as a line."""
    usage, timings, cache = result.usage, result.timings, result.cache
    computed = usage.prompt_tokens - usage.cached_tokens
    skipped = f", {cache.skipped:.0%} of rows not read" if cache.skipped else ""
    drafts = f" ({usage.accepted_tokens} of {usage.drafted_tokens} guesses right)" if usage.drafted_tokens else ""
    held = f"cache {format_bytes(cache.bytes)} ({kinds(cache.layers())}{skipped})"
    return (
        f"slimrt: first token after {timings.ttft:.3f} s; "
        f"prefill {computed} tokens, {timings.prefill_tok_s:.1f} tok/s; "
        f"decode {usage.completion_tokens} tokens{drafts}, {timings.decode_tok_s:.1f} tok/s; "
        f"{held}; seed {result.seed}; {result.finish_reason}"
    )


def _prompts(args: argparse.Namespace) -> list[str]:
    if args.prompt is not None and args.file is not None:
        args.usage_error("give -p or -f, not both")
    if args.prompt is not None:
        return [_unescaped(one) for one in args.prompt] if args.escape else args.prompt
    if args.file is None and sys.stdin.isatty():
        args.usage_error("what to continue? give -p TEXT, -f FILE, or pipe a text in")
    return [read_input(args.file).removesuffix("\n")]  # a final newline comes from editors and echo


def _unescaped(text: str) -> str:
    """Replace escape sequences, as llama.cpp does."""
    return re.sub(r"\\([nrt\\'\"])", lambda found: _ESCAPES.get(found[1], found[1]), text)


def _print(args: argparse.Namespace, prompt: str, stream: Stream) -> int:
    """Print the text as it is generated; returns the exit code."""
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


def _save(session: Session, tokens: list[int], shifted: int, path: str, overwrite: bool) -> None:
    """Save the session with the whole text, without tokens shifted out. The last token, chosen but not computed yet, is
    computed first, unless the context is full."""
    if session.length > len(tokens) - shifted:  # Ctrl-C has left drafts
        session.truncate(len(tokens) - shifted)
    left = tokens[session.length + shifted :][: session.runtime.n_ctx - session.length]
    if left:
        session.append(left, last_only=True)
    session.save(path, overwrite=overwrite)
