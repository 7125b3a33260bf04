"""The commands of slimrt chat: lines that begin with a slash."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimrt.cli.conversation import Conversation
from slimrt.plumbing.arguments import unknown

HINT = '/help lists commands; """ opens and closes a message of several lines; Ctrl-D leaves'
_LEAVE = ("/exit", "/quit", "/bye")
_ALIASES = {"temp": "temperature", "n": "max_tokens", "n_predict": "max_tokens", "typical": "typical_p"}


@dataclass(frozen=True)
class Command:
    """argument: as shown by /help (in brackets: optional; empty: none); help: what it does; do: executes it."""

    argument: str
    help: str
    do: Callable[[str], None]


class Commands:
    """Executes commands. Their output goes to stderr."""

    def __init__(self, conversation: Conversation):
        self.conversation = conversation
        self._commands = {
            "/help": Command("", "this list", self._help),
            "/reset": Command("", "forget everything but the system message", lambda _: conversation.reset()),
            "/regenerate": Command("", "answer the last message again", lambda _: conversation.regenerate()),
            "/system": Command("[TEXT]", "tell the model how to behave; none: no more; alone: show it", self._system),
            "/set": Command("[NAME VALUE]", "a sampling option, as in /set temperature 0; alone: all", self._set),
            "/load": Command("FILE", "go on with a saved conversation", lambda name: conversation.load(_path(name))),
            "/save": Command("FILE", "the messages as JSON", lambda name: conversation.save(_path(name))),
            "/stats": Command("", "how full the context is, and how fast the last answer was", self._stats),
        }

    def obey(self, line: str) -> bool:
        """Execute a line. False: it ends the conversation.

        Raises:
            ValueError: an unknown command, or one with a missing or superfluous argument.
            Others: errors of the command.
        """
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        if name in _LEAVE and not argument:
            return False
        command = self._commands.get(name)
        escape = f"(a message that begins with / is written /{name} ...)"
        if command is None and name not in _LEAVE:
            raise ValueError(f"{unknown('command', name, [*self._commands, *_LEAVE])} {escape}")
        if argument and (command is None or not command.argument):
            raise ValueError(f"{name} takes nothing after it {escape}")
        if command is not None:
            if not argument and command.argument and not command.argument.startswith("["):
                raise ValueError(f"{name} needs a {command.argument}")
            command.do(argument)
        return True

    def _help(self, _: str) -> None:
        rows = [(f"{name} {command.argument}", command.help) for name, command in self._commands.items()]
        rows += [
            (" ".join(_LEAVE), "leave; so does Ctrl-D"),
            ("//...", "a message that begins with /"),
            ("...\\", "a message that goes on in the next line"),
            ('""" ... """', "a message of several lines"),
        ]
        print("\n".join(f"{left:<20} {right}" for left, right in rows), file=sys.stderr)

    def _system(self, text: str) -> None:
        if text:
            self.conversation.system = "" if text == "none" else text
        else:
            print(self.conversation.system or "there is no system message", file=sys.stderr)

    def _set(self, text: str) -> None:
        options = self.conversation.options
        name, _, value = text.partition(" ")
        name = name.replace("-", "_")
        name = _ALIASES.get(name, name)
        if text and name not in options:
            raise ValueError(unknown("option", name, options))
        if text and not value.strip():
            raise ValueError(f"/set {name} needs a VALUE (now {options[name]})")
        if text:
            self.conversation.set(**{name: _value(name, value.strip())})
        shown = [name] if text else list(options)
        print(", ".join(f"{name} {self.conversation.options[name]}" for name in shown), file=sys.stderr)

    def _stats(self, _: str) -> None:
        print(self.conversation.describe(), file=sys.stderr)


def _path(name: str) -> Path:
    """A path, with ~ expanded. ValueError: ~ names nobody's home directory."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise ValueError(f"{name}: ~ stands for no home directory that is known here: write the whole path") from None


def _value(name: str, text: str) -> Any:
    """The value of an option: JSON such as a number, or else the text itself; "none" is None."""
    if text.lower() in ("none", "null"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if name == "logit_bias" and isinstance(value, dict):  # keys are texts in JSON
        return {int(id) if id.isdecimal() else id: bias for id, bias in value.items()}
    return value
