"""Adding flags to a parser: groups, lists with blanks, twins in the environment."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from slimrt.cli.parser import Parser
from slimrt.cli.values import one_of


class Collect(argparse.Action):
    """A list of what the flag is given each time, in place of its default; argparse's "append" adds to the default."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        so_far = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [values] if so_far is self.default else [*so_far, values])


class _Twin(str):
    """What the environment says of a flag, as its default: argparse converts it only where the flag is not typed."""


class Adder:
    """Adds flags to a parser, in groups; each takes its default from SLIMRT_NAME in the environment, if that is set.

    Attributes:
        checks: what is looked at when all flags are known, each with wrong usage as its answer.
    """

    def __init__(self, parser: Parser):
        self.parser = parser
        self.checks: list[Callable[[argparse.Namespace], None]] = []
        self.twins = True  # whether the flags that are added from now on have twins
        self._group: argparse._ActionsContainer = parser

    def group(self, title: str) -> None:
        """What is added from now on stands under this title."""
        self._group = self.parser.add_argument_group(title)

    def add(
        self, *names: str, twin: bool = True, goes_on: Callable[[str], bool] | None = None, **settings: Any
    ) -> None:
        """A flag.

        Args:
            twin: whether the environment may say it: settings, not what one command reads or writes, nor what has
                another meaning in another verb.
            goes_on: of a list with commas, whether a further word belongs to it, so that blanks do as well.
        """
        action = self._group.add_argument(*names, **settings)
        if goes_on is not None:
            self.parser.lists[action] = goes_on
        if twin and self.twins:
            self._take_twin(action, next(name for name in names if name.startswith("--")))

    def _take_twin(self, action: argparse.Action, name: str) -> None:
        twin = "SLIMRT_" + name.lstrip("-").replace("-", "_").upper()
        value = os.environ.get(twin)
        if not value:
            return
        action.required = False
        kind: Callable[[str], Any] = action.type if callable(action.type) else one_of(action.choices)
        if isinstance(action.const, bool):
            const = action.const
            action.type = lambda text: const if self._switch(twin, text) else not const
            action.default = value
        elif isinstance(action.default, int) and action.nargs == 0:  # a count
            action.default = int(value) if value.isdecimal() else int(self._switch(twin, value))
        elif isinstance(action, Collect):
            try:
                action.default = [kind(value)]
            except argparse.ArgumentTypeError as error:
                self.parser.error(f"{twin}: {error}")
        else:
            action.type, action.default = _told_of(kind, twin), _Twin(value)

    def _switch(self, twin: str, value: str) -> bool:
        """What a variable says of a flag without a value; wrong usage if that is neither yes nor no."""
        known = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)
        if value.lower() not in known:
            self.parser.error(f"{twin} is '{value}'; it may be {', '.join(known)}")
        return known[value.lower()]

    def usage(self) -> str:
        """The line of --help that says what must be there."""
        needed = list[str]()
        for action in self.parser._actions:
            if not action.option_strings:
                optional = action.nargs == "*" or action.nargs == "?" and needed
                needed.append(f"[{action.metavar}]" if optional else str(action.metavar))
            elif action.required:
                needed.append(f"{action.option_strings[0]} {action.metavar}")
        return " ".join([self.parser.prog, *needed, "[flags]"])


def _told_of(kind: Callable[[str], Any], twin: str) -> Callable[[str], Any]:
    """A type that names the variable where what it dislikes comes from there."""

    def typed(text: str) -> Any:
        try:
            return kind(text)
        except (argparse.ArgumentTypeError, ValueError) as error:
            where = f" (from {twin})" if isinstance(text, _Twin) else ""
            raise argparse.ArgumentTypeError(f"{error}{where}") from None

    return typed
