"""Chat templates: messages to the text and the ids that the model was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slimrt.errors import UnsupportedError

if TYPE_CHECKING:
    from slimrt.tokenizer.tokenizer import Tokenizer

Message = Mapping[str, Any]


def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], add_generation_prompt: bool = True, **kwargs: Any
) -> list[int]:
    """Return the ids of a conversation in the model's own chat format.

    The model's BOS is there once, whether or not the template writes it. Control tokens are parsed in the whole text,
    messages included, as the template's own must be.

    Args:
        tokenizer: the model's.
        messages: {"role": ..., "content": ...}, in order.
        add_generation_prompt: end with the opening of the assistant's turn.
        kwargs: more variables for the template (tools, enable_thinking, ...).

    Raises:
        UnsupportedError: the model has no chat template.
        ValueError: the template refused the messages, or is itself wrong; the message is the template's.
    """
    text = render_chat_text(tokenizer, messages, add_generation_prompt, **kwargs)
    return tokenizer.with_bos(tokenizer.encode(text, add_special_tokens=False))


def render_chat_text(
    tokenizer: Tokenizer, messages: Sequence[Message], add_generation_prompt: bool = True, **kwargs: Any
) -> str:
    """Return the text that `render_chat` tokenises; same arguments and errors."""
    if tokenizer.chat_template is None:
        raise UnsupportedError(
            "the model has no chat template (tokenizer.chat_template in a GGUF, chat_template in a directory's "
            "tokenizer_config.json). It may not be a chat model: write the whole prompt yourself and generate from it, "
            "or use a file that has a template"
        )
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message:
            raise ValueError(f"a message is a mapping with a role and a content, got {message!r}")
    variables = {
        f"{name}_token": tokenizer.vocabulary.tokens[id] for name, id in tokenizer.vocabulary.special_ids.items()
    }
    variables |= {"tools": None, "documents": None} | kwargs
    try:
        return _compile(tokenizer.chat_template).render(
            messages=messages, add_generation_prompt=add_generation_prompt, **variables
        )
    except Exception as error:  # a template is foreign code: whatever it raises is a fault of it or of the messages
        raise ValueError(f"chat template: {error}") from error


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment.from_string(template)


class _GenerationTag(Extension):
    """{% generation %}: marks the assistant's text for training; for inference it is its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """json.dumps; jinja2's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
