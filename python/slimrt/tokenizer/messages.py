"""Checks of the messages of a conversation, before a template renders them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from slimrt.errors import ChatError
from slimrt.plumbing.arguments import DEEPEST, is_deeper, unknown

Message = Mapping[str, Any]

# Where a template tests whether the content is none: DeepSeek's write calls only if it is. Not: Qwen3's test of
# reasoning_content.
_ASKS_FOR_NONE = re.compile(r"""(?<![a-z_])content['"]?\]?\s+(?:is\s+(?:not\s+)?|[!=]=\s*)none\b""", re.IGNORECASE)

# The names that clients use for thoughts; templates read the first two.
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")

# Where a template refuses a message with calls that has both a content and thoughts, either of which it would write as
# thoughts: gpt-oss'.
_TAKES_EITHER = re.compile(r"if message\.content and message\.thinking")

_ROLES = ("system", "user", "assistant", "tool")
_DEVELOPER = "developer"  # OpenAI's newer name for system
_RESULT = "tool_response"  # Granite 3.0's name for tool


def checked_messages(messages: Sequence[Message], template: str, answer: bool) -> list[dict[str, Any]]:
    """The messages as copies with text contents, if they form a conversation.

    Args:
        messages: {"role": ..., "content": ...}, in order; a content is text, or OpenAI's parts of the type "text",
            which are joined by newlines. The content may be missing in an assistant's message with tool calls; it is
            passed on as "", or as None to templates that test for that. Other null values are dropped.
        template: the chat template's text: roles that it names are allowed, besides the usual ones. "developer" becomes
            "system" if it does not name that role.
        answer: the assistant's next message is wanted, so the last one must not be the assistant's.

    Raises:
        ChatError: there are no messages, one is malformed, or their order is impossible; the message says which.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ChatError(f"messages are a list of mappings with a role and a content, got {messages!r}")
    if not messages:
        raise ChatError("there are no messages: a conversation has at least one")
    for i, message in enumerate(messages):
        if is_deeper(message, DEEPEST):
            raise ChatError(f"messages[{i}] is nested more than {DEEPEST} deep")
    made = [_checked(f"messages[{i}]", message, template) for i, message in enumerate(messages)]
    for i, message in enumerate(made):
        before = made[i - 1] if i else {}
        if message["role"] == "tool" and not (before.get("role") == "tool" or before.get("tool_calls")):
            raise ChatError(f"messages[{i}] is a tool's, but the message before it calls none (tool_calls)")
    if answer and made[-1]["role"] == "assistant":
        raise ChatError(
            f"messages[{len(made) - 1}] is the assistant's, and so would the next be: end with the message to answer"
        )
    return made


def with_named_results(messages: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """The messages with the role of tools' results as the template has it, where it names another than "tool"."""
    if _names("tool", template) or not _names(_RESULT, template):
        return messages
    return [{**one, "role": _RESULT} if one["role"] == "tool" else one for one in messages]


def _names(role: str, template: str) -> bool:
    return f"'{role}'" in template or f'"{role}"' in template


def _checked(where: str, message: Message, template: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or "role" not in message:
        raise ChatError(f"{where}: a message is a mapping with a role and a content, got {message!r}")
    role = message["role"]
    named = isinstance(role, str) and _names(role, template)
    if role == _DEVELOPER and not named:
        role = "system"
    if not isinstance(role, str) or not (role in _ROLES or named):
        raise ChatError(f"{where}: {unknown('role', role, _ROLES)}, and the chat template names no other such role")
    if not isinstance(message.get("tool_calls") or [], (list, tuple)):
        raise ChatError(f"{where}: tool_calls are a list, got {message['tool_calls']!r}")
    content = message.get("content")
    if content is None and not (role == "assistant" and message.get("tool_calls")):
        raise ChatError(f"{where}: the {role}'s message has no content")
    nothing = None if _ASKS_FOR_NONE.search(template) else ""
    if wrong := [name for name in _THOUGHTS if not isinstance(message.get(name) or "", str)]:
        raise ChatError(f"{where}: {wrong[0]} is text, got {message[wrong[0]]!r}")
    # Clients write null, or an empty list of calls, for absent fields; templates that test for presence need them gone.
    there = {
        name: one for name, one in _with_thoughts(message).items() if one is not None and (one or name != "tool_calls")
    }
    made = {**there, "role": role, "content": nothing if content is None else _text(where, content)}
    if made.get("tool_calls") and made["content"] and made.get("thinking") and _TAKES_EITHER.search(template):
        made |= {"thinking": f"{made['thinking']}\n\n{made['content']}", "content": ""}
    return made


def _with_thoughts(message: Message) -> Message:
    """A message with its thoughts, if any, under the names that templates read, as in transformers."""
    thoughts = next((message[name] for name in _THOUGHTS if message.get(name) is not None), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}


def _text(where: str, content: Any) -> str:
    """A content as text. ChatError: it is neither text nor a list of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ChatError(f"{where}: a content is text or a list of parts, got {content!r}")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind is None:
            raise ChatError(f"{where}.content[{i}]: a part is a mapping with a type, got {part!r}")
        if kind != "text":
            raise ChatError(f"{where}.content[{i}]: a part of type '{kind}' is not supported: this reads text alone")
        if not isinstance(part.get("text"), str):
            raise ChatError(f"{where}.content[{i}]: a part of type 'text' has its text under 'text', got {part!r}")
        texts.append(part["text"])
    return "\n".join(texts)
