# SPDX-License-Identifier: Apache-2.0
"""gpt-oss' channels: thoughts, calls of tools and the answer, told apart, held to schemas, and shown in later turns."""

from __future__ import annotations

import itertools
import json
import random

import numpy as np
import pytest

import slimrt
import tool_templates
from slimrt.openai.answer import joined
from slimrt.openai.harmony import HarmonyParser
from slimrt.openai.tools import ChatRequest, constrain
from slimrt.tokenizer.channels import MARKS, has_channels
from tiny_model import write_tiny

pytestmark = pytest.mark.unsanitized  # Python, and another library's Rust

TURN = "<|end|><|start|>assistant"
THINKS = "<|channel|>analysis<|message|>hm, 1 < 2"
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a":1}'
AS_SHOWN = ' to=functions.add<|channel|>commentary json<|message|>{"a":1}'  # by the template, in earlier turns
FINAL = "<|channel|>final<|message|>So é."
SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("add", "add_all")]
MESSAGES = [{"role": "user", "content": "hello"}]
SEED = 1


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    path = tmp_path_factory.mktemp("harmony") / "harmony.gguf"
    with slimrt.Model(write_tiny(path, n_ctx=2048, controls=[*MARKS, "<|call|>", "<|return|>"])) as model:
        yield model


def told(pieces, names=("add",)):
    """The message, without the ids of calls, and how many calls there were."""
    parser = HarmonyParser(names)
    message = joined([*(delta for piece in pieces for delta in parser.feed(piece)), *parser.flush()])
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", ())]
    assert parser.calls == len(calls)
    return message.get("reasoning_content"), message["content"], calls


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (FINAL, (None, "So é.", [])),
        (THINKS + TURN + FINAL, ("hm, 1 < 2", "So é.", [])),
        (THINKS + TURN + THINKS + TURN + FINAL + "<|return|>", ("hm, 1 < 2\n\nhm, 1 < 2", "So é.", [])),
        (THINKS + TURN + CALL + "<|call|>", ("hm, 1 < 2", None, [("add", '{"a":1}')])),
        (THINKS + TURN + AS_SHOWN, ("hm, 1 < 2", None, [("add", '{"a":1}')])),
        (CALL + TURN + CALL, (None, None, [("add", '{"a":1}')] * 2)),
        ("<|channel|>commentary<|message|>I look." + TURN + CALL, (None, "I look.", [("add", '{"a":1}')])),
        ("<|channel|>commentary<|message|>I look." + TURN + FINAL, (None, "I look.\n\nSo é.", [])),
        (CALL.replace("add", "sub"), (None, 'to=functions.sub {"a":1}', [])),
        ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", ("to=python 1 + 1", "", [])),
        ("So <|en|> | <|", (None, "So <|en|> | <|", [])),  # a model that was not taught it
        (THINKS, ("hm, 1 < 2", "", [])),
        (THINKS + "<|end|><|start|>assist", ("hm, 1 < 2", "", [])),
        (THINKS + "<|channel|>final<|message|>So.", ("hm, 1 < 2", "So.", [])),  # without an end
        ("<|channel|>" * 30 + "a", (None, "<|channel|>" * 30 + "a", [])),
        ("", (None, "", [])),
    ],
)
def test_parts_are_told_however_an_answer_is_cut(text, wanted):
    rng = random.Random(SEED)
    cuts = [sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(9))) for _ in range(30)]
    for pieces in (
        [text],
        list(text),
        *([text[a:b] for a, b in itertools.pairwise([0, *at, len(text)])] for at in cuts),
    ):
        assert told(pieces) == wanted


def test_a_header_that_never_ends_is_content():
    text = "<|start|>assistant<|channel|>" + "a" * 400
    assert told([text]) == (None, text, []) == told(list(text))


def test_deltas_come_as_soon_as_they_can():
    parser = HarmonyParser(["add"])
    pieces = ("<|channel|>", "analysis", "<|message|>", "h", "m<", "|", "end|>", TURN[7:], CALL[:-3], ":1", "}")
    seen = [parser.feed(piece) for piece in pieces]
    assert seen[:7] == [[], [], [], [{"reasoning_content": "h"}], [{"reasoning_content": "m"}], [], []]
    assert seen[8][0]["tool_calls"][0]["function"] == {"name": "add", "arguments": ""}
    assert [one[-1]["tool_calls"][0]["function"]["arguments"] for one in seen[8:]] == ['{"a"', ":1", "}"]


def said(chat, text, hot=True):
    """A logits_processor for a model that says this first, and then anything at all, or an end."""
    ids, start, rng = chat.tokenize(text, add_special_tokens=False), [], np.random.default_rng(SEED)
    end = chat.tokenize("<|return|>", add_special_tokens=False)

    def process(so_far, logits):
        start.append(len(so_far)) if not start else None
        at = len(so_far) - start[0]
        logits = rng.standard_normal(len(logits)).astype(np.float32)
        logits[[*ids, *([] if hot else end * 999)][at : at + 1]] = 1e4
        return logits

    return process


def asked(chat, text, hot=True, **options):
    """The choice of an answer that begins so, and whether the chunks of a stream are the same."""
    options |= {"chat_template": tool_templates.HARMONY, "max_tokens": 400, "seed": SEED, "temperature": 1.0}
    whole = chat.create_chat_completion(MESSAGES, logits_processor=said(chat, text, hot), **options)
    chunks = chat.create_chat_completion(MESSAGES, logits_processor=said(chat, text, hot), stream=True, **options)
    *parts, last = [one["choices"][0] for one in chunks]
    (choice,), streamed = whole["choices"], joined([one["delta"] for one in parts])
    for message in (choice["message"], streamed):
        for call in message.get("tool_calls", ()):
            del call["id"]
    assert streamed == choice["message"] and last["finish_reason"] == choice["finish_reason"]
    return choice["message"], choice["finish_reason"], whole["usage"]


def test_thoughts_and_answer(chat):
    message, reason, usage = asked(chat, THINKS + TURN + FINAL, hot=False)
    assert message == {"role": "assistant", "content": "So é.", "reasoning_content": "hm, 1 < 2"} and reason == "stop"
    thought = len(chat.tokenize(THINKS, add_special_tokens=False))
    assert usage["completion_tokens_details"] == {"reasoning_tokens": thought}


@pytest.mark.parametrize("call", [CALL, AS_SHOWN])
def test_a_call_behind_thoughts(chat, call):
    pytest.importorskip("llguidance")
    message, reason, _ = asked(chat, THINKS + TURN + call[:-3], tools=TOOLS)  # whose arguments the schema completes
    (called,) = message["tool_calls"]
    assert called["function"]["name"] == "add" and json.loads(called["function"]["arguments"]) == {"a": 1}
    assert (message["content"], message["reasoning_content"], reason) == (None, "hm, 1 < 2", "tool_calls")


@pytest.mark.parametrize(("stop", "reason"), [(":", "stop"), ("}", "stop"), ("<|call|>", "tool_calls")])
def test_a_stop_string_within_a_call_cuts_it_off_and_that_is_said(chat, stop, reason):
    pytest.importorskip("llguidance")
    message, told_reason, _ = asked(chat, THINKS + TURN + CALL, tools=TOOLS, stop=[stop])
    assert message["tool_calls"][0]["function"]["name"] == "add" and told_reason == reason


def test_who_may_call_need_not(chat):
    pytest.importorskip("llguidance")
    message, reason, _ = asked(chat, THINKS + TURN + FINAL, hot=False, tools=TOOLS)
    assert (message["content"], message["reasoning_content"], reason) == ("So é.", "hm, 1 < 2", "stop")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add_all"}}])
def test_who_must_call_may_think_first(chat, choice):
    pytest.importorskip("llguidance")
    message, reason, _ = asked(chat, THINKS + TURN + "<|channel|>final", tools=TOOLS, tool_choice=choice)
    names = [one["function"]["name"] for one in message["tool_calls"]]
    assert names == ["add_all"] if choice != "required" else len(names) == 1
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 1} and reason == "tool_calls"
    assert message["reasoning_content"].startswith("hm, 1 < 2") and not message["content"]


def test_a_schema_is_of_the_answer(chat):
    pytest.importorskip("llguidance")
    format = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    for text in (THINKS + TURN + FINAL[:21], THINKS + TURN + "<|channel|>final <|constrain|>json<|message|>"):
        message, reason, _ = asked(chat, text, response_format=format)
        assert json.loads(message["content"]) == {"a": 1} and message["reasoning_content"] == "hm, 1 < 2"
        assert reason == "stop"


def test_earlier_turns_are_as_the_template_has_them(chat):
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."}, *MESSAGES,
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ]  # fmt: skip
    request = ChatRequest(messages, {}, TOOLS, "none", chat_template=tool_templates.HARMONY)
    shown = chat.tokenizer.decode(constrain(chat._runtime, request).ids)
    assert shown.endswith(
        "<|start|>user<|message|>hello<|end|><|start|>assistant<|channel|>analysis<|message|>hm<|end|>"
        '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"2"<|end|><|start|>assistant'
    )
    with pytest.raises(slimrt.ChatError, match="2 calls, of which the chat template shows one"):
        messages[2]["tool_calls"].append(call)
        constrain(chat._runtime, request)


def test_how_much_is_thought(chat):
    for effort, words in ((None, "Reasoning: medium"), ("low", "Reasoning: low")):
        request = ChatRequest(MESSAGES, {}, reasoning_effort=effort, chat_template=tool_templates.HARMONY)
        assert words in chat.tokenizer.decode(constrain(chat._runtime, request).ids)
    with pytest.raises(slimrt.UnsupportedError, match="reasoning_effort='low' is not supported: the model's chat"):
        chat.create_chat_completion(MESSAGES, reasoning_effort="low")


def test_a_text_has_what_tells_the_channels(chat):
    text = THINKS + TURN + FINAL
    processor = said(chat, text, hot=False)
    template = tool_templates.HARMONY
    got = chat.chat(MESSAGES, chat_template=template, logits_processor=processor, max_tokens=200)
    assert got.text == text and has_channels(template) and not has_channels(tool_templates.THINKING)
