"""From a prompt to text: stop strings, and the loop that decodes several texts together."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from slimrt.errors import ContextOverflowError
from slimrt.generation.options import REPEAT_LAST_N, Options
from slimrt.plumbing import progress
from slimrt.plumbing.closing import Closing
from slimrt.plumbing.numbers import log_softmax
from slimrt.results import CacheUse, Generation, Timings, TokenLogprob, Usage
from slimrt.runtime.runtime import Runtime
from slimrt.runtime.session import Session, append_together, check_length


class StopFilter:
    """Lets text through up to the first stop string, holding back an end that may still become one."""

    def __init__(self, stops: Sequence[str]):
        self.stopped = False
        self._stops = stops
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that is safe to show now."""
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            released, self._held = self._held[: min(found)], ""
            return released
        safe = len(self._held) - self._possible_start()
        released, self._held = self._held[:safe], self._held[safe:]
        return released

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        released, self._held = self._held, ""
        return released

    def _possible_start(self) -> int:
        """The length of the longest end of the held text that begins a stop string."""
        longest = min(len(self._held), max((len(stop) for stop in self._stops), default=1) - 1)
        for size in range(longest, 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0


class Run:
    """One text in the making.

    Args:
        prompt: ids, checked.
        session: a session to continue in; None: one of its own, which ends with the run.
        called: time.perf_counter() when the user asked.

    Raises:
        ContextOverflowError: the prompt does not fit the context.
        ValueError: an empty prompt, or a sampling parameter out of its range.
        UnsupportedError: stop strings without a tokenizer.
    """

    def __init__(
        self,
        runtime: Runtime,
        prompt: Sequence[int],
        options: Options,
        seed: int,
        session: Session | None,
        called: float,
    ):
        if not prompt:
            raise ValueError("the prompt has no tokens, and the model has no BOS token to begin with: give some text")
        check_length(len(prompt), runtime, "the prompt")
        tokenizer = runtime.source.tokenizer_if_any
        if tokenizer is None and options.stops:
            runtime.source.tokenizer  # noqa: B018  raises, with the reason why there is none
        self.runtime, self.prompt, self.options, self.seed = runtime, prompt, options, seed
        self.session = session
        self.tokens: list[int] = []
        self.pending: list[int] = []
        self.finish_reason: str | None = None
        self._own_session = session is None
        self._tokenizer = tokenizer
        self._ends = frozenset(tokenizer.eog_ids) if tokenizer else frozenset()
        self._detokenizer = tokenizer.detokenizer(prompt, skip_special_tokens=True) if tokenizer else None
        self._filter = StopFilter(options.stops)
        self._sampler = options.sampler(seed)
        self._history = list(prompt[-REPEAT_LAST_N:])
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._called = called
        self._cached = self._held = 0
        self._ttft = self._prefill_seconds = self._decode_seconds = 0.0
        self._rows = self._skipped = 0

    def begin(self) -> None:
        """Take a sequence and note what is to be computed first."""
        if self.session is None:
            self.session = Session.new(self.runtime)
        self.pending = self.session.keep_common(self.prompt)
        self._cached = self.session.length

    @classmethod
    def begin_together(cls, runs: Sequence[Run]) -> None:
        """begin() for several runs of one kind, which may have work that is quicker for all at once."""
        for run in runs:
            run.begin()

    def end(self) -> None:
        """Let the sequence go, unless it is the user's."""
        if self.session is not None:
            self._held = self.session.length
            if self._own_session:
                self.session.close()
                self.session = None

    def accept(self, logits: NDArray[np.float32]) -> str:
        """Choose a token from logits (vocab,); returns the text that may be shown now."""
        if self.options.max_tokens == 0:
            return self._finish("length")
        token = self._choose(logits)
        if token in self._ends:
            return self._finish("stop")
        self.tokens.append(token)
        self._history = [*self._history[1 - REPEAT_LAST_N :], token]
        if self.options.logprobs:
            self._logprobs.append(self._token_logprob(token, logits))
        text = self._show(self._detokenizer.feed(token)) if self._detokenizer else ""
        if self._filter.stopped:
            self.finish_reason = "stop"
            return text
        if len(self.tokens) == self.options.max_tokens:
            return text + self._finish("length")
        assert self.session is not None
        if self.session.length >= self.runtime.n_ctx:
            return text + self._finish("context")
        self.pending = [token]
        return text

    def overflow(self) -> str:
        """End here: other sequences hold the rows that the next token needs."""
        return self._finish("context")

    def timed(self, seconds: float) -> None:
        """Count the seconds of the step that ended in the last accept()."""
        if self._ttft == 0.0:
            self._prefill_seconds += seconds
            self._ttft = time.perf_counter() - self._called
        else:
            self._decode_seconds += seconds

    def counted(self, rows: int, skipped: int) -> None:
        """Count the rows of V that a step came by, and those it skipped."""
        self._rows += rows
        self._skipped += skipped

    def result(self) -> Generation:
        """What there is so far."""
        held = self.session.length if self.session is not None else self._held
        layers = self.runtime.info["layers"]
        per_token = sum(layer["bytes_per_token"] for layer in layers)
        computed, decoded = len(self.prompt) - self._cached, len(self.tokens) - 1
        return Generation(
            text="".join(self._text),
            tokens=tuple(self.tokens),
            finish_reason=self.finish_reason or "unfinished",
            truncated=self.finish_reason == "context",
            seed=self.seed,
            usage=Usage(len(self.prompt), self._cached, len(self.tokens)),
            timings=Timings(
                ttft=self._ttft,
                prefill_tok_s=computed / self._prefill_seconds if self._prefill_seconds else 0.0,
                decode_tok_s=decoded / self._decode_seconds if decoded > 0 and self._decode_seconds else 0.0,
            ),
            cache=CacheUse(
                bytes=held * per_token,
                bytes_per_token=per_token,
                modes=tuple(layer["mode"] for layer in layers),
                types=tuple(layer["type"] for layer in layers),
                ranks=tuple(layer.get("rank", 0) for layer in layers),
                residual_types=tuple(layer.get("residual_type", "") for layer in layers),
                skipped=self._skipped / self._rows if self._rows else 0.0,
                cross=self.runtime.info.get("cross"),
            ),
            logprobs=tuple(self._logprobs) if self.options.logprobs else None,
        )

    def adjusted(self, logits: NDArray[np.float32], tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits (vocab,) after these tokens as the options change them; copied where they do."""
        if self.options.logits_processor is not None:
            ids = [*self.prompt, *tokens]
            logits = np.ascontiguousarray(self.options.logits_processor(ids, logits.copy()), np.float32)
            if logits.shape != (self.runtime.n_vocab,):
                raise ValueError(f"logits_processor returned shape {logits.shape}, not ({self.runtime.n_vocab},)")
        if self.options.ignore_eos and self._ends:
            logits = logits.copy()
            logits[list(self._ends)] = -np.inf
        return logits

    def _choose(self, logits: NDArray[np.float32]) -> int:
        return self._sampler.sample(self.adjusted(logits, self.tokens), self._history)

    def _token_logprob(self, token: int, logits: NDArray[np.float32]) -> TokenLogprob:
        logprobs = log_softmax(logits)
        n = min(self.options.logprobs, len(logprobs))
        likeliest = np.argpartition(-logprobs, n - 1)[:n]
        likeliest = likeliest[np.argsort(-logprobs[likeliest], kind="stable")]
        text = self._tokenizer.token_bytes(token).decode("utf-8", "replace") if self._tokenizer else ""
        return TokenLogprob(
            token, text, float(logprobs[token]), tuple((int(id), float(logprobs[id])) for id in likeliest)
        )

    def _show(self, text: str) -> str:
        text = self._filter.feed(text)
        self._text.append(text)
        return text

    def _finish(self, reason: str) -> str:
        """End for this reason; returns the text that was held back."""
        self.finish_reason = reason
        text = self._show(self._detokenizer.flush()) if self._detokenizer else ""
        if self._filter.stopped:
            self.finish_reason = "stop"
            return text
        held = self._filter.flush()
        self._text.append(held)
        return text + held


def run_together(runtime: Runtime, runs: Sequence[Run], width: int) -> Generator[tuple[Run, str]]:
    """Decode texts, at most `width` at once, a token of each per step; a finished one makes room for the next.

    Yields (run, text that may be shown now). Closing the iterator, or any exception, frees what is still running.
    """
    waiting, active = deque(runs), list[Run]()
    try:
        while waiting or active:
            starting = [waiting.popleft() for _ in range(min(len(waiting), width - len(active)))]
            active += starting
            if starting:
                starting[0].begin_together(starting)
            yield from _step(runtime, active)
            for run in active:
                if run.finish_reason is not None:
                    run.end()
            active = [run for run in active if run.finish_reason is None]
    finally:
        for run in active:
            run.end()


def _step(runtime: Runtime, active: Sequence[Run]) -> list[tuple[Run, str]]:
    started, (rows, skipped) = time.perf_counter(), runtime.sparse_counts()
    try:
        logits = _append(runtime, active)
    except ContextOverflowError:
        if not all(run.tokens for run in active):
            raise
        return [(run, run.overflow()) for run in active]
    pieces = [(run, run.accept(row)) for run, row in zip(active, logits, strict=True)]
    seconds, (rows_now, skipped_now) = time.perf_counter() - started, runtime.sparse_counts()
    for run in active:
        run.timed(seconds)
        run.counted(rows_now - rows, skipped_now - skipped)
        if run.options.on_progress is not None and run.tokens:
            run.options.on_progress("decode", len(run.tokens), run.options.max_tokens)
    return pieces


def _append(runtime: Runtime, active: Sequence[Run]) -> NDArray[np.float32]:
    """Compute the pending tokens of every run; logits of the last one of each."""
    items = [(run.session, run.pending) for run in active if run.session is not None]
    n_tokens = sum(len(ids) for _, ids in items)
    if n_tokens == len(active):
        return append_together(runtime, items)
    on_progress = active[0].options.on_progress  # all runs of one call have the same options
    with progress.bar(runtime.show_progress, n_tokens, "prefill", "tok") as update:

        def report(done: int, total: int) -> None:
            update(done, total)
            if on_progress is not None:
                on_progress("prefill", done, total)

        return append_together(runtime, items, on_progress=report)


class Stream(Closing, Iterator[str]):
    """Pieces of text as they are generated; `result` is the Generation so far, complete after the last piece.

    Close it (or use it as a context manager) to stop early and free its part of the cache.
    """

    def __init__(self, runtime: Runtime, run: Run):
        self._run = run
        self._steps = run_together(runtime, [run], 1)

    @property
    def result(self) -> Generation:
        return self._run.result()

    def __next__(self) -> str:
        for _, text in self._steps:
            if text:
                return text
        raise StopIteration

    def close(self) -> None:
        self._steps.close()
