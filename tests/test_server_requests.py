# SPDX-License-Identifier: Apache-2.0
"""Requests as the server reads them, without one: what is wrong is refused with the field that it is in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("msgspec")  # the extra `serve`

from served import CHAT, MESSAGES  # noqa: E402
from slimrt import Model  # noqa: E402
from slimrt.generation.loop import loop_of  # noqa: E402
from slimrt.generation.options import Options  # noqa: E402
from slimrt.server.engine_thread import Making, News  # noqa: E402
from slimrt.server.errors import Refusal  # noqa: E402
from slimrt.server.limits import Limits  # noqa: E402
from slimrt.server.protocol import chat_request, completion_request, read_object  # noqa: E402
from slimrt.server.text import plan_chat  # noqa: E402

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


TUPLE = {"prefixItems": [{}], "additionalItems": {}}
TOOLS = [tool({"not": {}})]


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model(CHAT) as loaded:
        yield loaded


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"stop": ""}, "stop", "must not be empty"),
        ({"stop": ["a", ""]}, "stop", "must not be empty"),
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers", "empty"),
        ({"dry_sequence_breakers": ["e" * 6000]}, "dry_sequence_breakers", "at most 40 characters"),
        ({"response_format": schema([])}, "response_format", "must be an object"),
        ({"response_format": schema({"type": "nothing"})}, "response_format", "nothing"),
        ({"response_format": {"type": "json_object", "schema": {"not": {}}}}, "response_format", "not"),
        ({"json_schema": {"not": {}}}, "json_schema", "not"),
        ({"json_schema": {"properties": {"a": TUPLE}}}, "json_schema", "additionalItems"),
        ({"grammar": "root ::= ("}, "grammar", "not GBNF"),
        ({"grammar": "{}"}, "grammar", "is JSON"),
        ({"tools": TOOLS}, "tools", "not"),
        ({"tools": [tool({"properties": {"a": TUPLE}})]}, "tools", "parameters of f: "),
        ({"reasoning_effort": "low"}, "reasoning_effort", "does not ask for it"),
        ({"reasoning_effort": 3}, "reasoning_effort", "must be a text"),
        (
            {"messages": [{"role": "assistant", "content": "", "thinking": ["a"]}, *MESSAGES]},
            "messages",
            "is text, got",
        ),
    ],
)
def test_what_is_refused_names_its_field(model: Model, fields: Any, param: str, words: str) -> None:
    pytest.importorskip("llguidance")
    with pytest.raises(Refusal) as caught:
        plan_chat(model, chat_request("/v1/chat/completions", {"messages": MESSAGES, **fields}, Limits()))
    assert caught.value.param == param and words in str(caught.value), (caught.value.param, str(caught.value))
    assert caught.value.status == 400 and caught.value.json["error"]["type"] == "invalid_request_error"


def test_completions_name_the_field_of_a_schema_too() -> None:
    with pytest.raises(Refusal) as caught:
        completion_request("/v1/completions", {"prompt": "a", "response_format": schema([])}, Limits())
    assert caught.value.param == "response_format"


@pytest.mark.parametrize("held", [{"stop": ["x" * 490]}, {}], ids=["a stop string", "half a character"])
def test_a_text_that_is_ended_early_shows_what_was_held_back(model: Model, held: Any) -> None:
    """A text of "x" might begin the stop string; an "é" without its second byte might become a character."""
    letter = model.tokenize("x" if held else "\u00e9", add_special_tokens=False)[0]
    options = Options(logit_bias={letter: 1e9}, max_tokens=40, temperature=0.0, **held)
    whole, early = (model._run([letter], options, 1, None, 0.0) for _ in range(2))
    loop, told = loop_of(model._runtime), list[News | None]()
    making, tell = Making(early, lambda *_: None), lambda ticket: told.append(making.news(ticket, 0.0))
    ticket = loop.submit(early.task(), on_step=tell, eager=True)
    while len(early.tokens) < 7:
        loop.step()
    ticket.cancel()
    loop.step()
    last = told[-1]
    assert last is not None and last.result is not None and last.result.finish_reason == "unfinished"
    shown = "".join(one.text for one in told if one is not None)
    assert shown == last.result.text == loop.run([(1, whole.task())])[0].text[: len(early.tokens)]
    assert len(shown) == 7


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (r'"a\ud800b"', "half a surrogate pair"),
        (r'"a\uDC00"', "half a surrogate pair"),
        (r'"\ud83d\ude00\ude00"', "half a surrogate pair"),
        (r'"\ud83d\ude00', "is not JSON"),
        (r'"\ud83d\ude00"', None),
        (r'"\\ud800"', None),
    ],
)
def test_surrogates(text: str, words: str | None) -> None:
    """msgspec says of half a pair that the input is cut off."""
    body = f'{{"prompt": {text}}}'.encode()
    if words is None:
        assert read_object(body, Limits()) == json.loads(body)
        return
    with pytest.raises(Refusal, match=words) as caught:
        read_object(body, Limits())
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
