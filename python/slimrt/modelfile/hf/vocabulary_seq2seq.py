# SPDX-License-Identifier: Apache-2.0
"""The vocabularies of BART's kin (mBART, M2M100, NLLB, Marian, Pegasus) as GGUF fields.

llama.cpp reads none of these models, so the file holds the tokenizer as it is (slimrt.tokenizer.embedded) and not as
one of ggml's vocabularies, of which few could express it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gguf import GGUFValueType, TokenType
from gguf.gguf_writer import GGUFValue

from slimrt.errors import UnsupportedError
from slimrt.modelfile.gguf import array, string, uint32
from slimrt.tokenizer import embedded
from slimrt.tokenizer.hf import read_json_if_any
from slimrt.tokenizer.languages import languages
from slimrt.tokenizer.tokenizer import Tokenizer
from slimrt.tokenizer.vocabulary import Vocabulary

ARCHITECTURES = ("bart", "mbart")
_Fields = dict[str, GGUFValue]

# Where each class of tokenizers puts the language of a text, whatever the post-processor of tokenizer.json does.
_PLACES = {"MBartTokenizer": "last", "MBart50Tokenizer": "first", "M2M100Tokenizer": "first", "NllbTokenizer": "first"}
_USUAL_CLASSES = {"mbart": "MBartTokenizer", "m2m_100": "M2M100Tokenizer"}  # where a directory names none


def seq2seq_fields(directory: Path, n_vocab: int) -> tuple[_Fields, list[str]]:
    """Return the `tokenizer.*` fields of a directory with a tokenizer.json, and warnings.

    Args:
        n_vocab: rows of the token embedding; unused ones get placeholders.

    Raises:
        UnsupportedError: a tokenizer of another kind, or one with tokens that have no row.
        ModelFormatError: a broken file.
    """
    vocabulary = _with_language(Tokenizer(directory).vocabulary, directory)
    state = json.loads(vocabulary.backend.to_str())
    warnings = _leave_out_rowless(state, n_vocab, directory)
    return embedded_fields(vocabulary, state, n_vocab), warnings


def embedded_fields(vocabulary: Vocabulary, state: Mapping[str, Any], n_vocab: int) -> _Fields:
    """The `tokenizer.*` fields of a vocabulary.

    Args:
        vocabulary: its aliases are one for each id of `state`, or none.
        state: the JSON of its backend.
        n_vocab: rows of the token embedding.

    Raises:
        ModelFormatError: they contradict each other.
    """
    tokens, types = _tokens(vocabulary, n_vocab)
    special = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {special[name]: id for name, id in vocabulary.special_ids.items()}
    fields = {
        "tokenizer.ggml.model": string(embedded.MODEL),
        "tokenizer.huggingface.json": string(json.dumps(state, ensure_ascii=False, separators=(",", ":"))),
        "tokenizer.ggml.tokens": array(tokens, GGUFValueType.STRING),
        "tokenizer.ggml.token_type": array(types, GGUFValueType.INT32),
        **{f"tokenizer.ggml.{name}_token_id": uint32(id) for name, id in ids.items() if id < n_vocab},
        **further_ends(vocabulary.eog_ids - {vocabulary.special_ids.get("eos")}, n_vocab),
    }
    lists = {"prefix": vocabulary.prefix, "suffix": vocabulary.suffix, "aliases": vocabulary.aliases.values()}
    fields |= {f"tokenizer.slimrt.{name}": array([*one], GGUFValueType.INT32) for name, one in lists.items() if one}
    if vocabulary.language_token:
        fields["tokenizer.slimrt.language_token"] = string(vocabulary.language_token)
    embedded.build({key: field.value for key, field in fields.items()})  # what cannot be read is not written
    return fields


def further_ends(ids: Collection[int | None], n_vocab: int) -> _Fields:
    """The fields of ids that end a text beside EOS: GGUF has room for two, slimrt for the others."""
    ends = sorted(id for id in ids if id is not None and id < n_vocab)
    fields = {f"tokenizer.ggml.{name}_token_id": uint32(id) for name, id in zip(("eot", "eom"), ends, strict=False)}
    return fields | ({"tokenizer.slimrt.ends": array(ends[2:], GGUFValueType.INT32)} if ends[2:] else {})


def _tokens(vocabulary: Vocabulary, n_vocab: int) -> tuple[list[str], list[int]]:
    """The text and type of each row of the embedding."""
    named = (vocabulary.tokens + [None] * n_vocab)[:n_vocab]
    aliases, added = vocabulary.aliases, vocabulary.backend.get_added_tokens_decoder()
    matched = {aliases.get(id, id) for id in added}

    def kind(id: int, text: str | None) -> TokenType:
        if text is None:
            return TokenType.UNUSED
        if id == vocabulary.special_ids.get("unk"):
            return TokenType.UNKNOWN
        if id in vocabulary.control:
            return TokenType.CONTROL
        return TokenType.USER_DEFINED if id in matched else TokenType.NORMAL

    types = [kind(id, text) for id, text in enumerate(named)]
    return [f"[PAD{id}]" if text is None else text for id, text in enumerate(named)], [int(one) for one in types]


def _leave_out_rowless(state: dict[str, Any], n_vocab: int, directory: Path) -> list[str]:
    """Remove added tokens without a row, as <mask> is in some of BART's, from the JSON of a tokenizer; a warning.

    Raises:
        UnsupportedError: text would become a token without a row.
    """
    lost = [token["content"] for token in state["added_tokens"] if token["id"] >= n_vocab]
    model, vocab = state["model"], state["model"]["vocab"]
    pairs = vocab.items() if isinstance(vocab, dict) else ((text, id) for id, (text, _) in enumerate(vocab))
    rowless = {text for text, id in pairs if id >= n_vocab}
    if more := sorted(rowless.difference(lost)):
        raise UnsupportedError(
            f"{directory / 'tokenizer.json'}: {len(more)} tokens of text have no row in the embedding of {n_vocab}, "
            f"such as {more[0]!r}"
        )
    if not lost:
        return []
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < n_vocab]
    kept = {text: id for text, id in vocab.items() if id < n_vocab} if isinstance(vocab, dict) else vocab[:n_vocab]
    model["vocab"] = kept
    return [f"{len(lost)} tokens have no row in the embedding of {n_vocab} and are left out, the first is {lost[0]!r}"]


def _with_language(vocabulary: Vocabulary, directory: Path) -> Vocabulary:
    """The vocabulary with the place of a language's token, which is then none of the ids around a text."""
    spoken = {id for id in languages(vocabulary).values() if id in vocabulary.control}
    place = _place(vocabulary, directory, spoken) if spoken else None
    eos = vocabulary.special_ids.get("eos")
    if place is None:
        return vocabulary
    if eos is None:
        raise UnsupportedError(f"{directory}: a tokenizer with languages, but without an end of text (eos_token)")
    return replace(vocabulary, prefix=(), suffix=(eos,), language_token=place)


def _place(vocabulary: Vocabulary, directory: Path, spoken: set[int]) -> str | None:
    settings, config = (read_json_if_any(directory / name) for name in ("tokenizer_config.json", "config.json"))
    named = str(settings.get("tokenizer_class") or config.get("tokenizer_class") or "")
    model_type = str(config.get("model_type"))
    known = named.removesuffix("Fast") if named else _USUAL_CLASSES.get(model_type, "")
    if known == "NllbTokenizer" and settings.get("legacy_behaviour"):
        return "last"
    if known in _PLACES:
        return _PLACES[known]
    if spoken & {*vocabulary.prefix, *vocabulary.suffix}:
        return "first" if spoken.intersection(vocabulary.prefix) else "last"
    return _PLACES.get(_USUAL_CLASSES.get(model_type, ""))
