# SPDX-License-Identifier: Apache-2.0
"""T5's and Whisper's tokenizers as GGUF vocabularies."""

from __future__ import annotations

import importlib.util
import json
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers

import slimrt
from conftest import third_party
from seq2seq_models import GOLDEN
from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.modelfile.hf.sentencepiece_model import read_sentencepiece
from slimrt.modelfile.hf.vocabulary import vocabulary_fields
from slimrt.tokenizer.vocabulary import byte_level_alphabet

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

needs_sentencepiece = pytest.mark.skipif(
    importlib.util.find_spec("sentencepiece") is None, reason="needs sentencepiece (the extra `oracle`)"
)
SPM = "tokenizers/spm_test_model.model"
N_VOCAB = 1010  # 1000 pieces, sentinels and rows that nothing uses
ALWAYS = pre_tokenizers.Metaspace(prepend_scheme="always")
TWO_OR_MORE = tokenizers.Regex(" {2,}")
# How transformers has cut T5's text: since 5; from 4.40 or so; before.
SPLITTERS = {
    "words": ([], pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), ALWAYS])),
    "trimmed": ([normalizers.Strip(left=False, right=True), normalizers.Replace(TWO_OR_MORE, "\u2581")], ALWAYS),
    "untrimmed": ([normalizers.Replace(TWO_OR_MORE, " ")], ALWAYS),
}


def opened(fields: dict) -> slimrt.Tokenizer:
    return slimrt.Tokenizer.from_gguf_fields({key: field.value for key, field in fields.items()})


def published() -> list[tuple[str, list[int]]]:
    """Texts, and the ids that sentencepiece 0.2.3 gives them with the fixture."""
    return [(text, ids) for text, ids in json.loads((GOLDEN / "spm_test_model.json").read_text())]


def tokenizer_json(splitter: str, directory: Path, source: Path | None = None) -> Path:
    """The fixture, or another model with its special ids, as transformers would write it."""
    model = read_sentencepiece(source or third_party(SPM))
    pieces = [(text, score) for text, score, _ in model.pieces] + [(f"<extra_id_{i}>", 0.0) for i in (1, 0)]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 0, byte_fallback=False))
    more, made.pre_tokenizer = SPLITTERS[splitter]
    made.normalizer = normalizers.Sequence([normalizers.Precompiled(model.charsmap), *more])
    made.decoder = tokenizers.decoders.Metaspace(prepend_scheme="always")
    made.post_processor = tokenizers.processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 2)])
    made.add_special_tokens(["<unk>", "<s>", "</s>", "<extra_id_0>", "<extra_id_1>"])
    made.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def sentencepiece_directory(directory: Path, **settings) -> Path:
    (directory / "spiece.model").symlink_to(third_party(SPM))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text('{"model_type": "t5"}')
    return directory


# ---------------------------------------------------------------- T5
@pytest.mark.parametrize("splitter", ["trimmed", "untrimmed"])
def test_t5_tokenizer_json(splitter, tmp_path):
    directory = tokenizer_json(splitter, tmp_path)
    fields, warnings = vocabulary_fields(directory, "t5", N_VOCAB)
    values = {key.removeprefix("tokenizer.ggml."): field.value for key, field in fields.items()}
    assert values["model"] == "t5" and values["add_eos_token"] and not values["add_bos_token"]
    assert values["eos_token_id"] == 2 and values["unknown_token_id"] == 0
    assert values["tokens"][1000:] == ["<extra_id_1>", "<extra_id_0>", *(f"[PAD{id}]" for id in range(1002, 1010))]
    assert (len(warnings) == 1 and "spaces at the end" in warnings[0]) if splitter == "untrimmed" else warnings == []
    made, own = opened(fields), slimrt.Tokenizer(directory)
    for text, ids in published():
        if "<extra_id" not in text:
            assert made.encode(text) == [*ids, 2], text
            assert own.encode(text.rstrip()) == [*ids, 2]
    assert made.encode("<extra_id_1>") == [1000, 2]
    assert made.decode(made.encode("Hello world"), skip_special_tokens=True) == "Hello world"


def test_white_space_that_only_tokenizer_json_drops(tmp_path):
    """The fixture's table keeps line ends, which a split at white space drops: not the same, and refused."""
    with pytest.raises(UnsupportedError, match="GGUF cannot express how it splits text"):
        vocabulary_fields(tokenizer_json("words", tmp_path), "t5", N_VOCAB)


@needs_sentencepiece
@pytest.mark.parametrize("splitter", SPLITTERS)
def test_t5_s_own_normalization(splitter, tmp_path):
    """nmt_nfkc makes spaces of line ends, so that splitting at white space is the same."""
    import sentencepiece

    book = third_party("text/tinyshakespeare.txt").read_text()[:200_000].splitlines()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(book), model_prefix=str(tmp_path / "spiece"), vocab_size=400, minloglevel=2,
        model_type="unigram", normalization_rule_name="nmt_nfkc", unk_id=0, bos_id=1, eos_id=2,
    )  # fmt: skip
    fields, warnings = vocabulary_fields(tokenizer_json(splitter, tmp_path, tmp_path / "spiece.model"), "t5", 410)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spiece.model"))
    made = opened(fields)
    assert len(warnings) == (splitter == "untrimmed")
    for text in ("First Citizen:\nBefore we proceed\tany further,  hear me speak. ", "\ufb01ne \uff21\u00bd", "\n"):
        assert made.encode(text, add_special_tokens=False) == theirs.encode(text)


def test_sentencepiece_s_own_file(tmp_path):
    fields, warnings = vocabulary_fields(sentencepiece_directory(tmp_path, extra_ids=4), "t5", N_VOCAB)
    made = opened(fields)
    assert warnings == [] and (made.eos_id, made.unk_id, made.add_eos, made.add_bos) == (2, 0, True, False)
    for text, ids in published():
        if "<extra_id" not in text:
            assert made.encode(text, add_special_tokens=False) == ids, text
    assert [made.special_tokens[f"<extra_id_{i}>"] for i in range(4)] == [1003, 1002, 1001, 1000]


@pytest.mark.parametrize("rows, named", [(1152, 100), (1100, 0), (1280, 0), (1408, 300)])
def test_sentinels_that_llama_cpp_s_converter_leaves_out(rows, named, tmp_path):
    """T5's hundred, UMT5's three hundred."""
    directory = sentencepiece_directory(tmp_path, extra_ids=0)
    fields, _ = vocabulary_fields(directory, "t5", rows)
    assert fields["tokenizer.ggml.tokens"].value[1000:] == [f"[PAD{id}]" for id in range(1000, rows)]
    made = opened(fields)
    assert sum(text.startswith("<extra_id_") for text in made.special_tokens) == named
    if named:
        hello, world = (made.encode(text, add_special_tokens=False) for text in ("Hello", " world"))
        assert made.encode(f"Hello<extra_id_0> world<extra_id_{named - 1}>") == [*hello, 999 + named, *world, 1000, 2]


def test_names_of_tokens_behind_the_pieces(tmp_path):
    """T5's hundred sentinels and UMT5's three hundred by default; others are named one by one."""
    directory = sentencepiece_directory(tmp_path)
    made = opened(vocabulary_fields(directory, "t5", 1128)[0])
    assert made.special_tokens["<extra_id_0>"] == 1099 and made.special_tokens["<extra_id_99>"] == 1000
    (directory / "config.json").write_text(json.dumps({"model_type": "umt5"}))
    made = opened(vocabulary_fields(directory, "t5", 1408)[0])
    assert made.special_tokens["<extra_id_0>"] == 1299 and made.special_tokens["<extra_id_299>"] == 1000
    named = {"added_tokens_decoder": {"1004": {"content": "<extra_id_0>"}, "1005": {"content": "<mask>"}}}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    made = opened(vocabulary_fields(directory, "t5", 1128)[0])
    assert made.special_tokens["<extra_id_0>"] == 1004 and made.special_tokens["<mask>"] == 1005
    assert "<extra_id_1>" not in made.special_tokens


@needs_sentencepiece
def test_ids_are_sentencepiece_s(tmp_path):
    """On stretches of a book, with and without white space at their ends, and on random Latin, Greek and kana."""
    import sentencepiece

    theirs = sentencepiece.SentencePieceProcessor(model_file=str(third_party(SPM)))
    ours, draw = opened(vocabulary_fields(sentencepiece_directory(tmp_path), "t5", 1128)[0]), random.Random(0)
    book = next(third_party("text").glob("*.txt")).read_text()
    starts = [draw.randrange(len(book) - 300) for _ in range(200)]
    texts = [book[at : at + draw.randrange(1, 300)] for at in starts]
    ranges = [(0x20, 0x7F), (0xA0, 0x250), (0x370, 0x400), (0x3041, 0x3097), (0x20, 0x21)]
    for _ in range(200):
        texts.append("".join(chr(draw.randrange(*draw.choice(ranges))) for _ in range(draw.randrange(40))))
    texts += [text for text, _ in published()]
    for text in texts:
        assert ours.encode(text, add_special_tokens=False, parse_special=False) == theirs.encode(text), repr(text)


def test_fields_of_the_sentencepiece_file():
    model = read_sentencepiece(third_party(SPM))
    assert len(model.pieces) == 1000 and model.pieces[0] == ("<unk>", 0.0, 2)
    assert (model.space_prefix, model.trims, model.ids) == (True, True, {"unk": 0, "bos": 1, "eos": 2})
    assert len(model.charsmap) > 200_000


def message(*fields: tuple[int, int | bytes | float]) -> bytes:
    """A protocol buffer of small numbers, strings and floats."""
    made = b""
    for number, value in fields:
        if isinstance(value, bytes):
            kind, body = 2, bytes([len(value)]) + value
        else:
            kind, body = (5, struct.pack("<f", value)) if isinstance(value, float) else (0, bytes([value]))
        low, high = number << 3 & 0x7F | kind, number >> 4
        made += (bytes([low | 0x80, high]) if high else bytes([low])) + body
    return made


PIECES = [(1, message((1, b"<unk>"), (3, 2))), (1, message((1, b"a"), (2, -1.5)))]


def test_a_small_sentencepiece_file(tmp_path):
    (tmp_path / "spiece.model").write_bytes(message(*PIECES, (3, message((3, 0), (4, 0), (2, b"")))))
    model = read_sentencepiece(tmp_path / "spiece.model")
    assert model.pieces == [("<unk>", 0.0, 2), ("a", -1.5, 1)]
    assert (model.space_prefix, model.trims, model.ids) == (False, False, {"unk": 0, "bos": 1})


BAD = {
    "empty": (b"", ModelFormatError, "it has no pieces"),
    "text": (b"not a model at all", ModelFormatError, "not a SentencePiece model"),
    "cut off": (message(*PIECES)[:-3], ModelFormatError, "runs past the end"),
    "a piece that is a number": (message((1, 5)), ModelFormatError, "a number where a message should be"),
    "not UTF-8": (message((1, message((1, b"\xff")))), ModelFormatError, "not a SentencePiece model"),
    "BPE": (message(*PIECES, (2, message((3, 2)))), UnsupportedError, "of kind BPE; supported: unigram"),
    "spaces kept": (message(*PIECES, (3, message((5, 0)))), UnsupportedError, "spaces are not written as"),
    "spaces behind": (message(*PIECES, (2, message((24, 1)))), UnsupportedError, "spaces are not written as"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_sentencepiece_files(case, tmp_path):
    data, error, match = BAD[case]
    (tmp_path / "spiece.model").write_bytes(data)
    with pytest.raises(error, match=f"spiece.model: .*{match}"):
        vocabulary_fields(tmp_path, "t5", 100)


def test_damaged_sentencepiece_files(tmp_path):
    """A byte of a good file changed or left out: it is read, or refused by name."""
    whole, draw = message(*PIECES * 8, (3, message((3, 0), (4, 0), (2, b"")))), random.Random(1)
    path, refused = tmp_path / "spiece.model", 0
    for _ in range(600):
        at = draw.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([draw.randrange(256)]) * draw.randrange(2) + whole[at + 1 :])
        try:
            assert read_sentencepiece(path).pieces
        except (ModelFormatError, UnsupportedError) as error:
            assert "spiece.model" in str(error)
            refused += 1
    assert 100 < refused < 500


def test_vocabularies_that_do_not_fit(tmp_path):
    directory = sentencepiece_directory(tmp_path)
    with pytest.raises(ModelFormatError, match="1000 pieces, but the embedding has 999 rows"):
        vocabulary_fields(directory, "t5", 999)
    (directory / "spiece.model").unlink()
    (directory / "spiece.model").write_bytes(message(*PIECES, (2, message((40, 9)))))
    with pytest.raises(UnsupportedError, match="no token for what it does not know"):
        vocabulary_fields(directory, "t5", 10)


def test_a_unigram_model_without_replacements(tmp_path):
    directory = tokenizer_json("trimmed", tmp_path)
    state = json.loads((directory / "tokenizer.json").read_text())
    del state["normalizer"]["normalizers"][0]
    (directory / "tokenizer.json").write_text(json.dumps(state))
    fields, _ = vocabulary_fields(directory, "t5", N_VOCAB)
    assert fields["tokenizer.ggml.precompiled_charsmap"].value == []
    assert opened(fields).encode("Hello  world!") == slimrt.Tokenizer(directory).encode("Hello world!")


# ---------------------------------------------------------------- Whisper
TEXTS = [
    "Hello world! It's 3 o'clock.",
    " And so, my fellow Americans",
    "Gr\u00f6\u00dfe \u4f60\u597d \U0001f642",
    "a\n\n  b",
]


def test_whisper_tokenizer_json(tmp_path):
    """Its template (start, no timestamps, ..., end) is a rule of the decoder's, not of the text's."""
    (tmp_path / "tokenizer.json").symlink_to(third_party("tokenizers/whisper_tokenizer.json"))
    fields, warnings = vocabulary_fields(tmp_path, "whisper", 51865)
    made, theirs = opened(fields), tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert warnings == [] and not made.add_bos and not made.add_eos
    assert fields["tokenizer.ggml.pre"].value == "gpt-2"
    for text in TEXTS:
        assert (
            made.encode(text) == theirs.encode(text, add_special_tokens=False).ids
            and made.decode(made.encode(text)) == text
        )
    names = made.special_tokens
    assert len(names) == 1608 and names["<|startoftranscript|>"] == 50258 and names["<|en|>"] == 50259
    assert (names["<|notimestamps|>"], names["<|0.00|>"], names["<|30.00|>"]) == (50363, 50364, 51864)
    assert made.encode("<|startoftranscript|><|0.00|> Hi<|1.20|>") == [50258, 50364, 2421, 50424]
    assert made.decode([50258, 50364, 2421, 50424], skip_special_tokens=True) == " Hi"
    assert 50257 in made.eog_ids


def test_timestamps_that_a_tokenizer_does_not_list(tmp_path):
    """Early ones end at <|notimestamps|>, and the embedding has 1501 rows more."""
    letters = byte_level_alphabet()
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({letter: id for id, letter in enumerate([*letters, "\u0120a"])}, [("\u0120", "a")])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|notimestamps|>"])
    made.save(str(tmp_path / "tokenizer.json"))
    fields, _ = vocabulary_fields(tmp_path, "whisper", 261 + 1501)
    found = opened(fields).special_tokens
    assert (found["<|notimestamps|>"], found["<|0.00|>"], found["<|29.98|>"]) == (260, 261, 261 + 1499)
    assert np.sum([name.startswith("[PAD") for name in fields["tokenizer.ggml.tokens"].value]) == 0
