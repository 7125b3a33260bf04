"""The OpenAI-compatible methods of slimrt.Model, with the names and defaults of llama-cpp-python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from slimrt.errors import UnsupportedError
from slimrt.generation.options import GenerateOptions
from slimrt.generation.scored import prompt_logprobs
from slimrt.generation.stream import Stream
from slimrt.openai.requests import TOOLS, engine_options, refuse
from slimrt.openai.responses import (
    Head,
    Json,
    chat_choice,
    chat_logprobs,
    chat_piece,
    chat_reason,
    completion_choice,
    completion_logprobs,
    embeddings,
    finish_reason,
    usage,
)
from slimrt.plumbing.arguments import check_switch, positive, unknown, whole
from slimrt.plumbing.keywords import of_model, refusal
from slimrt.results import Generation, TokenLogprob
from slimrt.runtime.kinds import continues_texts
from slimrt.runtime.session import as_prompt, is_batch
from slimrt.tasks import Text, Texts
from slimrt.text_generation import TextGeneration

if TYPE_CHECKING:
    from slimrt.openai.tools import Chat

_COMPLETION, _CHAT, _CHUNK = "text_completion", "chat.completion", "chat.completion.chunk"
_Choice = Callable[[str, Sequence[TokenLogprob], str | None], Json]
"""(a piece of text, the tokens new with it, the finish reason or None) -> the choice of a chunk."""


class OpenAIMethods(TextGeneration):
    """Requests and responses as dictionaries in OpenAI's format, by the same engine as generate."""

    @overload
    def create_completion(
        self, prompt: Text | Texts, *, max_tokens: int | None = 16, echo: bool = False, logprobs: int | None = None,
        n: int = 1, stream: Literal[False] = False, stream_options: Mapping[str, bool] | None = None,
        model: str | None = None, **options: Any,
    ) -> Json: ...  # fmt: skip

    @overload
    def create_completion(
        self, prompt: Text | Texts, *, max_tokens: int | None = 16, echo: bool = False, logprobs: int | None = None,
        n: int = 1, stream: bool, stream_options: Mapping[str, bool] | None = None,
        model: str | None = None, **options: Any,
    ) -> Any: ...  # fmt: skip

    @of_model
    def create_completion(
        self, prompt: Text | Texts, *, max_tokens: int | None = 16, echo: bool = False, logprobs: int | None = None,
        n: int = 1, stream: bool = False, stream_options: Mapping[str, bool] | None = None,
        model: str | None = None, **options: Any,
    ) -> Json | Iterator[Json]:  # fmt: skip
        """Continue a prompt: returns a text_completion. Calling the model is the same.

        Args:
            prompt: text or token ids, or a list of these, whose choices come one prompt after the other.
            max_tokens: 16 by default; None or -1: until the model ends the text or the context is full.
            echo: begin the text with the prompt; with logprobs the prompt's tokens are scored too.
            logprobs: how many of the most likely tokens to report at each position, besides the chosen one.
            n: answers to each prompt; choice i uses seed + i. They are decoded n_seqs at a time.
            stream: return an iterator of chunks. stream_options: {"include_usage": True} adds one with the usage.
            model: the name in the response; None: the file's.
            response_format: {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": ...}}.
            options: as generate, with its defaults (temperature 0.8); None means the default.

        Raises:
            UnsupportedError: an option of OpenAI or llama-cpp-python that slimrt lacks. TypeError: an unknown option.
            Others as generate.
        """
        continues_texts(self._runtime.source)
        check_switch("echo", echo)
        asked = engine_options("create_completion", options, max_tokens)
        count = None if logprobs is None or logprobs is False else _not_negative("logprobs", logprobs)
        ids = [as_prompt(self._runtime, one) for one in _listed(prompt)]
        begun = [self._echoed(one, its) if echo else "" for one, its in zip(_listed(prompt), ids, strict=True)]
        head = Head.new("cmpl", model or self._runtime.source.name)
        usage_too = _wants_usage(stream, stream_options)
        asked |= {"logprobs": 0 if count is None else max(count, 1)}
        if stream:
            _require_one_text(len(ids), n)
            if echo and count is not None:
                raise UnsupportedError("create_completion has no echo with logprobs where stream=True: drop one")
            return self._completion_chunks(head, ids[0], asked, begun[0], count, usage_too)
        answers = self._several(ids, n, asked)
        choices = list[Json]()
        for its, text, results in zip(ids, begun, answers, strict=True):
            before = text if echo else None
            for result in results:
                shown = None if count is None else self._completion_logprobs(its, result, count, before)
                choices.append(completion_choice(len(choices), text + result.text, shown, finish_reason(result)))
        return head.response(_COMPLETION, choices, usage([one[0] for one in answers], list(chain(*answers))))

    __call__ = create_completion

    @overload
    def create_chat_completion(
        self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int | None = None, temperature: float | None = 0.2,
        logprobs: bool | None = None, top_logprobs: int | None = None, n: int = 1, stream: Literal[False] = False,
        stream_options: Mapping[str, bool] | None = None, model: str | None = None, **options: Any,
    ) -> Json: ...  # fmt: skip

    @overload
    def create_chat_completion(
        self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int | None = None, temperature: float | None = 0.2,
        logprobs: bool | None = None, top_logprobs: int | None = None, n: int = 1, stream: bool,
        stream_options: Mapping[str, bool] | None = None, model: str | None = None, **options: Any,
    ) -> Any: ...  # fmt: skip

    @of_model
    def create_chat_completion(
        self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int | None = None, temperature: float | None = 0.2,
        logprobs: bool | None = None, top_logprobs: int | None = None, n: int = 1, stream: bool = False,
        stream_options: Mapping[str, bool] | None = None, model: str | None = None, **options: Any,
    ) -> Json | Iterator[Json]:  # fmt: skip
        """Generate the assistant's next message: returns a chat.completion.

        Args:
            messages: {"role": "user", "content": "..."}, in order.
            max_tokens: None or -1: until the model ends the message or the context is full. max_completion_tokens means
                the same.
            temperature: 0.2 by default.
            logprobs: report the tokens' log probabilities, with the top_logprobs most likely tokens at each position.
            tools: {"type": "function", "function": {"name", "description", "parameters"}}, which the model may call:
                the message then has tool_calls, whose arguments follow the schemas in `parameters`. tool_choice:
                "auto", "none", "required", or a function; parallel_tool_calls: allow several calls in a message.
            reasoning_effort: how much the model is to think, if its chat template has such a setting.
            chat_template, chat_template_kwargs: as in chat. Thoughts that the template marks become reasoning_content.
            Others as create_completion, and its errors; also UnsupportedError for a model without a chat template.
        """
        from slimrt.openai.tools import ChatRequest, constrain  # imports jinja2, which takes time

        continues_texts(self._runtime.source)
        newer = options.pop("max_completion_tokens", None)
        max_tokens = max_tokens if newer is None else newer
        template, variables = options.pop("chat_template", None), options.pop("chat_template_kwargs", None)
        tools = {name: value for name in TOOLS if (value := options.pop(name, None)) is not None}
        asked = engine_options("create_chat_completion", options | {"temperature": temperature}, max_tokens)
        check_switch("logprobs", logprobs)
        count = _not_negative("top_logprobs", top_logprobs or 0)
        if count and not logprobs:
            raise ValueError("top_logprobs goes with logprobs=True")
        asked |= {"logprobs": max(count, 1) if logprobs else 0}
        request = ChatRequest(messages, asked, chat_template=template, variables=variables or {}, **tools)
        chat = constrain(self._runtime, request)
        head = Head.new("chatcmpl", model or self._runtime.source.name)
        usage_too = _wants_usage(stream, stream_options)
        bytes_of = self._runtime.source.tokenizer.token_bytes

        def shown(tokens: Sequence[TokenLogprob]) -> Json | None:
            return chat_logprobs(tokens, count, bytes_of) if logprobs else None

        if stream:
            _require_one_text(1, n)
            return _chat_chunks(head, self.stream(chat.ids, **chat.options), chat, shown, usage_too)
        (results,) = self._several([chat.ids], n, chat.options)
        choices = [
            chat_choice(index, *chat.message(one), shown(one.logprobs or ())) for index, one in enumerate(results)
        ]
        return head.response(_CHAT, choices, usage(results[:1], results) | chat.details(results))

    @of_model
    def create_embedding(
        self, input: Text | Texts, *, model: str | None = None, encoding_format: str = "float", **options: Any
    ) -> Json:
        """Embed texts as vectors of length 1 (see embed): returns a list.

        Args:
            input: a text or its token ids, or a list of these.
            encoding_format: "float" or "base64".

        Raises:
            UnsupportedError: dimensions, or another format. Others as embed.
        """
        for name, value in options.items():
            if name == "dimensions":
                refuse("create_embedding", name, value)
            elif name != "user":
                raise TypeError(refusal("create_embedding", name, {"input", "model", "encoding_format"}))
        if encoding_format not in ("float", "base64"):
            raise UnsupportedError(unknown("encoding_format", encoding_format, ["float", "base64"]))
        ids = [self._read_ids(one) for one in _listed(input)]
        vectors = np.asarray(self.embed(ids), np.float32)
        name = model or self._runtime.source.name
        return embeddings(vectors, sum(map(len, ids)), name, encoding_format)

    def _several(self, prompts: list[list[int]], n: int, options: GenerateOptions) -> list[list[Generation]]:
        """n answers to each prompt; fewer where a beam search finds no more."""
        if positive("n", n) == 1:
            return [[one] for one in self._generate(prompts, None, None, options)]
        return list(self._generate(prompts, n, None, options))

    def _echoed(self, prompt: Text, ids: list[int]) -> str:
        """A prompt as text."""
        return prompt if isinstance(prompt, str) else self._runtime.source.tokenizer.decode(ids, True)

    def _completion_logprobs(self, prompt: list[int], result: Generation, count: int, before: str | None) -> Json:
        """Logprobs of a completion. before: the prompt's text, if it is echoed: its tokens are scored too."""
        bytes_of = self._runtime.source.tokenizer.token_bytes
        tokens = result.logprobs or ()
        if before is None:
            return completion_logprobs(tokens, count, bytes_of)
        first, scored = prompt_logprobs(self._runtime, prompt, max(count, 1))
        return completion_logprobs(tokens, count, bytes_of, offset=len(before), first=first, prompt=scored)

    def _completion_chunks(
        self, head: Head, prompt: list[int], options: GenerateOptions, begun: str, count: int | None, counts: bool
    ) -> Iterator[Json]:
        bytes_of = self._runtime.source.tokenizer.token_bytes

        def piece(text: str, tokens: Sequence[TokenLogprob], reason: str | None) -> Json:
            shown = None if count is None or not tokens else completion_logprobs(tokens, count, bytes_of)
            return completion_choice(0, text, shown, reason)

        first = head.response(_COMPLETION, [completion_choice(0, begun, None, None)]) if begun else None
        return _chunks(head, _COMPLETION, self.stream(prompt, **options), piece, first, counts)


def _chunks(head: Head, kind: str, stream: Stream, choice: _Choice, first: Json | None, counts: bool) -> Iterator[Json]:
    """The chunks of a text as it is generated; closing the iterator stops the work."""
    with stream:
        if first is not None:
            yield first
        told = 0
        for text in stream:
            tokens = (stream.result.logprobs or ())[told:]
            told += len(tokens)
            yield head.response(kind, [choice(text, tokens, None)])
        result = stream.result
        yield head.response(kind, [choice("", (result.logprobs or ())[told:], finish_reason(result))])
        if counts:
            yield head.response(kind, [], usage([result], [result]))


def _chat_chunks(
    head: Head, stream: Stream, chat: Chat, shown: Callable[[Sequence[TokenLogprob]], Json | None], counts: bool
) -> Iterator[Json]:
    """The chunks of a message as it is generated; closing the iterator stops the work."""
    with stream:
        yield head.response(_CHUNK, [chat_piece(0, {"role": "assistant"}, None, None)])
        parser, told = chat.parser(), 0
        for text in chain(stream, [None]):
            for delta in parser.flush() if text is None else parser.feed(text):
                tokens = (stream.result.logprobs or ())[told:]
                told += len(tokens)
                yield head.response(_CHUNK, [chat_piece(0, delta, shown(tokens) if tokens else None, None)])
        result = stream.result
        rest, reason = (result.logprobs or ())[told:], chat_reason(result, parser.has_called)
        yield head.response(_CHUNK, [chat_piece(0, {}, shown(rest) if rest else None, reason)])
        if counts:
            yield head.response(_CHUNK, [], usage([result], [result]) | chat.details([result]))


def _listed(prompt: Any) -> list[Any]:
    return list(prompt) if is_batch(prompt) else [prompt]


def _not_negative(name: str, value: Any) -> int:
    if whole(name, value) < 0:
        raise ValueError(f"{name} must not be negative, got {value}")
    return whole(name, value)


def _require_one_text(prompts: int, n: int) -> None:
    if prompts * positive("n", n) != 1:
        raise UnsupportedError(f"stream=True gives one text, not {prompts * n}: ask for each by itself")


def _wants_usage(stream: bool, options: Mapping[str, bool] | None) -> bool:
    check_switch("stream", stream)
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"stream_options maps names to true or false, got {options!r}")
    for name, value in (options or {}).items():
        if name != "include_usage":
            raise UnsupportedError(unknown("stream_options", name, ["include_usage"]))
        check_switch(name, value)
    if options and not stream:
        raise ValueError("stream_options goes with stream=True")
    return bool((options or {}).get("include_usage"))
