# SPDX-License-Identifier: Apache-2.0
"""Tokenizer and incremental detokeniser: published vectors, independent oracles, properties, bad files."""

from __future__ import annotations

import json
import struct
import threading
import time
import unicodedata
from functools import lru_cache
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from conftest import third_party
from slimrt import _pretokenizers
from slimrt._tokenizer_gguf import read_fields
from slimrt._vocabulary import end_of_generation
from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.tokenizer import Tokenizer

VOCABULARIES = ["gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2"]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

# No "<": what reads as a special token decodes as one, with SentencePiece's space before the text after it.
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<\u2581"), max_size=60)
quick = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@lru_cache
def opened(path: Path) -> Tokenizer:
    return Tokenizer(path)


def vocabulary(name: str) -> Tokenizer:
    return opened(third_party(f"tokenizers/ggml-vocab-{name}.gguf"))


def vectors(name: str) -> list[tuple[str, list[int]]]:
    path = third_party(f"tokenizers/ggml-vocab-{name}.gguf")
    inputs = path.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    outputs = path.with_suffix(".gguf.out").read_text().split("\n")
    assert len(inputs) == len(outputs) == 47
    return [(text, [int(id) for id in ids.split()]) for text, ids in zip(inputs, outputs, strict=True)]


def ggml(**fields) -> dict:
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def sentencepiece_fields(**changes) -> dict:
    """A small SentencePiece vocabulary: every byte, some letters, and unions of them."""
    pieces = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    pieces += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    unions = ["ab", "abc", "bc", "\u2581a", "\u2581ab", "\u2581\u2581", "\u2581\u2581\u2581\u2581", "é\u2581", "ca"]
    pieces += [(text, -float(rank), NORMAL) for rank, text in enumerate(unions)]
    pieces += [(text, -float(100 + rank), NORMAL) for rank, text in enumerate("\u2581abcdé")]
    pieces += [("<|tool|>", 0.0, USER_DEFINED), ("<|im_end|>", 0.0, CONTROL)]
    tokens, scores, types = zip(*pieces, strict=True)
    fields = ggml(
        model="llama", tokens=list(tokens), scores=np.array(scores, np.float32), token_type=np.array(types, np.int32)
    )
    return fields | ggml(bos_token_id=1, eos_token_id=2, unknown_token_id=0) | ggml(**changes)


def byte_level_fields(**changes) -> dict:
    """A small byte-level BPE vocabulary: every byte, a few merges."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w"]
    tokens += [merge.replace(" ", "") for merge in merges] + ["<|endoftext|>", "<|im_end|>", "<|tool|>"]
    types = [NORMAL] * (len(tokens) - 3) + [CONTROL, CONTROL, USER_DEFINED]
    fields = ggml(model="gpt2", pre="gpt-2", tokens=tokens, merges=merges, token_type=np.array(types, np.int32))
    return fields | ggml(eos_token_id=tokens.index("<|endoftext|>")) | ggml(**changes)


SMALL = {
    "sentencepiece": Tokenizer.from_gguf_fields(sentencepiece_fields()),
    "byte-level": Tokenizer.from_gguf_fields(byte_level_fields()),
}


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


def greedy_union(text: str, fields: dict) -> list[int]:
    """SentencePiece's BPE in plain loops: join the best-scored union, leftmost first, until none is a token."""
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    ids = {token: id for id, token in enumerate(tokens)}
    score = {tokens[id]: fields["tokenizer.ggml.scores"][id] for id in range(len(tokens)) if types[id] == NORMAL}
    parts = list("\u2581" + text.replace(" ", "\u2581")) if text else []
    while True:
        joins = [(score[a + b], -at) for at, (a, b) in enumerate(zip(parts, parts[1:], strict=False)) if a + b in score]
        if not joins:
            break
        at = -max(joins)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    spelt = [[ids[part]] if part in score else [ids[f"<0x{byte:02X}>"] for byte in part.encode()] for part in parts]
    return [id for part in spelt for id in part]


class TestSentencePiece:
    @quick
    @given(st.text("ab cdé\n😀", max_size=40) | texts)
    def test_equals_greedy_unions_small(self, text):
        ids = SMALL["sentencepiece"].encode(text, add_special_tokens=False)
        assert ids == greedy_union(text, sentencepiece_fields())

    @quick
    @given(st.text("the anwshi", max_size=40) | texts)
    def test_equals_greedy_unions_llama(self, text):
        path = third_party("tokenizers/ggml-vocab-llama-spm.gguf")
        assert opened(path).encode(text, add_special_tokens=False) == greedy_union(text, fields_of(path))

    def test_without_space_prefix(self):
        tokenizer = Tokenizer.from_gguf_fields(sentencepiece_fields(add_space_prefix=False))
        (a,) = tokenizer.encode("a", add_special_tokens=False)
        assert tokenizer.token_bytes(a) == b"a" and tokenizer.decode([a]) == "a"
        assert tokenizer.decode(tokenizer.encode(" a")[1:]) == " a"

    def test_missing_scores(self):
        fields = sentencepiece_fields()
        del fields["tokenizer.ggml.scores"]
        with pytest.raises(ModelFormatError, match="scores"):
            Tokenizer.from_gguf_fields(fields)


@lru_cache
def fields_of(path: Path) -> dict:
    return read_fields(path)


def protobuf(data: bytes):
    """The (field number, value) pairs of a protobuf message."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            value |= (data[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if data[at - 1] < 0x80:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
        elif key & 7 == 5:
            yield key >> 3, struct.unpack_from("<f", data, at)[0]
            at += 4
        else:
            size = varint()
            yield key >> 3, data[at : at + size]
            at += size


@lru_cache
def unigram_fields() -> dict:
    """The fixture's SentencePiece unigram model, as a converter would write it into a GGUF."""
    message = list(protobuf(third_party("tokenizers/spm_test_model.model").read_bytes()))
    pieces = [dict(protobuf(value)) for field, value in message if field == 1]
    charsmap = dict(protobuf(next(value for field, value in message if field == 3)))[2]
    return ggml(
        model="t5",
        tokens=[piece[1].decode() for piece in pieces],
        scores=np.array([piece.get(2, 0.0) for piece in pieces], np.float32),
        token_type=np.array([piece.get(3, NORMAL) for piece in pieces], np.int32),
        precompiled_charsmap=np.frombuffer(charsmap, np.uint8),
        unknown_token_id=0,
        eos_token_id=2,
    )


UNIGRAM_GOLDEN = {  # SentencePieceProcessor(model_file="spm_test_model.model").encode(text)
    "": [],
    "Hello world": [151, 88, 21, 887],
    "  two   spaces  ": [213, 273, 19, 135, 8],
    "I saw a girl with a telescope.": [9, 459, 11, 939, 44, 11, 4, 142, 82, 8, 28, 21, 132, 6],
    "ＡＢＣ ﬁne Ⅳ": [104, 540, 381, 706, 9, 0],
    "naïve café": [4, 24, 19, 0, 125, 78, 19, 57, 0],
    "你好 😀!": [4, 0, 4, 0, 147],
    "\t\n mixed\twhite\n": [4, 0, 402, 297, 12, 0, 63, 60, 382, 0],
}


class TestUnigram:
    @pytest.mark.parametrize("text", UNIGRAM_GOLDEN)
    def test_golden(self, text):
        tokenizer = Tokenizer.from_gguf_fields(unigram_fields())
        assert tokenizer.encode(text, add_special_tokens=False) == UNIGRAM_GOLDEN[text]
        assert tokenizer.encode(text) == [*UNIGRAM_GOLDEN[text], tokenizer.eos_id]

    @quick
    @given(texts | st.text("the  and\t\uff21ﬁ", max_size=40))
    def test_equals_sentencepiece(self, text):
        sentencepiece = pytest.importorskip("sentencepiece")
        oracle = sentencepiece.SentencePieceProcessor(model_file=str(third_party("tokenizers/spm_test_model.model")))
        tokenizer = Tokenizer.from_gguf_fields(unigram_fields())
        assert tokenizer.encode(text, add_special_tokens=False) == oracle.encode(text)

    def test_control_tokens_are_found_only_when_parsed(self):
        tokenizer = Tokenizer.from_gguf_fields(unigram_fields())
        assert tokenizer.eos_id in tokenizer.encode("a</s>b", add_special_tokens=False)
        assert tokenizer.eos_id not in tokenizer.encode("a</s>b", add_special_tokens=False, parse_special=False)
        assert tokenizer.encode("a</s>").count(tokenizer.eos_id) == 1
        assert max(tokenizer.encode("<s>a</s>")) < tokenizer.vocab_size

    @pytest.mark.parametrize("at", [0, 1, 4, 5, 6, 1000, 177155, 177160, -1])
    def test_corrupted_charsmap(self, at):
        """Whatever a flipped byte does, it is a typed error or an encoding, never a panic of the library."""
        charsmap = unigram_fields()["tokenizer.ggml.precompiled_charsmap"].copy()
        charsmap[at] ^= 0xFF
        try:
            tokenizer = Tokenizer.from_gguf_fields(unigram_fields() | ggml(precompiled_charsmap=charsmap))
        except ModelFormatError:
            return
        tokenizer.encode("Hello ﬁ Ⅳ é 😀 \uff21")

    @pytest.mark.parametrize("size", [0, 3, 4, 1000, -1])
    def test_truncated_charsmap(self, size):
        charsmap = unigram_fields()["tokenizer.ggml.precompiled_charsmap"][:size]
        fields = unigram_fields() | ggml(precompiled_charsmap=charsmap)
        if size == 0:  # none at all is legal: the text is taken as it is
            assert Tokenizer.from_gguf_fields(fields).encode("the", add_special_tokens=False)
            return
        with pytest.raises(ModelFormatError):
            Tokenizer.from_gguf_fields(fields)


def cut(name: str, text: str) -> list[str]:
    pieces = _pretokenizers.lookup(name).splitter.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in pieces]


class TestPreTokenizers:
    @pytest.mark.parametrize(
        ("name", "expected"),
        {
            "gpt-2": "I_'ve_ 12345_ DON_'_T_ end_..._\n _ camelCase",
            "smollm": "I_'ve_ _1_2_3_4_5_ DON_'_T_ end_..._\n _ camelCase",
            "llama-bpe": "I_'ve_ _123_45_ DON_'T_ end_...\n_ _ camelCase",
            "qwen2": "I_'ve_ _1_2_3_4_5_ DON_'T_ end_...\n_ _ camelCase",
            "tekken": "I_'ve_ _1_2_3_4_5_ DON_'T_ end_...\n_ _ camel_Case",
            "gpt-4o": "I've_ _123_45_ DON'T_ end_...\n_ _ camel_Case",
            "falcon": "I_'_ve_ _123_45_ DON_'_T_ end_..._\n _ camelCase",
            "deepseek-v3": "I_'ve_ _123_45_ DON_'T_ end_...\n_ _ camelCase",
            "deepseek-coder": "I_'_ve_ _1_2_3_4_5_ DON_'_T_ end_..._\n_ _ camelCase",
            "bloom": "I've_ 12345_ DON'T_ end_...\n _ camelCase",
        }.items(),
    )
    def test_cuts(self, name, expected):
        assert cut(name, "I've 12345 DON'T end...\n  camelCase") == expected.split("_")

    @pytest.mark.parametrize("name", _pretokenizers.SUPPORTED)
    @settings(deadline=None, max_examples=25)
    @given(texts)
    def test_no_byte_is_lost(self, name, text):
        tokenizer = Tokenizer.from_gguf_fields(byte_level_fields(pre=name, add_bos_token=False))
        composed = unicodedata.normalize("NFC", text) if _pretokenizers.lookup(name).nfc else text
        assume(unicodedata.normalize("NFC", composed) == composed)
        assert tokenizer.decode(tokenizer.encode(text)) == composed

    @pytest.mark.parametrize("name", ["default", "llama-4-maverick", "", None])
    def test_unknown_is_an_error_that_lists_the_known(self, name):
        fields = byte_level_fields(pre=name)
        with pytest.raises(UnsupportedError, match="supported: .*gpt-2.*qwen2") as caught:
            Tokenizer.from_gguf_fields(fields)
        assert name is None or repr(name) in str(caught.value)

    def test_ignore_merges_takes_a_word_that_is_a_token_whole(self):
        tokens = [*byte_level_fields()["tokenizer.ggml.tokens"], "owl"]
        fields = byte_level_fields(tokens=tokens, token_type=np.ones(len(tokens), np.int32), add_bos_token=False)
        whole = Tokenizer.from_gguf_fields(fields | ggml(pre="llama-bpe")).encode("owl")
        assert whole == [tokens.index("owl")]
        assert len(Tokenizer.from_gguf_fields(fields | ggml(pre="gpt-2")).encode("owl")) == 3


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

    @pytest.mark.parametrize("name", SMALL)
    def test_control_text_is_a_token_only_when_parsed(self, name):
        tokenizer = SMALL[name]
        end = tokenizer.special_tokens["<|im_end|>"]
        assert end in tokenizer.encode("a<|im_end|>b")
        assert end not in tokenizer.encode("a<|im_end|>b", parse_special=False)
        assert end in tokenizer.encode("a<|im_end|>b")  # the setting does not stick

    @pytest.mark.parametrize("name", SMALL)
    def test_user_defined_tokens_are_always_matched(self, name):
        tokenizer = SMALL[name]
        tool = tokenizer.vocabulary.tokens.index("<|tool|>")
        assert tool in tokenizer.encode("a<|tool|>b", parse_special=False)
        assert tool not in tokenizer.special_tokens.values()
        assert "<|tool|>" in tokenizer.decode([tool], skip_special_tokens=True)

    @pytest.mark.parametrize("name", SMALL)
    def test_end_of_generation(self, name):
        tokenizer = SMALL[name]
        assert tokenizer.eog_ids == {tokenizer.eos_id, tokenizer.special_tokens["<|im_end|>"]}

    def test_end_of_generation_declared(self):
        tokenizer = Tokenizer.from_gguf_fields(sentencepiece_fields(eot_token_id=7, eom_token_id=9))
        assert {2, 7, 9} <= tokenizer.eog_ids

    def test_end_of_a_harmony_message_is_not_the_end_of_a_turn(self):
        control = {"<|return|>": 1, "<|call|>": 2, "<|end|>": 3}
        assert end_of_generation(control, [None]) == {1, 2}
        assert end_of_generation({"<|end|>": 3}, [None]) == {3}

    def test_no_token_has_no_bytes_and_negative_is_an_error(self):
        tokenizer = SMALL["byte-level"]
        assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""
        with pytest.raises(ValueError, match="negative"):
            tokenizer.decode([-1])

    def test_lone_surrogates_are_a_value_error(self):
        with pytest.raises(ValueError):
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


class TestBadFields:
    @pytest.mark.parametrize(
        ("changes", "message"),
        {
            "tokens": ({"tokens": []}, "tokens"),
            "tokens kind": ({"tokens": np.ones(3)}, "tokens"),
            "types count": ({"token_type": np.ones(3, np.int32)}, "token_type"),
            "scores count": ({"scores": np.ones(3, np.float32)}, "scores"),
            "scores nan": ({"scores": np.full(276, np.nan, np.float32)}, "scores"),
            "bos range": ({"bos_token_id": 99999}, "bos_token_id"),
            "bos kind": ({"bos_token_id": "one"}, "bos_token_id"),
            "bos wanted, none": ({"bos_token_id": 0xFFFFFFFF, "add_bos_token": True, "tokens": ["a"] * 276}, "bos"),
            "add_bos kind": ({"add_bos_token": 3.5}, "add_bos_token"),
        }.values(),
    )
    def test_sentencepiece(self, changes, message):
        with pytest.raises(ModelFormatError, match=message):
            Tokenizer.from_gguf_fields(sentencepiece_fields(**changes))

    @pytest.mark.parametrize("merges", [["he"], ["h zz"], ["x y"], None, [1, 2]])
    def test_merges(self, merges):
        with pytest.raises(ModelFormatError):
            Tokenizer.from_gguf_fields(byte_level_fields(merges=merges))

    def test_unigram_without_unknown_token(self):
        fields = ggml(model="t5", tokens=["a"], scores=np.zeros(1, np.float32))
        with pytest.raises(ModelFormatError, match="unknown"):
            Tokenizer.from_gguf_fields(fields)

    @pytest.mark.parametrize("model", ["bert", "rwkv", None])
    def test_unknown_model(self, model):
        with pytest.raises(UnsupportedError, match="supported: llama, gpt2, t5"):
            Tokenizer.from_gguf_fields(byte_level_fields(model=model))

    def test_a_text_that_occurs_twice_is_its_first_token(self):
        tokens = [*byte_level_fields()["tokenizer.ggml.tokens"], "hello"]
        types = [*byte_level_fields()["tokenizer.ggml.token_type"], NORMAL]
        tokenizer = Tokenizer.from_gguf_fields(byte_level_fields(tokens=tokens, token_type=types))
        assert tokenizer.encode("hello") == [tokens.index("hello")]
        assert tokenizer.decode([len(tokens) - 1]) == "hello"


@pytest.fixture(scope="session")
def small_gguf(tmp_path_factory) -> Path:
    """The small SentencePiece vocabulary in a file, among fields of other kinds."""
    path = tmp_path_factory.mktemp("gguf") / "vocabulary.gguf"
    fields = sentencepiece_fields()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("general.tags", ["a", "bc"])
    writer.add_array("general.numbers", [1, 2, 3])
    writer.add_float64("general.real", 0.5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(fields["tokenizer.ggml.tokens"])
    writer.add_token_scores(fields["tokenizer.ggml.scores"].tolist())
    writer.add_token_types(fields["tokenizer.ggml.token_type"].tolist())
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


class TestFiles:
    def test_written_and_read(self, small_gguf):
        tokenizer = Tokenizer(str(small_gguf))
        assert tokenizer.chat_template == "{{ messages }}"
        assert tokenizer.encode("ab cd é") == SMALL["sentencepiece"].encode("ab cd é")
        fields = read_fields(small_gguf)
        assert fields["general.architecture"] == "llama" and "general.tags" not in fields

    def test_every_truncation_is_a_typed_error(self, small_gguf, tmp_path):
        data = small_gguf.read_bytes()
        path = tmp_path / "cut.gguf"
        for size in [*range(0, 300), *range(300, len(data) - 1, 97)]:
            path.write_bytes(data[:size])
            with pytest.raises(ModelFormatError):
                Tokenizer(path)

    @settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(changes=st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 255)), min_size=1, max_size=5))
    def test_corruption_is_a_typed_error_or_harmless(self, small_gguf, tmp_path, changes):
        data = bytearray(small_gguf.read_bytes())
        for at, byte in changes:
            data[at % len(data) if at % 2 else at % 400] = byte
        path = tmp_path / "corrupted.gguf"
        path.write_bytes(data)
        try:
            tokenizer = Tokenizer(path)
        except (ModelFormatError, UnsupportedError):
            return
        tokenizer.decode(tokenizer.encode("ab cd 😀"))

    @pytest.mark.parametrize("count", [2**63, 2**64 - 1, 10**9])
    def test_absurd_counts_end_at_once(self, tmp_path, count):
        def field(key, kind, value):
            return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value

        header = b"GGUF" + struct.pack("<IQQ", 3, 0, count)
        strings = field(b"tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, count))
        numbers = field(b"tokenizer.ggml.scores", 9, struct.pack("<IQ", 6, count))
        text = field(b"tokenizer.ggml.model", 8, struct.pack("<Q", count))
        for data in (header, header + strings, header + numbers, header + text):
            path = tmp_path / "absurd.gguf"
            path.write_bytes(data + b"\0" * 64)
            with pytest.raises(ModelFormatError):
                Tokenizer(path)

    def test_other_files(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            Tokenizer(tmp_path / "absent.gguf")
        contents = {"a.gguf": b"\x89PNG", "b.bin": b"", "c.json": b"{]", "d.json": b"{}", "e.gguf": b"FUGG"}
        for name, data in contents.items():
            (tmp_path / name).write_bytes(data)
            with pytest.raises(ModelFormatError, match=name):
                Tokenizer(tmp_path / name)

    @pytest.mark.parametrize("version", [0, 1, 4, 3 << 24])
    def test_versions(self, tmp_path, version):
        (tmp_path / "v.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
        with pytest.raises(ModelFormatError, match="version"):
            Tokenizer(tmp_path / "v.gguf")


@pytest.fixture
def directory(tmp_path) -> Path:
    """A Hugging Face directory: byte-level BPE with a BOS, and settings that would truncate."""
    backend = tokenizers.Tokenizer(
        models.BPE({text: id for id, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<eos>", "<|im_end|>"])
    backend.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 256)])
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", {"bos_token": {"content": "<bos>"}, "eos_token": "<eos>"})
    return tmp_path


def write(directory: Path, name: str, value: dict) -> None:
    (directory / name).write_text(json.dumps(value))


class TestDirectory:
    def test_opens(self, directory):
        tokenizer = Tokenizer(directory)
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos, tokenizer.add_eos) == (256, 257, True, False)
        assert tokenizer.eog_ids == {257, 258}
        assert tokenizer.vocab_size == 259
        assert tokenizer.chat_template is None
        ids = tokenizer.encode("longer than four")
        assert len(ids) == 17 and ids.count(256) == 1  # neither truncated nor padded
        assert tokenizer.encode("<bos>longer than four") == ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == "longer than four"
        assert Tokenizer(directory / "tokenizer.json").eos_id == 257

    def test_bare_tokenizer_json(self, directory):
        (directory / "tokenizer.json").rename(directory / "other.json")
        tokenizer = Tokenizer(directory / "other.json")
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (256, None, True)

    def test_configuration_overrules_the_post_processor(self, directory):
        config = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": False, "add_eos_token": True}
        write(directory, "tokenizer_config.json", config)
        assert Tokenizer(directory).encode("") == [257]

    def test_ids_from_the_generation_settings(self, directory):
        write(directory, "tokenizer_config.json", {})
        write(directory, "config.json", {"bos_token_id": 256, "eos_token_id": 5})
        write(directory, "generation_config.json", {"eos_token_id": [257, 7, 10**6, None]})
        tokenizer = Tokenizer(directory)
        assert (tokenizer.bos_id, tokenizer.eos_id) == (256, 257)
        assert tokenizer.eog_ids == {257, 7, 258}

    def test_chat_template_places(self, directory):
        write(directory, "tokenizer_config.json", {"chat_template": "one"})
        assert Tokenizer(directory).chat_template == "one"
        named = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
        write(directory, "tokenizer_config.json", {"chat_template": named})
        assert Tokenizer(directory).chat_template == "three"
        (directory / "chat_template.jinja").write_text("four")
        assert Tokenizer(directory).chat_template == "four"

    def test_broken_neighbours(self, directory):
        for text in ("[1]", "{", '"x"'):
            (directory / "generation_config.json").write_text(text)
            with pytest.raises(ModelFormatError, match="generation_config"):
                Tokenizer(directory)

    def test_missing_tokenizer_json_says_how_to_make_one(self, tmp_path):
        with pytest.raises(UnsupportedError, match="save_pretrained"):
            Tokenizer(tmp_path)

    def test_unknown_decoder(self, directory):
        backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        backend.decoder = decoders.WordPiece()
        backend.save(str(directory / "tokenizer.json"))
        with pytest.raises(UnsupportedError, match="WordPiece.*supported: ByteLevel"):
            Tokenizer(directory)

    def test_sentencepiece_decoder(self, tmp_path):
        """A llama-style tokenizer.json gives the ids and the text of the same vocabulary in a GGUF."""
        small = SMALL["sentencepiece"]
        backend = tokenizers.Tokenizer.from_str(small.vocabulary.backend.to_str())
        backend.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        backend.save(str(tmp_path / "tokenizer.json"))
        tokenizer = Tokenizer(tmp_path)
        for text in ("ab c  é 😀", " ab", ""):
            ids = small.encode(text, add_special_tokens=False)
            assert tokenizer.encode(text) == ids
            assert tokenizer.decode(ids) == text == backend.decode(ids)
