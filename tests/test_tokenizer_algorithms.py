# SPDX-License-Identifier: Apache-2.0
"""SentencePiece's BPE and unigram, and the cuts of byte-level BPE, against independent oracles."""

from __future__ import annotations

import copy
import pickle
import re
import struct
import unicodedata
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from conftest import third_party
from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.tokenizer import pretokenizers
from slimrt.tokenizer.gguf import read_file
from slimrt.tokenizer.tokenizer import Tokenizer
from vocabularies import NORMAL, SMALL, byte_level_fields, ggml, opened, quick, sentencepiece_fields, texts

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others


def greedy_union(text: str, fields: dict, prefix: str = "\u2581") -> list[int]:
    """SentencePiece's BPE in plain loops: join the best-scored union, leftmost first, until none is a token."""
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    ids = {token: id for id, token in enumerate(tokens)}
    score = {tokens[id]: fields["tokenizer.ggml.scores"][id] for id in range(len(tokens)) if types[id] == NORMAL}
    parts = list(prefix + text.replace(" ", "\u2581")) if text else []
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
def gemma4() -> Tokenizer:
    """Of sentencepiece_fields(), with its merges in place of scores."""
    fields = sentencepiece_fields()
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    score = {tokens[id]: fields["tokenizer.ggml.scores"][id] for id in range(len(tokens)) if types[id] == NORMAL}
    ranked = sorted(score, key=score.__getitem__, reverse=True)
    cuts = [(word[:cut], word[cut:]) for word in ranked for cut in range(1, len(word))]
    merges = [" ".join(cut) for cut in cuts if set(cut) <= score.keys()]
    del fields["tokenizer.ggml.scores"]
    fields |= {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": merges}
    fields["tokenizer.ggml.add_bos_token"] = False
    return Tokenizer.from_gguf_fields(fields)


class TestGemma4:
    """Merges of characters, as llama.cpp has Gemma 4: of a SentencePiece vocabulary the same tokens."""

    @quick
    @given(st.text("ab cdé\n😀", max_size=40) | texts)
    def test_equals_greedy_unions_of_each_line(self, text):
        tokenizer, fields, wanted = gemma4(), sentencepiece_fields(), []
        for part in re.findall("[^\n]+|\n+", text):
            wanted += greedy_union(part, fields, prefix="")
        assert tokenizer.encode(text, add_special_tokens=False) == wanted
        assert tokenizer.decode(wanted) == text

    def test_a_text_begins_with_bos(self):
        """Whatever the file says."""
        assert gemma4().encode("a")[0] == gemma4().bos_id

    def test_missing_merges(self):
        fields = sentencepiece_fields() | {"tokenizer.ggml.model": "gemma4"}
        with pytest.raises(ModelFormatError, match="merges"):
            Tokenizer.from_gguf_fields(fields)


@lru_cache
def fields_of(path: Path) -> dict:
    return read_file(path)


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

    def test_its_table_goes_to_another_process(self):
        tokenizer, text = Tokenizer.from_gguf_fields(unigram_fields()), "\uff21\u0301 \ufb01ne  x</s>"
        for copied in (pickle.loads(pickle.dumps(tokenizer)), copy.deepcopy(tokenizer)):
            for special in (True, False):
                assert copied.encode(text, parse_special=special) == tokenizer.encode(text, parse_special=special)

    def test_an_unknown_character_costs_ten_more_than_the_unlikeliest_piece(self):
        """Not than the rows of padding behind them, which converters give -10000."""
        tokens = ["<unk>", "</s>", "za", "z", "a\u00e9", "[PAD5]"]
        fields = ggml(model="t5", tokens=tokens, token_type=[2, 3, 1, 1, 1, 5], add_space_prefix=False,
                      scores=np.array([0, 0, -1, -12, -12, -10000], np.float32), unknown_token_id=0)  # fmt: skip
        tokenizer = Tokenizer.from_gguf_fields(fields)
        assert tokenizer.encode("za\u00e9", add_special_tokens=False) == [2, 0]  # -1 - 22 is more than -12 - 12

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
        with pytest.raises(ModelFormatError, match="precompiled_charsmap is truncated"):
            Tokenizer.from_gguf_fields(fields)


def cut(name: str, text: str) -> list[str]:
    pieces = pretokenizers.lookup(name).splitter.pre_tokenize_str(text)
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
            "deepseek-llm": "I_'_ve_ _12345_ DON_'_T_ end_..._\n_ _ camelCase",
            "bloom": "I've_ 12345_ DON'T_ end_...\n _ camelCase",
            "viking": "I've_ _1_2_3_4_5_ DON'T_ end_...\n _ camelCase",
            "seed-coder": "I_'ve_ _1_2_3_4_5_ DON_'T_ end_..._\n_ _ camelCase",
            "minicpm5": "I_'ve_ _123_45_ DON_'T_ end_...\n_ _ camelCase",
            "tiny_aya": "I've_ _12_345_ DON'T_ end_...\n_ _ camel_Case",
            "superbpe": "I've _12_345_ DON'T end...\n  camelCase",
            "youtu": "I've_ _1_2_3_4_5_ DON'T_ end_...\n_ _ camel_Case",
            "kimi-k2": "I've_ _123_45_ DON'T_ end_...\n_ _ camel_Case",
        }.items(),
    )
    def test_cuts(self, name, expected):
        assert cut(name, "I've 12345 DON'T end...\n  camelCase") == expected.split("_")

    @pytest.mark.parametrize(
        ("name", "expected"), {"kimi-k2": "a_你好_b한국", "youtu": "a_你好_b_한국", "qwen2": "a你好b한국"}.items()
    )
    def test_scripts_that_are_cut_apart(self, name, expected):
        assert cut(name, "a你好b한국") == expected.split("_")

    def test_letters_that_are_composed(self):
        """Qwen 2's tokenizer composes them first; Qwen 3.5's keeps the mark beside its letter (llama.cpp's vectors)."""
        assert pretokenizers.lookup("qwen2").nfc and not pretokenizers.lookup("qwen35").nfc
        assert cut("qwen35", "re\u0301sume") == ["re\u0301sume"] != cut("gpt-2", "re\u0301sume")

    @pytest.mark.parametrize("name", pretokenizers.SUPPORTED)
    @settings(deadline=None, max_examples=25)
    @given(texts)
    def test_no_byte_is_lost(self, name, text):
        tokenizer = Tokenizer.from_gguf_fields(byte_level_fields(pre=name, add_bos_token=False))
        composed = unicodedata.normalize("NFC", text) if pretokenizers.lookup(name).nfc else text
        assume(unicodedata.normalize("NFC", composed) == composed)
        assert tokenizer.decode(tokenizer.encode(text)) == composed

    @pytest.mark.parametrize("name", ["default", "llama-4-maverick", "", None])
    def test_unknown_is_an_error_that_lists_the_known(self, name):
        fields = byte_level_fields(pre=name)
        with pytest.raises(UnsupportedError, match="supported: .*gpt-2.*qwen2") as caught:
            Tokenizer.from_gguf_fields(fields)
        assert name is None or repr(name) in str(caught.value)

    @pytest.mark.parametrize("said", [None, "default"])
    @pytest.mark.parametrize(
        ("arch", "name"), {"phi2": "gpt-2", "qwen2": "qwen2", "gptneox": "mpt", "bloom": "bloom"}.items()
    )
    def test_files_that_name_none(self, arch, name, said, caplog):
        """Those of before May 2024: it is that of the architecture's published models, and said."""
        fields = byte_level_fields(pre=said) | {"general.architecture": arch}
        with caplog.at_level("INFO", "slimrt"):
            made = Tokenizer.from_gguf_fields(fields)
        assert "names no pre-tokenizer" in caplog.text and f"published {arch} models" in caplog.text
        assert pretokenizers.lookup(said, arch) is pretokenizers.lookup(name)
        assert made.encode("e\u0301") == Tokenizer.from_gguf_fields(fields | ggml(pre=name)).encode("e\u0301")

    def test_llama_that_names_none_is_told_by_its_size(self):
        tokens = byte_level_fields()["tokenizer.ggml.tokens"]
        for n_tokens, known in ((128256, True), (50000, False)):
            more = [f"[PAD{i}]" for i in range(n_tokens - len(tokens))]
            fields = byte_level_fields(
                pre=None, tokens=tokens + more, token_type=np.ones(n_tokens, np.int32), bos_token_id=0
            )
            fields["general.architecture"] = "llama"
            if known:
                assert Tokenizer.from_gguf_fields(fields).add_bos
                continue
            with pytest.raises(UnsupportedError, match="names no pre-tokenizer"):
                Tokenizer.from_gguf_fields(fields)

    def test_ignore_merges_takes_a_word_that_is_a_token_whole(self):
        tokens = [*byte_level_fields()["tokenizer.ggml.tokens"], "owl"]
        fields = byte_level_fields(tokens=tokens, token_type=np.ones(len(tokens), np.int32), add_bos_token=False)
        whole = Tokenizer.from_gguf_fields(fields | ggml(pre="llama-bpe")).encode("owl")
        assert whole == [tokens.index("owl")]
        assert len(Tokenizer.from_gguf_fields(fields | ggml(pre="gpt-2")).encode("owl")) == 3
