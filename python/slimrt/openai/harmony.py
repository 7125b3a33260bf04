"""gpt-oss' format (Harmony): an answer is a sequence of messages, whose headers name a channel and a recipient.

Thoughts are in the channel "analysis"; a tool call is in "commentary" with to=functions.NAME and its arguments as the
text; the answer is in "final". Commentary without a recipient is shown to the user. The prompt ends within the first
header, after the role.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slimrt.openai.answer import Arguments, Delta, call_begun
from slimrt.tokenizer.channels import ANALYSIS, MARKS
from slimrt.tokenizer.tokenizer import Tokenizer

_HEADERS = (*MARKS[:4], "to=")  # beginnings of a header, after white space
_LONGEST_HEADER = 256
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")  # any of them ends a message's text
_END = re.compile("|".join(map(re.escape, _ENDS)))
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTION = "functions."


class HarmonyParser:
    """The parser of one answer, with the interface of answer.Parser.

    Args:
        names: of the tools that may be called.

    Attributes:
        calls: tool calls so far.
        part: of the current message: "content", "reasoning_content" or "tool_calls"; "": still in its header.
    """

    def __init__(self, names: Sequence[str] = ()):
        self.calls, self.part = 0, ""
        self._names = frozenset(names)
        self._arguments = Arguments()  # of the last call
        self._held = ""  # text not passed on yet
        self._is_plain = False  # the rest is content without marks
        self._before = ""  # put before the next text of the message
        self._told: set[str] = set()
        self._deltas: list[Delta] = []

    @property
    def has_called(self) -> bool:
        """There are calls, and the arguments of the last one are complete."""
        return self.calls > 0 and self._arguments.ended

    def feed(self, text: str) -> list[Delta]:
        """The deltas of a further piece."""
        self._held += text
        while self._held and (self._in_text() if self.part else self._in_header()):
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def flush(self) -> list[Delta]:
        """The remaining deltas, when no more text comes; an incomplete header is dropped."""
        if self.part:
            self._emit(self._held)
        self._held, deltas, self._deltas = "", self._deltas, []
        return deltas

    def _in_header(self) -> bool:
        text = self._held.lstrip()
        header, found, rest = text.partition("<|message|>")
        if not any(text.startswith(one[: len(text)]) for one in _HEADERS):
            self._begin("content")  # a text without a header
        elif len(header) > _LONGEST_HEADER:  # too long for a header
            self._begin("content")
            self._is_plain = True
        elif found:
            self._held = rest
            self._open(header)
        return bool(self.part)

    def _open(self, header: str) -> None:
        """Begin the message with this header."""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = recipient[1].removeprefix(_FUNCTION) if recipient else ""
        if recipient and recipient[1].startswith(_FUNCTION) and name in self._names:
            self._deltas.append(call_begun(self.calls, name))
            self.calls, self.part, self._before = self.calls + 1, "tool_calls", ""
            self._arguments = Arguments()
            return
        self._begin("reasoning_content" if channel and channel[1] == "analysis" else "content")
        self._before += f"to={recipient[1]} " if recipient else ""  # an unknown tool: its name is shown

    def _begin(self, part: str) -> None:
        self.part, self._before = part, "\n\n" if part in self._told else ""

    def _in_text(self) -> bool:
        end = None if self._is_plain else _END.search(self._held)
        if end is None:
            begun = next((n for n in range(min(len(self._held), 10), 0, -1)
                          if any(one.startswith(self._held[-n:]) for one in _ENDS)), 0)  # fmt: skip
            size = len(self._held) - begun
            self._emit(self._held[:size])
            self._held = self._held[size:]
            return False
        self._emit(self._held[: end.start()])
        self._held = self._held[end.start() if end[0] in MARKS[:2] else end.end() :]
        self.part = ""
        return True

    def _emit(self, text: str) -> None:
        if not text:
            return
        if self.part == "tool_calls":
            if not self._arguments.ended:
                self._arguments.take(text)
            self._deltas.append({"tool_calls": [{"index": self.calls - 1, "function": {"arguments": text}}]})
            return
        self._deltas.append({self.part: self._before + text})
        self._before = ""
        self._told.add(self.part)


def thought_tokens(tokenizer: Tokenizer, tokens: Sequence[int]) -> int:
    """How many of an answer's tokens are thoughts, with their headers."""
    parser, thought, pending = HarmonyParser(), 0, 0
    for token in tokens:
        parser.feed(tokenizer.token_bytes(token).decode("latin-1"))  # the marks are ASCII
        pending = 0 if parser.part == "content" else pending + 1
        if parser.part == "reasoning_content":
            thought, pending = thought + pending, 0
    return thought


def harmony_source(
    literal: Callable[[str], str], schemas: Mapping[str, Mapping[str, Any]], answer: str, free_end: bool
) -> str:
    """A Lark grammar of answers: thoughts and commentary, then a call or the final answer.

    Args:
        literal: makes a Lark literal of a text with control tokens.
        schemas: tool name -> JSON schema of its arguments.
        answer: the rule of the final answer; "": a call is required.
        free_end: free text ends with a control token, which no text spells; else it must not contain its beginning.
    """
    turn = literal("<|end|><|start|>assistant")
    message = literal("<|message|>")
    last = [f"call_{i}" for i in range(len(schemas))] + ["final"] * bool(answer)
    rules = [
        f"start: before* ({' | '.join(last)})",
        f"before: ({literal(ANALYSIS)} | {literal('<|channel|>commentary<|message|>')}) free {turn}",
        "free: " + (r"/(.|\n)*/" if free_end else "/([^<]|<[^|<])*/"),
        f'kind: (" "? {literal("<|constrain|>json")} | " json")?',
        f"final: {literal('<|channel|>final')} kind {message} {answer}" if answer else "",
    ]
    for i, (name, schema) in enumerate(schemas.items()):
        as_written = f"{literal(f'<|channel|>commentary to={_FUNCTION}{name}')} kind {message}"
        as_shown = f"{literal(f' to={_FUNCTION}{name}<|channel|>commentary')} kind {message}"
        rules.append(f"call_{i}: ({as_written} | {as_shown}) %json {json.dumps(schema)}")
    return "\n".join(rules)
