# SPDX-License-Identifier: Apache-2.0
"""Which chat template is used, what the built-in ones write, and that only templates write control tokens."""

from __future__ import annotations

import json
import re
import warnings

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

import slimrt
from conftest import TESTS, third_party
from slimrt.errors import UnsupportedError
from slimrt.tokenizer.chat import find_template, render_chat, render_chat_text, stops
from slimrt.tokenizer.chat_templates import TEMPLATES
from slimrt.tokenizer.tokenizer import Tokenizer
from test_chat import CHATML, MESSAGES, tokenizer

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "bye"},
]
# What the published templates of these families make of TALK; "↵" is a new line.
PUBLISHED = {
    "chatml": "<|im_start|>system↵be brief<|im_end|>↵<|im_start|>user↵hi<|im_end|>↵<|im_start|>assistant↵yo<|im_end|>↵"
    "<|im_start|>user↵bye<|im_end|>↵<|im_start|>assistant↵",
    "gemma": "<bos><start_of_turn>user↵be brief↵↵hi<end_of_turn>↵<start_of_turn>model↵yo<end_of_turn>↵"
    "<start_of_turn>user↵bye<end_of_turn>↵<start_of_turn>model↵",
    "llama2": "<bos>[INST] <<SYS>>↵be brief↵<</SYS>>↵↵hi [/INST] yo <eos><bos>[INST] bye [/INST]",
    "llama3": "<bos><|start_header_id|>system<|end_header_id|>↵↵be brief<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>↵↵hi<|eot_id|><|start_header_id|>assistant<|end_header_id|>↵↵yo<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>↵↵bye<|eot_id|><|start_header_id|>assistant<|end_header_id|>↵↵",
    "mistral": "<bos>[INST] hi[/INST] yo<eos>[INST] be brief↵↵bye[/INST]",
    "phi3": "<|system|>↵be brief<|end|>↵<|user|>↵hi<|end|>↵<|assistant|>↵yo<|end|>↵<|user|>↵bye<|end|>↵<|assistant|>↵",
    "vicuna": "be brief USER: hi ASSISTANT: yo<eos>USER: bye ASSISTANT:",
    "zephyr": "<|system|>↵be brief<eos>↵<|user|>↵hi<eos>↵<|assistant|>↵yo<eos>↵<|user|>↵bye<eos>↵<|assistant|>↵",
}


class TestWhich:
    @pytest.mark.parametrize("name", TEMPLATES)
    def test_built_in(self, name):
        wanted = PUBLISHED[name].replace("↵", "\n")
        assert render_chat_text(tokenizer(None), TALK, chat_template=name) == wanted
        assert "be brief" not in render_chat_text(tokenizer(None), TALK[1:], chat_template=name)

    @pytest.mark.parametrize("name", ["gemma", "llama2", "mistral", "vicuna"])
    def test_turns_must_alternate_where_the_family_has_it_so(self, name):
        with pytest.raises(ValueError, match="must take turns"):
            render_chat(tokenizer(None), [TALK[1], TALK[1]], chat_template=name)

    def test_text_file_and_names_of_the_file(self, tmp_path, monkeypatch):
        tok = tokenizer(CHATML, **{"x": 1})
        tok.chat_templates = {"rag": "rag", "zephyr": "own"}
        (tmp_path / "one.jinja").write_text("of a file: {{ messages[0].content }}")
        (tmp_path / "chatml").write_text("no")
        monkeypatch.chdir(tmp_path)
        assert find_template(tok) == CHATML
        assert find_template(tok, "{{ 1 }}") == "{{ 1 }}"
        assert find_template(tok, "rag") == "rag" and find_template(tok, "zephyr") == "own"
        assert find_template(tok, "chatml") == TEMPLATES["chatml"] and find_template(tok, "./chatml") == "no"
        assert render_chat_text(tok, MESSAGES[:1], chat_template=tmp_path / "one.jinja").startswith("of a file: hi")

    def test_no_such_template(self, tmp_path):
        with pytest.raises(UnsupportedError, match=r"template 'lama3' .*did you mean 'llama3'.*no file either"):
            find_template(tokenizer(None), "lama3")
        (tmp_path / "latin").write_bytes(b"\xe4")
        with pytest.raises(ValueError, match="latin: not UTF-8"):
            find_template(tokenizer(None), tmp_path / "latin")
        with pytest.raises(UnsupportedError, match="no chat template.*chatml, gemma"):
            find_template(tokenizer(None))

    def test_named_templates_of_files(self, tmp_path):
        fields = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": ["a", "b", "ab"],
        }
        fields |= {
            "tokenizer.ggml.merges": ["a b"],
            "tokenizer.chat_template.rag": "r",
            "tokenizer.chat_templates": ["rag"],
        }
        tok = Tokenizer.from_gguf_fields(fields)
        assert (tok.chat_template, tok.chat_templates) == (None, {"rag": "r"})
        directory = metaspace_directory(tmp_path)
        listed = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
        (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
        (directory / "additional_chat_templates").mkdir()
        (directory / "additional_chat_templates" / "rag.jinja").write_text("r")
        tok = Tokenizer(directory)
        assert (tok.chat_template, tok.chat_templates) == ("d", {"tool_use": "t", "rag": "r"})
        shown = [render_chat_text(tok, MESSAGES[:1], variables={"tools": tools}) for tools in (None, [], [{}])]
        assert shown == ["d", "d", "t"]
        assert render_chat_text(tok, MESSAGES[:1], variables={"tools": [{}]}, chat_template="rag") == "r"

    def test_a_turn_ends_where_the_vocabulary_has_no_token_for_it(self):
        assert stops(tokenizer(None), "chatml") == [] and stops(tokenizer(None), None) == []
        assert stops(tokenizer(None), "llama3") == ["<|eot_id|>"] and stops(tokenizer(None), "zephyr") == []

    def test_variables_that_it_does_not_read_are_said_once(self):
        template = "{% macro say() %}{{ enable_thinking }}{% endmacro %}{% for m in messages %}{{ say() }}{% endfor %}"
        told = "does not read 'enable_thinkin'; it reads 'enable_thinking'$"
        for given, times in (({"enable_thinkin": True, "tools": [1]}, 1), ({"enable_thinkin": True}, 0),
                             ({"enable_thinking": 1}, 0)):  # fmt: skip
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                render_chat_text(tokenizer(template), MESSAGES[:1], variables=given)
            assert [re.search(told, str(one.message)) is not None for one in found] == [True] * times

    def test_model_takes_them(self, tiny):
        message = [{"role": "user", "content": [{"type": "text", "text": "abc"}]}]
        with slimrt.Model(tiny, n_ctx=64) as model:
            own = model.render_chat(message)
            assert model.detokenize(model.render_chat(message, chat_template="{{ messages[0].content }}!")) == "abc!"
            think = {"chat_template": "{% if think %}x{% endif %}", "chat_template_kwargs": {"think": True}}
            assert model.detokenize(model.render_chat(message, **think)) == "x"
            assert model.chat(message, max_tokens=3, seed=1).tokens == model.generate(own, max_tokens=3, seed=1).tokens
            with_session = model.session()
            model.chat(message, chat_template="chatml", max_tokens=3, seed=1, session=with_session)
            assert with_session.length > len(own)


def metaspace_directory(path):
    """A SentencePiece vocabulary whose Metaspace marks the first word of a text alone, as Mistral's later ones do."""
    tokens = ["<unk>", "<s>", "</s>", "[INST]", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghis"]
    backend = Backend(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in tokens[:4]])
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    return path


def of_fixture(name):
    return lambda tmp_path: Tokenizer(third_party(f"tokenizers/{name}"))


TOKENIZERS = {
    "phi-3, whose tokens swallow white space": of_fixture("ggml-vocab-phi-3.gguf"),
    "qwen2": of_fixture("ggml-vocab-qwen2.gguf"),
    "llama-3": of_fixture("ggml-vocab-llama-bpe.gguf"),
    "llama-2": of_fixture("ggml-vocab-llama-spm.gguf"),
    "gpt-2": of_fixture("ggml-vocab-gpt-2.gguf"),
    "neox": of_fixture("20B_tokenizer_neox.json"),
    "tale-llama": lambda tmp_path: Tokenizer(TESTS.parent / "models" / "tale-llama.gguf"),
    "tale-t5": lambda tmp_path: Tokenizer(TESTS.parent / "models" / "tale-t5.gguf"),
    "own": lambda tmp_path: tokenizer(CHATML),
    "metaspace": lambda tmp_path: Tokenizer(metaspace_directory(tmp_path)),
}


@pytest.fixture(params=TOKENIZERS)
def any_tokenizer(request, tmp_path):
    return TOKENIZERS[request.param](tmp_path)


class TestControlTokensInMessages:
    def test_they_stay_text(self, any_tokenizer):
        """Each way to write them: alone, between words, and as keys and values of what else a template is given."""
        tok = any_tokenizer
        specials = sorted(tok.spelled_out)[:8]
        mark = specials[0]
        template = f"{mark}{{{{ messages[0].content }}}}{mark}{{{{ documents | tojson }}}}"
        control = set(tok.special_tokens.values())

        def render(made, said, key):
            variables = {"documents": [{key: said}]}
            return made(tok, [{"role": "user", "content": said}], chat_template=template, variables=variables)

        written = sum(id in control for id in render(render_chat, "abc", "key"))
        for special in specials:
            for said in (special, f"a {special} b", f"{special}{special}a", f" {special} ", f"{special[:-1]}{special}"):
                ids = render(render_chat, said, f"{special}a")
                assert sum(id in control for id in ids) == written, (said, ids)
                documents = json.dumps([{f"{special}a": said}], ensure_ascii=False)
                assert render(render_chat_text, said, f"{special}a") == f"{mark}{said}{mark}{documents}"

    def test_the_ids_are_those_of_plain_text(self, any_tokenizer):
        tok = any_tokenizer
        special = sorted(tok.spelled_out)[0]
        inner = f"a {special} b{special}c"
        ids = render_chat(tok, [{"role": "user", "content": inner}], chat_template="{{ messages[0].content }}")
        assert ids == tok.with_bos(tok.encode(inner, add_special_tokens=False, parse_special=False))

    def test_other_parts_are_encoded_as_without_one(self, any_tokenizer):
        """The ids beside the part that holds the text are those that encode makes of the whole."""
        tok = any_tokenizer
        special = sorted(tok.spelled_out)[0]
        template = f"a b{special} c {{{{ messages[0].content }}}}{special}  d\n\n{special}e"
        wanted = tok.encode(f"a b{special} c x{special}  d\n\n{special}e", add_special_tokens=False)
        ids = render_chat(tok, [{"role": "user", "content": special}], chat_template=template)
        ids = ids[len(tok.with_bos(["x"])) - 1 :] if ids[: len(wanted)] != wanted else ids
        first = wanted.index(tok.encode(special, add_special_tokens=False)[0])
        second = wanted.index(wanted[first], first + 1)
        assert ids[: first + 1] == wanted[: first + 1] and ids[second - len(wanted) :] == wanted[second:]

    def test_no_unicode(self, any_tokenizer):
        special = sorted(any_tokenizer.spelled_out)[0]
        for said in ("\ud800", f"{special}\ud800"):
            with pytest.raises(ValueError, match="lone surrogate"):
                render_chat(
                    any_tokenizer, [{"role": "user", "content": said}], chat_template="{{ messages[0].content }}"
                )

    def test_a_template_finds_the_end_of_thoughts(self):
        """In an assistant's message the texts that the template looks for stay as they are, those of others do not."""
        template = (
            "{% for m in messages %}{{ m.role }}:{{ m.content.split('<|im_end|>')[-1] }}{% endfor %}"
            "{% if '<eos>' in messages[0].content %}found{% endif %}"
        )
        thought = {"role": "assistant", "content": "hm<|im_end|>yes"}
        user = {"role": "user", "content": "a<|im_end|>b<eos>"}
        got = render_chat_text(tokenizer(template), [user, thought], False)
        assert got == "user:a<|im_end|>b<eos>assistant:yes"
