"""SentencePiece's normalisation table (precompiled_charsmap): at each position the longest matching entry is replaced.

The implementation in the `tokenizers` library matches whole graphemes, and loses characters where only the beginning of
one is an entry: the accent after a full-width letter, the voicing mark after a half-width kana.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
from tokenizers import normalizers

from slimrt.errors import ModelFormatError

_LEAF = 0x100  # in a unit of the trie: its path spells an entry
_LABEL = 0x800000FF  # in a unit: the byte that leads to it; the highest bit is set in units with a value
_VALUE = 0x7FFFFFFF


class Charsmap:
    """A double-array trie (its size in bytes, then units of 32 bits) and the replacements, NUL-terminated.

    Raises:
        ModelFormatError: the data is cut off, or a unit refers outside.
    """

    def __init__(self, data: bytes):
        size = int.from_bytes(data[:4], "little")
        self._replacements = data[4 + size :]
        text = np.frombuffer(self._replacements, np.uint8)
        if size == 0 or size % 4 or not text.size or text[-1]:
            raise ModelFormatError("tokenizer.ggml.precompiled_charsmap is truncated")
        units = np.frombuffer(data, "<u4", size // 4, 4).astype(np.int64)
        inner = units >> 31 == 0
        child = np.arange(len(units)) ^ ((units >> 10) << ((units & 0x200) >> 6))
        if not inner[0] or ((child[inner] | 0xFF) >= len(units)).any():
            raise ModelFormatError("tokenizer.ggml.precompiled_charsmap has a link past its end")
        replacement = units[child[inner & (units & _LEAF > 0)]] & _VALUE
        if (replacement >= text.size).any() or (text[replacement] & 0xC0 == 0x80).any():
            raise ModelFormatError("tokenizer.ggml.precompiled_charsmap has a replacement outside its text")
        self._units, self._child = units.tolist(), child.tolist()

    def normalize(self, text: Any) -> None:
        """Replace in a tokenizers.NormalizedString: the interface of a custom Normalizer."""
        before = text.normalized
        if (after := self.replaced(before)) != before:
            text.clear()
            text.append(after)

    def replaced(self, text: str) -> str:
        """The text with all replacements made, from left to right."""
        parts, at = list[str](), 0
        while at < len(text):
            length, part = self._longest(text, at)
            parts.append(part if length else text[at])
            at += length or 1
        return "".join(parts)

    def _longest(self, text: str, at: int) -> tuple[int, str]:
        """The longest entry at a position: its length in characters, and its replacement; 0: there is none."""
        length, value, node = 0, 0, self._child[0]
        for end in range(at, len(text)):
            unit = 0
            for byte in text[end].encode():
                unit = self._units[node ^ byte]
                if unit & _LABEL != byte:
                    return length, self._replacement(value) if length else ""
                node = self._child[node ^ byte]
            if unit & _LEAF:
                length, value = end + 1 - at, self._units[node] & _VALUE
        return length, self._replacement(value) if length else ""

    def _replacement(self, start: int) -> str:
        return self._replacements[start : self._replacements.index(0, start)].decode(errors="replace")


def exact(step: normalizers.Normalizer) -> normalizers.Normalizer:
    """A normalizer in which a Charsmap is in place of the library's table; the library cannot write (pickle) it.

    Raises:
        ModelFormatError: as Charsmap.
    """
    if isinstance(step, normalizers.Sequence):
        parts = json.loads(step.__getstate__())["normalizers"]
        return normalizers.Sequence([exact(step[at]) for at in range(len(parts))])
    if isinstance(step, normalizers.Precompiled):
        table = base64.b64decode(json.loads(step.__getstate__())["precompiled_charsmap"], validate=True)
        return normalizers.Normalizer.custom(Charsmap(table))
    return step
