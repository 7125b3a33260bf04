"""Chat templates: from messages to the text and token ids that the model was trained on."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimrt.errors import ChatError, UnsupportedError
from slimrt.plumbing.arguments import DEEPEST, is_deeper, unknown
from slimrt.plumbing.files import read_text
from slimrt.plumbing.notes import tell
from slimrt.tokenizer.chat_templates import ENDS, TEMPLATES
from slimrt.tokenizer.messages import Message, checked_messages, with_named_results
from slimrt.tokenizer.template import CompiledTemplate, TemplateTimeError, compiled

if TYPE_CHECKING:
    from slimrt.tokenizer.tokenizer import Tokenizer

Template = str | os.PathLike[str]

_PROBE = "730519826404"  # a text that no template writes by itself; without letters, since templates may change case

_LEFT_OUT = {  # by role, what is said of a message that a template does not write
    "system": "the system message out, as of a model trained without one; put it into the user's first message",
    "tool": "the tool's result out, as of a model trained without tools; put it into a message of the user's",
}

_PRIVATE_USE = range(0xE000, 0xF900)  # characters that no vocabulary has, and that are not white space

_MOST_UNREAD = 100  # names of variables that a template does not read, until no more is said: clients choose them
_LONGEST_UNREAD = 80  # characters of one that are kept

# Where a template searches its input for a text, as in content.split('</think>') or '</think>' in content.
_SEARCHES = re.compile(
    r"""(?:with|split|partition|find|replace)\(\s*(['"])(.+?)\1|(['"])([^'"]+)\3\s+(?:not\s+)?in\s"""
)


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    *,
    chat_template: Template | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the ids of a conversation in the model's own chat format.

    The model's BOS comes once, whether or not the template writes it. Only the template can write control tokens: their
    names in a message or a variable ("<|im_end|>") stay plain text.

    Args:
        tokenizer: the model's.
        messages: {"role": ..., "content": ...}, in order; a content is text, or parts {"type": "text", "text": ...}.
        add_generation_prompt: end with the opening of the assistant's turn.
        chat_template: used instead of the model's own: see `find_template`.
        variables: further variables of the template (tools, documents, enable_thinking, ...): JSON-serialisable.

    Raises:
        UnsupportedError: the model has no chat template and none was given, or the given name is unknown.
        ChatError: malformed messages, or in an impossible order; a variable that is reserved or not JSON-serialisable;
            or the template raises an error, ignores the system message, takes too long, or is not valid jinja2.
        OSError: the file of a chat template cannot be read.
    """
    marks, text = _render(tokenizer, messages, add_generation_prompt, chat_template, variables or {})
    ids = (
        tokenizer.encode_plain(*marks.as_letters(text))
        if marks.texts
        else tokenizer.encode(text, add_special_tokens=False)
    )
    return tokenizer.with_bos(ids)


def render_chat_text(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    *,
    chat_template: Template | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Return the text that `render_chat` tokenises; same arguments and errors."""
    marks, text = _render(tokenizer, messages, add_generation_prompt, chat_template, variables or {})
    return marks.plain(text)


def find_template(tokenizer: Tokenizer, chat_template: Template | None = None, *, tools: bool = False) -> str:
    """Return the text (jinja2) of a chat template.

    Args:
        tokenizer: the model's.
        chat_template: None: the model's own. Else jinja2 text, the name of one of the file's templates or of a built-in
            one (slimrt.tokenizer.chat_templates), or the path of a file.
        tools: the conversation has tools: of the model's own templates "tool_use" is preferred, if there is one.

    Raises:
        UnsupportedError: the model has none; or the name is unknown and there is no such file.
        OSError, ValueError: the file cannot be read, or is not UTF-8.
    """
    if chat_template is None:
        if tools and "tool_use" in tokenizer.chat_templates:
            return tokenizer.chat_templates["tool_use"]
        if tokenizer.chat_template is None:
            raise UnsupportedError(
                "the model has no chat template (tokenizer.chat_template in a GGUF, chat_template in a directory's "
                "tokenizer_config.json). It may not be a chat model: write the whole prompt yourself and generate from "
                "it, or give the template it was trained with (chat_template, --chat-template: "
                f"{', '.join(TEMPLATES)}, or a file)"
            )
        return tokenizer.chat_template
    name = os.fspath(chat_template)
    if "{{" in name or "{%" in name:
        return name
    named = TEMPLATES | tokenizer.chat_templates
    if name in named:
        return named[name]
    if not Path(name).is_file():
        known = unknown("chat template", name, named)
        raise UnsupportedError(f"{known}; it is no file either, and no jinja2 text")
    return read_text(name)


def stops(tokenizer: Tokenizer, chat_template: Template | None) -> list[str]:
    """The stop string of a built-in template's turns, if the vocabulary has no such control token; else none."""
    name = None if chat_template is None else os.fspath(chat_template)
    end = ENDS.get(name or "") if name not in tokenizer.chat_templates else None
    return [end] if end and end not in tokenizer.special_tokens else []


def _render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    chat_template: Template | None,
    variables: Mapping[str, Any],
) -> tuple[_Marks, str]:
    """The rendered text, in which marks stand for the names of control tokens in messages and variables."""
    tokens = {f"{name}_token": tokenizer.vocabulary.tokens[id] for name, id in tokenizer.vocabulary.special_ids.items()}
    own = {"messages", "add_generation_prompt", *tokens}
    _check_variables(variables, own)
    template = find_template(tokenizer, chat_template, tools=bool(variables.get("tools")))
    writer = compiled(template)
    _tell_of_unread(variables, writer, own)
    made = with_named_results(checked_messages(messages, template, answer=add_generation_prompt), template)
    marks = _Marks(tokenizer.spelled_out)
    sought = frozenset(control for control in marks.controls if control in _searched_for(template))
    given = {"tools": None, "documents": None} | marks.put(variables)
    marked = [marks.put(message, sought if message["role"] == "assistant" else frozenset()) for message in made]

    def written(messages: list[dict[str, Any]]) -> str:
        inner = [_in_parts(message) for message in messages] if _reads_parts(template) else messages
        try:
            return writer.render(messages=inner, add_generation_prompt=add_generation_prompt, **tokens, **given)
        except TemplateTimeError:
            raise
        except Exception as error:  # templates are foreign code: any exception is a fault in them or in the messages
            if any(message["content"] is None for message in messages):  # it tests for None, and uses it nevertheless
                return written([message | {"content": message["content"] or ""} for message in messages])
            raise ChatError(f"chat template: {error}") from error

    text = written(marked)
    _check_what_is_left_out(marked, text, written)
    return marks, text


def _check_what_is_left_out(
    messages: list[dict[str, Any]], text: str, written: Callable[[list[dict[str, Any]]], str]
) -> None:
    """ChatError: the template drops a system message or a tool's result. It may change one, as SmolLM3's, which removes
    /no_think."""
    squeezed = "".join(text.split())
    probes = {
        i: f"{_PROBE}{i:06}"
        for i, message in enumerate(messages)
        if message["role"] in _LEFT_OUT and "".join(message["content"].split()) not in squeezed
    }
    if not probes:
        return
    probed = [
        {**message, "content": f"{message['content']} {probes[i]}"} if i in probes else message
        for i, message in enumerate(messages)
    ]
    text = written(probed)
    # Mistral's templates write it before the last user message, and only if that is the last message of all.
    asked = max((at + 1 for at, one in enumerate(messages) if one["role"] == "user"), default=0)
    if asked < len(messages) and any(messages[i]["role"] == "system" for i in probes if i < asked):
        text += written(probed[:asked])
    for i, probe in probes.items():
        if probe not in text:
            raise ChatError(f"messages[{i}]: the chat template leaves {_LEFT_OUT[messages[i]['role']]}")


class _Marks:
    """Random placeholders for the names of control tokens in a template's input.

    Attributes:
        controls: names of the control tokens, longest first.
        texts: name -> number of its mark, for the marks made so far.
    """

    def __init__(self, controls: Iterable[str]):
        self.controls = sorted(controls, key=len, reverse=True)
        begins = sorted({control[:2] for control in self.controls})
        self._begin = re.compile("|".join(map(re.escape, begins)) or "(?!)")  # a fast test: they share few beginnings
        self.texts: dict[str, int] = {}
        self._secret = secrets.token_hex(8)

    def put(self, value: Any, leave: frozenset[str] = frozenset()) -> Any:
        """A copy of a value in which marks replace the names of control tokens, except those in `leave`."""
        if isinstance(value, str):
            if not self._begin.search(value):
                return value
            controls = [re.escape(control) for control in self.controls if control not in leave and control in value]
            return re.sub("|".join(controls), self._mark, value) if controls else value
        if isinstance(value, Mapping):
            return {self.put(name, leave): self.put(one, leave) for name, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.put(one, leave) for one in value]
        return value

    def plain(self, text: str) -> str:
        """A text with its marks replaced by the names they stand for."""
        return self._replaced(text, list(self.texts))

    def as_letters(self, text: str) -> tuple[str, Callable[[str], str]]:
        """The text with each mark replaced by a letter that it does not contain, and a function that makes plain text
        of a part of it. Marks are longer than most names: encoding a text with very many of them would take seconds."""
        used = set(text)
        free = (letter for letter in map(chr, _PRIVATE_USE) if letter not in used)
        letters = dict(zip(self.texts, free, strict=False))
        if len(letters) < len(self.texts):  # too few letters are free
            return text, self.plain
        table = str.maketrans({letter: control for control, letter in letters.items()})
        return self._replaced(text, list(letters.values())), lambda part: part.translate(table)

    def _replaced(self, text: str, by: Sequence[str]) -> str:
        return re.sub(rf"{self._secret}m(\d+)m", lambda mark: by[int(mark[1])], text)

    def _mark(self, control: re.Match[str]) -> str:
        return f"{self._secret}m{self.texts.setdefault(control[0], len(self.texts))}m"


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content, if any, is a list of one part."""
    content = message["content"]
    return message if content is None else {**message, "content": [{"type": "text", "text": content}]}


@lru_cache(maxsize=16)
def _reads_parts(template: str) -> bool:
    """Whether a template writes contents only if they are lists of parts, as those of some vision models (SmolVLM):
    a content that is plain text would be lost."""

    def shows(message: dict[str, Any]) -> bool:
        try:
            text = compiled(template).render(messages=[message], bos_token="", eos_token="")
        except TemplateTimeError:
            raise
        except Exception:  # it needs more than this: the conversation itself will show the error
            return False
        return _PROBE in text

    probe = {"role": "user", "content": _PROBE}
    return not shows(probe) and shows(_in_parts(probe))


@lru_cache(maxsize=16)
def _searched_for(template: str) -> str:
    """The texts that a template searches messages for, such as the end of thoughts, which it removes; by newlines."""
    return "\n".join(found[2] or found[4] for found in _SEARCHES.finditer(template))


def _tell_of_unread(variables: Mapping[str, Any], writer: CompiledTemplate, own: Iterable[str]) -> None:
    """Say once which variables the template does not read: the name may be misspelt, or another model's."""
    names = {name[:_LONGEST_UNREAD] for name in variables}  # clients choose them
    unread = names - writer.reads - writer.unread - {"tools"}  # of tools the caller knows what became
    if not unread or len(writer.unread) > _MOST_UNREAD:
        return
    writer.unread |= unread
    named, known = (", ".join(map(repr, sorted(names))) for names in (unread, writer.reads.difference(own)))
    tell(f"chat_template_kwargs: the chat template does not read {named[:500]}; it reads {known or 'no others'}")


def _check_variables(variables: Mapping[str, Any], taken: Iterable[str]) -> None:
    """ChatError: `variables` is not a mapping, or a variable is reserved or not JSON-serialisable."""
    if not isinstance(variables, Mapping):
        raise ChatError(f"chat_template_kwargs maps names to values, got {variables!r}")
    if not all(isinstance(name, str) for name in variables):
        raise ChatError(f"chat_template_kwargs maps names to values, got {variables!r}")
    if is_deeper(variables, DEEPEST):
        raise ChatError(f"chat_template_kwargs are nested more than {DEEPEST} deep")
    for name, value in variables.items():
        if name in taken:
            raise ChatError(f"chat_template_kwargs: '{name}' is set by the conversation and the vocabulary")
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ChatError(f"chat_template_kwargs: '{name}' must be what JSON can hold: {error}") from None
