# SPDX-License-Identifier: Apache-2.0
"""Chat templates: the text, the ids, BOS once, and errors that say what is wrong."""

from __future__ import annotations

import datetime
import json
import time

import jinja2
import pytest
from tokenizers import pre_tokenizers

from conftest import third_party
from slimrt.errors import ChatError, UnsupportedError
from slimrt.tokenizer.chat import _Marks, render_chat, render_chat_text
from slimrt.tokenizer.tokenizer import Tokenizer
from slimrt.tokenizer.tool_format import tool_format

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

MESSAGES = [
    {"role": "user", "content": "hi <b>'there'</b>"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye ü"},
]

CHATML = """{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
WITH_BOS = "{{ bos_token }}" + CHATML


def tokenizer(template: str | None, **changes) -> Tokenizer:
    """A byte-level vocabulary with ChatML's control tokens and this template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": letters + special,
        "tokenizer.ggml.merges": ["h i"],
        "tokenizer.ggml.token_type": [1] * 256 + [3] * 4,
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.chat_template": template,
    }
    fields["tokenizer.ggml.tokens"] = [*letters, *special, "hi"]
    fields["tokenizer.ggml.token_type"].append(1)
    return Tokenizer.from_gguf_fields(fields | {f"tokenizer.ggml.{name}": value for name, value in changes.items()})


def text(template: str, messages=MESSAGES, add_generation_prompt: bool = True, **variables) -> str:
    return render_chat_text(tokenizer(template), messages, add_generation_prompt, variables=variables)


class TestText:
    def test_chatml(self):
        expected = (
            "<|im_start|>user\nhi <b>'there'</b><|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
            "<|im_start|>user\nbye ü<|im_end|>\n"
        )
        assert text(CHATML, add_generation_prompt=False) == expected
        assert text(CHATML) == expected + "<|im_start|>assistant\n"

    def test_blocks_leave_no_white_space(self):
        assert text("a\n    {% if true %}\nb\n    {% endif %}\nc") == "a\nb\nc"

    def test_special_token_names_and_own_variables(self):
        assert text("{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ mode }}", mode="x") == "<bos>|<eos>||x"
        assert text("{{ tools is none }} {{ documents is none }}") == "True True"
        assert text("{{ tools | length }}", tools=[{}, {}]) == "2"

    def test_tojson_escapes_no_html_and_keeps_letters(self):
        assert text("{{ messages[0] | tojson }}") == json.dumps(MESSAGES[0])
        assert text("{{ 'ü' | tojson }}") == '"ü"'
        value = {"b": 1, "a": [2]}
        got = text("{{ value | tojson(indent=2, sort_keys=true) }}", value=value)
        assert got == json.dumps(value, indent=2, sort_keys=True)

    def test_loop_controls_and_generation_tag(self):
        first = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}"
        assert text(first) == "user"
        assert text("a{% generation %}{{ messages[1].content }}{% endgeneration %}b") == "ahellob"
        assert text("{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}[{{ x }}]") == "1[]"

    def test_strftime_now(self):
        assert text("{{ strftime_now('%Y') }}") == datetime.datetime.now().strftime("%Y")

    def test_unset_variables_are_false(self):
        assert text("{% if enable_thinking %}a{% else %}b{% endif %}") == "b"
        assert text("{% if enable_thinking %}a{% else %}b{% endif %}", enable_thinking=True) == "a"


class TestMessages:
    def test_parts_are_joined_and_messages_left_alone(self):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        messages = [{"role": "user", "content": parts, "name": "Ann"}]
        assert text("{{ messages[0].content }}|{{ messages[0].name }}", messages) == "a\nb|Ann"
        assert messages == [{"role": "user", "content": parts, "name": "Ann"}]

    def test_a_template_that_reads_parts_alone(self):
        """SmolVLM's, as published: text that is no part would vanish from it."""
        template = (
            "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
            "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
            "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
            "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
            "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
        )
        wanted = "<|im_start|>User: {}<end_of_utterance>\nAssistant:"
        for content in ("hi", [{"type": "text", "text": "hi"}], "<|im_end|>"):
            said = content if isinstance(content, str) else "hi"
            assert text(template, [{"role": "user", "content": content}]) == wanted.format(said)

    @pytest.mark.parametrize("calls", [None, [], ()])
    def test_null_is_as_if_it_were_not_there(self, calls):
        """OpenAI's Python client writes what it has of a message, templates (Llama 3's) ask what a message has."""
        template = (
            "{% for m in messages %}{% if 'tool_calls' in m or 'audio' in m or m.reasoning_content is defined %}"
            "{{ m.tool_calls | length }}{{ raise_exception('calls') }}{% else %}{{ m.content }};{% endif %}{% endfor %}"
        )
        answer = {"role": "assistant", "content": "b", "tool_calls": calls, "audio": None, "reasoning_content": None}
        assert text(template, [MESSAGES[2], answer, MESSAGES[2]]) == "bye ü;b;bye ü;"

    def test_no_content_is_none_to_a_template_that_asks(self):
        """DeepSeek-R1's writes calls there alone."""
        template = (
            "{% for m in messages %}{% if m['content'] is none %}calls {{ m.tool_calls[0].function.name }}"
            "{% else %}{{ m['content'] }}{% endif %};{% endfor %}"
        )
        call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
        got = text(template, [MESSAGES[0], call, {"role": "tool", "content": "4"}])
        assert got == f"{MESSAGES[0]['content']};calls add;4;"

    @pytest.mark.parametrize(
        "asks",
        [
            "{% if m.reasoning_content is defined and m.reasoning_content is not none %}t{% endif %}",  # Qwen3's
            "{% if m['content'] is none %}{% endif %}",  # vLLM's for DeepSeek R1, which then looks into it
        ],
    )
    def test_no_content_is_empty_to_a_template_that_looks_into_it(self, asks):
        template = (
            "{% for m in messages %}" + asks + "{% if '</think>' in m.content %}{{ m.content.split('</think>')[1] }}"
            "{% else %}{{ m['content'] }}{% endif %};{% endfor %}"
        )
        call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
        assert text(template, [MESSAGES[0], call, {"role": "tool", "content": "4"}]).endswith(";;4;")
        with pytest.raises(ChatError, match="'nothing' is undefined"):
            text(template + "{{ nothing() }}", [MESSAGES[0], call, {"role": "tool", "content": "4"}])

    def test_a_call_s_content_is_among_its_thoughts_where_a_template_takes_either(self):
        """gpt-oss'."""
        template = (
            "{% for message in messages %}{% if message.tool_calls %}{% if message.content and message.thinking %}"
            "{{ raise_exception('both') }}{% endif %}[{{ message.thinking }}|{{ message.content }}]{% else %}"
            "{{ message.content }}{% endif %}{% endfor %}"
        )
        call = {"role": "assistant", "content": "so", "tool_calls": [{"function": {"name": "add"}}]}
        for thoughts, shown in (({"reasoning_content": "hm"}, "[hm\n\nso|]4"), ({}, "[|so]4")):
            messages = [MESSAGES[0], call | thoughts, {"role": "tool", "content": "4"}]
            assert text(template, messages).endswith(shown)
        plain = "{{ messages[1].thinking }}|{{ messages[1].content }};{{ messages[2].content }}"
        assert text(plain, [MESSAGES[0], call | {"thinking": "hm"}, {"role": "tool", "content": "4"}]) == "hm|so;4"

    @pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
    def test_thoughts_by_any_name(self, name):
        messages = [MESSAGES[0], {"role": "assistant", "content": "b", name: "t"}, MESSAGES[0]]
        assert text("{{ messages[1].reasoning_content }}{{ messages[1].thinking }}", messages) == "tt"
        assert text("{{ messages[0].thinking }}|{{ messages[0].reasoning_content }}", messages) == "|"

    def test_tools_answer_calls(self):
        calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
        messages = [
            MESSAGES[0],
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "content": "4"},
            {"role": "tool", "content": "5"},
        ]
        got = text(
            "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls | default(0) | tojson }};{% endfor %}",
            messages,
        )
        assert f"assistant:{json.dumps(calls)};" in got and got.endswith("tool:50;")

    def test_roles_that_the_template_names(self):
        message = [{"role": "developer", "content": "hi"}]
        assert text("{% if messages[0].role == 'developer' %}yes{% endif %}", message) == "yes"
        with pytest.raises(ChatError, match="role 'critic' is not supported"):
            text(CHATML, [{"role": "critic", "content": "hi"}])

    def test_a_developer_s_message_is_a_system_message(self):
        """OpenAI's newer name, to templates that do not have it."""
        messages = [{"role": "developer", "content": "be brief"}, MESSAGES[0]]
        assert text(CHATML, messages) == text(CHATML, [{**messages[0], "role": "system"}, MESSAGES[0]])
        assert messages[0]["role"] == "developer"
        with pytest.raises(ChatError, match=r"messages\[0\]: the chat template leaves the system message out"):
            text("{{ messages[1] }}", messages)


class TestIds:
    def test_control_tokens_become_ids(self):
        tok = tokenizer(CHATML)
        ids = render_chat(tok, MESSAGES[:1])
        start, end = tok.special_tokens["<|im_start|>"], tok.special_tokens["<|im_end|>"]
        assert ids[0] == start and ids.count(start) == 2 and ids.count(end) == 1
        assert tok.decode(ids) == render_chat_text(tok, MESSAGES[:1])

    @pytest.mark.parametrize("template", [CHATML, WITH_BOS])
    @pytest.mark.parametrize("add_bos", [True, False])
    def test_bos_is_there_once_and_eos_not_at_all(self, template, add_bos):
        tok = tokenizer(template, add_bos_token=add_bos, add_eos_token=True)
        ids = render_chat(tok, MESSAGES)
        wanted = 1 if add_bos or template == WITH_BOS else 0
        assert ids.count(tok.bos_id) == wanted and (ids[0] == tok.bos_id) == bool(wanted)
        assert tok.eos_id not in ids

    def test_a_message_of_control_tokens_is_encoded_as_short_as_it_is(self, monkeypatch):
        """Not as marks, which are longer: a megabyte took 9 s."""
        tok, lengths, encoded = tokenizer("{{ '<bos>' ~ messages[0].content | upper | lower }}"), [], Tokenizer._encoded
        monkeypatch.setattr(Tokenizer, "_encoded", lambda *a: lengths.append(len(a[1])) or encoded(*a))
        for content in ("<|im_end|>" * 200 + "a\ue000<eos>\ue001", "<eos>" + "".join(map(chr, range(0xE000, 0xF900)))):
            ids = render_chat(tok, [{"role": "user", "content": content}])
            lengths.clear()
            assert ids == [tok.bos_id, *tok.encode(content, parse_special=False)]
            assert tok.decode(ids[1:]) == content
        content = "<|im_end|>" * 200
        lengths.clear()
        render_chat(tok, [{"role": "user", "content": content}])
        assert max(lengths) == len(content)

    def test_a_vocabulary_of_many_control_tokens_takes_no_time(self):
        """Gemma's have 6000, each of which was looked for in each text of a message: 0.7 s."""
        marks = _Marks(f"<unused{i}>" for i in range(6000))
        messages, began = [{"role": "user", "content": "how are you?"} for _ in range(1000)], time.thread_time()
        assert marks.put(messages) == messages and time.thread_time() - began < 0.1
        assert marks.plain(marks.put("a <unused5> <unused59>")) == "a <unused5> <unused59>" and len(marks.texts) == 2
        assert _Marks([]).put("a") == "a"


class TestErrors:
    def test_no_template_says_what_to_do(self):
        with pytest.raises(UnsupportedError, match="no chat template.*write the whole prompt"):
            render_chat(tokenizer(None), MESSAGES)

    @pytest.mark.parametrize(
        ("template", "message"),
        [
            ("{{ raise_exception('Roles must alternate!') }}", "Roles must alternate!"),
            ("{{ messages[7].content.upper() }}", "no element 7"),
            ("{{ messages[0].content + 1 }}", "str"),
            ("{{ 1 / 0 }}", "division"),
            ("{% for %}", "Expected"),
            ("{{ nothing('x') }}", "'nothing' is undefined"),
        ],
    )
    def test_a_template_s_errors_keep_their_message(self, template, message):
        with pytest.raises(ValueError, match=message):
            text(template)

    @pytest.mark.parametrize(
        "template",
        [
            "{{ messages.__class__.__mro__ }}",
            "{{ ''.__class__.__base__.__subclasses__() }}",
            "{{ raise_exception.__globals__['json'] }}",
            "{{ messages.append(1) }}",
            "{{ messages[0].update({'role': 'system'}) }}",
            "{% for i in range(10000000) %}{% endfor %}",
        ],
    )
    def test_the_sandbox_holds(self, template):
        messages = [dict(message) for message in MESSAGES]
        with pytest.raises(ValueError, match="chat template"):
            text(template, messages)
        assert messages == MESSAGES

    @pytest.mark.parametrize(
        "loop",
        [
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
            "{% macro f() %}{% for i in range(9) %}{{ caller() }}{% endfor %}{% endmacro %}{% macro g(n) %}{% if n %}"
            "{% call f() %}{{ g(n - 1) }}{% endcall %}{% endif %}{% endmacro %}{{ g(60) }}",
        ],
    )
    def test_a_template_that_loops_for_ever(self, monkeypatch, loop):
        """For the conversation, for one with tools, and where it is looked at how it shows a content."""
        monkeypatch.setattr("slimrt.tokenizer.template.SECONDS", 0.05)
        tok = tokenizer(loop + "{{ messages[0].content }}{{ messages[1].nothing.at_all }}")
        began = time.thread_time()
        for ask in (lambda: render_chat(tok, MESSAGES), lambda: tool_format(tok)):
            with pytest.raises(ChatError, match="takes more than 0.05 s for this conversation: it loops for ever"):
                ask()
        assert time.thread_time() - began < 2.0

    @pytest.mark.parametrize(
        "large",
        [
            "{{ 10**(10**8) }}",
            "{{ 'x' * 10**10 }}",
            "{{ 10**9 * [1] }}",
            "{% set n = namespace(a='x' * 99) %}{% for i in range(60) %}{% set n.a = n.a + n.a %}{% endfor %}",
            "{% set n = namespace(a='x' * 99) %}{% for i in range(60) %}{% set n.a = n.a ~ '-' ~ n.a %}{% endfor %}",
            "{% set n = namespace(a=9**99) %}{% for i in range(60) %}{% set n.a = n.a * n.a %}{% endfor %}",
            "{{ '%1000000000d' % 1 }}",
            "{{ '%*d' % (10**9, 1) }}",
            "{{ '{:>1000000000}'.format(1) }}",
            "{{ '{:>{}}'.format(1, 10**9) }}",
            "{{ '%.999999999d'|format(1) }}",
            "{{ 'x'.ljust(10**9) }}",
            "{{ 'x'|center(10**9) }}",
            "{{ [1]|tojson(indent=10**9) }}",
            "{{ ('a' * 50000)|replace('a', 'b' * 50000) }}",
            "{{ ('a' * 50000).replace('a', 'b' * 50000) }}",
            "{{ ('a' * 50000)|join('b' * 50000) }}",
            "{{ ('b' * 50000).join('a' * 50000) }}",
            "{{ (['b' * 50000] * 50000)|join }}",
            "{{ ('\n' * 50000)|indent('b' * 50000, blank=true) }}",
            "{{ ('{0}' * 20000).format('b' * 50000) }}",
            "{{ ('%s' * 30000) % (('b' * 50000,) * 30000) }}",
        ],
    )
    def test_what_would_be_huge_is_not_made(self, large):
        began = time.thread_time()
        with pytest.raises(
            ChatError, match="chat template: it makes a .* of more than [0-9]+ characters, items or bits"
        ):
            text(large)
        assert time.thread_time() - began < 1.0

    def test_operators_are_as_jinja_has_them(self):
        assert text("{{ 2**10 + 3 * 4 - 7 % 4 }} {{ 2**-1 }} {{ 1.5 * 2 }}") == "1033 0.5 3.0"
        assert text("{{ '=' * 80 + 'a' ~ 1 ~ none }}{{ ([1] + [2]) * 2 }}") == "=" * 80 + "a1None[1, 2, 1, 2]"
        assert text("{{ '%05d 100%% 20240131 %s' % (7, 1700000000) }}") == "00007 100% 20240131 1700000000"
        assert text("{{ 'day: 20240131 {} {:>4}'.format(1700000000, 'x') }}") == "day: 20240131 1700000000    x"
        assert text(
            "{{ '%s'|format(1700000000) }}{{ 'a'.ljust(3) }}{{ 'a'|center(3) }}|{{ [1]|tojson(indent=1) }}"
        ) == ("1700000000a   a |[\n 1\n]")

    def test_replacing_and_joining_are_as_jinja_has_them(self):
        assert text("{{ 'a-b-c'|replace('-', '+') }} {{ 'a-b-c'|replace('-', '', 1) }} {{ 12|replace(1, 3) }}") == (
            "a+b+c ab-c 32"
        )
        assert text("{{ 'a-b-c'.replace('-', '', 1) }} {{ 'aa'.replace('', '.') }}") == "ab-c .a.a."
        assert text("{{ [1, 'b', none]|join }} {{ [1, 2]|map('string')|join(', ') }}") == "1bNone 1, 2"
        assert text("{{ [{'a': 1}, {'a': 2}]|join('+', attribute='a') }} {{ '-'.join(['x', 'y']) }}") == "1+2 x-y"
        for wrong in ("{{ '-'.join([1, 2]) }}", "{{ 'a'.replace('a', 1) }}"):
            with pytest.raises(ChatError):
                text(wrong)

    def test_loops_are_as_jinja_has_them(self):
        loop = (
            "{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }}{{ loop.last }};{% endfor %}"
        )
        assert text(loop) == "1/2False;2/2True;"
        assert text("{% for i in [1, [2, 3]] recursive %}{{ loop(i) if i is iterable else i }}{% endfor %}") == "123"
        assert text("{% for i in [] %}{{ i }}{% else %}none{% endfor %}") == "none"

    @pytest.mark.parametrize("messages", [["hi"], [{"content": "hi"}], [None]])
    def test_what_a_message_is(self, messages):
        with pytest.raises(ValueError, match="a role and a content"):
            text(CHATML, messages)

    @pytest.mark.parametrize(
        ("messages", "message"),
        [
            ([], "there are no messages"),
            ("hi", "messages are a list"),
            ({"role": "user", "content": "hi"}, "messages are a list"),
            ([*MESSAGES, {"role": "user"}], r"messages\[3\]: the user's message has no content"),
            ([{"role": "user", "content": 5}], r"messages\[0\]: a content is text or a list of parts, got 5"),
            ([{"role": "usr", "content": "hi"}], r"messages\[0\]: role 'usr' is not supported \(did you mean 'user'\?"),
            ([*MESSAGES, {"role": "tool", "content": "4"}], r"messages\[3\] is a tool's, but .* calls none"),
            (MESSAGES[:2], r"messages\[1\] is the assistant's, and so would the next be"),
            ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content\[0\].* under 'text'"),
            (
                [{"role": "assistant", "content": "", "thinking": ["hm"]}],
                r"messages\[0\]: thinking is text, got \['hm'\]",
            ),
            ([{"role": "assistant", "tool_calls": 7}], r"messages\[0\]: tool_calls are a list, got 7"),
            ([{"role": "user", "content": ["hi"]}], r"messages\[0\]\.content\[0\]: a part is a mapping"),
            (
                [MESSAGES[0], MESSAGES[1], {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
                r"messages\[2\]\.content\[0\]: a part of type 'image_url' is not supported",
            ),
        ],
    )
    def test_messages_that_make_no_conversation(self, messages, message):
        with pytest.raises(ChatError, match=message):
            text(CHATML, messages)

    def test_a_system_message_that_the_template_leaves_out(self):
        messages = [{"role": "system", "content": "be  brief"}, MESSAGES[0]]
        assert "be  brief" in text(CHATML, messages)
        for template in (
            "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
            "{{ messages[1] }}",
        ):
            with pytest.raises(ChatError, match=r"messages\[0\]: the chat template leaves the system message out"):
                text(template, messages)

    def test_a_system_message_that_stands_in_the_last_message_of_the_user(self):
        """Mistral's has it nowhere while a tool's result is to be answered: so was the model trained."""
        template = (
            "{% for m in messages if m.role != 'system' %}{% if loop.last and m.role == 'user' %}"
            "{{ messages[0].content }}:{% endif %}{{ m.content }};{% endfor %}"
        )
        call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
        messages = [{"role": "system", "content": "be brief"}, MESSAGES[0], call, {"role": "tool", "content": "4"}]
        assert text(template, messages[:2]).startswith("be brief:")
        assert text(template, messages) == f"{MESSAGES[0]['content']};;4;"

    def test_a_tool_s_result_that_the_template_leaves_out(self):
        call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
        messages = [MESSAGES[0], call, {"role": "tool", "content": 'it is "4"'}]
        template = "{% for m in messages if m.role != 'user' %}{{ m.content | tojson }}{% endfor %}"
        assert text(template, messages) == json.dumps("") + json.dumps('it is "4"')
        with pytest.raises(ChatError, match=r"messages\[2\]: the chat template leaves the tool's result out"):
            text("{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}", messages)

    def test_many_system_messages_take_no_more_time_each(self, monkeypatch):
        """One that the template changes is looked for by rendering the conversation again: all at once."""
        rendered, render = [], jinja2.Template.render
        monkeypatch.setattr(jinja2.Template, "render", lambda *a, **k: rendered.append(1) or render(*a, **k))
        messages = [one for i in range(100) for one in ({"role": "system", "content": f"so {i}"}, MESSAGES[0])]
        template = "{% for m in messages %}{{ m.content | upper }};{% endfor %}"
        assert text(template, messages).startswith("SO 0;HI") and len(rendered) < 10
        lost = template.replace("in messages", "in messages if not m.content.startswith('so 7')")
        with pytest.raises(ChatError, match=r"messages\[14\]: the chat template leaves"):
            text(lost, messages)

    def test_a_system_message_that_the_template_changes(self):
        """SmolLM3's takes such words out of it."""
        template = "{{ messages[0].content.replace('/no_think', '') | trim }}|{{ messages[1].content }}"
        for content, shown in {"/no_think": "", "be brief /no_think": "be brief"}.items():
            messages = [{"role": "system", "content": content}, MESSAGES[0]]
            assert text(template, messages) == f"{shown}|{MESSAGES[0]['content']}"
        assert text("{{ messages[0].content | upper }}", messages) == "BE BRIEF /NO_THINK"

    @pytest.mark.parametrize(
        ("variables", "message"),
        [
            ({"messages": []}, "'messages' is set by the conversation"),
            ({5: 1}, "chat_template_kwargs maps names to values, got {5: 1}"),
            ({"bos_token": "x"}, "'bos_token' is set by"),
            ({"documents": [object()]}, "'documents' must be what JSON can hold"),
        ],
    )
    def test_variables_that_cannot_be(self, variables, message):
        with pytest.raises(ChatError, match=message):
            render_chat_text(tokenizer(CHATML), MESSAGES, variables=variables)


class TestPublished:
    def test_phi_3_gguf(self):
        tok = Tokenizer(third_party("tokenizers/ggml-vocab-phi-3.gguf"))
        ids = render_chat(tok, [{"role": "user", "content": "Hello world"}])
        special = tok.special_tokens
        hello = tok.encode("Hello world", add_special_tokens=False)
        # The template writes BOS, and the vocabulary adds it: once in all. The new lines belong to the tokens before.
        assert ids == [tok.bos_id, special["<|user|>"], *hello, special["<|end|>"], special["<|assistant|>"]]

    def test_equals_transformers(self):
        transformers = pytest.importorskip("transformers")
        tok = Tokenizer(third_party("tokenizers/ggml-vocab-qwen2.gguf"))
        oracle = transformers.PreTrainedTokenizerFast(tokenizer_object=tok.vocabulary.backend)
        for template in (tok.chat_template, CHATML, "{% for m in messages %}\n  {{ m | tojson }}\n{% endfor %}\n"):
            tok.chat_template = oracle.chat_template = template
            for prompt in (True, False):
                expected = oracle.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=prompt)
                assert render_chat_text(tok, MESSAGES, add_generation_prompt=prompt) == expected
