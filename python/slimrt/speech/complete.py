"""Whether a sound file is whole: libsndfile reads many that are cut off up to their end, and says nothing."""

from __future__ import annotations

import mmap
from typing import Literal

Content = bytes | mmap.mmap

_UNKNOWN = 0xFFFFFF00  # a stream's header, written before the length was known, says 0 or about 2^32: believed
_PAGE = 27  # bytes of an Ogg page before the lengths of its segments (RFC 3533, section 6)


def cut_off(data: Content) -> bool:
    """Whether a WAV, AIFF, AU or Ogg file has less in it than it says; False of others."""
    kind = data[:4], data[8:12]
    if kind == (b"RIFF", b"WAVE"):
        return _short_chunk(data, b"data", "little")
    if kind in ((b"FORM", b"AIFF"), (b"FORM", b"AIFC")):
        return _short_chunk(data, b"SSND", "big")
    if kind[0] == b".snd":
        begin, length = (int.from_bytes(data[at : at + 4], "big") for at in (4, 8))
        return length < _UNKNOWN and begin + length > len(data)
    return kind[0] == b"OggS" and _short_page(data)


def _short_chunk(data: Content, wanted: bytes, order: Literal["little", "big"]) -> bool:
    """Whether the chunk that holds the samples reaches beyond the end. A chunk: its name, its length, so many bytes."""
    at = 12
    while at + 8 <= len(data):
        length = int.from_bytes(data[at + 4 : at + 8], order)
        if data[at : at + 4] == wanted:
            return 0 < length < _UNKNOWN and at + 8 + length > len(data)
        at += 8 + length + length % 2
    return False


def _short_page(data: Content) -> bool:
    """Whether the last page reaches beyond the end: after 27 bytes come the number of segments, their lengths, they."""
    last = data.rfind(b"OggS")
    lengths = data[last + _PAGE : last + _PAGE + data[last + _PAGE - 1]] if last + _PAGE <= len(data) else b""
    return last + _PAGE > len(data) or last + _PAGE + data[last + _PAGE - 1] + sum(lengths) > len(data)
