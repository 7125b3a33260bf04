"""Adding flags to a parser: groups, lists separated by blanks, defaults from the environment."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from slimrt.cli.parser import Parser
from slimrt.cli.values import one_of


class Collect(argparse.Action):
    """Collects the values of a repeated flag, replacing its default; argparse's "append" would extend the default."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        so_far = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [values] if so_far is self.default else [*so_far, values])


class _Twin(str):
    """A default that comes from the environment: argparse converts string defaults only if the flag is not given."""


class Adder:
    """Adds flags to a parser, in groups; the environment variable SLIMRT_NAME overrides a flag's default.

    Attributes:
        checks: functions called with all flags once they are parsed, which refuse wrong usage.
    """

    def __init__(self, parser: Parser):
        self.parser = parser
        self.checks: list[Callable[[argparse.Namespace], None]] = []
        self.twins = True  # whether flags added from now on have environment variables ("twins")
        self._group: argparse._ActionsContainer = parser

    def group(self, title: str) -> None:
        """Begin a group of flags in --help."""
        self._group = self.parser.add_argument_group(title)

    def add(
        self, *names: str, twin: bool = True, goes_on: Callable[[str], bool] | None = None, **settings: Any
    ) -> None:
        """Add a flag.

        Args:
            twin: whether it has an environment variable: only settings have, not inputs and outputs of one command, nor
                flags whose meaning differs between verbs.
            goes_on: for comma-separated lists: whether a further word belongs to the list, so that blanks may separate
                its items too.
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
        elif isinstance(action.default, int) and action.nargs == 0:  # counts, such as -vv
            action.default = int(value) if value.isdecimal() else int(self._switch(twin, value))
        elif isinstance(action, Collect):
            try:
                action.default = [kind(value)]
            except argparse.ArgumentTypeError as error:
                self.parser.error(f"{twin}: {error}")
        else:
            action.type, action.default = _naming_variable(kind, twin), _Twin(value)

    def _switch(self, twin: str, value: str) -> bool:
        """The value of a variable for a flag without a value; other texts than yes, no and the like are wrong usage."""
        known = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)
        if value.lower() not in known:
            self.parser.error(f"{twin} is '{value}'; it may be {', '.join(known)}")
        return known[value.lower()]

    def usage(self) -> str:
        """The usage line of --help: required arguments and flags."""
        needed = list[str]()
        for action in self.parser._actions:
            if not action.option_strings:
                optional = action.nargs == "*" or action.nargs == "?" and needed
                needed.append(f"[{action.metavar}]" if optional else str(action.metavar))
            elif action.required:
                needed.append(f"{action.option_strings[0]} {action.metavar}")
        return " ".join([self.parser.prog, *needed, "[flags]"])


def _naming_variable(kind: Callable[[str], Any], twin: str) -> Callable[[str], Any]:
    """The type of a flag, whose errors name the environment variable if the value comes from it."""

    def typed(text: str) -> Any:
        try:
            return kind(text)
        except (argparse.ArgumentTypeError, ValueError) as error:
            where = f" (from {twin})" if isinstance(text, _Twin) else ""
            raise argparse.ArgumentTypeError(f"{error}{where}") from None

    return typed
