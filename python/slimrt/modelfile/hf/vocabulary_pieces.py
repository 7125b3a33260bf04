# SPDX-License-Identifier: Apache-2.0
"""Marian's and M2M100's vocabularies: SentencePiece cuts a text into pieces, and a vocab.json says their ids.

Two files that were made apart. A piece that vocab.json lacks becomes the unknown token, and so does what SentencePiece
does not know, except where vocab.json has just that text. So the tokenizer keeps SentencePiece's ids, and aliases map
them to those of the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from gguf import TokenType
from gguf.gguf_writer import GGUFValue
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.modelfile.hf.sentencepiece_model import SentencePieceModel, read_sentencepiece
from slimrt.modelfile.hf.vocabulary_seq2seq import embedded_fields
from slimrt.tokenizer.embedded import START
from slimrt.tokenizer.gguf import merges_by_score
from slimrt.tokenizer.hf import read_json, read_json_if_any
from slimrt.tokenizer.vocabulary import Vocabulary, end_of_generation, typed

_CODE = re.compile(r">>[^<>\s]+<<")
_PIECES = (TokenType.NORMAL, TokenType.UNKNOWN, TokenType.CONTROL, TokenType.UNUSED)
# The languages of M2M100, and of the models for WMT 2021, in the order of their tokens.
M2M100 = """
    af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu hy
    id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt ro ru
    sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu
"""
_WMT21 = "en ha is ja cs ru zh de"
_SPECIAL = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>"}


def marian_fields(directory: Path, n_vocab: int) -> tuple[dict[str, GGUFValue], list[str]]:
    """Return the `tokenizer.*` fields of a Marian directory (source.spm, vocab.json), and warnings.

    A model of several target languages is told one by a code at the beginning of a text, as `>>fra<<`. There it is a
    token; anywhere else, and if the vocabulary lacks it, it is text.

    Args:
        n_vocab: rows of the token embedding.

    Raises:
        UnsupportedError: encoder and decoder have vocabularies of their own; a SentencePiece model of another kind.
        ModelFormatError: a file is broken or does not fit the others.
    """
    settings, config = (read_json_if_any(directory / name) for name in ("tokenizer_config.json", "config.json"))
    shared = config.get("share_encoder_decoder_embeddings", True) and not settings.get("separate_vocabs")
    if not shared or (directory / "target_vocab.json").is_file():
        raise UnsupportedError(
            f"{directory}: encoder and decoder have vocabularies of their own (share_encoder_decoder_embeddings is "
            "false, or there is a target_vocab.json); supported: Marian models with one"
        )
    model = _model(directory / "source.spm", "unigram")
    ids = _ids(directory / "vocab.json", n_vocab)
    with typed(f"{directory / 'source.spm'}: a broken model"):
        backend = tokenizers.Tokenizer(models.Unigram(list(_pieces(model).items()), model.ids["unk"]))
        backend.normalizer = normalizers.Sequence(_steps(model))
    codes = {text: START + text[1:] for text in ids if _CODE.fullmatch(text)}
    if codes:
        _mark(backend, codes, directory)
    return _fields(directory, backend, ids, {mark: ids[code] for code, mark in codes.items()}, n_vocab), []


def m2m100_fields(directory: Path, n_vocab: int) -> tuple[dict[str, GGUFValue], list[str]]:
    """Return the `tokenizer.*` fields of an M2M100 directory (sentencepiece.bpe.model, vocab.json), and warnings.

    Its languages have the ids behind vocab.json's, in a fixed order. Characters that vocab.json has and SentencePiece
    lacks are found one by one, next to other unknown ones, too. Arguments and errors as `marian_fields`.
    """
    model = _model(directory / "sentencepiece.bpe.model", "BPE")
    ids = _ids(directory / "vocab.json", n_vocab)
    scores = _pieces(model)
    letters = [text for text in ids if len(text) == 1 and text not in scores]  # unknown to SentencePiece
    numbers = {text: id for id, text in enumerate([*scores, *letters])}
    normal = {text: score for text, score, kind in model.pieces if kind == TokenType.NORMAL}
    unknown = list(scores)[model.ids["unk"]]
    with typed(f"{directory / 'sentencepiece.bpe.model'}: a broken model"):
        backend = tokenizers.Tokenizer(models.BPE(numbers, merges_by_score(normal), unk_token=unknown, fuse_unk=True))
        backend.normalizer = normalizers.Sequence(_steps(model))
    codes = _WMT21 if read_json_if_any(directory / "tokenizer_config.json").get("language_codes") == "wmt21" else M2M100
    languages = {f"__{code}__": id for id, code in enumerate(codes.split(), len(ids))}
    if len(ids) + len(languages) > n_vocab or max(ids.values()) >= len(ids) or languages.keys() & ids.keys():
        raise ModelFormatError(
            f"{directory}: {len(ids)} tokens and {len(languages)} languages do not fit the embedding of {n_vocab}"
        )
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in languages])
    return _fields(directory, backend, ids | languages, {}, n_vocab, languages), []


def _model(path: Path, kind: str) -> SentencePieceModel:
    model = read_sentencepiece(path, kind)
    if len({text for text, _, _ in model.pieces}) < len(model.pieces):
        raise ModelFormatError(f"{path}: a piece occurs twice")
    others = [text for text, _, type in model.pieces if type not in _PIECES]
    if others or not (model.space_prefix and model.trims and "unk" in model.ids):
        raise UnsupportedError(
            f"{path}: supported are models that put a space before a text, drop superfluous ones, and have an unknown "
            f"piece, but no pieces for bytes or of users{f' such as {others[0]!r}' if others else ''}"
        )
    return model


def _pieces(model: SentencePieceModel) -> dict[str, float]:
    """The score of each piece; those that SentencePiece never finds in a text, as <s>, get names that none contains."""
    return {text if kind == TokenType.NORMAL else START + text: score for text, score, kind in model.pieces}


def _ids(path: Path, n_vocab: int) -> dict[str, int]:
    """The id of each token in a vocab.json. ModelFormatError: they are not ids of rows, each of one token."""
    ids = read_json(path)
    if not ids or not all(isinstance(id, int) and 0 <= id < n_vocab for id in ids.values()):
        raise ModelFormatError(f"{path}: not ids of tokens, of which the embedding has {n_vocab}")
    if len({*ids.values()}) < len(ids):
        raise ModelFormatError(f"{path}: two tokens have the same id")
    return ids


def _steps(model: SentencePieceModel) -> list[normalizers.Normalizer]:
    table = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    return [*table, normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]


def _mark(backend: tokenizers.Tokenizer, codes: dict[str, str], directory: Path) -> None:
    """Have codes at the beginning of a text found as tokens. There START replaces the first character of a code; an
    insertion before it makes the library lose count of the characters that later steps replace."""
    if any(backend.normalizer.normalize_str(code) != code for code in codes):
        raise UnsupportedError(f"{directory / 'source.spm'}: its normalization changes codes of languages")
    known = "|".join(re.escape(code[1:]) for code in codes)
    first = normalizers.Replace(Regex(rf"\A>(?={known})"), START)
    backend.normalizer = normalizers.Sequence([first, backend.normalizer])
    backend.add_tokens([AddedToken(mark, special=False, normalized=True) for mark in codes.values()])


def _fields(
    directory: Path,
    backend: tokenizers.Tokenizer,
    ids: dict[str, int],
    marked: dict[str, int],
    n_vocab: int,
    languages: Iterable[str] = (),
) -> dict[str, GGUFValue]:
    """The fields of a vocabulary.

    Args:
        backend: with a model, a normalizer and the tokens of languages.
        ids: of all tokens.
        marked: those that the backend knows by another name: its name -> id.
        languages: tokens of which each text has one in front.

    Raises:
        ModelFormatError: no token for the end of a text, or for what is unknown.
    """
    settings = read_json_if_any(directory / "special_tokens_map.json") | read_json_if_any(
        directory / "tokenizer_config.json"
    )
    names = {name: _text(settings.get(f"{name}_token")) or usual for name, usual in _SPECIAL.items()}
    special_ids = {name: ids[text] for name, text in names.items() if text in ids}
    if missing := {"eos", "unk"} - special_ids.keys():
        raise ModelFormatError(f"{directory / 'vocab.json'} lacks {', '.join(names[one] for one in sorted(missing))}")
    backend.add_special_tokens([AddedToken(names[name], normalized=False) for name in special_ids])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    known = ids | marked
    found = [backend.id_to_token(id) for id in range(backend.get_vocab_size())]
    tokens: list[str | None] = [None] * (max(ids.values()) + 1)
    for text, id in ids.items():
        tokens[id] = text
    control = frozenset([*special_ids.values(), *(ids[text] for text in languages)])
    vocabulary = Vocabulary(
        backend=backend,
        tokens=tokens,
        control=control,
        literal=control,
        byte_level=False,
        strips_space=True,
        prefix=(),
        suffix=(special_ids["eos"],),
        special_ids=special_ids,
        eog_ids=end_of_generation({}, [special_ids["eos"]]),
        chat_template=None,
        aliases={id: known.get(text or "", special_ids["unk"]) for id, text in enumerate(found)},
        language_token="first" if languages else None,
    )
    return embedded_fields(vocabulary, json.loads(backend.to_str()), n_vocab)


def _text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


READERS = {"source.spm": marian_fields, "sentencepiece.bpe.model": m2m100_fields}
"""The file beside vocab.json by which each kind of directory is known."""
