"""slimrt text2text: sequence-to-sequence generation with T5, BART and their kin."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Sequence
from typing import Any

from slimrt.cli.common import (
    Flags,
    as_item,
    as_json,
    from_flags,
    model_source,
    note,
    open_model,
    read_input,
    show_progress,
)
from slimrt.cli.flags import Collect
from slimrt.cli.sampling import sampling_arguments
from slimrt.cli.values import not_empty
from slimrt.generation.text2text import Text2Text, searchable
from slimrt.modelfile.source import ModelSource
from slimrt.plumbing import progress
from slimrt.results import Generation

_AT_ONCE = 8  # texts decoded together by default


def add_flags(
    flags: Flags,
    *,
    what: str = "transform",
    usual_beams: str = "1",
    task: Callable[[Flags], None] = lambda flags: None,
) -> None:
    """Add the flags. usual_beams: beams of models that say nothing. task: adds the flags of the verb's own task."""
    flags.model()
    flags.add("-p", "--prompt", twin=False, action=Collect, metavar="TEXT", help=f"the text to {what} (else -f, else "
              "stdin); several -p are one batch")  # fmt: skip
    flags.add("-f", "--file", twin=False, type=not_empty, metavar="FILE", help="a file with a text on each line; an "
              "empty one stays so")  # fmt: skip
    flags.n_predict(256, own=True)
    flags.parallel(_AT_ONCE)
    task(flags)
    flags.sampling(temp=0.0, num_beams=None, beams="beam search with so many beams; 1: greedy, or sampling with "
                   f"--temp (default: what the model says, else {usual_beams}; 1 with --temp)")  # fmt: skip
    flags.length_penalty(own=True)
    flags.engine(encoder=True, several=True)
    flags.output()


def run(args: argparse.Namespace) -> int:
    return transform(args, texts(args))


def texts(args: argparse.Namespace) -> list[str]:
    """The texts given by -p, or one on each line of -f or stdin; blank lines are kept as blank texts."""
    if args.prompt is not None and args.file is not None:
        args.usage_error("give -p or -f, not both")
    if args.prompt is not None:
        return [str(one) for one in args.prompt]
    if args.file is None and sys.stdin.isatty():
        args.usage_error("which text? give -p TEXT, -f FILE, or pipe one in")
    lines = [line.rstrip("\n") for line in io.StringIO(read_input(args.file), newline=None)]
    if not any(map(str.strip, lines)):
        raise ValueError(f"{'stdin' if args.file in (None, '-') else args.file}: no text in it")
    return lines


def transform(args: argparse.Namespace, sources: Sequence[str], usual_beams: int = 1, **languages: str | None) -> int:
    """Print the output for each text, one line each; among several texts a blank one gives an empty line.

    Args:
        usual_beams: beams where neither flags nor the model say how many.
        languages: Model.translate's source and target, to translate.
    """
    given = sampling_arguments(args) | {"max_tokens": args.n_predict, "length_penalty": args.length_penalty}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    searches = searchable(options)
    # Wrong usage is found before the model is loaded, and so before it is known how many beams it has.
    from_flags(args, lambda: Text2Text(**({"num_beams": 2} if searches else {}) | options))
    source = model_source(args)
    num_beams = options.setdefault("num_beams", (source.settings.num_beams or usual_beams) if searches else 1)
    filled = [i for i, text in enumerate(sources) if text.strip() or len(sources) == 1]
    at_once, n = args.parallel or min(len(filled), _AT_ONCE), len(filled)
    output = _Output(args, sources, filled)
    with open_model(args, source, args.ctx or 0, n_seqs=at_once * num_beams) as model:
        shown = n > 1 and progress.wanted(show_progress(args))
        with progress.bar(shown, n, "texts", "text") as update:

            def done(index: int, one: Generation) -> None:
                output.result(filled[index], one)
                update(output.n_done, n)

            try:
                call: Callable[..., object] = model.translate if languages else model.text2text
                call([sources[i] for i in filled], **languages, **options, on_result=done)
            except KeyboardInterrupt:
                output.interrupted()
                raise
            finally:
                output.end(source, model.n_ctx)
    return 0


class _Output:
    """Prints results in the order of the texts, each as soon as it and all before it are known.

    Args:
        given: indices of the texts that are not blank.
    """

    def __init__(self, args: argparse.Namespace, sources: Sequence[str], given: Sequence[int]):
        self._args, self._sources = args, sources
        self._results: dict[int, Generation] = {}
        self._known = set(range(len(sources))) - set(given)  # indices of the lines that are known
        self._n, self._turn = len(given), 0
        self._begun = False

    @property
    def n_done(self) -> int:
        return len(self._results)

    def result(self, index: int, one: Generation) -> None:
        self._results[index] = one
        self._known.add(index)
        while self._turn in self._known:
            self._print(self._turn)
            self._turn += 1

    def interrupted(self) -> None:
        """Print a note about how much is done."""
        holes = self._turn < max(self._results, default=-1) and not self._args.json
        with progress.aside():
            note(self._args, f"slimrt: interrupted: {self.n_done} of {self._n} texts are done"
                 + "; an empty line stands for one that is not" * holes)  # fmt: skip

    def end(self, file: ModelSource, n_ctx: int) -> None:
        """Print results that were held back because earlier ones are missing, and note truncated texts."""
        for index in range(self._turn, max(self._results, default=-1) + 1):
            self._print(index)
        if self._begun and self._args.json and self._several:
            self._write("\n]\n")
        reasons = [one.finish_reason for one in self._results.values()]
        with progress.aside():
            if cut := reasons.count("length"):
                most = "the usual most" if self._args.n_predict is None else self._args.n_predict
                note(self._args, f"slimrt: {cut} of {self.n_done} texts are cut off at {most} tokens; "
                     "-n makes room")  # fmt: skip
            if cut := reasons.count("context"):
                note(self._args, f"slimrt: {cut} of {self.n_done} texts are cut off at a full context; "
                     f"{file.more_context(n_ctx)}")  # fmt: skip

    @property
    def _several(self) -> bool:
        return len(self._sources) > 1

    def _print(self, index: int) -> None:
        """Print a result as a record or a line; without a result the line is empty."""
        one = self._results.get(index)
        if self._args.json:
            if one is not None:
                self._write(self._record(self._sources[index], one))
        else:
            text = one.text if one is not None else ""
            self._write((" ".join(text.split("\n")) if self._several else text) + "\n")

    def _record(self, source: str, one: Generation) -> str:
        record = as_json({"source": source} | one.to_dict())
        if not self._several:
            return f"{record}\n"
        return (",\n" if self._begun else "[\n") + as_item(record)

    def _write(self, text: str) -> None:
        self._begun = True
        with progress.aside():
            sys.stdout.write(text)
            sys.stdout.flush()
