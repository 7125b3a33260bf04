"""How a model writes calls of tools and its thoughts, read off its chat template.

A turn that calls a made-up tool is rendered, and what stands around the name and the arguments is the format; a turn
with another tool must differ in these alone. What templates do not tell, a table of families does; else the Hermes
format, explained to the model in the system message.
"""

from __future__ import annotations

import json
import os
import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slimrt.errors import ChatError
from slimrt.tokenizer.chat import Template, find_template, render_chat_text
from slimrt.tokenizer.tokenizer import Tokenizer

ID = "\ufdd0"  # no character: stands for the id of a call
ID_PATTERN = "[a-zA-Z0-9]{9}"  # what templates that show ids (Mistral's) make of them
ID_LENGTH = 9


@dataclass(frozen=True)
class ToolFormat:
    """What a model writes around the calls of a turn: head NAME middle ARGUMENTS (between NAME middle ARGUMENTS)* tail.

    Attributes:
        between: None: the template has one call a turn.
        origin: "template": read off it; "table": of a known family; "prompt": put into the system message.
        as_text: the template wants arguments as JSON text, else as objects.
    """

    head: str
    middle: str
    between: str | None
    tail: str
    origin: str
    as_text: bool = False

    @property
    def trigger(self) -> str:
        """The beginning of the head by which a call is known in free text: its first tag, or all of it."""
        tag = re.match(r"<[^>]*>|\[[A-Z_]+\]", self.head)
        return tag[0] if tag else self.head

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.head, self.middle, self.between or "", self.tail)


@dataclass(frozen=True)
class Thoughts:
    """What stands around the thoughts of a model, which come before its answer."""

    begin: str
    end: str


_THOUGHTS = (
    Thoughts("<think>", "</think>"),
    Thoughts("[THINK]", "[/THINK]"),
    Thoughts("<|START_THINKING|>", "<|END_THINKING|>"),
    Thoughts("<seed:think>", "</seed:think>"),
)

_HERMES = ToolFormat(
    '<tool_call>\n{"name": "',
    '", "arguments": ',
    '}\n</tool_call>\n<tool_call>\n{"name": "',
    "}\n</tool_call>",
    "prompt",
)
_MISTRAL_NEXT = f', "id": "{ID}"}}, {{"name": "'
_TABLE: Sequence[tuple[Sequence[str], ToolFormat]] = (  # what the template has, and what then holds
    (
        ("<tool_call>", '"arguments"'),
        ToolFormat(_HERMES.head, _HERMES.middle, _HERMES.between, _HERMES.tail, "table"),
    ),
    (("<|python_tag|>", "parameters"), ToolFormat('{"name": "', '", "parameters": ', None, "}", "table")),
    (
        ("[TOOL_CALLS]",),
        ToolFormat('[TOOL_CALLS][{"name": "', '", "arguments": ', _MISTRAL_NEXT, f', "id": "{ID}"}}]', "table"),
    ),
    (
        ("<|tool_call|>",),
        ToolFormat('<|tool_call|>[{"name": "', '", "arguments": ', '}, {"name": "', "}]<|/tool_call|>", "table"),
    ),
)

_NAMES = ("slimrt_first", "slimrt_second")
_ARGUMENTS = ({"slimrt_key": "first value"}, {"slimrt_key": "second value"})
_IDS = ("firstid01", "secondid2")
_CONTENT = "\u00a7slimrt content"
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "a probe",
            "parameters": {"type": "object", "properties": {"slimrt_key": {"type": "string"}}},
        },
    }
    for name in _NAMES
]

_formats: weakref.WeakKeyDictionary[Tokenizer, dict[str, ToolFormat]] = weakref.WeakKeyDictionary()


def thoughts_of(template: str) -> Thoughts | None:
    """Those that a chat template (its text) knows of."""
    return next((one for one in _THOUGHTS if one.end in template or one.begin in template), None)


def tool_format(tokenizer: Tokenizer, chat_template: Template | None = None) -> ToolFormat:
    """How a model calls tools. Arguments and errors as slimrt.tokenizer.chat.find_template."""
    template = find_template(tokenizer, chat_template)
    known = _formats.setdefault(tokenizer, {})
    if template not in known:
        known[template] = _found(tokenizer, template)
    return known[template]


def _found(tokenizer: Tokenizer, template: str) -> ToolFormat:
    if not _shows_tools(tokenizer, template):
        return _HERMES
    for as_text in (False, True):
        if found := _read(tokenizer, template, as_text):
            return found
    return next((one for words, one in _TABLE if all(word in template for word in words)), _HERMES)


def _shows_tools(tokenizer: Tokenizer, template: str) -> bool:
    text = _rendered(tokenizer, template, None)
    return text is not None and all(name in text for name in _NAMES)


def _read(tokenizer: Tokenizer, template: str, as_text: bool) -> ToolFormat | None:
    """The format as the template shows it; None: it does not."""
    plain = _rendered(tokenizer, template, {"content": _CONTENT})
    one, other = (_rendered(tokenizer, template, _calls([i], as_text)) for i in (0, 1))
    if plain is None or one is None or other is None or _CONTENT not in plain:
        return None
    header = len(os.path.commonprefix([plain, one]))
    found = _split(one[header:], 0)
    if found is None or found != _split(other[header:], 1):
        return None
    head, middle, tail = found
    tail = _end(tokenizer, tail, plain.partition(_CONTENT)[2])
    two = _rendered(tokenizer, template, _calls([0, 1], as_text))
    return ToolFormat(head.lstrip(), middle, _between(two, middle, found[2]), tail, "template", as_text)


def _split(turn: str, index: int) -> tuple[str, str, str] | None:
    """What stands before the name, between it and the arguments, and after these; None: they are not both there."""
    written = next((form for form in _forms(index) if form in turn), None)
    if turn.count(_NAMES[index]) != 1 or written is None:
        return None
    head, _, rest = turn.partition(_NAMES[index])
    middle, found, tail = rest.partition(written)
    if not found or not head.strip():
        return None
    return head.replace(_IDS[index], ID), middle.replace(_IDS[index], ID), tail.replace(_IDS[index], ID)


def _between(two: str | None, middle: str, tail: str) -> str | None:
    """What stands between two calls, if the template has several in a turn and writes them alike."""
    written = None if two is None else next((form for form in _forms(0) if form in two), None)
    if two is None or written is None:
        return None
    between, name, rest = two.partition(written)[2].partition(_NAMES[1])
    second = next((form for form in _forms(1) if rest.startswith(middle + form)), None)
    if not name or second is None or rest[len(middle + second) :].replace(_IDS[1], ID) != tail:
        return None
    return between.replace(_IDS[0], ID)


def _end(tokenizer: Tokenizer, tail: str, after: str) -> str:
    """The tail without what ends any turn. after: what follows the content of one."""
    ends = [text for text, id in tokenizer.special_tokens.items() if text and id in tokenizer.eog_ids]
    tail = tail.removesuffix(after)
    return tail[: min((at for at in (tail.find(text) for text in ends) if at >= 0), default=len(tail))].rstrip()


def _forms(index: int) -> list[str]:
    return [json.dumps(_ARGUMENTS[index]), json.dumps(_ARGUMENTS[index], separators=(",", ":"))]


def _calls(which: Sequence[int], as_text: bool) -> dict[str, Any]:
    """A message that calls the probes."""
    return {
        "content": None,
        "tool_calls": [
            {
                "id": _IDS[i],
                "type": "function",
                "function": {"name": _NAMES[i], "arguments": json.dumps(_ARGUMENTS[i]) if as_text else _ARGUMENTS[i]},
            }
            for i in which
        ],
    }


def _rendered(tokenizer: Tokenizer, template: str, answer: Mapping[str, Any] | None) -> str | None:
    """A conversation that ends with this answer; None: the template will not have it."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    if answer is not None:
        messages.append({"role": "assistant", **answer})
    try:
        return render_chat_text(tokenizer, messages, False, chat_template=template, variables={"tools": _TOOLS})
    except ChatError:
        return None


def instructions(tools: Sequence[Mapping[str, Any]]) -> str:
    """What a system message says of tools where the template says nothing."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    call = f"{_HERMES.head}NAME{_HERMES.middle}ARGUMENTS{_HERMES.tail}"
    return (
        "You may call functions. These are there, with JSON schemas of their parameters:\n"
        f"<tools>\n{listed}\n</tools>\n"
        f"To call one, write its name and its arguments, a JSON object, like this:\n{call}"
    )


def history(messages: Sequence[Mapping[str, Any]], format: ToolFormat) -> list[dict[str, Any]]:
    """Messages with calls and results as the template wants them.

    Raises:
        ChatError: the arguments of a call are no JSON object; it says where.
    """
    if format.origin != "prompt":
        return [_with_calls(f"messages[{i}]", message, format) for i, message in enumerate(messages)]
    made, results = list[dict[str, Any]](), False
    for i, message in enumerate(messages):
        is_result = isinstance(message, Mapping) and message.get("role") == "tool"
        if is_result:
            text = f"<tool_response>\n{message.get('content')}\n</tool_response>"
            if results:
                made[-1]["content"] += f"\n{text}"
            else:
                made.append({"role": "user", "content": text})
        else:
            made.append(_spelled(f"messages[{i}]", message, format))
        results = is_result
    return made


def _with_calls(where: str, message: Any, format: ToolFormat) -> Any:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    return {**message, "tool_calls": [_call(where, one, format.as_text) for one in calls]} if calls else message


def _call(where: str, call: Any, as_text: bool) -> dict[str, Any]:
    """A call whose arguments are as the template wants them."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ChatError(f"{where}: a call is {{'id', 'type', 'function': {{'name', 'arguments'}}}}, got {call!r}")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError as error:
            raise ChatError(f"{where}: the arguments of {function['name']} are not JSON: {error}") from None
    else:
        parsed = arguments
    if not isinstance(parsed, Mapping):
        raise ChatError(f"{where}: the arguments of {function['name']} must be a JSON object, got {arguments!r}")
    return {**call, "function": {**function, "arguments": json.dumps(parsed) if as_text else parsed}}


def _spelled(where: str, message: Any, format: ToolFormat) -> Any:
    """A message whose calls are in its content, as the model wrote them."""
    if not isinstance(message, Mapping) or not message.get("tool_calls"):
        return message
    calls = [_call(where, one, True)["function"] for one in message["tool_calls"]]
    texts = [f"{format.head}{one['name']}{format.middle}{one['arguments']}{format.tail}" for one in calls]
    content = [message["content"]] if message.get("content") else []
    return {"role": message.get("role"), "content": "\n".join([*content, *texts])}
