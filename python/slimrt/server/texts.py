"""The texts of one request: generated in the engine's thread, sent as a whole or as events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from slimrt.generation.answers import Answer, Root
from slimrt.generation.beams import SearchedRun
from slimrt.generation.generate import Run
from slimrt.generation.languages import Translation, first_ids, translation
from slimrt.generation.text2text import EncodedRun, check_source, with_own
from slimrt.model import Model
from slimrt.openai.responses import Head, Json
from slimrt.results import Generation, TokenLogprob
from slimrt.runtime.kinds import require
from slimrt.server.engine_thread import EngineThread, Making, News
from slimrt.server.errors import refusal_of, timed_out
from slimrt.server.exchange import ClientGone, Exchange
from slimrt.server.limits import PING_EVERY, Limits, Place, Places
from slimrt.server.metrics import Metrics
from slimrt.server.protocol import CompletionRequest, TextRequest
from slimrt.server.text import Choice, Plan, counts, counts_so_far, measured

_GUESS = 256  # assumed length of a text without max_tokens, to estimate when the work is done


@dataclass
class _Text:
    """One text, with what is not sent yet. tokens: generated so far."""

    making: Making
    choice: Choice
    text: str = ""
    tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    result: Generation | None = None
    told: bool = False  # completely sent


def runs_of(model: Model, request: TextRequest, plan: Plan, called: float, key: str) -> list[Run]:
    """The runs of a plan, n for each prompt; for a thread. key: owner, for the prefix cache. Refusal 400: a prompt or
    option is not possible."""
    seed, n, runtime = model._seed_of(plan.options.seed), request.n, model._runtime
    try:
        if runtime.source.kind == "text2text":
            runs = list[Run](_encoded(model, request, plan, seed, called))
        elif plan.options.num_beams > 1:
            runs = [SearchedRun(runtime, ids, plan.options, seed, None, called) for ids in plan.prompts]
        elif n == 1:
            runs = [model._run(ids, plan.options, seed + i, None, called) for i, ids in enumerate(plan.prompts)]
        else:
            roots = [Root(ids) for ids in plan.prompts]
            runs = [Answer(runtime, root, i, plan.options, seed + at * n, called)
                    for at, root in enumerate(roots) for i in range(n)]  # fmt: skip
        for one in runs:
            one.needs  # noqa: B018  raises where the model has too few sequences
    except Exception as error:
        param = "messages" if "chat" in request.call else "prompt"
        raise refusal_of(error, param, request.schema_field) from error
    for one in runs:
        one.key = key
    return runs


class _SearchedTranslation(SearchedRun, EncodedRun):
    """A text that a beam search finds from a source."""


def translation_of(model: Model, request: CompletionRequest) -> Translation | None:
    """How an encoder-decoder reads the texts of a request; None: there are none, or the model is another.

    Refusal 400: a language that the model needs is missing; one is named that it does not know or is not told."""
    runtime, named = model._runtime, "target" if request.source is None else "source"
    texts = [isinstance(one, str) for one in request.prompts]
    try:
        if request.source is not None or request.target is not None:
            require(runtime, "text2text", to="translate")
            if not all(texts):
                raise ValueError("languages are told with texts: a prompt of ids is encoded as it is")
        if runtime.source.kind != "text2text" or not any(texts):
            return None
        return translation(runtime, request.source, request.target)
    except Exception as error:
        raise refusal_of(error, named) from error


def _encoded(model: Model, request: TextRequest, plan: Plan, seed: int, called: float) -> Iterator[EncodedRun]:
    """The runs for an encoder-decoder of texts."""
    given: Any = request.options | {"cache_prompt": False}  # decoder rows depend on the source too
    first = plan.first or first_ids(model._runtime)
    options = with_own(model._runtime, given, len(first), search=False)
    kind = EncodedRun if options.num_beams == 1 else _SearchedTranslation
    for at, ids in enumerate(plan.prompts):
        check_source(model._runtime, len(ids))
        for i in range(request.n):
            yield kind(model._runtime, ids, at * request.n + i, options, seed, called, first)


class Texts:
    """The texts of a request, from submission to the end of the response.

    Args:
        head: of the response.
        called: time.perf_counter() when the request came.
        place: the request's share of `places`; its tokens are counted down.
    """

    def __init__(
        self, request: TextRequest, plan: Plan, runs: Sequence[Run], exchange: Exchange, head: Head, called: float,
        place: Place, places: Places, metrics: Metrics, limits: Limits,
    ):  # fmt: skip
        self._request, self._plan, self._exchange, self._head = request, plan, exchange, head
        self._called, self._place, self._places, self._metrics, self._limits = called, place, places, metrics, limits
        self._texts = [
            _Text(Making(run, self._take), plan.choice(index, index // request.n)) for index, run in enumerate(runs)
        ]
        self._of = {one.making: one for one in self._texts}
        self._latest: dict[Making, float] = {}
        self._error: BaseException | None = None
        self._started = self._late = False
        most = plan.options.max_tokens
        place.tokens = sum(len(run.prompt) + (_GUESS if most < 0 else most) for run in runs)

    async def answer(self, thread: EngineThread, key: str, more: bool) -> None:
        """Generate the texts and respond. more: with timings and cache.

        Raises:
            Refusal: they did not begin within queue_timeout, or one failed. ClientGone.
        """
        makings = [one.making for one in self._texts]
        try:
            for one in makings:
                thread.submit(one, key)
            await self._wait_for_start()
            if self._request.stream:
                await self._stream(thread, more)
            else:
                await self._all_at_once(thread, more)
        except ClientGone:
            self._metrics.cancelled.labels("gone").inc()
            raise
        finally:
            thread.cancel(makings)
            self._place.tokens = 0

    async def _wait_for_start(self) -> None:
        """Wait until the model begins. A timeout is reported by status 503; but a stream that may wait longer than
        proxies do begins before these give up, and the timeout is then an event."""
        end = self._called + self._limits.queue_timeout
        ping = self._called + self._limits.silence if self._request.stream else end
        while not self._started and self._error is None:
            if await self._exchange.wait(min(end, ping) - time.perf_counter()) or self._started:
                continue
            if ping < end:
                await self._exchange.ping()
                ping += PING_EVERY
            else:
                self._metrics.cancelled.labels("queue").inc()
                raise timed_out(self._limits.queue_timeout, "queue_timeout")
        self._raise_error()

    async def _wait_for_text(self, thread: EngineThread) -> None:
        """Wait for the first text, so that errors before it have a status of their own; at most PING_EVERY."""
        while not any(one.text or one.result for one in self._texts) and self._error is None:
            if not await self._wait(thread, PING_EVERY):
                break
        self._raise_error()

    async def _stream(self, thread: EngineThread, more: bool) -> None:
        exchange, kind = self._exchange, "chat.completion.chunk" if "chat" in self._request.call else "text_completion"
        await self._wait_for_text(thread)
        await exchange.begin_events()
        for one in self._texts:
            if (opening := one.choice.opening()) is not None:
                await exchange.event(self._head.response(kind, [opening], self._so_far()))
        while not all(one.told for one in self._texts):
            for one in self._texts:
                for piece in self._pieces(one):
                    await exchange.event(self._head.response(kind, [piece], self._so_far()))
            self._raise_error()
            if not all(one.told for one in self._texts) and not await self._wait(thread, PING_EVERY):
                await exchange.ping()
        results = self._results()
        extra = measured(results) if more else {}
        if self._request.include_usage or more:
            usage = counts(self._plan, self._request.n, results)
            await exchange.event(self._head.response(kind, [], usage) | extra)
        await exchange.send_part(b"data: [DONE]\n\n")
        await exchange.end_events()

    def _so_far(self) -> Json | None:
        """The usage for a chunk, if it is wanted in each."""
        if not self._request.continuous_usage:
            return None
        return counts_so_far(self._plan, sum(one.tokens for one in self._texts))

    async def _all_at_once(self, thread: EngineThread, more: bool) -> None:
        while not all(one.result for one in self._texts):
            await self._wait(thread, self._limits.request_timeout)
            self._raise_error()
        kind = "chat.completion" if "chat" in self._request.call else "text_completion"
        results = self._results()
        choices = [self._marked(one.choice.whole(result, self._ended_early(result)), result)
                   for one, result in zip(self._texts, results, strict=True)]  # fmt: skip
        answer = self._head.response(kind, choices, counts(self._plan, self._request.n, results))
        await self._exchange.answer(answer | (measured(results) if more else {}))

    def _pieces(self, one: _Text) -> list[Json]:
        """The chunks for what is not sent yet of a text."""
        if one.told:
            return []
        text, tokens, one.text, one.logprobs = one.text, one.logprobs, "", []
        pieces = one.choice.piece(text, tokens) if text else []
        if pieces:
            tokens = []
        if one.result is None:
            one.logprobs = tokens  # their text is still held back
            return pieces
        one.told = True
        *added, last = one.choice.closing(one.result, tokens, self._ended_early(one.result))
        return [*pieces, *added, self._marked(last, one.result)]

    async def _wait(self, thread: EngineThread, seconds: float) -> bool:
        """Wait for news, at most so long. A request that exceeds request_timeout is ended early."""
        left = self._called + self._limits.request_timeout - time.perf_counter()
        if left <= 0 and not self._late:
            self.end_early(thread)
        return await self._exchange.wait(seconds if self._late else min(seconds, left))

    def end_early(self, thread: EngineThread) -> None:
        """End the texts with what they have, as if max_tokens were reached."""
        self._late = True
        self._metrics.cancelled.labels("timeout").inc()
        thread.cancel([one.making for one in self._texts])

    def _take(self, making: Making, news: News) -> None:
        """Take in what a step added to a text."""
        one = self._of[making]
        if not self._started:
            self._started = True
            self._metrics.queued.observe(news.at - self._called)
        one.text += news.text
        one.tokens += news.tokens
        one.logprobs += news.logprobs
        if news.tokens:
            self._count(making, news)
        if news.result is not None:
            one.result, usage = news.result, news.result.usage
            self._metrics.tokens.labels("reused").inc(usage.cached_tokens)
            self._metrics.preempted.inc(making.ticket.preemptions if making.ticket else 0)
            self._metrics.drafts.labels("drafted").inc(usage.drafted_tokens)
            self._metrics.drafts.labels("accepted").inc(usage.accepted_tokens)
            if self._latest.get(making):
                self._metrics.tokens.labels("prompt").inc(usage.prompt_tokens - usage.cached_tokens)
        self._error = self._error or news.error
        self._exchange.news.set()

    def _count(self, making: Making, news: News) -> None:
        self._metrics.tokens.labels("generated").inc(news.tokens)
        latest, self._latest[making] = self._latest.get(making), news.at
        done = news.tokens
        if latest is None:
            self._metrics.first_token.observe(news.at - self._called)
            done += len(making.run.prompt)
        else:
            self._metrics.between_tokens.observe(news.at - latest)
        self._places.count(self._place, done)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _ended_early(self, result: Generation) -> bool:
        return self._late and result.finish_reason == "unfinished"

    def _marked(self, choice: Json, result: Generation) -> Json:
        """The last chunk of a choice, marked if the text was cut off by a timeout."""
        return choice | {"timeout": True} if self._ended_early(result) else choice

    def _results(self) -> list[Generation]:
        return [one.result for one in self._texts if one.result is not None]
