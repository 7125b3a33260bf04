# SPDX-License-Identifier: Apache-2.0
"""Chat templates: the text, the ids, BOS once, and errors that say what is wrong."""

from __future__ import annotations

import datetime
import json

import pytest
from tokenizers import pre_tokenizers

from conftest import third_party
from slimrt.errors import UnsupportedError
from slimrt.tokenizer.chat import render_chat, render_chat_text
from slimrt.tokenizer.tokenizer import Tokenizer

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


def text(template: str, messages=MESSAGES, **variables) -> str:
    return render_chat_text(tokenizer(template), messages, **variables)


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

    def test_strftime_now(self):
        assert text("{{ strftime_now('%Y') }}") == datetime.datetime.now().strftime("%Y")

    def test_unset_variables_are_false(self):
        assert text("{% if enable_thinking %}a{% else %}b{% endif %}") == "b"
        assert text("{% if enable_thinking %}a{% else %}b{% endif %}", enable_thinking=True) == "a"


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

    @pytest.mark.parametrize("messages", [["hi"], [{"content": "hi"}], [None]])
    def test_what_a_message_is(self, messages):
        with pytest.raises(ValueError, match="a role and a content"):
            text(CHATML, messages)


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
