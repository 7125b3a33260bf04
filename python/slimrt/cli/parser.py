"""An argument parser with exact flag names, hints for flags of other programs, and error messages of one line."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from slimrt.cli.habits import HABITS, habit


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help that shows a flag's metavar once, after all its names."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, action.dest.upper())
        return f"{', '.join(action.option_strings)} {value}"


class Parser(argparse.ArgumentParser):
    """argparse with exact names: flags are passed to it as --name=value, before the positionals, so that it guesses
    nothing. Wrong usage ends with exit code 2 and one line on stderr.

    Attributes:
        lists: flags that take lists -> whether a further word belongs to the list (`--compare kv:f16 k:f16`).
    """

    def __init__(self, **settings: Any):
        super().__init__(**{"allow_abbrev": False, "formatter_class": _Help, **settings})
        self.lists: dict[argparse.Action, Callable[[str], bool]] = {}

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse a command line. SystemExit 2: wrong usage."""
        found, left = self.parse_known_args(self._plain(words))
        if left:
            prompt = self._action("--prompt")
            self.error(f"'{left[0]}' is one word too many{'; a text goes after -p' if prompt else ''}")
        return found

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help; argparse's own method ignores errors, such as a full disk."""
        if file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument ((-\w+/)*--[\w-]+)\S*:", r"\1:", message)  # up to the first long name
        self.refuse(f"{message} ({self.prog} --help shows what there is)")

    def refuse(self, message: str) -> NoReturn:
        """Wrong usage: exit with this message only."""
        self.exit(2, f"slimrt: error: {' '.join(message.split())}\n")

    def _plain(self, words: Sequence[str]) -> list[str]:
        left, flags, positionals = deque(words), list[str](), list[str]()
        while left:
            word = left.popleft()
            name, equals, value = word.partition("=")
            if word == "--":
                positionals += left
                break
            if not name.startswith("-") or name == "-":
                positionals.append(word)
            elif action := self._action(name):
                flags.append(self._flag(action, value if equals else None, left))
            elif apart := self._split_short(word):
                left.extendleft(reversed(apart))
            elif " " in name:  # a positional text that begins with a dash
                positionals.append(word)
            else:
                self._foreign_flag(name, value if equals else None, left)
        dashed = any(one.startswith("-") and one != "-" for one in positionals)
        return [*flags, *(["--"] if dashed else []), *positionals]

    def _action(self, name: str) -> argparse.Action | None:
        """The flag with this name; long names may have underscores instead of dashes."""
        known = self._option_string_actions
        return known.get(name) or (known.get(name.replace("_", "-")) if name.startswith("--") else None)

    def _flag(self, action: argparse.Action, value: str | None, left: deque[str]) -> str:
        """A flag with its value, which is taken from the following words if it is not attached by =."""
        name = action.option_strings[-1]
        if value is None and action.nargs is None and left and not self._is_flag(left[0]):
            value = left.popleft()
        elif value is None and action.nargs == "?":
            value = left.popleft() if left and not left[0].startswith("-") else str(action.const)
        if value is None and action.nargs is None:  # argparse would take the first positional as the value
            self.error(str(argparse.ArgumentError(action, "expected one argument")))
        if value is None:
            self._leave_out_true(action, name, left)
            return name
        if goes_on := self.lists.get(action):
            parts = [value.rstrip(", ")]
            while left and goes_on(left[0].rstrip(",")):
                parts.append(left.popleft().rstrip(","))
            value = ",".join(parts)
        return f"{name}={value}"

    def _leave_out_true(self, action: argparse.Action, name: str, left: deque[str]) -> None:
        """Ignore "True" after a switch, as openai-whisper has it; refuse "False", which would become a positional."""
        if action.nargs == 0 and left and left[0] in ("True", "False") and left.popleft() == "False":
            self.refuse(f"{name} takes no value: for False leave it out")

    def _is_flag(self, word: str) -> bool:
        """Whether the word after a flag is another flag, so that the first one has no value."""
        name = word.partition("=")[0]
        known = self._action(name) or habit(name, self._verb)
        return known is not None or word.startswith("--") and " " not in word

    def _split_short(self, word: str) -> list[str]:
        """Split `-n5` and `-vv` into flags and values; other combinations are not allowed."""
        first = self._action(word[:2])
        if first is None or len(word) < 3:
            return []
        if first.nargs is None and re.fullmatch(r"-?\d+(\.\d+)?", word[2:]):
            return [word[:2], word[2:]]
        switches = [f"-{letter}" for letter in word[1:]]
        return switches if all((one := self._action(name)) and one.nargs == 0 for name in switches) else []

    def _foreign_flag(self, name: str, value: str | None, left: deque[str]) -> None:
        """Handle a flag of another program: ignored if it asks for what is done anyway, else refused with advice."""
        known = habit(name, self._verb) or habit(name.replace("_", "-"), self._verb)
        if known is None:
            self.error(f"there is no flag {name}{self._nearest(name)}")
        if known.granted is None:
            self.refuse(f"there is no flag {name}: {known.advice}")
        if value is None:
            takes = [one for one in (*known.granted, "off", "0", "false") if one]
            value = left.popleft() if known.granted != ("",) and left and left[0].lower() in takes else ""
        if value.lower() not in known.granted:
            self.refuse(f"{name}{value and f' {value}'}: {known.advice}")

    def _nearest(self, name: str) -> str:
        """A hint with the most similar flag, of slimrt or of another program."""
        glued = self._action(name[:2])
        if glued and glued.nargs is None and len(name) > 2:
            return f" (did you mean {name[:2]} {name[2:]}?)"
        long = [one for one in self._option_string_actions if one.startswith("--")]
        others = [one for habit in HABITS if self._verb in (habit.verbs or [self._verb]) for one in habit.names]
        near = partial(difflib.get_close_matches, name.replace("_", "-"), n=1)
        found = near(long, cutoff=0.7) or near(others, cutoff=0.8) if name.startswith("--") else []
        return f" (did you mean {found[0]}?)" if found else ""

    @property
    def _verb(self) -> str:
        return self.prog.rpartition(" ")[2]
