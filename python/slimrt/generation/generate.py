"""Generation of one text after a prompt, as a task of the scheduler, with stop strings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slimrt import core
from slimrt.errors import ContextOverflowError, GrammarError
from slimrt.generation.bans import Bans
from slimrt.generation.breakers import breaker_tokens
from slimrt.generation.grammar import Matcher, compile_grammar
from slimrt.generation.loop import loop_of, prefixes_of
from slimrt.generation.masks import MASKS, Mask, NothingMayCome
from slimrt.generation.options import Options
from slimrt.generation.search import Append, Decode, Encode, Logprobs, Task
from slimrt.generation.stops import StopFilter
from slimrt.generation.tickets import Call, Meter
from slimrt.results import CacheUse, Generation, Timings, TokenLogprob, TopLogprob, Usage
from slimrt.runtime.runtime import Runtime
from slimrt.runtime.session import Session, check_length
from slimrt.tokenizer.detokenizer import IncrementalDetokenizer
from slimrt.tokenizer.tokenizer import Tokenizer


class Run:
    """One text being generated.

    Attributes:
        n_given: tokens of the prompt that are the output's, which a beam search counts in its length.
        drafted, accepted: numbers of draft tokens, and of those that were accepted (speculative decoding).
        needs: sequences that it takes.
        key: the owner's name; cache_prompt reuses and leaves rows only among texts with the same key.

    Args:
        prompt: ids, checked.
        session: a session to continue in; None: one of its own, which ends with the run.
        called: time.perf_counter() when the user called.

    Raises:
        ContextOverflowError: the prompt does not fit the context.
        ValueError: an empty prompt, or a sampling parameter out of its range.
        GrammarError: a grammar that is wrong, or that cannot be enforced.
        UnsupportedError: stop strings, a grammar, or breakers for DRY, without a tokenizer.
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
            raise ValueError("the prompt has no tokens: give some text, or a BOS token if the model has one")
        check_length(len(prompt), runtime, "the prompt")
        breaking = options.dry_sequence_breakers if options.dry_multiplier else ()
        tokenizer = runtime.source.tokenizer_if_any
        constraint = options.constraint
        if tokenizer is None and (options.stops or breaking or constraint):
            runtime.source.tokenizer  # noqa: B018  raises, with the reason why there is none
        self.runtime, self.prompt, self.options, self.seed = runtime, prompt, options, seed
        self.session = session
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.shifted = self.drafted = self.accepted = self.n_given = 0
        self.key = ""
        self.meter = Meter()
        self._own_session = session is None
        self._pending: list[int] = []
        self._tokenizer = tokenizer
        self.ends = frozenset(tokenizer.eog_ids) if tokenizer else frozenset()
        grammar = compile_grammar(tokenizer, runtime.n_vocab, **constraint) if tokenizer and constraint else None
        self._matcher = grammar.matcher() if grammar else None
        self._next_mask = MASKS.begin(self._matcher) if self._matcher else None
        if self._next_mask is not None and isinstance(error := self._next_mask.exception(), GrammarError):
            raise error  # before anything is computed
        self._detokenizer = self._new_detokenizer(tokenizer) if tokenizer else None
        self._filter = StopFilter(options.stops)
        for name in ("logit_bias", "suppress_tokens"):
            if wrong := [id for id in getattr(options, name) or () if not 0 <= id < runtime.n_vocab]:
                raise ValueError(f"{name} names token {wrong[0]}, the vocabulary has {runtime.n_vocab}")
        breakers = breaker_tokens(tokenizer, breaking) if tokenizer and breaking else ()
        self._sampler = options.sampler(seed, self.ends, breakers)
        self._sampler.accept(list(prompt))
        self._text: list[str] = []
        self._n_taken = self._n_characters = 0
        self._logprobs: list[TokenLogprob] = []
        self._called = called
        self._cached = self._n_rows = 0
        self._ttft = self._prefill_seconds = self._decode_seconds = 0.0
        self._rows = self._skipped = 0

    @property
    def needs(self) -> int:
        return 1

    def task(self) -> Task[Generation]:
        """Generate the text; meanwhile take() returns the pieces that may be shown."""
        try:
            self._pending = yield from self._begin()
            yield from self.sources(self.session)
            while self.finish_reason is None:
                try:
                    token, logprobs = yield from self._next(self._pending)
                except NothingMayCome:
                    self._finish("stop" if self._matcher is not None and self._matcher.is_complete else "length")
                    break
                except ContextOverflowError:
                    if not self.tokens:
                        raise
                    self._finish("context")  # other sequences hold the rows that the next token needs
                    break
                self._accept(token, logprobs)
                self._count()
        finally:
            self._end()
        return self.result()

    def take(self) -> str:
        """The text that may be shown and has not been taken yet (what may begin a stop string is held back)."""
        begin, self._n_taken = self._n_taken, len(self._text)  # the thread that computes may append meanwhile
        return "".join(self._text[begin : self._n_taken])

    @property
    def logprobs(self) -> Sequence[TokenLogprob]:
        """Of the tokens so far; empty unless options.logprobs asks for them."""
        return self._logprobs

    @cached_property
    def bans(self) -> Bans | None:
        """What may not come next; None: nothing says so, or a grammar says what the text is."""
        if self._matcher is not None:
            return None
        return self.new_bans(None) or None

    def new_bans(self, source: Sequence[int] | None) -> Bans:
        """Bans of this text. source: ids that an encoder reads."""
        runtime = self.runtime
        return Bans(runtime.source.settings, self.options, self.prompt, source, self.ends, runtime.n_vocab)

    def _mask(self) -> Future[Mask] | Mask | None:
        """The tokens that may come next, for the sampler."""
        return self._next_mask if self.bans is None else self.bans.mask(self.tokens)

    def _begin(self) -> Task[list[int]]:
        """Take a sequence; returns the tokens of the prompt that it has no rows of."""
        yield from ()
        self.session = self.session or self.begin_session()
        self.session.lend(self)
        pending = self.session.keep_common(self.prompt)
        self._cached = self.session.length
        return pending

    def begin_session(self) -> Session:
        """A new session for the prompt, with cached rows of a common prefix if there are any."""
        found = prefixes_of(self.runtime).take(self.prompt, self.key) if self.options.cache_prompt else None
        session = found or Session.new(self.runtime)
        session.replaceable = True
        return session

    def sources(self, sequence: Any) -> Sequence[Encode]:
        """The sources that an encoder reads first for this sequence; none in decoder-only models."""
        return ()

    def _end(self) -> None:
        """Release the session, unless it is the user's."""
        if self.session is not None:
            self._n_rows = self.session.length
            if self.session.text is self:
                self.session.text = None
            if self._own_session:
                if self.options.cache_prompt:
                    prefixes_of(self.runtime).give(self.session, self.key)
                else:
                    self.session.close()
                self.session = None

    def _next(self, pending: Sequence[int]) -> Task[tuple[int, Logprobs | None]]:
        """Compute `pending` and choose the next token; logprobs are the model's own, before a logits_processor."""
        n_logprobs = self.options.logprobs
        if self.options.logits_processor is None:
            choice: tuple[int, Logprobs | None] = yield Decode(
                self.session, pending, self._sampler, n_logprobs, self._mask()
            )
            return choice
        (logits,) = yield Append([(self.session, pending)])
        return self._chosen(logits)

    def _chosen(self, logits: NDArray[np.float32]) -> tuple[int, Logprobs | None]:
        """The token chosen from a row of logits (vocab,), and its logprobs if asked for."""
        token = self._sampler.sample(self._processed(logits, self.tokens), MASKS.wait(self._mask()))
        n_logprobs = self.options.logprobs
        return token, core.token_logprobs(logits, token, n_logprobs) if n_logprobs else None

    def _accept(self, token: int, logprobs: Logprobs | None) -> None:
        """Append a chosen token, or end the text with it."""
        if self.options.max_tokens == 0:
            return self._finish("length")
        if token in self.ends:
            return self._finish(self.reason_of_end(len(self.tokens)))
        if logprobs is not None:
            self._logprobs.append(self._token_logprob(token, logprobs))
        self._pending = []
        self._append(token)
        if self._matcher is not None:
            self._append_forced(self._matcher)

    def reason_of_end(self, n: int) -> str:
        """The finish_reason of a text that an end token follows after n others."""
        return "stop" if self.bans is None or self.bans.forced(n) is None else "length"

    def _append_forced(self, matcher: Matcher) -> None:
        """Append the tokens that the grammar forces, which need no sampling (unless logprobs are asked for), and begin
        the mask of the next token."""
        for token in matcher.forced() if not self.options.logprobs and self.finish_reason is None else ():
            if self.finish_reason is None:
                self._append(token)
        if self.finish_reason is None:
            self._next_mask = MASKS.begin(matcher)

    def _append(self, token: int) -> None:
        """Append a token, and end the text if a stop string, the grammar, max_tokens or the context says so."""
        self.tokens.append(token)
        self._pending.append(token)
        self._sampler.accept([token])
        if self._matcher is not None:
            self._matcher.accept(token)
        if self._detokenizer:
            text = self._detokenizer.feed(token)
            self._n_characters += len(text)
            self._show(text)
        assert self.session is not None
        if self._filter.stopped:
            self.finish_reason = "stop"
        elif self._matcher is not None and self._matcher.is_done:
            self._finish("stop")
        elif len(self.tokens) == self.options.max_tokens:
            self._finish("length")
        elif self.session.length + len(self._pending) > self.runtime.n_ctx and not self._shift():
            self._finish("context")

    def _shift(self) -> bool:
        """Drop the older half of a full context behind the first n_keep tokens, with on_overflow="shift"; the rest is
        computed again, like a prompt. False: not asked for, or nothing to drop."""
        if self.options.on_overflow != "shift" or self.session is None:
            return False
        n_keep, n_prompt = self.options.n_keep, len(self.prompt)
        keep = n_prompt if n_keep < 0 else min(n_keep, n_prompt)
        if self._tokenizer and self.prompt[0] == self._tokenizer.bos_id:
            keep = max(keep, 1)
        context = [*self.session.tokens, *self._pending]
        dropped = (len(context) - keep) // 2
        if dropped == 0:
            return False
        self.shifted += dropped
        self._pending = context[:keep] + context[keep + dropped :]
        self.session.cut(0)
        return True

    def _count(self) -> None:
        """Add up what the steps took, and call on_progress."""
        seconds, rows, skipped = self.meter.take()
        if self._ttft == 0.0:
            self._prefill_seconds += seconds
            self._ttft = time.perf_counter() - self._called
        else:
            self._decode_seconds += seconds
        self._rows += rows
        self._skipped += skipped
        if self.options.on_progress is not None and self.tokens:
            self.options.on_progress("decode", len(self.tokens), self.options.max_tokens)

    def result(self) -> Generation:
        """The Generation so far."""
        held = self.session.length if self.session is not None else self._n_rows
        layers, cross = self.runtime.info["layers"], self.runtime.info.get("cross")
        per_token = sum(layer["bytes_per_token"] for layer in layers)
        computed, decoded = len(self.prompt) - self._cached, len(self.tokens) - 1
        return Generation(
            text="".join(self._text),
            tokens=tuple(self.tokens),
            finish_reason=self.finish_reason or "unfinished",
            truncated=self.finish_reason == "context",
            seed=self.seed,
            usage=Usage(len(self.prompt), self._cached, len(self.tokens), self.drafted, self.accepted),
            timings=Timings(
                ttft=self._ttft,
                prefill_tok_s=computed / self._prefill_seconds if self._prefill_seconds else 0.0,
                decode_tok_s=decoded / self._decode_seconds if decoded > 0 and self._decode_seconds else 0.0,
            ),
            cache=CacheUse(
                bytes=self.runtime.cache_bytes(held),
                bytes_per_token=per_token,
                modes=tuple(layer["mode"] for layer in layers),
                types=tuple(layer["type"] for layer in layers),
                ranks=tuple(layer.get("rank", 0) for layer in layers),
                residual_types=tuple(layer.get("residual_type", "") for layer in layers),
                skipped=self._skipped / self._rows if self._rows else 0.0,
                cross=None if cross is None else {**cross},
                lossy=self.runtime.lossy,
            ),
            logprobs=tuple(self._logprobs) if self.options.logprobs else None,
            shifted=self.shifted,
        )

    def adjust(self, logits: NDArray[np.float32], tokens: Sequence[int]) -> None:
        """Apply logits_processor and biases to logits (vocab,) after these tokens, in place, for beam search."""
        if self.options.logits_processor is not None:
            logits[:] = self._processed(logits, tokens)
        for token, bias in self.options.biases(self.ends).items():
            logits[token] += bias

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of tokens after the prompt; "" without a tokenizer."""
        if self._tokenizer is None:
            return ""
        detokenizer = self._new_detokenizer(self._tokenizer)
        return "".join([detokenizer.feed(token) for token in tokens]) + detokenizer.flush()

    def _new_detokenizer(self, tokenizer: Tokenizer) -> IncrementalDetokenizer:
        return tokenizer.detokenizer(self.prompt, skip_special_tokens=True, shown=self.options.show_tokens)

    def _processed(self, logits: NDArray[np.float32], tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits (vocab,) after these tokens, changed by the logits_processor if there is one."""
        if self.options.logits_processor is None:
            return logits
        ids = [*self.prompt, *tokens]
        logits = np.ascontiguousarray(self.options.logits_processor(ids, logits.copy()), np.float32)
        if logits.shape != (self.runtime.n_vocab,):
            raise ValueError(f"logits_processor returned shape {logits.shape}, not ({self.runtime.n_vocab},)")
        return logits

    def _token_logprob(self, token: int, logprobs: Logprobs) -> TokenLogprob:
        logprob, top = logprobs
        likeliest = tuple(TopLogprob(id, self._token_text(id), value) for id, value in top)
        return TokenLogprob(token, self._token_text(token), logprob, likeliest, self._n_characters)

    def _token_text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace") if self._tokenizer else ""

    def _show(self, text: str) -> None:
        self._text.append(self._filter.feed(text))

    def end_unfinished(self) -> None:
        """Show what was held back, after the task was ended early."""
        self._finish(None)

    def _finish(self, reason: str | None) -> None:
        """End for this reason; text that was held back as a possible stop string is shown."""
        self.finish_reason = reason
        if self._detokenizer:
            self._show(self._detokenizer.flush())
        if self._filter.stopped:
            self.finish_reason = "stop"
        else:
            self._text.append(self._filter.flush())


def run_texts(runtime: Runtime, runs: Sequence[Run], options: Options) -> list[Generation]:
    """Generate several texts together; results in order."""
    loop, call = loop_of(runtime), Call.of(options.on_progress)
    return loop.results([loop.submit(run.task(), call=call, meter=run.meter) for run in runs])
