# SPDX-License-Identifier: Apache-2.0
"""Tokenizer and incremental detokeniser: published vectors, round trips, special tokens."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from conftest import third_party
from slimrt.tokenizer.tokenizer import Tokenizer
from slimrt.tokenizer.vocabulary import end_of_generation
from vocabularies import (
    NORMAL,
    SMALL,
    UNUSED,
    VOCABULARIES,
    byte_level_fields,
    quick,
    sentencepiece_fields,
    texts,
    vectors,
    vocabulary,
)

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

MODELS = Path(__file__).parent.parent / "models"


class TestVectors:
    @pytest.mark.parametrize("name", VOCABULARIES)
    def test_every_string_gives_the_published_ids(self, name):
        tokenizer = vocabulary(name)
        for text, ids in vectors(name):
            assert tokenizer.encode(text, add_special_tokens=False) == ids, repr(text)
            assert tokenizer.decode(ids) == text

    def test_a_tokenizer_json_gives_the_same_ids_as_the_gguf(self):
        tokenizer = Tokenizer(third_party("tokenizers/20B_tokenizer_neox.json"))
        for text, ids in vectors("mpt"):
            assert tokenizer.encode(text, add_special_tokens=False) == ids, repr(text)
            assert tokenizer.decode(ids) == text

    @pytest.mark.parametrize("name", VOCABULARIES)
    def test_opening_takes_seconds_at_most(self, name):
        path = third_party(f"tokenizers/ggml-vocab-{name}.gguf")
        start = time.process_time()
        Tokenizer(path)
        assert time.process_time() - start < 5  # about 1 s for 128k tokens and 280k merges; room for a busy machine

    def test_what_the_files_declare(self):
        llama = vocabulary("llama-bpe")
        assert (llama.vocab_size, llama.bos_id, llama.eos_id, llama.unk_id) == (128256, 128000, 128001, None)
        assert (llama.add_bos, llama.add_eos) == (True, False)
        assert llama.special_tokens["<|eot_id|>"] == 128009
        assert llama.eog_ids == {128001, 128009}
        phi = vocabulary("phi-3")
        assert phi.eog_ids == {32000, phi.special_tokens["<|end|>"]}
        assert phi.chat_template.startswith("{{ bos_token }}")
        qwen = vocabulary("qwen2")
        assert qwen.add_bos is False and qwen.special_tokens["<|im_end|>"] in qwen.eog_ids

    def test_phi_3_special_tokens_swallow_the_space_after_them(self):
        phi = vocabulary("phi-3")
        hi = phi.encode("Hi", add_special_tokens=False)
        assert phi.encode("<|user|>\nHi", add_special_tokens=False) == [phi.special_tokens["<|user|>"], *hi]
        assert phi.encode("<s>\nHi", add_special_tokens=False) != [phi.bos_id, *hi]

    def test_stories260k_model_file(self):
        tokenizer = Tokenizer(third_party("models/stories260K/stories260K.gguf"))
        assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (512, 1, 2, None)
        ids = tokenizer.encode("Once upon a time")
        assert ids[0] == 1 and tokenizer.decode(ids, skip_special_tokens=True) == "Once upon a time"

    def test_whisper_tokenizer_json(self):
        tokenizer = Tokenizer(third_party("tokenizers/whisper_tokenizer.json"))
        ids = tokenizer.encode(" ask not")
        special = tokenizer.special_tokens
        assert ids[:2] == [special["<|startoftranscript|>"], special["<|notimestamps|>"]]
        assert ids[-1] == tokenizer.eos_id == special["<|endoftext|>"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == " ask not"


class TestRoundTrip:
    @pytest.mark.parametrize("name", SMALL)
    @quick
    @given(text=texts)
    def test_small(self, name, text):
        self.check(SMALL[name], text)

    @pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "llama-spm"])
    @quick
    @given(text=texts)
    def test_published(self, name, text):
        self.check(vocabulary(name), text)

    @staticmethod
    def check(tokenizer, text):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        plain = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(plain) == text
        joined = b"".join(tokenizer.token_bytes(id) for id in plain).decode()
        assert joined == (f" {text}" if tokenizer.vocabulary.strips_space and text else text)
        assert tokenizer.decode(np.array(plain, np.int32)) == text


class TestIncremental:
    @pytest.mark.parametrize("name", SMALL)
    @quick
    @given(data=st.data())
    def test_any_ids_joined_equal_decode(self, name, data):
        """Any sequence of ids, so invalid and unfinished UTF-8 too."""
        tokenizer = SMALL[name]
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
        skip = data.draw(st.booleans())
        detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
        pieces = [detokenizer.feed(id) for id in ids]
        assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids, skip_special_tokens=skip)

    @pytest.mark.parametrize("name", SMALL)
    @quick
    @given(text=texts, data=st.data())
    def test_every_split_into_prompt_and_rest(self, name, text, data):
        tokenizer = SMALL[name]
        ids = tokenizer.encode(text)
        at = data.draw(st.integers(0, len(ids)))
        prompt = b"".join(map(tokenizer.token_bytes, ids[:at]))
        try:
            prompt.decode()
        except UnicodeDecodeError:
            assume(False)  # a prompt ends with a whole character
        detokenizer = tokenizer.detokenizer(prompt_ids=ids[:at])
        rest = "".join(map(detokenizer.feed, ids[at:])) + detokenizer.flush()
        assert tokenizer.decode(ids[:at]) + rest == tokenizer.decode(ids)

    @pytest.mark.parametrize("name", SMALL)
    def test_an_emoji_comes_whole_with_its_last_byte(self, name):
        tokenizer = SMALL[name]
        ids = tokenizer.encode("👩‍🚀", add_special_tokens=False)
        assert len(ids) >= 11
        detokenizer = tokenizer.detokenizer()
        pieces = [detokenizer.feed(id) for id in ids]
        assert [piece for piece in pieces if piece] == ["👩", "\u200d", "🚀"]
        assert detokenizer.flush() == ""

    @pytest.mark.parametrize("name", SMALL)
    def test_half_a_character_is_held_back_until_flush(self, name):
        tokenizer = SMALL[name]
        detokenizer = tokenizer.detokenizer()
        ids = tokenizer.encode("a😀", add_special_tokens=False)[:-1]
        assert "".join(map(detokenizer.feed, ids)) == "a"
        assert detokenizer.flush() == "\ufffd"

    def test_the_space_prefix_is_kept_where_a_text_goes_on(self):
        tokenizer = SMALL["sentencepiece"]
        (id,) = tokenizer.encode("ab", add_special_tokens=False)
        assert tokenizer.detokenizer().feed(id) == "ab"
        assert tokenizer.detokenizer(prompt_ids=[tokenizer.bos_id]).feed(id) == "ab"
        assert tokenizer.detokenizer(prompt_ids=[tokenizer.bos_id, id]).feed(id) == " ab"

    def test_published_vectors_piece_by_piece(self):
        for name in VOCABULARIES:
            tokenizer = vocabulary(name)
            for text, ids in vectors(name):
                detokenizer = tokenizer.detokenizer()
                pieces = [detokenizer.feed(id) for id in ids]
                assert "".join(pieces) + detokenizer.flush() == text and "\ufffd" not in "".join(pieces)


class TestSpecialTokens:
    def test_bos_is_there_once(self):
        tokenizer = SMALL["sentencepiece"]
        assert tokenizer.encode("a") == [1, *tokenizer.encode("a", add_special_tokens=False)]
        assert tokenizer.encode("<s>a") == tokenizer.encode("a")
        assert tokenizer.encode("") == tokenizer.encode("<s>") == [1]
        assert tokenizer.encode("<s>a", parse_special=False).count(1) == 1
        assert tokenizer.encode("<s>a", parse_special=False) != tokenizer.encode("a")

    @pytest.mark.parametrize(("bos", "eos"), [(True, True), (True, False), (False, True), (False, False)])
    def test_the_file_says_what_is_added(self, bos, eos):
        tokenizer = Tokenizer.from_gguf_fields(sentencepiece_fields(add_bos_token=bos, add_eos_token=eos))
        assert (tokenizer.add_bos, tokenizer.add_eos) == (bos, eos)
        inner = tokenizer.encode("ab", add_special_tokens=False)
        assert tokenizer.encode("ab") == [1] * bos + inner + [2] * eos
        assert tokenizer.encode("<s>ab</s>") == [1, *inner, 2]

    def test_one_token_at_both_ends(self):
        fields = byte_level_fields(add_bos_token=True, add_eos_token=True)
        end = fields["tokenizer.ggml.eos_token_id"]
        tokenizer = Tokenizer.from_gguf_fields(fields | {"tokenizer.ggml.bos_token_id": end})
        assert tokenizer.encode("") == [end, end] and tokenizer.encode("<|endoftext|>") == [end]

    @pytest.mark.parametrize("name", SMALL)
    def test_control_text_is_a_token_only_when_parsed(self, name):
        tokenizer = SMALL[name]
        end = tokenizer.special_tokens["<|im_end|>"]
        assert end in tokenizer.encode("a<|im_end|>b")
        assert end not in tokenizer.encode("a<|im_end|>b", parse_special=False)
        assert end in tokenizer.encode("a<|im_end|>b")  # the setting does not stick

    @pytest.mark.parametrize("kind", [NORMAL, UNUSED])
    @pytest.mark.parametrize("made", [sentencepiece_fields, byte_level_fields])
    def test_ends_of_turns_that_a_file_calls_normal(self, made, kind):
        """As Gemma's first files do, where nothing ended a turn; files that say what is found in a text are right."""
        types = made()["tokenizer.ggml.token_type"].copy()
        end = made()["tokenizer.ggml.tokens"].index("<|im_end|>")
        types[end] = kind
        tokenizer = Tokenizer.from_gguf_fields(made(token_type=types))
        assert end in tokenizer.eog_ids
        assert end in tokenizer.encode("a<|im_end|>b") and end not in tokenizer.encode(
            "a<|im_end|>b", parse_special=False
        )
        said = {"tokenizer.slimrt.added": [end - 1], "tokenizer.slimrt.added_flags": [1]}
        assert end not in Tokenizer.from_gguf_fields(made(token_type=types) | said).eog_ids

    @pytest.mark.parametrize("name", SMALL)
    def test_user_defined_tokens_are_always_matched(self, name):
        tokenizer = SMALL[name]
        tool = tokenizer.vocabulary.tokens.index("<|tool|>")
        assert tool in tokenizer.encode("a<|tool|>b", parse_special=False)
        assert tool not in tokenizer.special_tokens.values()
        assert "<|tool|>" in tokenizer.decode([tool], skip_special_tokens=True)

    def test_spaces_of_a_user_defined_token_are_shown_as_spaces(self):
        fields = sentencepiece_fields()
        tokens = ["\u2581\u2581\u2581" if token == "<|tool|>" else token for token in fields["tokenizer.ggml.tokens"]]
        tokenizer = Tokenizer.from_gguf_fields(fields | {"tokenizer.ggml.tokens": tokens})
        a, run = tokens.index("a"), tokens.index("\u2581\u2581\u2581")
        assert tokenizer.decode([a, run, a]) == "a   a"

    @pytest.mark.parametrize("name", SMALL)
    def test_end_of_generation(self, name):
        tokenizer = SMALL[name]
        assert tokenizer.eog_ids == {tokenizer.eos_id, tokenizer.special_tokens["<|im_end|>"]}

    def test_end_of_generation_declared(self):
        tokenizer = Tokenizer.from_gguf_fields(sentencepiece_fields(eot_token_id=7, eom_token_id=9))
        assert {2, 7, 9} <= tokenizer.eog_ids

    @pytest.mark.parametrize("end", ["<turn|>", "<|tool_response>", "<end_of_utterance>", "<|im_start|>"])
    def test_end_of_generation_by_name(self, end):
        """Gemma 4's files declare <eos>, and have one of its other ends as a token that is user-defined."""
        fields = sentencepiece_fields()
        tokens = [end if token == "<|tool|>" else token for token in fields["tokenizer.ggml.tokens"]]
        tokenizer = Tokenizer.from_gguf_fields(fields | {"tokenizer.ggml.tokens": tokens})
        assert (tokens.index(end) in tokenizer.eog_ids) is (end != "<|im_start|>")

    def test_end_of_a_harmony_message_is_not_the_end_of_a_turn(self):
        control = {"<|return|>": 1, "<|call|>": 2, "<|end|>": 3}
        assert end_of_generation(control, [None]) == {1, 2}
        assert end_of_generation({"<|end|>": 3}, [None]) == {3}

    def test_no_token_has_no_bytes_and_negative_is_an_error(self):
        tokenizer = SMALL["byte-level"]
        assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""
        with pytest.raises(ValueError, match="negative"):
            tokenizer.decode([-1])
        for wrong in ([1.5], "ab", [[1]]):
            with pytest.raises(TypeError, match="a token id must be a whole number"):
                tokenizer.decode(wrong)

    def test_lone_surrogates_are_a_value_error(self):
        with pytest.raises(ValueError, match="lone surrogate at character 1"):
            SMALL["byte-level"].encode("a\ud800b")

    def test_threads_with_different_settings(self):
        tokenizer = SMALL["byte-level"]
        wanted = {parse: tokenizer.encode("hello<|im_end|>" * 20, parse_special=parse) for parse in (True, False)}
        wrong = []

        def work(parse):
            for _ in range(200):
                if tokenizer.encode("hello<|im_end|>" * 20, parse_special=parse) != wanted[parse]:
                    wrong.append(parse)

        threads = [threading.Thread(target=work, args=(parse,)) for parse in (True, False) * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


@pytest.mark.unemulated  # it bounds resident memory
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("plain", [False, True])
def test_memory_of_a_long_text_is_given_back(plain):
    """Some 150 bytes for each character, most of which the C library kept."""
    text = (MODELS / "heldout.txt").read_text() * 10
    code = f"""
        import sys
        from slimrt.tokenizer.tokenizer import Tokenizer
        tokenizer, text = Tokenizer({str(MODELS / "tale-gqa.gguf")!r}), sys.stdin.read()

        def held():
            return int(open("/proc/self/statm").read().split()[1]) * 4096

        tokenizer.encode("a")
        before = held()
        ids = tokenizer.encode_plain(text, str) if {plain} else tokenizer.encode(text)
        print((held() - before) / len(text))
        """
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], input=text, text=True, stdout=-1, check=True)
    assert float(out.stdout) < 35
