"""What to generate for a text request, and how the texts become choices of the response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slimrt.generation.options import Options
from slimrt.model import Model
from slimrt.openai.responses import (
    Json,
    chat_choice,
    chat_logprobs,
    chat_piece,
    chat_reason,
    completion_choice,
    completion_logprobs,
    finish_reason,
)
from slimrt.openai.tools import Chat, constrain
from slimrt.results import Generation, TokenLogprob
from slimrt.runtime.kinds import require
from slimrt.server.errors import refusal_of
from slimrt.server.protocol import ChatRequest, CompletionRequest


@dataclass(frozen=True)
class Plan:
    """The texts to generate for a request.

    Attributes:
        prompts: ids; n texts are generated for each.
        choice: (index of the choice, index of its prompt) -> its Choice.
        details: additional fields of the usage, from the results.
        first: ids that an encoder-decoder's outputs begin with; None: those that any has.
    """

    prompts: Sequence[list[int]]
    options: Options
    choice: Callable[[int, int], Choice]
    details: Callable[[Sequence[Generation]], Json] = lambda _: {}
    first: Sequence[int] | None = None


class Choice(Protocol):
    """One text as a choice of the response."""

    def opening(self) -> Json | None:
        """The chunk before all text, if there is one."""

    def piece(self, text: str, tokens: Sequence[TokenLogprob]) -> list[Json]:
        """The chunks for a piece of text and its new tokens; empty if the piece is held back."""

    def closing(self, result: Generation, tokens: Sequence[TokenLogprob], late: bool) -> list[Json]:
        """The last chunks. late: the text was cut off by a timeout, which is reported as "length"."""

    def whole(self, result: Generation, late: bool) -> Json:
        """The choice in a response without streaming."""


def plan_chat(model: Model, request: ChatRequest) -> Plan:
    """The plan of a chat request. Refusal: for the errors of slimrt.openai.tools.constrain."""
    try:
        require(model._runtime, "text", to="chat")  # first: what a model is for, then its template
        chat = constrain(model._runtime, request.asked)
    except Exception as error:
        raise refusal_of(error, "messages", request.schema_field) from error
    bytes_of = model.tokenizer.token_bytes

    def shown(tokens: Sequence[TokenLogprob]) -> Json | None:
        return None if request.logprobs is None else chat_logprobs(tokens, request.logprobs, bytes_of)

    return Plan([chat.ids], Options(**chat.options), lambda index, _: ChatChoice(index, chat, shown), chat.details)


def plan_completion(
    model: Model, request: CompletionRequest, scored: Sequence[Scored], first: Sequence[int] | None
) -> Plan:
    """The plan of a completion request. scored: each prompt, with what echo shows of it. first: Plan's."""
    bytes_of = model.tokenizer.token_bytes if request.logprobs is not None else None

    def shown(tokens: Sequence[TokenLogprob], **before: Any) -> Json | None:
        if bytes_of is None or request.logprobs is None:
            return None
        return completion_logprobs(tokens, request.logprobs, bytes_of, **before)

    def choice(index: int, prompt: int) -> Choice:
        return CompletionChoice(index, scored[prompt], shown)

    return Plan([one.ids for one in scored], Options(**request.options), choice, first=first)


@dataclass(frozen=True)
class Scored:
    """A prompt, with what the response shows of it if it is echoed.

    Attributes:
        text: "" without echo.
        first: the text of the first token, which has no probability; None: without logprobs of the prompt.
        tokens: the other tokens with their logprobs.
    """

    ids: list[int]
    text: str = ""
    first: str | None = None
    tokens: Sequence[TokenLogprob] = ()


@dataclass
class ChatChoice:
    """A choice of a chat.completion, or of its chunks."""

    index: int
    chat: Chat
    shown: Callable[[Sequence[TokenLogprob]], Json | None]

    def __post_init__(self) -> None:
        self._parser = self.chat.parser()

    def opening(self) -> Json:
        return chat_piece(self.index, {"role": "assistant", "content": ""}, None, None)

    def piece(self, text: str, tokens: Sequence[TokenLogprob]) -> list[Json]:
        return self._chunks(self._parser.feed(text), tokens)

    def closing(self, result: Generation, tokens: Sequence[TokenLogprob], late: bool) -> list[Json]:
        told = self._chunks(self._parser.flush(), ())
        reason = "length" if late else chat_reason(result, self._parser.has_called)
        return [*told, chat_piece(self.index, {}, self.shown(tokens) if tokens else None, reason)]

    def whole(self, result: Generation, late: bool) -> Json:
        message, reason = self.chat.message(result)
        return chat_choice(self.index, message, "length" if late else reason, self.shown(result.logprobs or ()))

    def _chunks(self, deltas: Sequence[Json], tokens: Sequence[TokenLogprob]) -> list[Json]:
        """One chunk for each delta, the first with the tokens' logprobs."""
        shown = self.shown(tokens) if tokens else None
        return [chat_piece(self.index, delta, None if i else shown, None) for i, delta in enumerate(deltas)]


@dataclass
class CompletionChoice:
    """A choice of a text_completion, or of its chunks."""

    index: int
    prompt: Scored
    shown: Callable[..., Json | None]

    def opening(self) -> Json | None:
        prompt = self.prompt
        if not prompt.text and prompt.first is None:
            return None
        shown = None if prompt.first is None else self.shown((), first=prompt.first, prompt=prompt.tokens)
        return completion_choice(self.index, prompt.text, shown, None)

    def piece(self, text: str, tokens: Sequence[TokenLogprob]) -> list[Json]:
        return [completion_choice(self.index, text, self._shown_next(tokens), None)]

    def closing(self, result: Generation, tokens: Sequence[TokenLogprob], late: bool) -> list[Json]:
        return [completion_choice(self.index, "", self._shown_next(tokens), _reason(result, late))]

    def whole(self, result: Generation, late: bool) -> Json:
        prompt = self.prompt
        shown = self.shown(result.logprobs or (), offset=len(prompt.text), first=prompt.first, prompt=prompt.tokens)
        return completion_choice(self.index, prompt.text + result.text, shown, _reason(result, late))

    def _shown_next(self, tokens: Sequence[TokenLogprob]) -> Json | None:
        return self.shown(tokens, offset=len(self.prompt.text)) if tokens else None


def _reason(result: Generation, late: bool) -> str | None:
    """OpenAI's finish_reason."""
    return "length" if late else finish_reason(result)


def counts_so_far(plan: Plan, completion: int) -> Json:
    """The usage of an unfinished response with this many completion tokens; each prompt counts once."""
    prompt = sum(len(one) for one in plan.prompts)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def counts(plan: Plan, n: int, results: Sequence[Generation]) -> Json:
    """The usage of a complete response, whose results are n for each prompt, in order."""
    cached = sum(one.usage.cached_tokens for one in results[::n])
    total = counts_so_far(plan, sum(one.usage.completion_tokens for one in results))
    return total | {"prompt_tokens_details": {"cached_tokens": cached}} | plan.details(results)


def measured(results: Sequence[Generation]) -> Json:
    """Timings and cache of each text, for clients that ask for them (header x-slimrt: 1)."""
    return {"timings": [one.timings.to_dict() for one in results], "cache": [one.cache.to_dict() for one in results]}
