"""Parsing of an assistant's answer into thoughts, content and tool calls, while it is generated.

A state machine over text, however it is cut into pieces. Nothing is repaired: what begins like a call but is none is
content, and arguments are passed on as the model writes them (a grammar makes them JSON).
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from typing import Any, Protocol

from slimrt.tokenizer.tool_format import ID, ID_LENGTH, INDEX, INDEX_LENGTH, Thoughts, ToolFormat

Delta = dict[str, Any]
_ID_LETTERS = string.ascii_letters + string.digits
_MORE, _NOT = -1, -2


class Parser(Protocol):
    """A parser of one answer."""

    @property
    def has_called(self) -> bool:
        """There are tool calls, and the arguments of the last one are complete."""

    def feed(self, text: str) -> list[Delta]:
        """The deltas of a further piece, as in OpenAI's chunks: {"content": text}, {"reasoning_content": text},
        {"tool_calls": [...]}."""

    def flush(self) -> list[Delta]:
        """The remaining deltas, when no more text comes."""


class Arguments:
    """Finds where the arguments of a call end, an object or a list, in text that comes in pieces.

    Attributes:
        ended: their last bracket came, or something that is none of theirs.
    """

    def __init__(self) -> None:
        self.ended = False
        self._depth, self._quoted, self._escaped = 0, False, False

    def take(self, text: str) -> int:
        """How many characters of a further piece belong to them."""
        for at, letter in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = letter == "\\", letter != '"'
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.ended = True
                    return at + 1
            elif self._depth == 0:
                self.ended = True
                return at
        return len(text)


class AnswerParser:
    """The parser of one answer.

    Args:
        thoughts: the marks around thoughts; None: the model writes none.
        opened: the prompt ends with the opening mark.
        format, names: of tool calls, and of the tools; None: there are no tools.

    Attributes:
        calls: tool calls so far.
    """

    def __init__(
        self,
        thoughts: Thoughts | None = None,
        opened: bool = False,
        format: ToolFormat | None = None,
        names: Sequence[str] = (),
    ):
        self.calls = 0
        self._thoughts, self._format = thoughts, format
        self._names = sorted(names, key=len, reverse=True)
        self._held = ""  # text not passed on yet
        self._begun = self._space = ""  # the beginning of a call, and the space before it: content if it is none
        self._strip = opened  # white space that comes next is dropped
        self._arguments = Arguments()
        self._calling = False  # after a call, until the tail of all calls has been read
        self._deltas: list[Delta] = []
        self._state = self._in_thoughts if opened else self._at_start if thoughts else self._in_content

    @property
    def has_called(self) -> bool:
        """There are calls, and the arguments of the last one are complete."""
        return self.calls > 0 and self._arguments.ended

    def feed(self, text: str) -> list[Delta]:
        """The deltas of a further piece."""
        self._held += text
        while self._held and self._state():
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def flush(self) -> list[Delta]:
        """The remaining deltas, when no more text comes."""
        rest, begun, self._held, self._begun, self._space = self._held, self._space + self._begun, "", "", ""
        if self._state == self._in_thoughts:
            self._emit("reasoning_content", rest)
        elif not self._calling:
            self._emit("content", begun + rest)
        deltas, self._deltas = self._deltas, []
        return deltas

    # Each state consumes what it can of the held text, and returns whether the next state should look at the rest.

    def _at_start(self) -> bool:
        assert self._thoughts is not None
        text = self._held.lstrip()
        if text.startswith(self._thoughts.begin):
            self._held, self._strip, self._state = text[len(self._thoughts.begin) :], True, self._in_thoughts
        elif self._thoughts.begin.startswith(text):
            return False
        else:
            self._state = self._in_content
        return True

    def _in_thoughts(self) -> bool:
        assert self._thoughts is not None
        before, end, after = self._held.partition(self._thoughts.end)
        if not end:
            return self._release("reasoning_content", self._thoughts.end)
        self._held = before.rstrip()
        self._release("reasoning_content", "")
        self._held, self._strip, self._state = after, True, self._in_content
        return True

    def _in_content(self) -> bool:
        if self._format is None:
            return self._release("content", "")
        before, trigger, after = self._held.partition(self._format.trigger)
        if not trigger:
            return self._release("content", self._format.trigger)
        self._held = before.rstrip()
        self._space = "" if self._strip and not self._held else before[len(self._held) :]
        self._release("content", "")
        self._held, self._begun, self._state = trigger + after, "", self._in_head
        return True

    def _in_head(self) -> bool:
        assert self._format is not None
        return self._expect(self._format.head, self._in_name)

    def _in_name(self) -> bool:
        assert self._format is not None
        sizes = [matched(name + self._format.middle, self._held) for name in self._names]
        found = next(((name, size) for name, size in zip(self._names, sizes, strict=True) if size > 0), None)
        if found is None:
            return False if _MORE in sizes else self._not_a_call()
        name, size = found
        self._held, self._begun, self._space, self._state = self._held[size:], "", "", self._in_arguments
        self._arguments = Arguments()
        self._deltas.append(call_begun(self.calls, name))
        self.calls, self._calling = self.calls + 1, True
        return True

    def _in_arguments(self) -> bool:
        size = self._arguments.take(self._held)
        piece, self._held = self._held[:size], self._held[size:]
        if piece:
            self._deltas.append({"tool_calls": [{"index": self.calls - 1, "function": {"arguments": piece}}]})
        if self._arguments.ended:
            self._state = self._behind_arguments
        return self._arguments.ended

    def _behind_arguments(self) -> bool:
        assert self._format is not None
        between = matched(self._format.between, self._held) if self._format.between is not None else _NOT
        tail = matched(self._format.tail, self._held)
        if between >= 0:
            self._begun, self._held, self._state = self._held[:between], self._held[between:], self._in_name
        elif between == _MORE:
            return False
        elif tail >= 0:
            self._held, self._strip, self._state = self._held[tail:], True, self._in_content
            self._calling = False
        elif tail == _NOT:
            self._state, self._calling = self._in_content, False
        return between >= 0 or tail != _MORE

    def _expect(self, pattern: str, then: Any) -> bool:
        size = matched(pattern, self._held)
        if size == _MORE:
            return False
        if size == _NOT:
            return self._not_a_call()
        self._begun += self._held[:size]
        self._held, self._state = self._held[size:], then
        return True

    def _not_a_call(self) -> bool:
        """It began like a call but is none: pass it on as content."""
        text = self._begun + self._held
        self._emit("content", self._space + text[0])
        self._held, self._begun, self._space, self._state = text[1:], "", "", self._in_content
        self._calling = False
        return True

    def _release(self, part: str, mark: str) -> bool:
        """Pass on the held text, except an end that may be the start of the mark, and white space before that."""
        if self._strip:
            self._held = self._held.lstrip()
            self._strip = not self._held
        begun = next((n for n in range(min(len(mark) - 1, len(self._held)), 0, -1) if self._held.endswith(mark[:n])), 0)
        text = self._held[: len(self._held) - begun]
        text = text.rstrip() if mark else text
        self._emit(part, text)
        self._held = self._held[len(text) :]
        return False

    def _emit(self, part: str, text: str) -> None:
        if text:
            self._deltas.append({part: text})


def call_begun(index: int, name: str) -> Delta:
    """The first delta of a call, with a new id."""
    head = {"id": f"call_{''.join(secrets.choice(_ID_LETTERS) for _ in range(24))}", "type": "function"}
    return {"tool_calls": [{"index": index, **head, "function": {"name": name, "arguments": ""}}]}


def matched(pattern: str, text: str) -> int:
    """Match a pattern, in which ID stands for any id and INDEX for any number, at the start of a text: the length of
    the match; _MORE: the text may be the beginning of one; _NOT: no match."""
    at = 0
    for letter in pattern:
        if letter == ID:
            piece = text[at : at + ID_LENGTH]
            if not all(one in _ID_LETTERS for one in piece):
                return _NOT
            if len(piece) < ID_LENGTH:
                return _MORE
            at += ID_LENGTH
        elif at >= len(text):
            return _MORE
        elif letter == INDEX:
            digits = len(text[at:]) - len(text[at:].lstrip(string.digits))
            if not 0 < digits <= INDEX_LENGTH:
                return _NOT
            at += digits
            if at == len(text):
                return _MORE
        elif text[at] != letter:
            return _NOT
        else:
            at += 1
    return at


def joined(deltas: Sequence[Delta]) -> dict[str, Any]:
    """The message that deltas add up to: content (None if there are only calls); reasoning_content and tool_calls only
    if there are any."""
    content, thoughts, calls = "", "", list[dict[str, Any]]()
    for delta in deltas:
        content += delta.get("content", "")
        thoughts += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "type": call["type"], "function": {**call["function"]}})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    message |= {"reasoning_content": thoughts} if thoughts else {}
    return message | ({"tool_calls": calls} if calls else {})
