"""slimrt chat: a conversation in the terminal, or over a pipe, a message a line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slimrt.cli.common import Flags, model_source, note, open_model, sampling_arguments
from slimrt.cli.generate import timings_line
from slimrt.errors import ContextOverflowError
from slimrt.model import Model
from slimrt.plumbing.files import decode_text
from slimrt.plumbing.units import format_bytes
from slimrt.results import Generation
from slimrt.runtime.kinds import continues_texts
from slimrt.tokenizer.chat import render_chat

_COMMANDS = "/help  /reset (forget everything)  /stats  /save FILE (messages as JSON)  /exit"


def add_flags(flags: Flags) -> None:
    flags.model()
    flags.add("--system", metavar="TEXT", help="a first message that tells the model how to behave")
    flags.n_predict(-1)
    flags.sampling()
    flags.engine()
    flags.output()


def run(args: argparse.Namespace) -> int:
    source = model_source(args)
    continues_texts(source)
    if source.tokenizer.chat_template is None:
        render_chat(source.tokenizer, [])  # says so, before the model is loaded
    with open_model(args, source, source.n_ctx(args.ctx or 0)) as model:
        conversation = Conversation(args, model)
        for line in _lines(args):
            if line.startswith("/"):
                if not conversation.command(line):
                    break
            elif line:
                conversation.answer(line)
    return 0


class Conversation:
    """Messages, and the session that holds what they have in common from turn to turn."""

    def __init__(self, args: argparse.Namespace, model: Model):
        self.args = args
        self.model = model
        self.session = model.session()
        self.messages: list[dict[str, str]] = []
        self.last: Generation | None = None
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.args.system}] if self.args.system else []
        self.session.truncate(0)

    def answer(self, text: str) -> None:
        """Say something, and print what the model says. Ctrl-C ends the answer and keeps what there is of it."""
        self.messages.append({"role": "user", "content": text})
        options: dict[str, Any] = sampling_arguments(self.args) | {"max_tokens": self.args.n_predict}
        try:
            stream = self.model.stream(self.model.render_chat(self.messages), session=self.session, **options)
        except (ContextOverflowError, ValueError) as error:  # too long, or the template will not have it
            self.messages.pop()
            if not sys.stdin.isatty():
                raise
            note(self.args, f"slimrt: {error} (/reset begins anew)")
            return
        with stream:
            try:
                for piece in stream:
                    if not self.args.json:
                        print(piece, end="", flush=True)
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
        self.last = stream.result
        self.messages.append({"role": "assistant", "content": self.last.text})
        print(json.dumps(self.last.to_dict(), ensure_ascii=False) if self.args.json else "", flush=True)
        if self.last.truncated:
            note(self.args, f"slimrt: the context of {self.model.n_ctx} tokens is full; /reset begins anew")
        if self.args.verbose:
            note(self.args, timings_line(self.last))

    def command(self, line: str) -> bool:
        """Do what a /command says; False ends the conversation."""
        name, _, argument = line.partition(" ")
        if name == "/exit":
            return False
        if name == "/reset":
            self.reset()
        elif name == "/stats":
            self.stats()
        elif name == "/save" and argument:
            self.save(Path(argument.strip()))
        else:
            print(_COMMANDS, file=sys.stderr)
        return True

    def save(self, path: Path) -> None:
        """Write the messages; at a terminal a file that cannot be written does not end the conversation."""
        try:
            path.write_text(json.dumps(self.messages, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            if not sys.stdin.isatty():
                raise
            note(self.args, f"slimrt: not saved: {error}")

    def stats(self) -> None:
        size = self.session.runtime.cache_bytes(self.session.length)
        print(f"{self.session.length} of {self.model.n_ctx} tokens, cache {format_bytes(size)}", file=sys.stderr)
        if self.last is not None:
            print(timings_line(self.last), file=sys.stderr)


def _lines(args: argparse.Namespace) -> Iterator[str]:
    """What the user types, or pipes in, a message a line, until the end of it."""
    if not sys.stdin.isatty():
        for line in sys.stdin.buffer:
            yield decode_text(line, "stdin").strip()
        return
    import readline  # noqa: F401  gives input() its line editing

    note(args, _COMMANDS)
    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            print(file=sys.stderr)
            return
