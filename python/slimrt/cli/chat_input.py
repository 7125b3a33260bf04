"""The input of a chat: messages of one or several lines, and commands."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from slimrt.plumbing.files import decode_text

_QUOTES = '"""'


@dataclass(frozen=True)
class Entered:
    """A message, or a command with its argument."""

    text: str
    command: bool = False


class Reader:
    """Reads messages and commands from a terminal or a pipe.

    A line is a message. A line that begins with / is a command, with // a message that begins with /. A line that ends
    with a backslash continues in the next one; text between triple quotes is one message, whatever it contains.
    """

    def __init__(self, interactive: bool):
        self.interactive = interactive
        if interactive:
            import readline  # noqa: F401  enables line editing in input()

    def read(self) -> Entered | None:
        """The next message or command, None at the end. In a terminal Ctrl-C discards the line.

        Raises:
            ValueError: from a pipe: bytes that are not UTF-8, or unclosed triple quotes.
            KeyboardInterrupt: Ctrl-C, outside a terminal.
        """
        try:
            return self._read()
        except EOFError:
            if self.interactive:
                print(file=sys.stderr)
            return None
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            print("\nslimrt: /exit or Ctrl-D leaves", file=sys.stderr)
            return Entered("")

    def _read(self) -> Entered:
        line = self._line("> ").strip()
        if line.startswith(_QUOTES):
            return Entered(self._quoted(line.removeprefix(_QUOTES)))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            try:
                lines.append(self._line(". ").rstrip())
            except EOFError:
                break
        text = "\n".join(lines)
        if text.startswith("//"):
            return Entered(text[1:])
        return Entered(text, command=text.startswith("/"))

    def _quoted(self, line: str) -> str:
        lines = [line]
        while not lines[-1].rstrip().endswith(_QUOTES):
            try:
                lines.append(self._line(". "))
            except EOFError:
                told = f"the message that {_QUOTES} opened was not closed by {_QUOTES}"
                if not self.interactive:
                    raise ValueError(told) from None
                print(f"\nslimrt: {told}, and is not sent", file=sys.stderr)
                return ""
        lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
        return "\n".join(lines).strip()

    def _line(self, prompt: str) -> str:
        """A line without its line ending. EOFError: there is none."""
        if not self.interactive:
            line = sys.stdin.buffer.readline()
            if not line:
                raise EOFError
            return decode_text(line, "stdin").rstrip("\r\n")
        if sys.stdout.isatty():
            return input(prompt)
        print(prompt, end="", file=sys.stderr, flush=True)  # input() would write the prompt to stdout
        return input()
