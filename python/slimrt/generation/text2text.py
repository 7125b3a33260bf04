"""From a text to another, with models that have an encoder: the T5 family."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slimrt import core
from slimrt.errors import ContextOverflowError
from slimrt.generation.generate import Run, SessionEngine
from slimrt.generation.options import PENALTIES, GenerateOptions, Options
from slimrt.generation.search import Append, Encode, Engine, Hypothesis, Logits, Task, beam_search, run
from slimrt.plumbing.arguments import check_function, real
from slimrt.results import Generation, Timings
from slimrt.runtime.kinds import check_sequences, require
from slimrt.runtime.runtime import Runtime

OnResult = Callable[[int, Generation], object]


class Text2TextOptions(GenerateOptions, total=False):
    """The keywords of text2text and translate. See Model.text2text."""

    length_penalty: float
    early_stopping: bool
    on_result: OnResult | None


@dataclass(frozen=True)
class Text2Text(Options):
    """The same with their defaults, checked: greedy, unless told otherwise.

    Raises:
        ValueError, TypeError: an option out of its range, of a wrong kind, or that beams cannot follow.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool = False
    on_result: OnResult | None = None

    def _check_kinds(self) -> None:
        super()._check_kinds()
        check_function("on_result", self.on_result)

    def _check_beams(self) -> None:
        real("length_penalty", self.length_penalty)
        if self.num_beams < 1:
            raise ValueError(f"num_beams must be at least 1, got {self.num_beams}")
        if self.num_beams == 1:
            return
        plain = {"temperature": 0.0, **PENALTIES, "logprobs": 0, "stop": ()}
        for name, value in plain.items():
            given = self.stops if name == "stop" else getattr(self, name)
            if given != value:
                raise ValueError(f"{name}={given!r} does not go with num_beams={self.num_beams}: leave out one of them")


class EncodedRun(Run):
    """One text in the making from another.

    Args:
        source: ids of the other one.
        index: its place among those of the call; the seed is that many above the call's.
    """

    def __init__(
        self, runtime: Runtime, source: Sequence[int], index: int, options: Text2Text, seed: int, called: float
    ):
        start = int(runtime.info["decoder_start_token_id"])
        super().__init__(runtime, [start], options, seed + index, None, called)
        self.source, self.index, self._on_result = source, index, options.on_result
        if self._tokenizer is not None:  # the text begins here, whatever token the decoder starts with
            self._detokenizer = self._tokenizer.detokenizer((), skip_special_tokens=True)

    def task(self, engine: SessionEngine) -> Task[Generation]:
        result = yield from super().task(engine)
        self.tell(result)
        return result

    def _sources(self) -> Sequence[Encode]:
        return [Encode(self.session, np.array(self.source, np.int32))]

    def result(self) -> Generation:
        """What there is so far; its prompt is the source."""
        result, n_source = super().result(), len(self.source)
        speed = n_source / self._prefill_seconds if self._prefill_seconds else 0.0
        return replace(
            result,
            usage=replace(result.usage, prompt_tokens=n_source),
            timings=replace(result.timings, prefill_tok_s=speed),
        )

    def tell(self, result: Generation) -> None:
        """Let who wants to know hear that the text is done."""
        if self._on_result is not None:
            self._on_result(self.index, result)


def text2text(
    runtime: Runtime, sources: Sequence[Sequence[int]], options: Text2Text, seed: int, called: float
) -> list[Generation]:
    """The text for each source (ids); they are decoded together. Arguments and errors as Model.text2text."""
    require(runtime, "t5", to="turn a text into another")
    for source in sources:
        check_source(runtime, len(source))
    runs = [EncodedRun(runtime, source, i, options, seed, called) for i, source in enumerate(sources)]
    width = int(runtime.info["n_seqs"])
    if options.num_beams == 1:
        sessions = SessionEngine(runtime, options.on_progress)
        with runtime.lock:
            return run(sessions, [(1, one.task(sessions)) for one in runs], width)
    check_sequences(runtime, options.num_beams)
    searches = [_Beams(runtime, one, called) for one in runs]
    with runtime.use() as engine:
        return run(engine, [(options.num_beams, search.task(engine)) for search in searches], width)


def check_source(runtime: Runtime, length: int) -> None:
    """Refuses a source that is empty or longer than the encoder takes: ValueError, ContextOverflowError."""
    most = core.encoder_of(runtime.info)["n_source"]
    if length == 0:
        raise ValueError("the text has no tokens: give some text")
    if length > most:
        raise ContextOverflowError(
            f"the text has {length} tokens, the encoder takes {most}: shorten it or split it, or load the model with a "
            f"larger n_source"
        )


class _Beams:
    """A beam search for one text."""

    def __init__(self, runtime: Runtime, run: EncodedRun, called: float):
        self._runtime, self._run, self._called = runtime, run, called
        tokenizer = runtime.source.tokenizer_if_any
        self._ends = frozenset(tokenizer.eog_ids) if tokenizer else frozenset[int]()

    def task(self, engine: Engine) -> Task[Generation]:
        options, prompt = self._run.options, list(self._run.prompt)
        assert isinstance(options, Text2Text)
        sequence = engine.new_sequence()
        try:
            yield Encode(sequence, np.array(self._run.source, np.int32))
            row = (yield Append([(sequence, prompt)]))[0]
            ready = time.perf_counter()
            room = self._runtime.n_ctx - len(prompt) + 1  # the last token takes no row
            limit = room if options.max_tokens < 0 else min(options.max_tokens, room)
            found = [Hypothesis((), (), False)]
            if limit > 0:
                found = yield from beam_search(
                    engine, sequence, row, self._rules, self._ends, limit, num_beams=options.num_beams,
                    length_penalty=options.length_penalty, early_stopping=options.early_stopping,
                    on_step=self._report,
                )  # fmt: skip
        finally:
            engine.free_sequence(sequence)
        result = self._result(found[0], limit != options.max_tokens, ready)
        self._run.tell(result)
        return result

    def _rules(self, row: Logits, tokens: Sequence[int]) -> None:
        row[:] = self._run.adjusted(row, tokens)

    def _report(self, n_tokens: int) -> None:
        if self._run.options.on_progress is not None:
            self._run.options.on_progress("decode", n_tokens, self._run.options.max_tokens)

    def _result(self, found: Hypothesis, full: bool, ready: float) -> Generation:
        tokenizer = self._runtime.source.tokenizer_if_any
        reason = "stop" if found.ended else ("context" if full else "length")
        blank = self._run.result()
        now, n_source = time.perf_counter(), len(self._run.source)
        first = ready - self._called
        return replace(
            blank,
            text=tokenizer.decode(found.tokens, skip_special_tokens=True) if tokenizer else "",
            tokens=found.tokens,
            finish_reason=reason,
            truncated=reason == "context",
            usage=replace(blank.usage, completion_tokens=len(found.tokens)),
            timings=Timings(first, n_source / first, max(len(found.tokens) - 1, 0) / (now - ready)),
            cache=replace(blank.cache, bytes=(len(found.tokens) + 1) * blank.cache.bytes_per_token),
        )


def prefixed(text: str, source: str | None, target: str | None) -> str:
    """A text with the words in front by which T5 was taught to translate, if both languages are named.

    Raises:
        ValueError: only one is named.
    """
    if (source is None) != (target is None):
        raise ValueError("name both languages, source and target, or neither (then the text says itself what to do)")
    return text if source is None else f"translate {source} to {target}: {text}"
