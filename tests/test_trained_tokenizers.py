# SPDX-License-Identifier: Apache-2.0
"""Tokenizers that the library `tokenizers` trains on a committed text: as GGUF they give its ids, and its text of ids.
Needs no file of others."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers, processors, trainers

import slimrt
from conftest import TESTS
from slimrt.modelfile.hf.vocabulary import vocabulary_fields

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
