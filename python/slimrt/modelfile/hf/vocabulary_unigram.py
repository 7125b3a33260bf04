# SPDX-License-Identifier: Apache-2.0
"""T5's vocabulary as GGUF fields: a unigram model, from tokenizer.json or from SentencePiece's own file."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gguf import GGUFValueType, TokenType
from gguf.gguf_writer import GGUFValue

from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.modelfile.gguf import array, boolean, string, uint32
from slimrt.modelfile.hf.sentencepiece_model import SentencePieceModel, read_sentencepiece
from slimrt.tokenizer.hf import read_json_if_any
from slimrt.tokenizer.tokenizer import Tokenizer

_UNUSED_SCORE = -10000.0
_SENTINELS = {"t5": 100, "umt5": 300}  # by model_type, where nothing else says how many there are
_SENTINEL = re.compile(r"<extra_id_\d+>")
SENTENCEPIECE_FILES = ("spiece.model", "tokenizer.model")


def unigram_kind(
    tokenizer: Tokenizer, state: Mapping[str, Any], tokens: list[str], where: Path
) -> dict[str, GGUFValue]:
    """What a unigram vocabulary has beside its tokens, their types and its special ids.

    Args:
        state: tokenizer.json's content.
        tokens: the text of each row of the embedding.
        where: tokenizer.json, for messages.

    Raises:
        ModelFormatError: scores or the table of replacements are broken.
    """
    scores: dict[str, float] = {}
    try:
        for text, score in state["model"]["vocab"]:
            scores.setdefault(text, float(score))
        charsmap = base64.b64decode(_charsmap(state.get("normalizer")), validate=True)
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise ModelFormatError(f"{where}: a broken unigram model: {error}") from error
    trims = tokenizer.encode("a  b", False) == tokenizer.encode("a b", False)
    values = [scores.get(token, _UNUSED_SCORE) for token in tokens]
    return _kind(values, charsmap, tokenizer.vocabulary.strips_space, trims)


def _kind(scores: list[float], charsmap: bytes, space_prefix: bool, trims: bool) -> dict[str, GGUFValue]:
    return {
        "model": string("t5"),
        "pre": string("default"),
        "scores": array(scores, GGUFValueType.FLOAT32),
        "add_space_prefix": boolean(space_prefix),
        "remove_extra_whitespaces": boolean(trims),
        "precompiled_charsmap": array(list(charsmap), GGUFValueType.UINT8),
    }


def _charsmap(normalizer: Any) -> str:
    """The compiled replacements in a normalizer's state, in base 64; empty when there are none."""
    if not isinstance(normalizer, dict):
        return ""
    inner = (_charsmap(one) for one in normalizer.get("normalizers", ()))
    return str(normalizer.get("precompiled_charsmap") or next(filter(None, inner), ""))


def sentencepiece_fields(directory: Path, n_vocab: int) -> tuple[dict[str, GGUFValue], list[str]]:
    """The `tokenizer.*` fields of a T5 directory that has SentencePiece's file and no tokenizer.json, and warnings.

    Args:
        n_vocab: rows of the token embedding.

    Raises:
        ModelFormatError, UnsupportedError: as `read_sentencepiece`, or its pieces have no rows.
    """
    file = next(directory / name for name in SENTENCEPIECE_FILES if (directory / name).is_file())
    model = read_sentencepiece(file)
    if len(model.pieces) > n_vocab:
        raise ModelFormatError(f"{file}: {len(model.pieces)} pieces, but the embedding has {n_vocab} rows")
    if "unk" not in model.ids:
        raise UnsupportedError(f"{file}: it has no token for what it does not know")
    rows = model.pieces + [(f"[PAD{id}]", _UNUSED_SCORE, TokenType.UNUSED) for id in range(len(model.pieces), n_vocab)]
    for id, text in _added(directory, model, n_vocab):
        rows[id] = (text, 0.0, TokenType.CONTROL)
    tokens, scores, types = (list(column) for column in zip(*rows, strict=True))
    named = {"unk": "unknown", "pad": "padding"}
    fields = _kind(scores, model.charsmap, model.space_prefix, model.trims) | {
        "tokens": array(tokens, GGUFValueType.STRING),
        "token_type": array(types, GGUFValueType.INT32),
        "add_bos_token": boolean(False),
        "add_eos_token": boolean("eos" in model.ids),
        **{f"{named.get(name, name)}_token_id": uint32(id) for name, id in model.ids.items()},
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}, []


def _added(directory: Path, model: SentencePieceModel, n_vocab: int) -> Iterator[tuple[int, str]]:
    """Tokens behind the pieces: those that are named, else the sentinels, counted down to <extra_id_0>."""
    settings = read_json_if_any(directory / "tokenizer_config.json")
    named = {text: id for text, id in read_json_if_any(directory / "added_tokens.json").items() if isinstance(id, int)}
    for id, token in (settings.get("added_tokens_decoder") or {}).items():
        if id.isdecimal() and isinstance(token, dict):
            named[str(token.get("content"))] = int(id)
    if not any(_SENTINEL.fullmatch(text) for text in named):
        usual = _SENTINELS.get(str(read_json_if_any(directory / "config.json").get("model_type")), 0)
        count = settings.get("extra_ids", usual)
        last = len(model.pieces) + (count if isinstance(count, int) else 0) - 1
        named |= {f"<extra_id_{last - id}>": id for id in range(len(model.pieces), last + 1)}
    yield from ((id, text) for text, id in named.items() if len(model.pieces) <= id < n_vocab)
