# SPDX-License-Identifier: Apache-2.0
"""Reads a SentencePiece model (spiece.model, tokenizer.model): its pieces, and how it changes a text before it is cut.

The file is a protocol buffer (sentencepiece_model.proto of google/sentencepiece). Of that format four kinds of fields
occur here, and only a few fields matter, so it is read without the library.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gguf import TokenType

from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.tokenizer.hf import check_fetched

_VARINT, _BITS64, _BYTES, _BITS32 = 0, 1, 2, 5
_KINDS = {1: "unigram", 2: "BPE", 3: "words", 4: "characters"}
_Value = int | bytes


@dataclass(frozen=True)
class SentencePieceModel:
    """A model that was read.

    Attributes:
        pieces: text, score (log probability, or rank of a merge) and type (as gguf.TokenType has them) of each token.
        charsmap: the compiled table of character replacements; may be empty.
        space_prefix: a space is put before a text.
        trims: spaces at both ends, and several in a row, are dropped.
        ids: of unk, bos, eos and pad, where there are such.
    """

    pieces: list[tuple[str, float, int]]
    charsmap: bytes
    space_prefix: bool
    trims: bool
    ids: dict[str, int]


def read_scores(path: Path) -> dict[str, float]:
    """The score of each piece of a model of any kind. ModelFormatError as `read_sentencepiece`."""
    return {text: score for text, score, _ in _read(path)[0]}


def read_sentencepiece(path: Path, kind: str = "unigram") -> SentencePieceModel:
    """Read a model of one kind: "unigram" or "BPE".

    Raises:
        ModelFormatError: not a SentencePiece model, or a truncated one.
        UnsupportedError: a model of another kind, or one that writes spaces in another way.
    """
    pieces, trainer, normalizer = _read(path)
    found = trainer.get(3, 1)
    if _KINDS.get(int(found)) != kind:
        raise UnsupportedError(
            f"{path}: a SentencePiece model of kind {_KINDS.get(int(found), found)}; supported: {kind}"
        )
    if not normalizer.get(5, 1) or trainer.get(24, 0):
        raise UnsupportedError(f"{path}: spaces are not written as \u2581 before words, which GGUF cannot say")
    charsmap = normalizer.get(2, b"")
    return SentencePieceModel(
        pieces=pieces,
        charsmap=charsmap if isinstance(charsmap, bytes) else b"",
        space_prefix=bool(normalizer.get(3, 1)),
        trims=bool(normalizer.get(4, 1)),
        ids=_ids(trainer, len(pieces)),
    )


def _read(path: Path) -> tuple[list[tuple[str, float, int]], dict[int, _Value], dict[int, _Value]]:
    """The pieces, and the fields of the trainer's and of the normalizer's settings."""
    check_fetched(path)
    try:
        fields = list(_fields(path.read_bytes()))
        pieces = [_piece(_message(value)) for number, value in fields if number == 1]
        trainer, normalizer = (_last(fields, number) for number in (2, 3))
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise ModelFormatError(f"{path}: not a SentencePiece model: {error}") from error
    if not pieces:
        raise ModelFormatError(f"{path}: not a SentencePiece model: it has no pieces")
    return pieces, trainer, normalizer


def _ids(trainer: dict[int, _Value], n_pieces: int) -> dict[str, int]:
    """Fields 40 to 43 of the trainer's settings; an id of -1 (64 bits of ones) says that there is none."""
    usual = {"unk": (40, 0), "bos": (41, 1), "eos": (42, 2), "pad": (43, -1)}
    found = {name: trainer.get(number, default) for name, (number, default) in usual.items()}
    return {name: id for name, id in found.items() if isinstance(id, int) and 0 <= id < n_pieces}


def _last(fields: list[tuple[int, _Value]], number: int) -> dict[int, _Value]:
    found = [_message(value) for key, value in fields if key == number]
    return found[-1] if found else {}


def _piece(fields: dict[int, _Value]) -> tuple[str, float, int]:
    text, score, kind = fields.get(1, b""), fields.get(2, b"\0\0\0\0"), fields.get(3, int(TokenType.NORMAL))
    if not isinstance(text, bytes) or not isinstance(score, bytes) or not isinstance(kind, int):
        raise ValueError("a piece has a field of another kind")
    return text.decode(), float(struct.unpack("<f", score)[0]), kind


def _message(value: _Value) -> dict[int, _Value]:
    """The fields of a message, the last one where a number occurs twice."""
    if not isinstance(value, bytes):
        raise ValueError("a number where a message should be")
    return dict(_fields(value))


def _fields(data: bytes) -> Iterator[tuple[int, _Value]]:
    """Number and value of each field: an int, or bytes (a string, a message, or a number of fixed size)."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind not in (_BITS64, _BYTES, _BITS32):
            raise ValueError(f"field {number} is of the unknown kind {kind}")
        size = {_BITS64: 8, _BITS32: 4}.get(kind)
        if size is None:
            size, at = _varint(data, at)
        if size > len(data) - at:
            raise ValueError(f"field {number} runs past the end")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number in base 128, lowest digits first, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("cut off in a number")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise ValueError("a number of more than 64 bits")
