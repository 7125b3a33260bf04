"""Tools and thoughts of chat requests: the grammar of the answer, and the parser of its parts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from slimrt.errors import ChatError, GrammarError, UnsupportedError
from slimrt.generation.grammar import compile_grammar, json_rules, quoted, source_of, vocabulary_of
from slimrt.generation.options import GenerateOptions, Options
from slimrt.generation.schemas import named
from slimrt.generation.waiting import WaitingGrammar, split_controls
from slimrt.openai.answer import AnswerParser, Parser, joined
from slimrt.openai.harmony import HarmonyParser, harmony_source, thought_tokens
from slimrt.openai.responses import chat_reason
from slimrt.plumbing.arguments import DEEPEST, is_deeper, unknown
from slimrt.results import Generation
from slimrt.runtime.runtime import Runtime
from slimrt.tokenizer.channels import MARKS, has_channels
from slimrt.tokenizer.chat import Template, find_template, render_chat, stops
from slimrt.tokenizer.messages import checked_messages
from slimrt.tokenizer.tokenizer import Tokenizer
from slimrt.tokenizer.tool_format import (
    ID,
    ID_PATTERN,
    INDEX,
    INDEX_LENGTH,
    Thoughts,
    ToolFormat,
    instructions,
    takes_system,
    thoughts_of,
    tool_format,
)
from slimrt.tokenizer.tool_history import history

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_PATTERNS = {ID: f"/{ID_PATTERN}/", INDEX: f"/[0-9]{{1,{INDEX_LENGTH}}}/"}
_SPACE = r"/[ \n]{0,4}/"  # allowed between thoughts and the answer


@dataclass(frozen=True)
class ChatRequest:
    """The messages, tools and options of a chat request, in OpenAI's format.

    Attributes:
        options: of generate, including json_schema, grammar, regex or choice if the request has them (requests.py).
        reasoning_effort: how much the model is to think, for templates with such a setting.
    """

    messages: Sequence[Mapping[str, Any]]
    options: GenerateOptions
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    chat_template: Template | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Chat:
    """A chat request ready to be generated.

    Attributes:
        ids: the prompt.
        options: of generate.
        parser: makes a parser, one for each answer.
        thought: counts the thought tokens of an answer; None: the model writes no thoughts.
    """

    ids: list[int]
    options: GenerateOptions
    parser: Callable[[], Parser]
    thought: Callable[[Sequence[int]], int] | None

    def message(self, result: Generation) -> tuple[dict[str, Any], str | None]:
        """The message of an answer, and its finish_reason, in OpenAI's format."""
        parser = self.parser()
        message = joined([*parser.feed(result.text), *parser.flush()])
        return message, chat_reason(result, parser.has_called)

    def details(self, results: Sequence[Generation]) -> dict[str, Any]:
        """completion_tokens_details for the usage; empty if the model writes no thoughts."""
        if self.thought is None:
            return {}
        return {"completion_tokens_details": {"reasoning_tokens": sum(self.thought(one.tokens) for one in results)}}


@dataclass(frozen=True)
class _Form:
    """How a model's answers are written.

    Attributes:
        tools: that may be called; required: one must be.
        calls: format of tool calls, if any. thoughts, opened: as in AnswerParser. harmony: gpt-oss' format.
    """

    tools: Sequence[Mapping[str, Any]]
    required: bool
    calls: ToolFormat | None
    thoughts: Thoughts | None
    opened: bool
    harmony: bool

    @property
    def marks(self) -> Sequence[str]:
        """Texts with the control tokens that the parser needs to see."""
        if self.harmony:
            return MARKS
        thoughts = [self.thoughts.begin, self.thoughts.end] if self.thoughts else []
        return [*(self.calls.texts if self.calls else ()), *thoughts]

    def parser(self) -> Parser:
        names = [_function(one)["name"] for one in self.tools]
        return HarmonyParser(names) if self.harmony else AnswerParser(self.thoughts, self.opened, self.calls, names)

    def thought(self, tokenizer: Tokenizer) -> Callable[[Sequence[int]], int] | None:
        if self.harmony:
            return partial(thought_tokens, tokenizer)
        return partial(_thought, tokenizer, self.thoughts, self.opened) if self.thoughts else None


def _thought(tokenizer: Tokenizer, thoughts: Thoughts, opened: bool, tokens: Sequence[int]) -> int:
    """How many of an answer's tokens are thoughts, with the marks around them."""
    begin, end, data = thoughts.begin.encode(), thoughts.end.encode(), b""
    for n, token in enumerate(tokens, 1):
        piece = tokenizer.token_bytes(token)
        data += piece
        if not opened and not data.lstrip().startswith(begin[: len(data.lstrip())]):
            return 0
        if end in data[-len(end) - len(piece) :]:
            return n
    return len(tokens)


def constrain(runtime: Runtime, request: ChatRequest) -> Chat:
    """Prepare a chat request: the prompt, the grammar of the answer, and its parser. It runs no model; it takes some
    milliseconds, and about a second the first time for a model.

    Raises:
        GrammarError: a schema that is wrong or cannot be enforced. TypeError: malformed tools.
        UnsupportedError: an unknown tool_choice; no chat template; llguidance is missing.
        Others as slimrt.tokenizer.chat.render_chat.
    """
    tokenizer = runtime.source.tokenizer
    tools, required = chosen_tools(request)
    template = find_template(tokenizer, request.chat_template, tools=bool(tools))
    harmony = has_channels(template)
    thoughts = None if harmony else thoughts_of(template)
    calls = any(isinstance(one, Mapping) and one.get("tool_calls") for one in request.messages)
    format = tool_format(tokenizer, template) if tools or calls else None
    ids = _prompt(tokenizer, template, request, tools, format)
    opened = thoughts is not None and tokenizer.decode(ids[-32:]).rstrip().endswith(thoughts.begin)
    options: dict[str, Any] = {**request.options}
    if ends := stops(tokenizer, request.chat_template):
        options["stop"] = [*Options(**request.options).stops, *ends]
    form = _Form(tools, required, format if tools else None, thoughts, opened, harmony)
    shown = [tokenizer.special_tokens[one] for text in form.marks for one in split_controls(tokenizer, text)
             if one in tokenizer.special_tokens]  # fmt: skip
    options["show_tokens"] = frozenset(shown) - tokenizer.eog_ids
    constraint = {name: options.pop(name) for name in Options(**request.options).constraint}
    if tools or constraint:
        options["grammar"] = _grammar(runtime, form, request.parallel_tool_calls, constraint)
    return Chat(ids, cast(GenerateOptions, options), form.parser, form.thought(tokenizer))


def chosen_tools(request: ChatRequest) -> tuple[list[Mapping[str, Any]], bool]:
    """The tools that may be called, and whether one must be.

    Raises:
        TypeError: malformed tools. UnsupportedError: an unknown tool_choice.
        ValueError: two tools with one name; a tool_choice that names none of the tools; either is nested too deeply.
    """
    if not isinstance(request.tools or (), Iterable):
        raise TypeError(f"tools must be a list, got {request.tools!r}")
    tools, choice = list(request.tools or ()), request.tool_choice
    for what, value in (("tools", tools), ("tool_choice", choice)):
        if is_deeper(value, DEEPEST):
            raise ValueError(f"{what}: nested more than {DEEPEST} deep")
    names = [str(_function(one)["name"]) for one in tools]
    if len(set(names)) < len(names):
        raise ValueError("tools: two have the same name")
    if choice in (None, "auto"):
        return tools, False
    if choice == "none":
        return [], False
    if not tools:
        raise ValueError(f"tool_choice={choice!r} goes with tools")
    if choice == "required":
        return tools, True
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name is None:
        raise UnsupportedError(unknown("tool_choice", choice, ["none", "auto", "required", "a function"]))
    if name not in names:
        raise ValueError(f"tool_choice names {name!r}, which is none of the tools: {', '.join(names)}")
    return [tools[names.index(name)]], True


def _function(tool: Any) -> Mapping[str, Any]:
    """The function of a tool. TypeError, UnsupportedError, GrammarError: it is malformed."""
    if not isinstance(tool, Mapping) or not isinstance(function := tool.get("function"), Mapping):
        raise TypeError(f"tools: a tool is {{'type': 'function', 'function': {{'name', 'parameters'}}}}, got {tool!r}")
    if tool.get("type", "function") != "function":
        raise UnsupportedError(unknown("tool of type", tool.get("type"), ["function"]))
    if not isinstance(function.get("name"), str) or not _NAME.fullmatch(function["name"]):
        raise GrammarError(f"tools: a name has 1 to 64 letters, digits, _, . and -, got {function.get('name')!r}")
    return function


def _prompt(
    tokenizer: Tokenizer,
    template: str,
    request: ChatRequest,
    tools: Sequence[Mapping[str, Any]],
    format: ToolFormat | None,
) -> list[int]:
    messages: list[Any] = checked_messages(request.messages, template, answer=True)
    variables = dict(request.variables or {})
    if request.reasoning_effort is not None:
        if "reasoning_effort" not in template:
            raise UnsupportedError(
                f"reasoning_effort={request.reasoning_effort!r} is not supported: the model's chat template does not "
                "ask for it; say it in the messages"
            )
        variables["reasoning_effort"] = request.reasoning_effort
    if format is not None:
        messages = history(messages, format)
    if tools and format is not None and format.origin == "prompt":
        messages = _instructed(tokenizer, template, messages, instructions(tools))
    elif tools:
        return _with_tools(tokenizer, template, messages, variables, tools)
    return render_chat(tokenizer, messages, chat_template=template, variables=variables)


def _with_tools(
    tokenizer: Tokenizer,
    template: str,
    messages: list[Any],
    variables: dict[str, Any],
    tools: Sequence[Mapping[str, Any]],
) -> list[int]:
    """A prompt with tools. OpenAI allows tools without description and parameters, which some templates read (gpt-oss',
    Hermes'): if one fails it is tried with empty ones."""
    try:
        return render_chat(tokenizer, messages, chat_template=template, variables=variables | {"tools": tools})
    except ChatError:
        empty = {"description": "", "parameters": {"type": "object", "properties": {}}}
        given = [{name: one for name, one in _function(tool).items() if one is not None} for tool in tools]
        if all(empty.keys() <= function.keys() for function in given):
            raise
        full = [{**tool, "function": empty | function} for tool, function in zip(tools, given, strict=True)]
        return render_chat(tokenizer, messages, chat_template=template, variables=variables | {"tools": full})


def _instructed(tokenizer: Tokenizer, template: str, messages: list[Any], text: str) -> list[Any]:
    """Messages with a text added to the system message, or to the first user message if the template takes none."""
    first = messages[0]
    if first["role"] == "system":
        return [
            {"role": "system", "content": f"{first['content']}\n\n{text}" if first["content"] else text},
            *messages[1:],
        ]
    if first["role"] == "user" and not takes_system(tokenizer, template):
        return [{**first, "content": f"{text}\n\n{first['content']}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _grammar(runtime: Runtime, form: _Form, parallel: bool, constraint: Mapping[str, Any]) -> Any:
    """The grammar of the answer: calls, another constraint, or either; after the thoughts."""
    tokenizer, thoughts, trigger = runtime.source.tokenizer, form.thoughts, ""
    if constraint and not (form.tools or thoughts or form.harmony):
        return compile_grammar(tokenizer, runtime.n_vocab, **constraint)
    grammars = [{"name": "answer", **_answer(name, value)} for name, value in constraint.items() if not form.required]
    alternatives = ["@answer"] * bool(grammars)
    rules = ""
    if form.calls is not None and not form.harmony:
        rules = calls_source(tokenizer, form.tools, form.calls, several=parallel)
        alternatives.append("calls")
        trigger = "" if form.required or grammars else form.calls.trigger
    source = f"start: {_SPACE if thoughts and not trigger else ''} ({' | '.join(alternatives)})\n{rules}"
    if form.harmony:
        answer = "" if form.required else "@answer" if grammars else "free"
        schemas = {_function(one)["name"]: _schema(_function(one)) for one in form.tools}
        source = harmony_source(partial(_literal, tokenizer), schemas, answer, "<|end|>" in tokenizer.special_tokens)
    marks = (thoughts.begin, thoughts.end) if thoughts else ()
    vocabulary = vocabulary_of(tokenizer, runtime.n_vocab)
    whole = json.dumps({"grammars": [{"lark_grammar": source}, *grammars]})
    with named(" or ".join([*constraint, *["tools"] * bool(form.tools)])):
        return WaitingGrammar(tokenizer, vocabulary, whole, trigger=trigger, thoughts=marks, opened=form.opened)


def _answer(name: str, value: Any) -> dict[str, Any]:
    """A constraint as an entry of llguidance's list of grammars."""
    return {"json_schema": json_rules(value)} if name == "json_schema" else {"lark_grammar": source_of(name, value)}


def calls_source(tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]], format: ToolFormat, several: bool) -> str:
    """The rule `calls` of a Lark grammar. GrammarError: parameters that are not a valid schema."""
    functions = [_function(tool) for tool in tools]
    alternatives = " | ".join(f"call_{i}" for i in range(len(functions)))
    more = f"({_literal(tokenizer, format.between)} call)*" if several and format.between is not None else ""
    rules = [
        f"calls: {_literal(tokenizer, format.head)} call {more} {_literal(tokenizer, format.tail)}",
        f"call: {alternatives}",
    ]
    for i, function in enumerate(functions):
        middle = _literal(tokenizer, function["name"] + format.middle)
        rules.append(f"call_{i}: {middle} %json {json.dumps(_schema(function))}")
    return "\n".join(rules)


def _schema(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a function's parameters for llguidance; without `parameters` it takes none, as in OpenAI's API.
    GrammarError: it is no schema, or not of an object."""
    given = function.get("parameters")
    given = {"additionalProperties": False} if given is None else given
    if not isinstance(given, Mapping):
        raise GrammarError(f"tools: the parameters of {function['name']} must be a JSON schema, got {given!r:.80}")
    schema = {"type": "object", **given}
    if schema["type"] != "object":
        raise GrammarError(f"tools: the parameters of {function['name']} are an object, not {schema['type']!r}")
    return json_rules(schema, f"tools: the parameters of {function['name']}")


def _literal(tokenizer: Tokenizer, text: str) -> str:
    """A text in Lark: control tokens by their ids; ids and numbers of calls as patterns."""
    made = []
    for part in split_controls(tokenizer, text):
        if part in tokenizer.special_tokens:
            made.append(f"<[{tokenizer.special_tokens[part]}]>")
        else:
            pieces = [_PATTERNS.get(piece) or quoted(piece) for piece in re.split(f"([{ID}{INDEX}])", part) if piece]
            made.append(" ".join(pieces))
    return " ".join(made)
