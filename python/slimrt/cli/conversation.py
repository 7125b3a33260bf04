"""The conversation of slimrt chat: messages, answers, and files."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimrt.cli.common import note
from slimrt.cli.generate import timings_line
from slimrt.cli.sampling import constraint_arguments, sampling_arguments
from slimrt.errors import ChatError, UnsupportedError
from slimrt.generation.options import Options
from slimrt.model import Model
from slimrt.plumbing.files import read_text, state_directory, written_beside
from slimrt.plumbing.units import format_bytes
from slimrt.results import Generation
from slimrt.tokenizer.channels import has_channels, mark_ids

if TYPE_CHECKING:
    from slimrt.tokenizer.tokenizer import Tokenizer


class Conversation:
    """Messages, and the session with the cached rows that the turns have in common.

    If an answer fails before it begins, the messages are unchanged.

    Attributes:
        messages: {"role", "content"}, in order.
        options: of Model.stream.
        last: the last answer, if there is one.
    """

    def __init__(self, model: Model, args: argparse.Namespace, interactive: bool):
        from slimrt.tokenizer.chat import stops

        self.model, self.args, self.interactive = model, args, interactive
        self.session = model.session()
        self.options: dict[str, Any] = sampling_arguments(args) | constraint_arguments(args)
        self.options["max_tokens"] = args.n_predict
        self.messages: list[dict[str, Any]] = []
        self.last: Generation | None = None
        self._ends = stops(model.tokenizer, args.chat_template)
        self._again = 0  # number of /regenerate: added to a fixed seed, so that the answers differ
        self._files: set[Path] = {Path(args.save).resolve()} if args.save else set()  # its own, may be overwritten
        self._unsaved = False
        self.reset()

    def reset(self) -> None:
        """Forget all messages but the system message of the command line."""
        self.messages = [{"role": "system", "content": self.args.system}] if self.args.system else []
        self.session.truncate(0)
        self._unsaved = False

    @property
    def system(self) -> str:
        """The system message; "": none."""
        return str(self.messages[0]["content"]) if self.messages and self.messages[0]["role"] == "system" else ""

    @system.setter
    def system(self, text: str) -> None:
        self.messages = [{"role": "system", "content": text}] * bool(text) + self.messages[bool(self.system) :]

    def say(self, text: str) -> None:
        """Send a message, and print the answer. In a terminal Ctrl-C ends the answer, and keeps what it has so far.

        Raises:
            ContextOverflowError: it does not fit the context.
            ChatError: the template refuses it.
        """
        self._answer([*self.messages, {"role": "user", "content": text}])

    def regenerate(self) -> None:
        """Answer the last message again. ValueError: there is none."""
        end = len(self.messages)
        while end and self.messages[end - 1]["role"] == "assistant":
            end -= 1
        if not end or self.messages[end - 1]["role"] == "system":
            raise ValueError("there is no message to answer again")
        self._again += 1
        self._answer(self.messages[:end])

    def set(self, **changes: Any) -> None:
        """Change options of sampling.

        Raises:
            ValueError, UnsupportedError: an invalid value, of a wrong type too, or one that no answer can be made with.
        """
        options = self.options | changes
        try:
            checked = Options(**options)
            checked.sampler(0)
        except TypeError as error:  # what was typed is wrong, not the program
            raise ValueError(str(error)) from None
        if checked.num_beams > 1:
            raise UnsupportedError("num_beams: chat shows a text as it comes, and beam search chooses it at the end: "
                                   "slimrt generate has it")  # fmt: skip
        self.options = options

    def _answer(self, messages: list[dict[str, Any]]) -> None:
        seed = self.options["seed"]
        options = self.options | {
            "stop": [*Options(**self.options).stops, *self._ends],
            "seed": None if seed in (None, -1) else seed + self._again,
        }
        ids = self.model.render_chat(
            messages, chat_template=self.args.chat_template, chat_template_kwargs=self.args.chat_template_kwargs
        )
        channels = _Channels.of(self.model.tokenizer, self.args.chat_template)
        options |= {} if channels is None else {"show_tokens": channels.shown}
        stream = self.model.stream(ids, session=self.session, **options)
        with stream:
            try:
                for piece in stream:
                    if not self.args.json:
                        print(piece if channels is None else channels.text(piece), end="", flush=True)
            except KeyboardInterrupt:
                if not self.interactive or not stream.result.text:
                    raise
        last, answer = stream.result, {"role": "assistant", "content": stream.result.text}
        if channels is not None:
            print("" if self.args.json else channels.rest(), end="")
            answer = channels.message(last.text)
            last = replace(last, text=answer["content"])
        self.last, self.messages = last, [*messages, answer]
        self._unsaved = True
        print(json.dumps(last.to_dict(), ensure_ascii=False) if self.args.json else "", flush=True)
        if self.args.save:
            self._write(Path(self.args.save))
        if last.truncated:
            note(self.args, f"slimrt: the context of {self.model.n_ctx} tokens is full; /reset starts a new one")
        if self.args.verbose:
            note(self.args, timings_line(last))

    def save(self, path: Path) -> None:
        """Write the messages as JSON. OSError: it fails, or the file exists and is not of this conversation."""
        if path.exists() and path.resolve() not in self._files:
            raise FileExistsError(f"{path} exists and is not of this conversation; name another file")
        self._write(path)

    def load(self, path: Path) -> None:
        """Continue with the messages of a file: one that `save` wrote, or any list of messages in JSON.

        Raises:
            OSError: it cannot be read.
            ChatError: it contains no conversation.
        """
        from slimrt.tokenizer.chat import find_template
        from slimrt.tokenizer.messages import checked_messages

        try:
            found = json.loads(read_text(path))
            messages = found["messages"] if isinstance(found, dict) and "messages" in found else found
            template = find_template(self.model.tokenizer, self.args.chat_template)
            self.messages = checked_messages(messages, template, answer=False)
        except (ValueError, RecursionError) as error:
            raise ChatError(f"{path} holds no conversation: {error}") from error
        self._files.add(path.resolve())
        self._unsaved = False
        waits = self.messages[-1]["role"] not in ("assistant", "system")
        note(self.args, f"slimrt: {len(self.messages)} messages" + (": /regenerate answers the last" if waits else ""))

    def rescue(self) -> None:
        """If an error or signal ends the program: save unsaved messages, and print where."""
        if not self._unsaved:
            return
        try:
            folder = state_directory()
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"chat-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.json"
            self._write(path)
            told = f"slimrt: the conversation is saved in {path}; slimrt chat MODEL --load continues it"
        except OSError as error:
            told = f"slimrt: the conversation could not be saved: {error}"
        try:
            print("\n" * self.interactive + told, file=sys.stderr, flush=True)
        except OSError:  # the terminal was closed
            pass

    def _write(self, path: Path) -> None:
        with written_beside(path) as partial:
            partial.touch(mode=0o600)
            partial.chmod(0o600)  # conversations are private
            partial.write_text(json.dumps(self.messages, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        self._files.add(path.resolve())
        self._unsaved = False

    def describe(self) -> str:
        """How full the context is, and the timings of the last answer."""
        size = self.session.runtime.cache_bytes(self.session.length)
        told = f"{self.session.length} of {self.model.n_ctx} tokens, cache {format_bytes(size)}"
        return told if self.last is None else f"{told}\n{timings_line(self.last)}"


class _Channels:
    """Shows the answer of a model with channels (gpt-oss) like others: thoughts in <think> tags, then the answer.

    Attributes:
        shown: ids of the control tokens that mark its parts.
    """

    def __init__(self, tokenizer: Tokenizer):
        from slimrt.openai.harmony import HarmonyParser

        self.shown, self._parser, self._part = mark_ids(tokenizer), HarmonyParser(), ""

    @classmethod
    def of(cls, tokenizer: Tokenizer, chat_template: str | None) -> _Channels | None:
        """None: the model does not use channels."""
        from slimrt.tokenizer.chat import find_template

        return cls(tokenizer) if has_channels(find_template(tokenizer, chat_template)) else None

    def text(self, piece: str) -> str:
        """The text to show for a further piece."""
        return self._shown(self._parser.feed(piece))

    def rest(self) -> str:
        """The text to show at the end of the answer."""
        return self._shown(self._parser.flush()) + ("</think>" if self._part == "reasoning_content" else "")

    def message(self, text: str) -> dict[str, str]:
        """The message for a whole answer."""
        from slimrt.openai.answer import joined
        from slimrt.openai.harmony import HarmonyParser

        parser = HarmonyParser()
        return joined([*parser.feed(text), *parser.flush()])

    def _shown(self, deltas: Sequence[Mapping[str, str]]) -> str:
        made = ""
        for delta in deltas:
            ((part, text),) = delta.items()
            if part != self._part:
                made += {"reasoning_content": "<think>", "content": "</think>\n\n" * bool(self._part)}[part]
                self._part = part
            made += text
        return made
