"""gpt-oss' format, Harmony: an answer is several messages, and the header of each names its channel and who it is for.

What is thought is in the channel analysis, a call of a tool in commentary, to=functions.NAME, with its arguments as the
text, and the answer in final; what commentary says to nobody is said to the user. The prompt ends within the first
header, behind the role.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slimrt.openai.answer import Delta, call_begun
from slimrt.tokenizer.channels import ANALYSIS, MARKS
from slimrt.tokenizer.tokenizer import Tokenizer

_HEADERS = (*MARKS[:4], "to=")  # what a header may begin with, behind white space
_LONGEST_HEADER = 256
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")  # of a message's text
_END = re.compile("|".join(map(re.escape, _ENDS)))
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTION = "functions."


class HarmonyParser:
    """Tells the parts of one answer, as AnswerParser does of others.

    Args:
        names: of the tools that may be called.

    Attributes:
        calls: how many there were so far.
        part: what the text of the message under way is told as: "content", "reasoning_content" or "tool_calls"; "": its
            header is not complete.
    """

    def __init__(self, names: Sequence[str] = ()):
        self.calls, self.part = 0, ""
        self._names = frozenset(names)
        self._held = ""  # what is not told yet
        self._is_plain = False  # what follows has no marks
        self._before = ""  # what stands before the message's text where that is told
        self._told: set[str] = set()
        self._deltas: list[Delta] = []

    def feed(self, text: str) -> list[Delta]:
        """What a further piece tells."""
        self._held += text
        while self._held and (self._in_text() if self.part else self._in_header()):
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def flush(self) -> list[Delta]:
        """What is left, now that no more text comes; a header that is cut off says nothing."""
        if self.part:
            self._tell(self._held)
        self._held, deltas, self._deltas = "", self._deltas, []
        return deltas

    def _in_header(self) -> bool:
        text = self._held.lstrip()
        header, found, rest = text.partition("<|message|>")
        if not any(text.startswith(one[: len(text)]) for one in _HEADERS):
            self._begin("content")  # a text without a header
        elif len(header) > _LONGEST_HEADER:  # nor is this one
            self._begin("content")
            self._is_plain = True
        elif found:
            self._held = rest
            self._open(header)
        return bool(self.part)

    def _open(self, header: str) -> None:
        """Begin a message."""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = recipient[1].removeprefix(_FUNCTION) if recipient else ""
        if recipient and recipient[1].startswith(_FUNCTION) and name in self._names:
            self._deltas.append(call_begun(self.calls, name))
            self.calls, self.part, self._before = self.calls + 1, "tool_calls", ""
            return
        self._begin("reasoning_content" if channel and channel[1] == "analysis" else "content")
        self._before += f"to={recipient[1]} " if recipient else ""  # a tool that there is not

    def _begin(self, part: str) -> None:
        self.part, self._before = part, "\n\n" if part in self._told else ""

    def _in_text(self) -> bool:
        end = None if self._is_plain else _END.search(self._held)
        if end is None:
            begun = next((n for n in range(min(len(self._held), 10), 0, -1)
                          if any(one.startswith(self._held[-n:]) for one in _ENDS)), 0)  # fmt: skip
            size = len(self._held) - begun
            self._tell(self._held[:size])
            self._held = self._held[size:]
            return False
        self._tell(self._held[: end.start()])
        self._held = self._held[end.start() if end[0] in MARKS[:2] else end.end() :]
        self.part = ""
        return True

    def _tell(self, text: str) -> None:
        if not text:
            return
        if self.part == "tool_calls":
            self._deltas.append({"tool_calls": [{"index": self.calls - 1, "function": {"arguments": text}}]})
            return
        self._deltas.append({self.part: self._before + text})
        self._before = ""
        self._told.add(self.part)


def thought_tokens(tokenizer: Tokenizer, tokens: Sequence[int]) -> int:
    """How many of an answer's tokens are thoughts, the headers of these included."""
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
    """A Lark grammar of answers: thoughts and words to the user, and then a call or the answer.

    Args:
        literal: makes a text with control tokens one of Lark's.
        schemas: of the arguments of each tool that may be called.
        answer: the rule of what the answer is; "": there is to be a call.
        free_end: what ends free texts is a control token, which no text spells; else they may not hold its beginning.
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
