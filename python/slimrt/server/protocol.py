"""Request bodies: from JSON to checked records. Unknown fields are refused by name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from slimrt.errors import UnsupportedError
from slimrt.generation.options import GenerateOptions, Options
from slimrt.openai import tools
from slimrt.openai.requests import OPTIONS, REFUSED, engine_options, refuse
from slimrt.openai.responses import Json
from slimrt.plumbing.arguments import is_deeper
from slimrt.plumbing.keywords import refusal
from slimrt.server.errors import Refusal, refusal_of, wrong
from slimrt.server.limits import Limits

IGNORED = frozenset(
    {
        "model", "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention",
    }
)  # fmt: skip
"""Fields that OpenAI's clients send and that are ignored: there is one model, and nothing is stored."""

_LIBRARY_ONLY = {"logits_processor", "show_tokens"}  # options of the library only
_NUMBERS = {one.name for one in Options.__dataclass_fields__.values() if type(one.default) in (int, float)}
_NUMBERS |= {"seed", "min_tokens", "no_repeat_ngram_size"}
_LANGUAGES = ("source", "target")
_RENAMED = {"mirostat_mode", "response_format"}  # become options of ours
_STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")  # the last one has no effect
_LONGEST_NAME = 64
_MOST_TOP = 20
_MOST_INPUTS = 2048
_LONE_SURROGATE = re.compile(rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]", re.DOTALL)
_Kind = TypeVar("_Kind")
_KINDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    str: "a text",
    list: "a list",
    dict: "an object",
}


@dataclass(frozen=True)
class TextRequest:
    """The common part of chat and completion requests.

    Attributes:
        options: of Model.generate.
        logprobs: most likely tokens to show at each position; None: no logprobs.
        include_usage: a stream ends with the counts of tokens. continuous_usage: each chunk has those so far.
        schema_field: the field that holds the JSON schema of the answer, if there is one.
    """

    call: str
    options: GenerateOptions
    n: int
    logprobs: int | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    schema_field: str


@dataclass(frozen=True)
class ChatRequest(TextRequest):
    """A request to /v1/chat/completions. asked: messages, tools and options for slimrt.openai.tools."""

    asked: tools.ChatRequest


@dataclass(frozen=True)
class CompletionRequest(TextRequest):
    """A request to /v1/completions. prompts: texts or token ids. source, target: languages, as Model.translate's."""

    prompts: Sequence[str | Sequence[int]]
    echo: bool
    source: str | None
    target: str | None


@dataclass(frozen=True)
class EmbeddingRequest:
    """A request to /v1/embeddings. encoding_format: "float" or "base64"."""

    inputs: Sequence[str | Sequence[int]]
    encoding_format: str


def read_object(body: bytes, limits: Limits) -> Json:
    """A body as a JSON object. Refusal 400: it is not JSON, not an object, or nested too deeply."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if _LONE_SURROGATE.search(body):  # msgspec's error would say that the input is truncated
            raise Refusal(400, "the body has half a surrogate pair, which no UTF-8 can write", "invalid_json") from None
        raise Refusal(400, f"the body is not JSON: {error}", "invalid_json") from None
    if not isinstance(value, dict):
        raise Refusal(400, "the body must be a JSON object", "invalid_json")
    if is_deeper(value, limits.max_depth):
        raise Refusal(400, f"the body is nested more than {limits.max_depth} deep", "invalid_json")
    if long := next((name for name in value if len(name) > _LONGEST_NAME), None):
        raise Refusal(400, f"there is no field {long[:_LONGEST_NAME]}...", "unknown_field")
    return value


def chat_request(call: str, given: Json, limits: Limits) -> ChatRequest:
    """Refusal 400: a field that is unknown, of a wrong type or out of bounds."""
    fields = _Fields(call, given, limits)
    messages = fields.required("messages", list)
    if not 1 <= len(messages) <= limits.max_messages:
        raise wrong("messages", f"give 1 to {limits.max_messages} messages, not {len(messages)}")
    variables = fields.take("chat_template_kwargs", dict)
    if any(isinstance(value, (dict, list)) for value in (variables or {}).values()):
        raise wrong("chat_template_kwargs", "chat_template_kwargs are texts, numbers, true or false")
    if given.get("chat_template") is not None:
        raise wrong("chat_template", "the chat template is the model's: a request cannot bring one")
    tokens, newer = fields.take("max_tokens", int), fields.take("max_completion_tokens", int)
    shows, top = fields.take("logprobs", bool), fields.take("top_logprobs", int) or 0
    if top and not shows:
        raise wrong("top_logprobs", "top_logprobs goes with logprobs: true")
    if not 0 <= top <= _MOST_TOP:
        raise wrong("top_logprobs", f"top_logprobs must be from 0 to {_MOST_TOP}, got {top}")
    logprobs = top if shows else None
    listed, chosen, several = (
        fields.take("tools", list),
        fields.take("tool_choice", object),
        fields.take("parallel_tool_calls", bool),
    )
    if len(listed or ()) > limits.max_tools:
        raise wrong("tools", f"there may be {limits.max_tools} tools, not {len(listed or ())}")
    effort = fields.take("reasoning_effort", str)
    common = fields.common(tokens if newer is None else newer, logprobs)
    asked = tools.ChatRequest(messages, common["options"], listed or (), chosen, several is not False, effort,
                              variables=variables or {})  # fmt: skip
    return ChatRequest(**common, asked=asked)


def completion_request(call: str, given: Json, limits: Limits) -> CompletionRequest:
    """Refusal 400: as chat_request."""
    fields = _Fields(call, given, limits)
    prompts = fields.texts("prompt", limits.max_texts)
    echo = bool(fields.take("echo", bool))
    tokens = fields.take("max_tokens", int)
    logprobs = fields.take("logprobs", int)
    if logprobs is not None and not 0 <= logprobs <= _MOST_TOP:
        raise wrong("logprobs", f"logprobs must be from 0 to {_MOST_TOP}, got {logprobs}")
    source, target = (fields.take(name, str) for name in _LANGUAGES)
    common = fields.common(16 if tokens is None else tokens, logprobs)
    if len(prompts) * common["n"] > limits.max_texts:
        raise wrong("n", f"{len(prompts)} prompts times n={common['n']} are more than {limits.max_texts} texts")
    return CompletionRequest(**common, prompts=prompts, echo=echo, source=source, target=target)


def embedding_request(call: str, given: Json, limits: Limits) -> EmbeddingRequest:
    """Refusal 400: as chat_request; dimensions, or another format."""
    fields = _Fields(call, given, limits)
    inputs = fields.texts("input", _MOST_INPUTS)
    encoding = fields.take("encoding_format", str) or "float"
    if encoding not in ("float", "base64"):
        raise wrong("encoding_format", f"encoding_format must be float or base64, got {encoding}")
    fields.refuse_rest()
    return EmbeddingRequest(inputs, encoding)


def take_fields(call: str, given: Json, kinds: Mapping[str, type[Any]], needed: Collection[str]) -> Json:
    """Fields by name and type, None for missing ones. Refusal 400: as chat_request."""
    fields = _Fields(call, given, Limits())
    taken = {name: (fields.required if name in needed else fields.take)(name, kind) for name, kind in kinds.items()}
    fields.refuse_rest()
    return taken


class _Fields:
    """The fields of a request, taken one by one; null counts as missing."""

    def __init__(self, call: str, given: Json, limits: Limits):
        self._call, self._limits = call, limits
        self._known: set[str] = set()  # fields that were looked for
        self._left = {name: value for name, value in given.items() if name not in IGNORED and value is not None}

    def take(self, name: str, kind: type[_Kind]) -> _Kind | None:
        """A field of this type; None: it is missing."""
        self._known.add(name)
        value = self._left.pop(name, None)
        if value is None or (isinstance(value, kind) and not (kind is int and isinstance(value, bool))):
            return value
        raise wrong(name, f"{name} must be {_KINDS[kind]}, got {value!r:.80}")

    def required(self, name: str, kind: type[_Kind]) -> _Kind:
        """A field of this type that must be present."""
        value = self.take(name, kind)
        if value is None:
            raise wrong(name, f"{self._call} needs {name}")
        return value

    def texts(self, name: str, most: int) -> list[Any]:
        """Texts or token ids: a list, also if the field has only one."""
        value = self.required(name, object)
        one = isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int))
        texts: Any = [value] if one else value
        if not isinstance(texts, list) or not all(isinstance(text, (str, list)) for text in texts):
            raise wrong(name, f"{name} must be a text or its token ids, or a list of these")
        if not 1 <= len(texts) <= most:
            raise wrong(name, f"{name} must be 1 to {most} texts, not {len(texts)}")
        return texts

    def common(self, max_tokens: int | None, logprobs: int | None) -> dict[str, Any]:
        """The fields of TextRequest; any field left is an option or refused, so take the call's own fields before."""
        n, stream = self.take("n", int), bool(self.take("stream", bool))
        n = 1 if n is None else n
        if not 1 <= n <= self._limits.max_texts:
            raise wrong("n", f"n must be from 1 to {self._limits.max_texts}, got {n}")
        wanted = self.take("stream_options", dict) or {}
        if others := [name for name in wanted if name not in _STREAM_OPTIONS]:
            raise wrong("stream_options", f"stream_options are {', '.join(_STREAM_OPTIONS)}, got {others[0]:.80}")
        for name, value in wanted.items():
            if value is not None and not isinstance(value, bool):
                raise wrong("stream_options", f"stream_options.{name} must be true or false, got {value!r:.80}")
        if wanted and not stream:
            raise wrong("stream_options", "stream_options goes with stream: true")
        self._check_bounds()
        options = self._options(max_tokens, logprobs)
        if options.get("num_beams", 1) > 1:
            if stream:
                raise wrong("stream", "beam search chooses its text at the end, which no stream can wait for: "
                            "leave out stream or num_beams")  # fmt: skip
            if n > 1:
                raise wrong("n", f"num_beams gives the likeliest text, not n={n}: leave out one of them")
        return {
            "call": self._call,
            "options": options,
            "n": n,
            "logprobs": logprobs,
            "stream": stream,
            "include_usage": bool(wanted.get("include_usage")),
            "continuous_usage": bool(wanted.get("continuous_usage_stats")),
            "schema_field": self._schema_field,
        }

    def refuse_rest(self) -> None:
        """Refuse the fields that have not been taken."""
        for name, value in self._left.items():
            if name not in REFUSED:
                raise wrong(name, refusal(self._call, name, self._known), "unknown_field")
            try:
                refuse(self._call, name, value)
            except UnsupportedError as error:
                raise wrong(name, str(error), "unsupported") from None

    def _check_bounds(self) -> None:
        stop = self._left.get("stop")
        if isinstance(stop, list) and len(stop) > self._limits.max_stops:
            raise wrong("stop", f"stop may be {self._limits.max_stops} texts, not {len(stop)}")
        never = self._left.get("suppress_tokens")
        if isinstance(never, list) and len(never) > self._limits.max_biases:
            raise wrong("suppress_tokens", f"suppress_tokens may be {self._limits.max_biases}, not {len(never)}")
        bias = self._left.get("logit_bias")
        if not isinstance(bias, dict):
            return
        if len(bias) > self._limits.max_biases:
            raise wrong("logit_bias", f"logit_bias may name {self._limits.max_biases} tokens, not {len(bias)}")
        if odd := next((key for key in bias if not re.fullmatch(r"[0-9]{1,9}", key)), None):
            raise wrong("logit_bias", f"logit_bias maps token ids to numbers, got '{odd:.80}'")

    def _options(self, max_tokens: int | None, logprobs: int | None) -> GenerateOptions:
        options_of_requests = (OPTIONS - _LIBRARY_ONLY) | _RENAMED
        for name, value in self._left.items():
            if name not in options_of_requests and name not in REFUSED:
                raise wrong(name, refusal(self._call, name, options_of_requests | self._known), "unknown_field")
            if isinstance(value, bool) and name in _NUMBERS:  # bool is a subclass of int
                raise wrong(name, f"{name} must be a number, got {value!r}")
            try:
                engine_options(self._call, {name: value}, None)
            except (UnsupportedError, TypeError, ValueError) as error:
                raise wrong(name, str(error), "unsupported") from None
        options: GenerateOptions = {"cache_prompt": True, **engine_options(self._call, self._left, max_tokens)}
        if logprobs is not None:
            options["logprobs"] = max(logprobs, 1)
        try:
            Options(**options)
        except Exception as error:
            raise refusal_of(error, schema_field=self._schema_field) from None
        return options

    @property
    def _schema_field(self) -> str:
        return "response_format" if "response_format" in self._left else "json_schema"
