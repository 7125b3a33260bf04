# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of Marian and M2M100, made of SentencePiece's model and a vocab.json, give transformers' ids and texts."""

from __future__ import annotations

import json
import random
from pathlib import Path

import gguf
import pytest

from seq2seq_vocabularies import PROBES, opened, trained
from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.modelfile.hf.sentencepiece_model import read_sentencepiece
from slimrt.modelfile.hf.vocabulary import vocabulary_fields
from slimrt.modelfile.hf.vocabulary_pieces import M2M100
from slimrt.tokenizer.languages import languages

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others


def pieces(path: Path, keep: int = 7) -> list[str]:
    """The pieces of text of a model but every seventh, which vocab.json will lack."""
    model = read_sentencepiece(path, "BPE" if "bpe" in path.name else "unigram")
    return [text for at, (text, _, kind) in enumerate(model.pieces) if kind == gguf.TokenType.NORMAL and at % keep]


def with_vocab_json(directory: Path, tokens: list[str], **settings) -> int:
    """Write vocab.json and the settings beside it; the number of tokens."""
    (directory / "vocab.json").write_text(json.dumps({text: id for id, text in enumerate(tokens)}))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(tokens)


def marian_directory(directory: Path, rule: str = "nmt_nfkc", more: tuple[str, ...] = ()) -> int:
    trained(directory / "source.spm", normalization_rule_name=rule)
    (directory / "target.spm").write_bytes((directory / "source.spm").read_bytes())
    # The target's pieces: SentencePiece does not know them, but finds them as runs of unknown characters.
    tokens = ["</s>", "<unk>", *more, *pieces(directory / "source.spm"), "\u00fc", "\U0001f642\U0001f642", "<pad>"]
    return with_vocab_json(directory, tokens, source_lang="en", target_lang="fr")


def m2m100_directory(directory: Path, letters: str = "") -> int:
    trained(directory / "sentencepiece.bpe.model", 500, model_type="bpe")
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *pieces(directory / "sentencepiece.bpe.model"), *letters]
    codes = [f"__{code}__" for code in M2M100.split()]
    return with_vocab_json(directory, tokens, src_lang="fr", additional_special_tokens=codes)


def drawn(n: int) -> list[str]:
    """Letters and marks of several scripts, and spaces; some behind the code of a language."""
    draw = random.Random(0)
    ranges = [(0x20, 0x7F), (0xA0, 0x250), (0x300, 0x400), (0x3041, 0x3097), (0xFF01, 0xFFE0), (0x20, 0x21)]
    texts = ["".join(chr(draw.randrange(*draw.choice(ranges))) for _ in range(draw.randrange(40))) for _ in range(n)]
    return [draw.choice(["", ">>fra<< ", ">>zho_Hans<<", "__en__", "</s>>>fra<<"]) + text for text in texts]


CODES = [">>fra<< We hold", ">>fra<<We  hold", " >>fra<< We", "We >>fra<< hold", ">>fra<<>>fra<< a", ">>fra<<"]


def directory(kind: str, path: Path) -> tuple[dict, type]:
    """The fields of a directory that is made at a path, and transformers' class for it."""
    transformers = pytest.importorskip("transformers")
    if kind == "m2m100":
        return vocabulary_fields(path, "mbart", m2m100_directory(path) + 108)[0], transformers.M2M100Tokenizer
    more = (">>fra<<", ">>zho_Hans<<") if kind == "languages" else ()
    n_tokens = marian_directory(path, "identity" if kind == "identity" else "nmt_nfkc", more)
    return vocabulary_fields(path, "bart", n_tokens + 2)[0], transformers.MarianTokenizer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["marian", "identity", "languages", "m2m100"])
def test_ids_and_texts_are_those_of_transformers(kind, tmp_path):
    fields, oracle = directory(kind, tmp_path)
    theirs, ours = oracle.from_pretrained(tmp_path), opened(fields)
    assert (ours.eos_id, ours.unk_id, ours.pad_id) == (theirs.eos_token_id, theirs.unk_token_id, theirs.pad_token_id)
    spoken = languages(ours.vocabulary)
    assert len(spoken) == {"m2m100": 100, "languages": 2}.get(kind, 0)
    assert ours.vocabulary.language_token == ("first" if kind == "m2m100" else None)
    front = [theirs.get_lang_id("fr")] if kind == "m2m100" else []
    assert front in ([], [spoken.get("fr")])
    for text in PROBES + drawn(300) + CODES:
        if (
            kind == "identity"
            and "\u2581" in text
            or kind != "languages"
            and text.removeprefix("</s>").startswith(">>")
        ):
            continue  # SentencePiece trims what looks like its spaces; a code that the vocabulary lacks: see below
        ids, wanted = ours.encode(text), theirs(text).input_ids
        assert front + ids == wanted, ascii(text)
        assert ours.decode(wanted, True).strip() == theirs.decode(wanted, skip_special_tokens=True), ascii(text)
        plain = ours.encode(text, add_special_tokens=False, parse_special=False)
        assert not ours.vocabulary.control.intersection(plain) - {ours.unk_id}, ascii(text)


def test_codes_of_languages_that_a_vocabulary_lacks_are_text(tmp_path):
    """transformers makes one unknown token of all between ">>" and "<<", were it half of the text."""
    ours = opened(vocabulary_fields(tmp_path, "bart", marian_directory(tmp_path, more=(">>fra<<",)))[0])
    assert ours.decode(ours.encode(">>xyz<< We hold", False), skip_special_tokens=True) == "xy We hold"
    assert ours.encode(">>fra<< We hold", False)[0] == languages(ours.vocabulary)["fra"] == 2


def test_letters_unknown_to_sentencepiece(tmp_path):
    ours = opened(vocabulary_fields(tmp_path, "mbart", m2m100_directory(tmp_path, "\u0416") + 100)[0])
    ids = ours.encode("\u0416 \u0416\U0001f642", add_special_tokens=False)
    assert [ours.vocabulary.tokens[id] for id in ids] == ["\u2581", "\u0416", "\u2581", "\u0416", "<unk>"]


def test_directories_that_do_not_fit(tmp_path):
    n_tokens = marian_directory(tmp_path, "nmt_nfkc_cf", (">>fra<<", ">>zho_Hans<<"))
    for n_vocab, match in {n_tokens: "changes codes of languages", n_tokens - 1: "not ids of tokens"}.items():
        with pytest.raises((ModelFormatError, UnsupportedError), match=match):
            vocabulary_fields(tmp_path, "bart", n_vocab)
    for vocabulary, match in (({"</s>": 0, "<unk>": 0}, "the same id"), ({"</s>": 0, "a": 1}, "lacks <unk>")):
        (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
        with pytest.raises(ModelFormatError, match=match):
            vocabulary_fields(tmp_path, "bart", 9)
    (tmp_path / "config.json").write_text('{"share_encoder_decoder_embeddings": false}')
    with pytest.raises(UnsupportedError, match="encoder and decoder have vocabularies of their own"):
        vocabulary_fields(tmp_path, "bart", n_tokens)
