"""slimrt chat: a conversation in the terminal, or with one message a line over a pipe."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from slimrt.cli.chat_commands import HINT, Commands
from slimrt.cli.chat_input import Entered, Reader
from slimrt.cli.common import Flags, check_options, model_source, note, open_model, read_input, sentence
from slimrt.cli.conversation import Conversation
from slimrt.cli.sampling import constraint_arguments, sampling_arguments
from slimrt.cli.values import file_name, not_empty
from slimrt.errors import SlimrtError
from slimrt.modelfile.source import ModelSource
from slimrt.plumbing.files import check_target
from slimrt.runtime.kinds import continues_texts


def add_flags(flags: Flags) -> None:
    flags.model()
    flags.add("-p", "--prompt", twin=False, metavar="TEXT", help="one message: print the answer and exit")
    flags.add("-f", "--file", twin=False, type=not_empty, metavar="FILE", help="the same, from a file")
    flags.add("-st", "--single-turn", twin=False, action="store_true", help="exit after one answer")
    flags.add("-sys", "--system", "--system-prompt", metavar="TEXT", dest="system", help="the system "
              "message")  # fmt: skip
    flags.add("--chat-template", "--chat-template-file", metavar="TEMPLATE", dest="chat_template", help="in place "
              "of the file's default: the name of another of its templates, or chatml, gemma, llama2, llama3, mistral, "
              "phi3, vicuna, zephyr; a file; or Jinja text")  # fmt: skip
    flags.add("--chat-template-kwargs", type=json_object, metavar="JSON", help="variables for the template, such as "
              "'{\"enable_thinking\": false}'")  # fmt: skip
    flags.add("--load", twin=False, type=not_empty, metavar="FILE", help="continue a conversation that --save or /save "
              "wrote")  # fmt: skip
    flags.add("--save", twin=False, type=file_name, metavar="FILE", help="save the conversation to a file after each "
              "answer")  # fmt: skip
    flags.n_predict(-1)
    flags.draft()
    flags.sampling()
    flags.constraints()
    flags.engine()
    flags.output()


def json_object(text: str) -> dict[str, Any]:
    """A JSON object, for argparse."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}: '{text}'") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, such as {{\"enable_thinking\": false}}, got '{text}'")
    return value


def run(args: argparse.Namespace) -> int:
    source = model_source(args)
    continues_texts(source)
    message = _one_message(args)
    if args.save:
        _check_save(args)
    check_options(args, sampling_arguments(args) | constraint_arguments(args))
    _try_template(args, source)
    with open_model(args, source, args.ctx or 0) as model:
        interactive = message is None and sys.stdin.isatty()
        conversation = Conversation(model, args, interactive)
        if args.load:
            conversation.load(Path(args.load))
            conversation.system = args.system or conversation.system
        if message is not None:
            conversation.say(message)
            return 0
        try:
            _converse(conversation, Reader(interactive))
        except BaseException:  # also Ctrl-C and signals
            conversation.rescue()
            raise
    return 0


def _one_message(args: argparse.Namespace) -> str | None:
    """The message given with -p or -f; None: a conversation."""
    if args.prompt is not None and args.file is not None:
        args.usage_error("give -p or -f, not both")
    if args.prompt is None and args.file is None:
        return None
    text = args.prompt if args.file is None else read_input(args.file)
    message = str(text).strip()
    if not message:
        args.usage_error("the message of -p or -f is empty")
    return message


def _check_save(args: argparse.Namespace) -> None:
    """OSError: --save cannot be written, or would replace a file other than that of --load."""
    target = Path(args.save)
    check_target(target)
    if target.exists() and not (args.load and target.samefile(args.load)):
        raise FileExistsError(f"{target} exists: go on with it with --load {target} as well, or name another file")


def _try_template(args: argparse.Namespace, source: ModelSource) -> None:
    """Render a first message before the model is loaded, so that errors of the template come early. This also imports
    jinja2, an import which Ctrl-C would else interrupt at the first message."""
    from slimrt.tokenizer.chat import render_chat_text

    system = [{"role": "system", "content": args.system}] if args.system else []
    render_chat_text(
        source.tokenizer,
        [*system, {"role": "user", "content": "hello"}],
        chat_template=args.chat_template,
        variables=args.chat_template_kwargs,
    )


def _converse(conversation: Conversation, reader: Reader) -> None:
    """Answer until the end of the input or /exit. In a terminal neither Ctrl-C nor errors end the conversation."""
    commands = Commands(conversation)
    if reader.interactive:
        note(conversation.args, HINT)
    while True:
        try:
            entered = reader.read()
            if entered is None or not _react(conversation, commands, entered):
                return
        except KeyboardInterrupt:
            if not reader.interactive:
                raise
            print("\nslimrt: stopped; the conversation is as it was (/exit or Ctrl-D leaves)", file=sys.stderr)


def _react(conversation: Conversation, commands: Commands, entered: Entered) -> bool:
    """Answer a message, or execute a command. False: the conversation ends."""
    try:
        if entered.command:
            return commands.obey(entered.text)
        if entered.text:
            conversation.say(entered.text)
            return not conversation.args.single_turn
    except (SlimrtError, OSError, ValueError, TypeError) as error:
        if not conversation.interactive or isinstance(error, BrokenPipeError):
            raise
        print(f"slimrt: {sentence(error)}", file=sys.stderr)
    return True
