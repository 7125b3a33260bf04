# SPDX-License-Identifier: Apache-2.0
"""Tokenizers that the library `tokenizers` trains on a committed text: as GGUF they give its ids, and its text of ids.
Needs no file of others."""

from __future__ import annotations

import json
import random

import pytest
import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers, processors, trainers

import slimrt
from conftest import TESTS
from slimrt.modelfile.hf.vocabulary import vocabulary_fields
from slimrt.modelfile.hf.vocabulary_unigram import sentencepiece_fields

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

MODELS = TESTS.parent / "models"
N_VOCAB = 600
SPECIAL = ["<unk>", "<s>", "</s>"]
STRANGE = [
    "",
    " ",
    "  two  spaces ",
    "Gr\u00f6\u00dfe \u4f60\u597d \U0001f642",
    "a\n\n  b\tc",
    "don't WE'LL 12345",
    "\u00a0x",
]


def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2's."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(made, trainers.BpeTrainer, initial_alphabet=alphabet)


def unigram() -> tokenizers.Tokenizer:
    """As T5's: spaces as letters, an end."""
    made = tokenizers.Tokenizer(tokenizers.models.Unigram())
    spaces = tokenizers.Regex(" {2,}")
    made.normalizer = normalizers.Sequence(
        [normalizers.Strip(left=False, right=True), normalizers.Replace(spaces, "\u2581")]
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    made = trained(made, trainers.UnigramTrainer, unk_token="<unk>")
    made.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 2)])
    return made


def trained(made: tokenizers.Tokenizer, trainer: type, **options) -> tokenizers.Tokenizer:
    given = {"vocab_size": N_VOCAB, "special_tokens": SPECIAL, "show_progress": False}
    text = (MODELS / "calibration.txt").read_text().splitlines(keepends=True)
    made.train_from_iterator(text, trainer(**given, **options))
    return made


@pytest.mark.parametrize(("make", "arch"), [(byte_level, "gpt2"), (unigram, "t5")])
def test_ids_and_text_are_the_library_s(make, arch, tmp_path):
    theirs = make()
    theirs.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": arch}))
    fields, warnings = vocabulary_fields(tmp_path, arch, N_VOCAB)
    assert warnings == [] and "tokenizer.huggingface.json" in fields
    values = {key: field.value for key, field in fields.items()}
    del values["tokenizer.huggingface.json"]  # what GGUF says itself, as llama.cpp would read it
    ours = slimrt.Tokenizer.from_gguf_fields(values)
    held_out = (MODELS / "heldout.txt").read_text()[:20_000].split(". ")
    longest = 0
    for text in [*held_out, *STRANGE]:
        ids = theirs.encode(text).ids
        assert ours.encode(text) == ids, repr(text)
        if 0 not in ids:  # <unk>, which they skip
            assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids), repr(text)
        longest = max([longest, *(len(theirs.id_to_token(id)) for id in ids)])
    assert longest > 4  # it has learned words


def test_added_tokens_within_words_of_t5(tmp_path):
    """In normalised text, as add_tokens() wants them: the space that T5 puts in front of a text is not part of it."""
    theirs = unigram()
    theirs.add_tokens(["<mark>"])
    theirs.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    fields, _ = vocabulary_fields(tmp_path, "t5", theirs.get_vocab_size())
    ours = slimrt.Tokenizer.from_gguf_fields({key: field.value for key, field in fields.items()})
    for text in ("tell me<mark>now", "<mark>now"):
        assert ours.encode(text) == theirs.encode(text).ids


def test_ids_of_marks_that_combine_are_sentencepiece_s(tmp_path):
    """Its table is looked up place by place, not grapheme by grapheme, by which accents and voicings would be lost."""
    sentencepiece = pytest.importorskip("sentencepiece")
    text = (MODELS / "calibration.txt").read_text()[:50_000].split(". ")
    odd = "\u00e9 \u00c1 na\u00efve fi 1/2 \u30ab \u30ac \u30d1 \u0301 \u3099"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*text, *[odd] * 20]), model_prefix=str(tmp_path / "spiece"), vocab_size=300,
        minloglevel=2, model_type="unigram", normalization_rule_name="nmt_nfkc", character_coverage=1.0,
        hard_vocab_limit=False, num_threads=1, unk_id=2, bos_id=-1, eos_id=1, pad_id=0,
    )  # fmt: skip
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spiece.model"))
    fields, _ = sentencepiece_fields(tmp_path, 500)
    ours = slimrt.Tokenizer.from_gguf_fields({key: field.value for key, field in fields.items()})
    assert ours.decode(ours.encode("\uff21\u0301 \uff76\uff9e", False)) == "\u00c1 \u30ac"
    ranges = [(1, 0x20), (0x20, 0x7F), (0xA0, 0x250), (0x300, 0x370), (0x900, 0x980), (0x1100, 0x1200),
              (0x200B, 0x2010), (0x2100, 0x2150), (0x2581, 0x2582), (0x3041, 0x3100), (0xFB00, 0xFB10),
              (0xFF00, 0xFFEF)]  # fmt: skip
    draw, held_out = random.Random(0), (MODELS / "heldout.txt").read_text()[:5000].split()
    for _ in range(1000):
        drawn = [chr(draw.randrange(*draw.choice(ranges))) for _ in range(draw.randrange(8))]
        made = "".join(draw.choice(held_out) if draw.random() < 0.3 else one for one in drawn)
        assert ours.encode(made, False, parse_special=False) == theirs.encode(made), ascii(made)
