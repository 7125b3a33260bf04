# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of BART's kin: small trained ones give the ids and texts of transformers' classes."""

from __future__ import annotations

import copy
import json
import pickle
import tempfile
from functools import lru_cache
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers, processors, trainers

import slimrt
from seq2seq_vocabularies import PROBES, book, opened, trained
from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.modelfile.hf.sentencepiece_model import read_sentencepiece
from slimrt.modelfile.hf.vocabulary import vocabulary_fields
from slimrt.modelfile.source import ModelSource
from slimrt.tokenizer.languages import languages

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]


def byte_level() -> tokenizers.Tokenizer:
    """As BART's: <s> before a text, </s> behind it, <mask> in the last row."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(book(), trainer)
    made.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
    made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return made


def metaspace() -> tokenizers.Tokenizer:
    """As NLLB's, without its normalizer."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    made.train_from_iterator(book(), trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False))
    return made


def saved(made: tokenizers.Tokenizer, directory: Path, **settings) -> Path:
    """A directory with a tokenizer.json that transformers did not write."""
    made.save(str(directory / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(named | settings))
    return directory


def with_languages(codes: list[str], directory: Path, around: str | None = None, **settings) -> Path:
    made = metaspace()
    made.add_special_tokens(codes)
    if around:
        ids = [(text, made.token_to_id(text)) for text in ("</s>", codes[0])]
        made.post_processor = processors.TemplateProcessing(around, special_tokens=ids)
    return saved(made, directory, **settings)


# ---------------------------------------------------------------- tokenizer.json
def theirs(name: str, directory: Path):
    """One of transformers' tokenizers, and where it puts a language's token."""
    transformers = pytest.importorskip("transformers")
    if name == "bart":
        model = json.loads(byte_level().to_str())["model"]
        merges = [tuple(merge) for merge in model["merges"]]
        return transformers.BartTokenizer(vocab=model["vocab"], merges=merges), None
    unigram = read_sentencepiece(trained(directory / "spm", normalization_rule_name="nmt_nfkc"))
    pieces = [(text, score) for text, score, _ in unigram.pieces]
    table = {"_spm_precompiled_charsmap": unigram.charsmap}
    if name == "mbart50":
        return transformers.MBart50Tokenizer(vocab=pieces, **table), "first"
    if name == "mbart":
        codes = ["ar_AR", "en_XX", "ro_RO", "<mask>"]
        rows = [(text, 0.0) for text in SPECIAL] + pieces[3:] + [(text, 0.0) for text in codes]
        return transformers.MBartTokenizer(vocab=rows), "last"
    if name == "pegasus":
        rows = ["<pad>", "</s>", "<mask_1>", "<mask_2>", *(f"<unk_{i}>" for i in range(2, 103)), "<unk>"]
        return transformers.PegasusTokenizer(vocab=[(text, 0.0) for text in rows] + pieces[3:], **table), None
    model, legacy = json.loads(metaspace().to_str())["model"], name == "nllb-legacy"
    merges = [tuple(merge) for merge in model["merges"]]
    made = transformers.NllbTokenizer(vocab=model["vocab"], merges=merges, legacy_behaviour=legacy, **table)
    return made, "last" if legacy else "first"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["bart", "mbart", "mbart50", "nllb", "nllb-legacy", "pegasus"])
def test_ids_and_texts_are_those_of_transformers(name, tmp_path):
    oracle, place = theirs(name, tmp_path)
    oracle.save_pretrained(tmp_path)
    fields, warnings = vocabulary_fields(tmp_path, "bart" if name == "bart" else "mbart", len(oracle) + 3)
    ours = opened(fields)
    assert warnings == [] and ours.vocab_size == len(oracle) + 3 and ours.vocabulary.tokens[-1].startswith("[PAD")
    assert (ours.eos_id, ours.unk_id, ours.pad_id) == (oracle.eos_token_id, oracle.unk_token_id, oracle.pad_token_id)
    assert ours.vocabulary.language_token == place and bool(languages(ours.vocabulary)) == bool(place)
    for text in PROBES:
        ids, wanted = ours.encode(text), oracle(text).input_ids
        spoken = [languages(ours.vocabulary)[oracle.src_lang]] if place else []
        assert (spoken + ids if place == "first" else ids + spoken) == wanted, repr(text)
        assert ours.decode(wanted, skip_special_tokens=True) == oracle.decode(wanted, skip_special_tokens=True)
        plain = ours.encode(text, add_special_tokens=False, parse_special=False)
        assert not ours.vocabulary.control.intersection(plain) - {ours.unk_id}, repr(text)


@pytest.mark.parametrize(
    ("around", "settings", "config", "place"),
    [
        ("fr_XX $A </s>", {"tokenizer_class": "MBartTokenizerFast"}, {}, "last"),
        ("$A </s> fr_XX", {"tokenizer_class": "MBart50Tokenizer"}, {}, "first"),
        ("$A </s> fr_XX", {"tokenizer_class": "PreTrainedTokenizerFast"}, {"model_type": "m2m_100"}, "last"),
        ("fr_XX $A </s>", {}, {"tokenizer_class": "TokenizersBackend"}, "first"),
        (None, {}, {"model_type": "mbart"}, "last"),
        (None, {}, {"model_type": "m2m_100"}, "first"),
        ("$A </s>", {}, {"model_type": "bart"}, None),
    ],
)
def test_where_a_language_goes(around, settings, config, place, tmp_path):
    directory = with_languages(["fr_XX", "en_XX", "zh_CN"], tmp_path, around, **settings)
    (directory / "config.json").write_text(json.dumps(config))
    made = opened(vocabulary_fields(directory, "mbart", 400)[0])
    assert made.vocabulary.language_token == place and languages(made.vocabulary)["en_XX"] == 301
    assert (made.vocabulary.prefix, made.vocabulary.suffix) == ((), (2,))
    assert made.decode([301, *made.encode("We hold")], skip_special_tokens=True) == "We hold"


def test_codes_of_languages(tmp_path):
    codes = ["eng_Latn", "zho_Hans", "en_XX", "__en__", "__ast__", "<en>", "en", "<mask>"]
    made = opened(vocabulary_fields(with_languages(codes, tmp_path), "mbart", 310)[0])
    assert languages(made.vocabulary) == {"eng_Latn": 300, "zho_Hans": 301, "en_XX": 302, "en": 303, "ast": 304}


def test_tokens_without_a_row(tmp_path):
    directory = saved(byte_level(), tmp_path)
    fields, warnings = vocabulary_fields(directory, "bart", 400)
    assert warnings == ["1 tokens have no row in the embedding of 400 and are left out, the first is '<mask>'"]
    assert max(opened(fields).encode("a <mask> b")) < 400
    with pytest.raises(UnsupportedError, match="1 tokens of text have no row in the embedding of 399, such as"):
        vocabulary_fields(directory, "bart", 399)


def test_rows_of_tokens_that_the_model_of_a_tokenizer_lists_too(tmp_path):
    """As BART's own files, whose vocab.json ends with <mask>."""
    directory = saved(byte_level(), tmp_path)
    state = json.loads((directory / "tokenizer.json").read_text())
    state["model"]["vocab"]["<mask>"] = 400
    (directory / "tokenizer.json").write_text(json.dumps(state))
    ours = opened(vocabulary_fields(directory, "bart", 400)[0])
    assert ours.decode(ours.encode("a <mask> b"), skip_special_tokens=True) == "a <mask> b"
    assert opened(vocabulary_fields(directory, "bart", 401)[0]).encode("<mask>") == [0, 400, 2]


def test_marks_that_combine(tmp_path):
    """They are kept, as SentencePiece does; the library's table loses an accent behind a letter that it replaces."""
    odd = "\u00e9 \u00c1 na\u00efve \u30ab \u30ac \u30d1 \u0301 \u3099"
    unigram = read_sentencepiece(trained(tmp_path / "spm", more=odd, normalization_rule_name="nmt_nfkc"))
    rows = [(text, score) for text, score, _ in unigram.pieces]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram(rows, 0))
    made.normalizer = tokenizers.normalizers.Precompiled(unigram.charsmap)
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    ours = opened(vocabulary_fields(saved(made, tmp_path), "mbart", 300)[0])
    text = "\uff21\u0301 \uff76\uff9e"
    assert ours.decode(ours.encode(text)) == "\u00c1 \u30ac"
    twin = pickle.loads(pickle.dumps(ours))
    for copied in (twin, copy.deepcopy(ours), copy.deepcopy(twin)):
        assert copied.encode(text) == ours.encode(text)


def test_directories_without_a_tokenizer_json(tmp_path):
    assert vocabulary_fields(tmp_path, "mbart", 9)[0]["tokenizer.ggml.model"].value == "no_vocab"
    (tmp_path / "sentencepiece.bpe.model").write_bytes(b"")
    with pytest.raises(UnsupportedError, match="has sentencepiece.bpe.model but no tokenizer.json. Make one: "):
        vocabulary_fields(tmp_path, "mbart", 9)


# ---------------------------------------------------------------- the fields
@lru_cache
def good() -> dict:
    directory = Path(tempfile.mkdtemp())
    fields, _ = vocabulary_fields(saved(byte_level(), directory), "bart", 410)
    return {key: field.value for key, field in fields.items()}


def write(fields: dict, path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for key, field in fields.items():
        writer.add_key_value(key, field.value, field.type, field.sub_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def test_a_file_holds_them(tmp_path):
    fields, _ = vocabulary_fields(saved(byte_level(), tmp_path), "bart", 410)
    write(fields, tmp_path / "vocabulary.gguf")
    made = slimrt.Tokenizer(tmp_path / "vocabulary.gguf")
    text = "We hold </s> these <mask> Gr\u00f6\u00dfe"
    assert made.encode(text) == slimrt.Tokenizer(tmp_path).encode(text)
    assert made.vocabulary.prefix == (0,) and made.special_tokens["<mask>"] == 400


def test_a_directory_is_read_as_its_file_says(tmp_path, monkeypatch):
    """Not as its tokenizer.json does, which puts the language of whoever saved it around every text."""
    directory = with_languages(["fr_XX", "en_XX"], tmp_path, "fr_XX $A </s>", tokenizer_class="MBart50Tokenizer")
    fields, _ = vocabulary_fields(directory, "mbart", 302)
    write(fields, tmp_path / "vocabulary.gguf")
    source = ModelSource(tmp_path / "vocabulary.gguf")
    assert source.tokenizer.encode("We hold")[0] != 300
    monkeypatch.setattr(source, "path", directory)
    del source.tokenizer
    assert source.tokenizer.encode("We hold")[0] != 300 == slimrt.Tokenizer(directory).encode("We hold")[0]


def huge_id(text: str) -> str:
    state = json.loads(text)
    state["model"]["vocab"]["!"] = 2**32 - 1
    return json.dumps(state)


BROKEN = {
    "no JSON": ("huggingface.json", lambda _: "{", "tokenizer.huggingface.json is not a tokenizer"),
    "another JSON": ("huggingface.json", lambda _: "[1]", "is not a tokenizer"),
    "no model": ("huggingface.json", lambda _: '{"added_tokens": [], "model": {}}', "is not a tokenizer"),
    "none": ("huggingface.json", lambda _: None, "is not a tokenizer"),
    "a number": ("huggingface.json", lambda _: 5, "tokenizer.huggingface.json is int"),
    "a huge id": ("huggingface.json", huge_id, "token 4294967295 is '!' in tokenizer.huggingface.json, but None in"),
    "few tokens": ("ggml.tokens", lambda tokens: tokens[:300], "token_type is not 300 finite numbers"),
    "another token": ("ggml.tokens", lambda tokens: [*tokens[:9], "other", *tokens[10:]], "token 9 is .* but 'other'"),
    "prefix outside": ("slimrt.prefix", lambda _: [410], "tokenizer.slimrt.prefix has an id outside of the vocabulary"),
    "suffix below": ("slimrt.suffix", lambda _: np.array([-1], np.int32), "tokenizer.slimrt.suffix has an id outside"),
    "prefix of text": ("slimrt.prefix", lambda _: ["<s>"], "tokenizer.slimrt.prefix is not a list of token ids"),
    "one suffix": ("slimrt.suffix", lambda _: 2, "tokenizer.slimrt.suffix is int"),
    "a place": ("slimrt.language_token", lambda _: "middle", "must be 'first' or 'last'"),
    "few aliases": ("slimrt.aliases", lambda _: [0, 1], "tokenizer.slimrt.aliases is too short"),
    "eos outside": ("ggml.eos_token_id", lambda _: 410, "eos_token_id is 410"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_fields(case):
    name, change, match = BROKEN[case]
    key = f"tokenizer.{name}"
    with pytest.raises(ModelFormatError, match=match):
        slimrt.Tokenizer.from_gguf_fields(good() | {key: change(good().get(key))})
