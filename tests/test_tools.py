# SPDX-License-Identifier: Apache-2.0
"""Tools and thoughts: formats read off templates, answers told as they come, calls held to their schemas."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import random
import re

import numpy as np
import pytest

import slimrt
import tool_templates
from conftest import TESTS
from slimrt.errors import ChatError, GrammarError
from slimrt.generation.grammar import vocabulary_of
from slimrt.generation.waiting import WaitingGrammar
from slimrt.openai.answer import AnswerParser, joined, matched
from slimrt.openai.tools import ChatRequest, constrain
from slimrt.tokenizer.chat import render_chat_text
from slimrt.tokenizer.tokenizer import Tokenizer
from slimrt.tokenizer.tool_format import ID, INDEX, Thoughts, ToolFormat, thoughts_of, tool_format
from slimrt.tokenizer.tool_history import history

pytestmark = pytest.mark.unsanitized  # Python, and another library's Rust
MODEL = TESTS.parent / "models" / "tale-chat.gguf"
THINK = Thoughts("<think>", "</think>")
HERMES = ('<tool_call>\n{"name": "', '", "arguments": ')
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.", f":{INDEX}<|tool_call_argument_begin|>",
    "<|tool_call_end|><|tool_call_begin|>functions.", "<|tool_call_end|><|tool_calls_section_end|>",
)  # fmt: skip
FORMATS = {
    "HERMES": ToolFormat(*HERMES, '}\n</tool_call>\n<tool_call>\n{"name": "', "}\n</tool_call>", "template"),
    "THINKING": ToolFormat(*HERMES, '}\n</tool_call><tool_call>\n{"name": "', "}\n</tool_call>", "template"),
    "OPENED": ToolFormat(*HERMES, '}\n</tool_call><tool_call>\n{"name": "', "}\n</tool_call>", "template"),
    "LLAMA": ToolFormat('{"name": "', '", "parameters": ', None, "}", "template"),
    "MISTRAL": ToolFormat(
        '[TOOL_CALLS] [{"name": "', '", "arguments": ', f', "id": "{ID}"}}, {{"name": "', f', "id": "{ID}"}}]',
        "template",
    ),
    "PHI": ToolFormat(
        '<|tool_call|>{"name": "', '", "arguments": ', '}<|/tool_call|><|tool_call|>{"name": "', "}<|/tool_call|>",
        "template",
    ),
    "TEXTUAL": ToolFormat(
        "<calls><call>function<sep>", "\n```json\n", "\n```</call>\n<call>function<sep>", "\n```</call></calls>",
        "template", True,
    ),
    "TAGGED": ToolFormat(
        '<|START_ACTION|>[{"tool_name": "', '", "parameters": ', '}, {"tool_name": "', "}]<|END_ACTION|>", "template"
    ),
    "THOUGHTLESS": ToolFormat(
        '<|START_ACTION|>[{"tool_name": "', '", "parameters": ', '}, {"tool_name": "', "}]<|END_ACTION|>", "template"
    ),
    "SPACED": ToolFormat('{"name": "', '", "parameters": ', '}{"name": "', "}", "template"),
    "NUMBERED": ToolFormat("[TOOL_CALLS]", f"[CALL_ID]{ID}[ARGS]", "[TOOL_CALLS]", "", "template"),
    "UNSHOWN": ToolFormat(
        '<|tool_call|>[{"name": "', '", "arguments": ', '}, {"name": "', "}]<|/tool_call|>", "table", shown=0
    ),
    "GRANITE": ToolFormat('<|tool_call|>[{"name": "', '", "arguments": ', '}, {"name": "', "}]", "table", shown=0),
    "FIRST_ALONE": ToolFormat('{"name": "', '", "parameters": ', None, "}", "template", shown=1),
    "CODED": ToolFormat(*HERMES, '}\n</tool_call>\n<tool_call>\n{"name": "', "}\n</tool_call>", "table", shown=0),
    "KIMI": ToolFormat(*KIMI, "template"),
    "KIMI_THINKING": ToolFormat(*KIMI, "template", counts_on=True),
    "KIMI_FIRST": ToolFormat(*KIMI, "table", shown=0),
    "XML": ToolFormat(*HERMES, '}\n</tool_call>\n<tool_call>\n{"name": "', "}\n</tool_call>", "prompt"),
    "PLAIN": ToolFormat(*HERMES, '}\n</tool_call>\n<tool_call>\n{"name": "', "}\n</tool_call>", "prompt"),
}  # fmt: skip
CALLABLE = [name for name in FORMATS if name not in ("CODED", "XML", "FIRST_ALONE")]
OPENING = ("OPENED", "THOUGHTLESS")


def tool(name, **properties):
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": f"to {name}", "parameters": schema}}


TOOLS = [
    tool("get_weather", city={"enum": ["Oslo", "Zürich"]}, days={"type": "integer", "minimum": 0, "maximum": 9}),
    tool("add", a={"type": "integer", "minimum": 0, "maximum": 99}, b={"type": "boolean"}),
    tool("nothing"),
]
MESSAGES = [{"role": "user", "content": "how is it?"}]
DEEP = functools.reduce(lambda inner, _: [inner], range(5000), [])


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(MODEL)


@pytest.fixture(scope="module")
def chat():
    with slimrt.Model(MODEL, n_ctx=1024) as model:
        yield model


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_read_off_templates(tokenizer, name):
    template = getattr(tool_templates, name)
    assert tool_format(tokenizer, template) == FORMATS[name]
    assert tool_format(tokenizer, template) is tool_format(tokenizer, template)
    assert thoughts_of(template) == (THINK if name in ("THINKING", "KIMI_THINKING", *OPENING) else None)


def test_a_trigger_is_the_first_tag_or_the_whole_head():
    triggers = {name: FORMATS[name].trigger for name in ("HERMES", "LLAMA", "MISTRAL", "PHI", "TEXTUAL")}
    assert triggers == {
        "HERMES": "<tool_call>", "LLAMA": '{"name": "', "MISTRAL": "[TOOL_CALLS]", "PHI": "<|tool_call|>",
        "TEXTUAL": "<calls>",
    }  # fmt: skip


# ---------------------------------------------------------------- what tells the parts of an answer
def pieces_of(text: str, rng: random.Random) -> list[str]:
    """A text in pieces of random sizes."""
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(0, len(text) + 1)))
    return [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]


def told(parser: AnswerParser, pieces) -> list[dict]:
    return [*(delta for piece in pieces for delta in parser.feed(piece)), *parser.flush()]


def random_value(rng: random.Random, depth: int = 0):
    kinds = [
        lambda: rng.choice([None, True, False, 0, -3, 2.5, 1e30]),
        lambda: "".join(rng.choice('ab {}[]",:\\\n\té日🙂<>/') for _ in range(rng.randrange(12))),
        lambda: [random_value(rng, depth + 1) for _ in range(rng.randrange(3))],
        lambda: {f"k{i}\"'}}": random_value(rng, depth + 1) for i in range(rng.randrange(3))},
    ]
    return rng.choice(kinds if depth < 3 else kinds[:2])()


def written(format: ToolFormat, calls) -> str:
    """Calls as a model writes them; an id is nine letters."""
    texts = [f"{name}{format.middle}{arguments}" for name, arguments in calls]
    text = format.head + (format.between or "").join(texts) + format.tail
    numbers = itertools.count(9)
    return re.sub(INDEX, lambda _: str(next(numbers)), text.replace(ID, "a1b2c3d4e"))


def test_a_thousand_streamed_calls():
    """Random arguments, cut anywhere, come out as they were written, with what stood before them and the thoughts."""
    rng, names, n_calls = random.Random(1), ["add", "add_all", "get_weather", "x"], 0
    while n_calls < 1000:
        format = FORMATS[rng.choice([*FORMATS])]
        n = 1 if format.between is None else rng.randrange(1, 4)
        dumps = (lambda value: json.dumps(value, indent=1)) if rng.random() < 0.3 else json.dumps
        calls = [
            (
                rng.choice(names),
                dumps({f"p{j}": random_value(rng) for j in range(rng.randrange(4))}, ensure_ascii=False),
            )
            if dumps is json.dumps
            else (rng.choice(names), dumps({f"p{j}": random_value(rng) for j in range(rng.randrange(4))}))
            for _ in range(n)
        ]
        before = rng.choice(["", "Let me see.", "I <think> {so}: [1, 2"])
        thoughts, opened = rng.choice([(None, False), (THINK, False), (THINK, True)])
        text = before + rng.choice(["", "\n", "\n\n"]) + written(format, calls)
        if thoughts:
            text = ("" if opened else "<think>") + "\nhm, <tool_call> or not?\n</think>\n\n" + text
        deltas = told(AnswerParser(thoughts, opened, format, names), pieces_of(text, rng))
        message = joined(deltas)
        assert [(one["function"]["name"], one["function"]["arguments"]) for one in message["tool_calls"]] == calls
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
        assert message["content"] == (before or None)
        assert message.get("reasoning_content") == ("hm, <tool_call> or not?" if thoughts else None)
        ids = [one["id"] for one in message["tool_calls"]]
        assert len(set(ids)) == n and all(re.fullmatch("call_[a-zA-Z0-9]{24}", id) for id in ids)
        n_calls += n


FRAGMENTS = ["<tool_call>", "<tool_", "\n", '{"name": "', "add", '", "arguments": ', "{}", "}", "</tool_call>", " ",
             "a", "<think>", "</think>", "</th", "<", "[TOOL_CALLS]", " [", '{"b": "}"}', '"', "é"]  # fmt: skip


@pytest.mark.parametrize("name", ["HERMES", "LLAMA", "MISTRAL", "PHI"])
def test_any_text_is_told_alike_however_it_is_cut(name):
    rng = random.Random(name)
    for _ in range(2000):
        text = "".join(rng.choice(FRAGMENTS) for _ in range(rng.randrange(1, 12)))
        thoughts, opened = rng.choice([(None, False), (THINK, False), (THINK, True)])
        messages = [
            joined(told(AnswerParser(thoughts, opened, FORMATS[name], ["add"]), pieces))
            for pieces in ([text], list(text), pieces_of(text, rng))
        ]
        for message in messages:
            for call in message.get("tool_calls", ()):
                del call["id"]
        assert messages[0] == messages[1] == messages[2]


def test_what_is_no_call_is_content():
    format = FORMATS["HERMES"]
    for text in (
        "plain", " \n spaces \n", "<tool_call", "<tool_call>", "<tool_call> {", '<tool_call>\n{"name": "other", "arg',
        '<tool_call>\n{"name": "add", "argument": {}}', "<tool_call><tool_call>\nx", "a <tool_call> b",
        '{"name": "add"}',    ):  # fmt: skip
        assert joined(told(AnswerParser(None, False, format, ["add"]), list(text))) == {
            "role": "assistant", "content": text,
        }  # fmt: skip
        assert joined(told(AnswerParser(), list(text)))["content"] == text


def test_a_call_that_is_cut_off_is_told_as_far_as_it_goes():
    parser = AnswerParser(None, False, FORMATS["HERMES"], ["add"])
    message = joined(told(parser, ['so <tool_call>\n{"name": "add", "arguments": {"a": [1, ']))
    assert message["content"] == "so" and parser.calls == 1 and not parser.has_called
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": [1, '}


@pytest.mark.parametrize(
    ("text", "opened", "thoughts", "content"),
    [
        ("<think>\na b\n</think>\n\nso", False, "a b", "so"),
        ("a b</think>so ", True, "a b", "so "),
        ("  <think></think>", False, None, ""),
        ("no thoughts, <think> or </think>", False, None, "no thoughts, <think> or </think>"),
        ("a < b </thin", True, "a < b </thin", ""),
        ("<thing>", False, None, "<thing>"),
        ("a</think>b</think>", True, "a", "b</think>"),
    ],
)
def test_thoughts_are_told_from_the_answer(text, opened, thoughts, content):
    rng = random.Random(0)
    for pieces in [[text], list(text), *(pieces_of(text, rng) for _ in range(50))]:
        message = joined(told(AnswerParser(THINK, opened), pieces))
        assert (message.get("reasoning_content"), message["content"]) == (thoughts, content)


def test_deltas_come_as_soon_as_they_can():
    parser = AnswerParser(THINK, True, FORMATS["HERMES"], ["add"])
    seen = [parser.feed(piece) for piece in ("ab", "c</", "think>\n", "x", " <to", "ol", "_call>",
                                             '\n{"name": "add', '"'
                                             ', "arguments": ', '{"a', '": 1}')]  # fmt: skip
    assert seen[:7] == [
        [{"reasoning_content": "ab"}], [{"reasoning_content": "c"}], [], [{"content": "x"}], [], [], []
    ]  # fmt: skip
    assert seen[7] == [] and seen[8][0]["tool_calls"][0]["function"] == {"name": "add", "arguments": ""}
    assert [one[0]["tool_calls"][0]["function"] for one in seen[9:]] == [{"arguments": '{"a'}, {"arguments": '": 1}'}]


def test_patterns():
    assert [matched(f"a{ID}b", text) for text in ("", "a", "a12345678", "a123456789b-", "a1234-", "b")] == [
        -1, -1, -1, 11, -2, -2,
    ]  # fmt: skip
    assert [matched(f"a{INDEX}b", text) for text in ("a", "a1", "a12345", "a12bc", "ab", "a12345b", "a1c")] == [
        -1, -1, -2, 4, -2, -2, -2,
    ]  # fmt: skip


# ---------------------------------------------------------------- what went before
def test_calls_of_earlier_turns_are_as_the_template_wants_them(tokenizer):
    call = {"id": "call_123456789abcdefgh", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call["id"], "content": "2"},
                {"role": "tool", "tool_call_id": call["id"], "content": "3"}]  # fmt: skip
    as_object = history(messages, FORMATS["HERMES"])
    assert as_object[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1} and as_object[2:] == messages[2:]
    assert history(messages, FORMATS["TEXTUAL"])[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    user, spelled, results = history(messages, FORMATS["PLAIN"])
    assert spelled == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    }
    assert results == {
        "role": "user", "content": "<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>",
    }  # fmt: skip
    assert messages[1]["tool_calls"] == [call]  # as it was
    for given, text in (('{"a":"北京"}', '{"a":"北京"}'), ({"a": "北京"}, '{"a": "北京"}')):  # as models write it
        other = [{"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": given}}]}]
        assert history(other, FORMATS["TEXTUAL"])[0]["tool_calls"][0]["function"]["arguments"] == text
        assert f'"arguments": {text}}}' in history(other, FORMATS["PLAIN"])[0]["content"]
    for wrong in ("{", "[1]", "[" * 5000, '{"a":' * 150 + "1" + "}" * 150):
        bad = {**call, "function": {"name": "add", "arguments": wrong}}
        with pytest.raises(ChatError, match=r"messages\[0\]: the arguments of add"):
            history([{"role": "assistant", "tool_calls": [bad]}], FORMATS["HERMES"])


def turns(*ids):
    """A conversation in which calls with these ids are answered."""
    calls = [{"id": id, "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}} for id in ids]
    return [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": calls},
            *({"role": "tool", "tool_call_id": id, "content": f"of {id}"} for id in ids)]  # fmt: skip


def test_ids_of_calls_are_as_short_as_templates_want_them(tokenizer):
    """Ours have more letters than Mistral's templates take; an id of theirs stays."""
    long = "call_123456789abcdefgh"
    _, answer, *results = history(turns(long, "a1b2c3d4e"), FORMATS["NUMBERED"])
    ids = [one["id"] for one in answer["tool_calls"]]
    assert ids == [one["tool_call_id"] for one in results] and ids[1] == "a1b2c3d4e"
    assert re.fullmatch("[a-zA-Z0-9]{9}", ids[0])
    shown = render_chat_text(tokenizer, [MESSAGES[0], answer, *results], chat_template=tool_templates.NUMBERED)
    assert f"[TOOL_CALLS]add[CALL_ID]{ids[0]}[ARGS]" in shown and f"[TOOL_RESULTS]{ids[0]}[TOOL_CONTENT]" in shown


@pytest.mark.parametrize(("name", "number"), [("KIMI", 0), ("KIMI_THINKING", 2)])
def test_calls_are_numbered_as_the_model_does(tokenizer, name, number):
    """Kimi-K2's ids are of names and numbers, which what the calls gave names again."""
    template, again = getattr(tool_templates, name), turns("c")[1:]
    shown = render_chat_text(tokenizer, history([*turns("b", "a"), *again], FORMATS[name]), chat_template=template)
    ids = re.findall(r"_begin\|>(functions\.\w+:\d+)<", shown)
    assert ids == ["functions.add:0", "functions.add:1", f"functions.add:{number}"]
    assert re.findall("## Return of (.*)\nof (.)", shown) == [*zip(ids, "bac", strict=True)]
    unknown = history([*turns("b"), {"role": "tool", "tool_call_id": "z", "content": ""}], FORMATS[name])[-1]
    assert unknown["tool_call_id"] == "z"


def test_calls_that_the_template_drops_are_content(tokenizer, chat):
    shown = chat.detokenize(asked(chat, "UNSHOWN", messages=turns("first", "second")).ids)
    call = '{"name": "add", "arguments": {"a": 1}}'
    assert f"<assistant><|tool_call|>[{call}, {call}]<|/tool_call|>" in shown and "of second" in shown


def test_results_have_the_role_that_the_template_names(chat):
    shown = chat.detokenize(asked(chat, "GRANITE", messages=turns("first", "second")).ids)
    call = '{"name": "add", "arguments": {"a": 1}}'
    assert f"<assistant><|tool_call|>[{call}, {call}]<" in shown
    assert "<tool_response>of first" in shown and "<tool_response>of second" in shown


def test_a_template_that_shows_one_call_of_several(chat):
    assert "of first" in chat.detokenize(asked(chat, "FIRST_ALONE", messages=turns("first")).ids)
    with pytest.raises(ChatError, match=r"messages\[1\] has 2 calls, of which the chat template shows one"):
        asked(chat, "FIRST_ALONE", messages=turns("first", "second"))


def test_tools_stand_before_the_user_s_words_where_no_system_message_can(chat, monkeypatch):
    """Gemma 2's templates refuse them, others leave them out."""
    words = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    for refusing in (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + words,
        words.replace("in messages %}", "in messages if m.role != 'system' %}"),
    ):
        monkeypatch.setattr(tool_templates, "PLAIN", refusing)
        shown = chat.detokenize(asked(chat, "PLAIN").ids)
        assert shown.startswith("<user>You may call functions.") and shown.endswith("\n\nhow is it?")
        with pytest.raises(ChatError, match="system"):
            asked(chat, "PLAIN", messages=[{"role": "system", "content": "Be brief."}, *MESSAGES])


def asked(chat, template="HERMES", **request):
    request = {"messages": MESSAGES, "options": {}, "tools": TOOLS} | request
    return constrain(chat._runtime, ChatRequest(**request, chat_template=getattr(tool_templates, template)))


def test_tools_stand_in_the_prompt(chat):
    shown = chat.detokenize(asked(chat).ids)
    assert all(json.dumps(one, ensure_ascii=False) in shown for one in TOOLS)
    told_of = chat.detokenize(asked(chat, "PLAIN").ids)
    assert all(json.dumps(one, ensure_ascii=False) in told_of for one in TOOLS) and "system\nYou may call" in told_of
    system = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    both = chat.detokenize(asked(chat, "PLAIN", messages=system).ids)
    assert "Be brief.\n\nYou may call" in both and both.count("system\n") == 1
    called = [{"type": "function", "function": {"name": "add", "arguments": "{}"}}]
    parts = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        *MESSAGES,
        {"role": "assistant", "content": [{"type": "text", "text": "Well:"}], "tool_calls": called},
        {"role": "tool", "content": [{"type": "text", "text": "42"}]},
    ]
    in_parts = chat.detokenize(asked(chat, "PLAIN", messages=parts).ids)
    assert "Be brief.\n\nYou may call" in in_parts and "Well:\n" in in_parts
    assert "<tool_response>\n42\n</tool_response>" in in_parts and "[{" not in in_parts
    none = asked(chat, "PLAIN", tool_choice="none")
    assert "get_weather" not in chat.detokenize(none.ids) and "grammar" not in none.options
    assert "get_weather" not in chat.detokenize(
        asked(chat, tool_choice={"type": "function", "function": {"name": "add"}}).ids
    )


@pytest.mark.parametrize("function", [{}, {"description": None, "parameters": None}])
def test_tools_without_what_a_template_looks_into(chat, monkeypatch, function):
    """gpt-oss' adds the description to a text, Hermes' goes through the properties; what asks for neither gets none."""
    tools = [{"type": "function", "function": {"name": "now", **function}}]
    looking = (
        "{% for t in tools %}<{{ t.function.name + ':' + t.function.description }}{% for p in "
        "t.function.parameters.properties %}{{ p }}{% endfor %}>{% endfor %}"
    )
    monkeypatch.setattr(tool_templates, "HERMES", looking + tool_templates.HERMES)
    assert chat.detokenize(asked(chat, "HERMES", tools=tools).ids).startswith("<now:>")
    with pytest.raises(ChatError, match="'nothing' is undefined"):
        monkeypatch.setattr(
            tool_templates, "HERMES", tool_templates.HERMES + "{{ nothing() if 'how' in messages[-1].content }}"
        )
        asked(chat, "HERMES", tools=tools)
    assert json.dumps(tools[0]) in chat.detokenize(asked(chat, "LLAMA", tools=tools).ids)


def test_the_template_that_a_file_has_for_tools(chat, monkeypatch):
    monkeypatch.setattr(chat.tokenizer, "chat_templates", {"tool_use": tool_templates.HERMES})
    request = {"messages": MESSAGES, "options": {}}
    with_tools = constrain(chat._runtime, ChatRequest(**request, tools=TOOLS))
    assert with_tools.ids == asked(chat, "HERMES").ids
    without = constrain(chat._runtime, ChatRequest(**request, tools=TOOLS, tool_choice="none"))
    assert without.ids == chat.render_chat(MESSAGES)


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        ({"tools": {"type": "function"}}, TypeError, "a tool is"),
        ({"tools": 5}, TypeError, "tools must be a list, got 5"),
        ({"tools": [{"type": "function"}]}, TypeError, "a tool is"),
        ({"tools": [{"type": "search", "function": {"name": "a"}}]}, slimrt.UnsupportedError, "tool of type 'search'"),
        ({"tools": [{"function": {"name": "a b"}}]}, GrammarError, "1 to 64 letters"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, ValueError, "two have the same name"),
        ({"tool_choice": "some"}, slimrt.UnsupportedError, "tool_choice 'some'"),
        ({"tool_choice": {"type": "function", "function": "get"}}, slimrt.UnsupportedError, "a function"),
        ({"messages": ["hi"]}, slimrt.ChatError, r"messages\[0\]: a message is a mapping"),
        ({"messages": [{"role": "system"}, *MESSAGES]}, slimrt.ChatError, r"messages\[0\]: the system's .* no content"),
        ({"messages": [*MESSAGES, {"role": "tool", "content": "4"}]}, slimrt.ChatError, "calls none"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "b"}}},
            ValueError,
            "none of the tools: get_weather",
        ),
        ({"tools": [], "tool_choice": "required"}, ValueError, "goes with tools"),
        ({"tools": [tool("a", b={"not": {}})]}, GrammarError, r'tools: .*"not"'),
        ({"tools": [{"function": {"name": "a", "parameters": {"type": "string"}}}]}, GrammarError, "a are an object"),
        ({"tools": [{"function": {"name": "a", "parameters": [1]}}]}, GrammarError, "a must be a JSON schema"),
        ({"tools": [tool("a", b=DEEP)]}, ValueError, "tools: nested more than 100 deep"),
        ({"tool_choice": DEEP}, ValueError, "tool_choice: nested more than 100 deep"),
        ({"messages": [MESSAGES[0] | {"name": DEEP}]}, slimrt.ChatError, r"messages\[0\] is nested more than 100 deep"),
        ({"variables": {"a": DEEP}}, slimrt.ChatError, "chat_template_kwargs are nested more than 100 deep"),
    ],
)
def test_wrong_requests(chat, request_, error, words):
    pytest.importorskip("llguidance")
    with pytest.raises(error, match=f"(?s){words}"):
        asked(chat, **request_)


# ---------------------------------------------------------------- a model that calls
def valid(calls) -> list[str]:
    """The names of calls, whose arguments are of their schemas."""
    jsonschema = pytest.importorskip("jsonschema")
    schemas = {one["function"]["name"]: one["function"]["parameters"] for one in TOOLS}
    for call in calls:
        jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])
    return [call["function"]["name"] for call in calls]


def said(chat, beginning):
    """A logits_processor for a model that says this first, and then anything at all."""
    ids, start, rng = chat.tokenize(beginning, add_special_tokens=False), [], np.random.default_rng(3)

    def process(so_far, logits):
        start.append(len(so_far)) if not start else None
        at, logits = len(so_far) - start[0], rng.standard_normal(len(logits)).astype(np.float32)
        if at < len(ids):
            logits[ids[at]] = 1e4
        return logits

    return process


@pytest.mark.parametrize("name", CALLABLE)
def test_a_model_that_must_call_calls(chat, name):
    pytest.importorskip("llguidance")

    def answer(seed, **more):
        options = {"chat_template": getattr(tool_templates, name), "tools": TOOLS, "max_tokens": 400, "seed": seed}
        options |= {"logits_processor": said(chat, "hm</think>\n")} if name in OPENING else {}
        (choice,) = chat.create_chat_completion(MESSAGES, temperature=1.0, **options, **more)["choices"]
        assert choice["message"]["content"] is None
        assert choice["message"].get("reasoning_content") == ("hm" if name in OPENING else None)
        return choice

    for seed in range(3):
        choice = answer(seed, tool_choice="required", parallel_tool_calls=False)
        assert len(valid(choice["message"]["tool_calls"])) == 1 and choice["finish_reason"] == "tool_calls"
    named = answer(1, tool_choice={"type": "function", "function": {"name": "add"}}, parallel_tool_calls=False)
    assert valid(named["message"]["tool_calls"]) == ["add"]
    several = [answer(seed, tool_choice="required") for seed in range(6)]
    for one in several:  # which may be cut off in the last
        calls = one["message"]["tool_calls"]
        valid(calls if one["finish_reason"] == "tool_calls" else calls[:-1])


@pytest.mark.parametrize("name", CALLABLE)
def test_several_calls_in_a_turn_where_the_format_and_the_request_have_them(chat, name):
    pytest.importorskip("llguidance")
    format, add = FORMATS[name], ("add", '{"a":1,"b":true}')
    for calls, parallel in itertools.product(([add], [add, ("nothing", "{}")]), (True, False)):
        request = {"tool_choice": "required", "parallel_tool_calls": parallel}
        matcher = asked(chat, name, **request).options["grammar"].matcher()
        tokens = chat.tokenize(
            ("</think>" if name in OPENING else "") + written(format, calls), add_special_tokens=False
        )
        fits = len(calls) == 1 or (parallel and format.between is not None)
        with contextlib.nullcontext() if fits else pytest.raises(GrammarError):
            for token in tokens:
                matcher.accept(token)
        assert not fits or matcher.is_complete


@pytest.mark.parametrize("name", ["HERMES", "LLAMA", "MISTRAL", "PHI", "THINKING"])
def test_a_model_that_may_call_is_held_to_a_call_once_it_begins_one(chat, name):
    pytest.importorskip("llguidance")
    format, options = FORMATS[name], {"chat_template": getattr(tool_templates, name), "tools": TOOLS, "max_tokens": 400}
    before = "<think>a <tool_call> b</think>" if name == "THINKING" else ""
    process = said(chat, f"{before}Let me see. {format.trigger}")
    message, reason = None, None
    answer = chat.create_chat_completion(MESSAGES, logits_processor=process, temperature=1.0, seed=1, **options)
    message, reason = answer["choices"][0]["message"], answer["choices"][0]["finish_reason"]
    assert message["content"] == "Let me see." and valid(message["tool_calls"]) and reason == "tool_calls"
    assert message.get("reasoning_content") == ("a <tool_call> b" if before else None)


def test_a_model_that_may_call_need_not(chat):
    pytest.importorskip("llguidance")
    plain = chat.create_chat_completion(MESSAGES, max_tokens=20, seed=3, chat_template=tool_templates.PLAIN)
    options = {"max_tokens": 20, "seed": 3, "chat_template": tool_templates.PLAIN}
    none = chat.create_chat_completion(MESSAGES, tools=TOOLS, tool_choice="none", **options)
    assert none["choices"] == plain["choices"]
    free = chat.create_chat_completion(MESSAGES, tools=TOOLS, **options)["choices"][0]
    assert free["message"].keys() == {"role", "content"}
    assert free["message"]["content"] and free["finish_reason"] in ("stop", "length")


def test_chunks_of_calls_are_the_whole(chat):
    pytest.importorskip("llguidance")
    options = {"tools": TOOLS, "tool_choice": "required", "chat_template": tool_templates.HERMES, "seed": 4}
    options |= {"temperature": 1.2, "max_tokens": 400}
    whole = chat.create_chat_completion(MESSAGES, **options)["choices"][0]
    first, *chunks, last = chat.create_chat_completion(MESSAGES, stream=True, **options)
    message = joined([chunk["choices"][0]["delta"] for chunk in chunks])
    functions = [[one["function"] for one in of["tool_calls"]] for of in (message, whole["message"])]
    assert (
        functions[0] == functions[1] and last["choices"][0]["finish_reason"] == whole["finish_reason"] == "tool_calls"
    )
    assert first["choices"][0]["delta"] == {"role": "assistant"} and len(chunks) > 3
    assert json.loads(json.dumps(chunks)) == chunks


def test_a_call_that_finds_no_room_ends_with_length(chat):
    pytest.importorskip("llguidance")
    options = {"tools": TOOLS, "tool_choice": "required", "chat_template": tool_templates.HERMES, "seed": 4}
    cut = chat.create_chat_completion(MESSAGES, max_tokens=12, **options)["choices"][0]
    assert cut["finish_reason"] == "length"


@pytest.mark.parametrize(("stop", "reason"), [('"b"', "stop"), ("</tool_call>", "tool_calls")])
def test_a_stop_string_within_a_call_cuts_it_off_and_that_is_said(chat, stop, reason):
    pytest.importorskip("llguidance")
    options = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}, "stop": [stop]}
    options |= {"chat_template": tool_templates.HERMES, "seed": 4, "max_tokens": 400}
    whole = chat.create_chat_completion(MESSAGES, **options)["choices"][0]
    *_, last = chat.create_chat_completion(MESSAGES, stream=True, **options)
    assert whole["finish_reason"] == last["choices"][0]["finish_reason"] == reason
    arguments = whole["message"]["tool_calls"][0]["function"]["arguments"]
    with pytest.raises(ValueError, match="property name") if reason == "stop" else contextlib.nullcontext():
        json.loads(arguments)


def test_a_schema_holds_behind_the_thoughts(chat):
    pytest.importorskip("llguidance")
    schema = TOOLS[1]["function"]["parameters"]
    format = {"type": "json_schema", "json_schema": {"schema": schema}}
    options = {"response_format": format, "chat_template": tool_templates.OPENED, "max_tokens": 200, "seed": 1}
    process = said(chat, "what {now</think>\n\n")
    answer = chat.create_chat_completion(MESSAGES, logits_processor=process, temperature=1.0, **options)
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == "what {now" and answer["choices"][0]["finish_reason"] == "stop"
    valid([{"function": {"name": "add", "arguments": message["content"]}}])
    counted = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert counted == len(chat.tokenize("what {now</think>", add_special_tokens=False))
    options["chat_template"] = tool_templates.THINKING  # which need not think
    answer = chat.create_chat_completion(MESSAGES, temperature=1.0, **options)
    message = answer["choices"][0]["message"]
    assert "reasoning_content" not in message and not answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    valid([{"function": {"name": "add", "arguments": message["content"]}}])


def test_thoughts_may_come_first_where_one_token_opens_them(tokenizer):
    """Their marks here are control tokens; what is thought is free, and the grammar begins behind it."""
    pytest.importorskip("llguidance")
    vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size)
    start, end = tokenizer.special_tokens["<|im_start|>"], tokenizer.special_tokens["<|im_end|>"]
    marks = ("<|im_start|>", "<|im_end|>")

    def allowed(matcher):
        bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
        return {tokenizer.token_bytes(int(id)) for id in np.flatnonzero(bits)}

    grammar = WaitingGrammar(tokenizer, vocabulary, 'start: /[ \\n]?/ "yes"', thoughts=marks)
    matcher = grammar.matcher()
    assert allowed(matcher) >= {b"y", b"<|im_start|>"} and not matcher.is_complete
    direct, thinking = matcher.copy(), matcher.copy()
    for token in tokenizer.encode("yes", False):
        direct.accept(token)
    assert direct.is_done
    for token in [start, *tokenizer.encode("no, or yes", False)]:
        thinking.accept(token)
        assert thinking.is_free and thinking.forced() == [] and not thinking.is_done
    thinking.accept(end)
    assert {b"y", b" "} <= allowed(thinking) and b"<|im_start|>" not in allowed(thinking)
    for token in tokenizer.encode(" yes", False):
        thinking.accept(token)
    assert thinking.is_done and thinking.is_complete


def test_a_schema_or_a_call(chat):
    """Both in one request: the answer is one of them, from its first token."""
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"ok": {"const": True}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    options = {"response_format": {"type": "json_object", "schema": schema}, "tools": TOOLS, "temperature": 1.0}
    options |= {"chat_template": tool_templates.HERMES, "max_tokens": 400}
    called, answered = 0, 0
    for seed, beginning in itertools.product(range(2), ("{", "<")):
        answer = chat.create_chat_completion(MESSAGES, logits_processor=said(chat, beginning), seed=seed, **options)
        message = answer["choices"][0]["message"]
        if "tool_calls" in message:
            called += bool(valid(message["tool_calls"]))
        else:
            answered += json.loads(message["content"]) == {"ok": True}
    assert (called, answered) == (2, 2)


def test_control_tokens_of_a_format_are_tokens(chat):
    """A format with the vocabulary's own control tokens: they are called by id, and are part of what is told."""
    pytest.importorskip("llguidance")
    template = tool_templates.HERMES.replace("<tool_call>", "<|im_start|>").replace("</tool_call>", "<|im_start|>/")
    request = ChatRequest(MESSAGES, {}, TOOLS, "required", False, chat_template=template)
    ready = constrain(chat._runtime, request)
    start = chat.tokenizer.special_tokens["<|im_start|>"]
    result = chat.generate(ready.ids, max_tokens=800, temperature=1.0, seed=2, **ready.options)
    assert result.tokens[0] == start and result.text.startswith('<|im_start|>\n{"name": "')
    message, reason = ready.message(result)
    assert valid(message["tool_calls"]) and reason == "tool_calls"
