"""Reads and tokenizes text files of any size, one piece at a time."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slimrt.tokenizer.tokenizer import Tokenizer

_PIECE = 1 << 20  # bytes read, and characters tokenized, at a time


def text_pieces(path: str | os.PathLike[str]) -> Iterator[str]:
    """The text of a UTF-8 file, without a byte order mark, in pieces that end with a line if possible, else with a
    word.

    Raises:
        OSError: it cannot be read. ValueError: it is not UTF-8; names the byte.
    """
    decoder, held = codecs.getincrementaldecoder("utf-8")(), ""
    with Path(path).open("rb") as file:
        if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
            file.seek(0)
        while True:
            start = file.tell() - len(decoder.getstate()[0])  # bytes of a character that is not complete yet
            data = file.read(_PIECE)
            try:
                held += decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                at = start + error.start
                raise ValueError(f"{path}: not UTF-8 text: {error.reason} at byte {at}") from None
            if not data:
                break
            if len(data) == _PIECE:
                cut = (held.rfind("\n") + 1) or (held.rfind(" ")) or len(held)
                piece, held = held[:cut], held[cut:]
                yield piece
    if held:
        yield held


def file_ids(tokenizer: Tokenizer, path: str | os.PathLike[str], limit: int | None = None) -> NDArray[np.int32]:
    """The token ids of a text file, int32 (n,), at most `limit` of them; only as much as needed is read.

    A file of up to 1 MiB is tokenized as a whole. A longer one is tokenized in pieces, at whose boundaries a tokenizer
    whose tokens may span lines may choose others.

    Raises:
        OSError, ValueError: as text_pieces.
    """
    parts, n = list[NDArray[np.int32]](), 0
    for piece in text_pieces(path):
        parts.append(np.array(tokenizer.encode(piece, add_special_tokens=not parts), np.int32))
        n += len(parts[-1])
        if limit is not None and n >= limit:
            break
    return np.concatenate(parts)[:limit] if parts else np.empty(0, np.int32)
