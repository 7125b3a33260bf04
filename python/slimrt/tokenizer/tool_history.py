"""Earlier turns with tool calls and results, in the form that a model's chat template takes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from slimrt.errors import ChatError
from slimrt.plumbing.arguments import DEEPEST, is_deeper
from slimrt.tokenizer.tool_format import ID, ID_LENGTH, ID_PATTERN, INDEX, ToolFormat


def history(messages: Sequence[Mapping[str, Any]], format: ToolFormat) -> list[dict[str, Any]]:
    """Messages whose calls and results have the form that the template takes.

    Raises:
        ChatError: arguments of a call are not a JSON object, or a message has several calls and the template writes
            one; the message says where.
    """
    if format.origin != "prompt":
        made = [_with_calls(f"messages[{i}]", message, format) for i, message in enumerate(messages)]
        return _numbered(made, format) if INDEX in format.middle else made
    made, results = [], False
    for i, message in enumerate(messages):
        is_result = isinstance(message, Mapping) and message.get("role") == "tool"
        if is_result:
            text = f"<tool_response>\n{message.get('content')}\n</tool_response>"
            if results:
                made[-1]["content"] += f"\n{text}"
            else:
                made.append({"role": "user", "content": text})
        else:
            made.append(_with_calls_in_content(f"messages[{i}]", message, format))
        results = is_result
    return made


def _with_calls(where: str, message: Any, format: ToolFormat) -> Any:
    if not isinstance(message, Mapping):
        return message
    shows_ids = any(ID in text for text in format.texts)
    if shows_ids and isinstance(id := message.get("tool_call_id"), str):
        return {**message, "tool_call_id": _short(id)}
    calls = message.get("tool_calls")
    if not calls:
        return message
    if not format.shown:
        return {**message, "content": _with_calls_in_content(where, message, format)["content"]}
    if len(calls) > 1 and format.shown < 2:
        raise ChatError(
            f"{where} has {len(calls)} calls, of which the chat template shows one: write a message for each"
        )
    made = [_call(where, one, format.as_text) for one in calls]
    for one in made if shows_ids else ():
        one |= {"id": _short(one["id"])} if isinstance(one.get("id"), str) else {}
    return {**message, "tool_calls": made}


def _numbered(messages: Sequence[Any], format: ToolFormat) -> list[Any]:
    """Messages with the ids of calls, and of their results, in the form in which the model writes them."""
    made, ids, count = list[Any](), dict[Any, str](), 0
    for message in messages:
        if isinstance(message, Mapping) and message.get("tool_calls"):
            calls, count = [], count if format.counts_on else 0
            for call in message["tool_calls"]:
                calls.append({**call, "id": format.numbered_id(call["function"]["name"], count)})
                ids[call.get("id")] = calls[-1]["id"]
                count += 1
            message = {**message, "tool_calls": calls}
        elif isinstance(message, Mapping) and message.get("tool_call_id") in ids:
            message = {**message, "tool_call_id": ids[message["tool_call_id"]]}
        made.append(message)
    return made


def _short(id: str) -> str:
    """A call's id, hashed to the 9 characters that templates with ids (Mistral's) require, if it has another form."""
    if re.fullmatch(ID_PATTERN, id):
        return id
    return hashlib.sha256(id.encode("utf-8", "surrogatepass")).hexdigest()[:ID_LENGTH]


def _call(where: str, call: Any, as_text: bool) -> dict[str, Any]:
    """A call with arguments as text or as an object. ChatError: it is malformed, or they are not a JSON object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ChatError(f"{where}: a call is {{'id', 'type', 'function': {{'name', 'arguments'}}}}, got {call!r}")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise ChatError(f"{where}: the arguments of {function['name']} are not JSON: {error}") from None
    else:
        parsed = arguments
    if is_deeper(parsed, DEEPEST):
        raise ChatError(f"{where}: the arguments of {function['name']} are nested more than {DEEPEST} deep")
    if not isinstance(parsed, Mapping):
        raise ChatError(f"{where}: the arguments of {function['name']} must be a JSON object, got {arguments!r}")
    if as_text:  # as the model wrote it, if it is given so
        parsed = arguments if isinstance(arguments, str) else json.dumps(parsed, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": parsed}}


def _with_calls_in_content(where: str, message: Any, format: ToolFormat) -> Any:
    """A message whose calls are part of its content, as the model wrote them."""
    if not isinstance(message, Mapping) or not message.get("tool_calls"):
        return message
    calls = [_call(where, one, True) for one in message["tool_calls"]]
    texts = [f"{one['function']['name']}{format.middle.replace(INDEX, str(i))}{one['function']['arguments']}"
             for i, one in enumerate(calls)]  # fmt: skip
    between = f"{format.tail}\n{format.head}" if format.between is None else format.between
    text = f"{format.head}{between.join(texts)}{format.tail}"
    for one in calls if ID in text else ():
        text = text.replace(ID, _short(str(one.get("id"))), 1)
    content = [message["content"]] if message.get("content") else []
    return {"role": message.get("role"), "content": "\n".join([*content, text])}
