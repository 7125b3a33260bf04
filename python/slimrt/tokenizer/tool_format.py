"""How a model writes tool calls and thoughts, derived from its chat template.

A turn that calls a made-up tool is rendered; what surrounds the name and the arguments is the format. A turn with
another tool must differ in these only. Where this fails a table of families is used; else the Hermes format, which is
explained to the model in the system message.
"""

from __future__ import annotations

import json
import os
import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slimrt.errors import ChatError
from slimrt.tokenizer.chat import Template, find_template, render_chat_text
from slimrt.tokenizer.template import TemplateTimeError
from slimrt.tokenizer.tokenizer import Tokenizer

ID = "\ufdd0"  # a noncharacter: placeholder for the id of a call
ID_PATTERN = "[a-zA-Z0-9]{9}"  # ids in templates that write them (Mistral's)
ID_LENGTH = 9
INDEX = "\ufdd1"  # a noncharacter: placeholder for the number of a call, which is part of Kimi-K2's ids
INDEX_LENGTH = 4  # digits at most


@dataclass(frozen=True)
class ToolFormat:
    """What surrounds the calls of a turn: head NAME middle ARGUMENTS (between NAME middle ARGUMENTS)* tail.

    Attributes:
        between: None: the template allows one call a turn.
        origin: "template": derived from it; "table": of a known family; "prompt": explained in the system message.
        as_text: the template takes arguments as JSON text, else as objects.
        shown: how many calls of two in an earlier turn the template writes; 0: calls must be written into the content.
        counts_on: numbers of calls continue through the conversation; else they begin anew in each turn.
    """

    head: str
    middle: str
    between: str | None
    tail: str
    origin: str
    as_text: bool = False
    shown: int = 2
    counts_on: bool = False

    def numbered_id(self, name: str, number: int) -> str:
        """The id of a call in a format with numbers: the text between tags around the name and the number."""
        before, after = re.search(r"[^<>]*$", self.head), re.match(r"[^<>]*", self.middle)
        return f"{before[0] if before else ''}{name}{after[0] if after else ''}".replace(INDEX, str(number))

    @property
    def trigger(self) -> str:
        """The beginning of the head that identifies a call in free text: its first tag, or all of it."""
        tag = re.match(r"<[^>]*>|\[[A-Z_]+\]", self.head)
        return tag[0] if tag else self.head

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.head, self.middle, self.between or "", self.tail)


@dataclass(frozen=True)
class Thoughts:
    """The texts around a model's thoughts, which come before its answer."""

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
_TABLE: Sequence[tuple[Sequence[str], ToolFormat]] = (  # words that a template contains -> its format
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
        ("tool_declare",),  # the first release of Kimi-K2
        ToolFormat(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
            f":{INDEX}<|tool_call_argument_begin|>",
            "<|tool_call_end|><|tool_call_begin|>functions.",
            "<|tool_call_end|><|tool_calls_section_end|>",
            "table",
        ),
    ),
    (
        ("<|tool_call|>", "'tool_response'"),  # Granite 3.0, whose calls end with the turn
        ToolFormat('<|tool_call|>[{"name": "', '", "arguments": ', '}, {"name": "', "}]", "table"),
    ),
    (
        ("<|tool_call|>",),
        ToolFormat('<|tool_call|>[{"name": "', '", "arguments": ', '}, {"name": "', "}]<|/tool_call|>", "table"),
    ),
)

_NAMES = ("slimrt_first", "slimrt_second")
_ARGUMENTS = ({"slimrt_key": "first value"}, {"slimrt_key": "second value"})
_IDS = ("firstid01", "secondid2")
_NAMED_IDS = ("functions.slimrt_first:7", "functions.slimrt_second:8")  # for templates that take the name from the id
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
    """The marks of thoughts that a chat template (its text) contains, if any."""
    return next((one for one in _THOUGHTS if one.end in template or one.begin in template), None)


def tool_format(tokenizer: Tokenizer, chat_template: Template | None = None) -> ToolFormat:
    """A model's format of tool calls; cached. Arguments and errors as slimrt.tokenizer.chat.find_template."""
    template = find_template(tokenizer, chat_template)
    known = _formats.setdefault(tokenizer, {})
    if template not in known:
        known[template] = _derive(tokenizer, template)
    return known[template]


def _derive(tokenizer: Tokenizer, template: str) -> ToolFormat:
    if not _shows_tools(tokenizer, template):
        return _HERMES
    for ids in (_IDS, _NAMED_IDS):
        for as_text in (False, True):
            if found := _derive_from_calls(tokenizer, template, as_text, ids):
                return found
    known = next((one for words, one in _TABLE if all(word in template for word in words)), None)
    return (
        _HERMES
        if known is None
        else replace(known, shown=_shown(_rendered(tokenizer, template, _calls([0, 1], False))))
    )


def _shown(two: str | None) -> int:
    """How many calls of two a rendered turn shows; 2 if the template refused it, so that it raises its own error."""
    return 2 if two is None else sum(one["slimrt_key"] in two for one in _ARGUMENTS)


def _shows_tools(tokenizer: Tokenizer, template: str) -> bool:
    text = _rendered(tokenizer, template, None)
    return text is not None and all(name in text for name in _NAMES)


def _derive_from_calls(tokenizer: Tokenizer, template: str, as_text: bool, ids: Sequence[str]) -> ToolFormat | None:
    """The format derived from rendering calls with these ids; None: the template does not show it."""
    plain = _rendered(tokenizer, template, {"content": _CONTENT})
    one, other = (_rendered(tokenizer, template, _calls([i], as_text, ids)) for i in (0, 1))
    if plain is None or one is None or other is None or _CONTENT not in plain:
        return None
    header = _header(_rendered(tokenizer, template, None), plain, one)
    found = _split(_without_id(one[header:], ids[0]), 0)
    if found is None or found != _split(_without_id(other[header:], ids[1]), 1):
        return None
    head, middle, tail = found
    thoughts = thoughts_of(template)  # some templates write empty thoughts: they are no part of the call
    head = head.rpartition(thoughts.end)[2] if thoughts else head
    if not head.strip():
        return None
    tail = _end(tokenizer, tail, plain.partition(_CONTENT)[2])
    two = _rendered(tokenizer, template, _calls([0, 1], as_text, ids))
    both = _without_id(_without_id(two or "", ids[0]), ids[1])
    between, middle = _between(both, middle, found[2])
    counts_on = ids is _NAMED_IDS and INDEX in middle
    return ToolFormat(head.lstrip(), middle, between, tail, "template", as_text, _shown(two), counts_on)


def _without_id(text: str, id: str) -> str:
    """A text with a call's id replaced by ID, or its number by INDEX."""
    _, named, number = id.rpartition(":")
    return text.replace(f":{number}", f":{INDEX}") if named else text.replace(id, ID)


def _header(opening: str | None, plain: str, call: str) -> int:
    """The length of the part of a turn with calls that the model does not write: the generation prompt; or else what
    turns with and without calls have in common, without an incomplete tag at its end."""
    if opening is not None and call.startswith(opening):
        return len(opening)
    common = os.path.commonprefix([plain, call])
    cut = re.search(r"[<\[][^<>\[\]\s]*$", common)
    return cut.start() if cut else len(common)


def _split(turn: str, index: int) -> tuple[str, str, str] | None:
    """(before the name, between name and arguments, after the arguments); None: they are not both there."""
    written = next((form for form in _forms(index) if form in turn), None)
    if turn.count(_NAMES[index]) != 1 or written is None:
        return None
    head, _, rest = turn.partition(_NAMES[index])
    middle, found, tail = rest.partition(written)
    if not found:
        return None
    return head, middle, tail


def _between(two: str, middle: str, tail: str) -> tuple[str | None, str]:
    """The text between two calls, if the template writes several in a turn, all in one form; and `middle`, with INDEX
    if calls are numbered."""
    written = next((form for form in _forms(0) if form in two), None)
    if written is None:
        return None, middle
    between, name, rest = two.partition(written)[2].partition(_NAMES[1])
    for one in (middle, re.sub(r"(?<!\d)0(?!\d)", INDEX, middle, count=1)):
        second = one.replace(INDEX, "1") if INDEX not in middle else one
        if name and any(rest == second + form + tail for form in _forms(1)):
            return between, one
    return None, middle


def _end(tokenizer: Tokenizer, tail: str, after: str) -> str:
    """The tail without what ends every turn. after: the text after the content of a turn without calls."""
    ends = [text for text, id in tokenizer.special_tokens.items() if text and id in tokenizer.eog_ids]
    tail = tail.removesuffix(after)
    return tail[: min((at for at in (tail.find(text) for text in ends) if at >= 0), default=len(tail))].rstrip()


def _forms(index: int) -> list[str]:
    return [json.dumps(_ARGUMENTS[index]), json.dumps(_ARGUMENTS[index], separators=(",", ":"))]


def _calls(which: Sequence[int], as_text: bool, ids: Sequence[str] = _IDS) -> dict[str, Any]:
    """An assistant's message that calls the made-up tools."""
    return {
        "content": None,
        "tool_calls": [
            {
                "id": ids[i],
                "type": "function",
                "function": {"name": _NAMES[i], "arguments": json.dumps(_ARGUMENTS[i]) if as_text else _ARGUMENTS[i]},
            }
            for i in which
        ],
    }


def _rendered(tokenizer: Tokenizer, template: str, answer: Mapping[str, Any] | None) -> str | None:
    """A rendered conversation that ends with this answer, or with the generation prompt if None; None: the template
    raised an error."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    if answer is not None:
        messages.append({"role": "assistant", **answer})
    try:
        return render_chat_text(
            tokenizer, messages, answer is None, chat_template=template, variables={"tools": _TOOLS}
        )
    except TemplateTimeError:
        raise
    except ChatError:
        return None


def instructions(tools: Sequence[Mapping[str, Any]]) -> str:
    """The part of a system message that explains tools, for templates that do not."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    call = f"{_HERMES.head}NAME{_HERMES.middle}ARGUMENTS{_HERMES.tail}"
    return (
        "You may call functions. These are there, with JSON schemas of their parameters:\n"
        f"<tools>\n{listed}\n</tools>\n"
        f"To call one, write its name and its arguments, a JSON object, like this:\n{call}"
    )


def takes_system(tokenizer: Tokenizer, template: str) -> bool:
    """Whether a chat template accepts a system message and writes it; Gemma 2's refuses it."""
    messages = [{"role": "system", "content": _CONTENT}, {"role": "user", "content": "hello"}]
    try:
        return bool(render_chat_text(tokenizer, messages, chat_template=template))
    except ChatError:
        return False
