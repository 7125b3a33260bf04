"""Whether a sound file is whole: libsndfile reads many that are cut off up to their end, and says nothing."""

from __future__ import annotations

from typing import Literal

from slimrt.speech.wav import UNKNOWN_LENGTH, Content

Order = Literal["little", "big"]
_PAGE = 27  # bytes of an Ogg page before the lengths of its segments (RFC 3533, section 6)


def cut_off(data: Content) -> bool:
    """Whether a WAV, RF64, W64, AIFF, AU, Ogg or MP3 file has less in it than it says; False of others."""
    kind = data[:4], data[8:12]
    if kind == (b"RIFF", b"WAVE"):
        return _short_chunk(data, b"data", "little")
    if kind == (b"RF64", b"WAVE"):
        return _short_rf64(data)
    if kind[0] == b"riff":
        return _short_w64(data)
    if kind in ((b"FORM", b"AIFF"), (b"FORM", b"AIFC")):
        return _short_chunk(data, b"SSND", "big")
    if kind[0] == b".snd":
        begin, length = (int.from_bytes(data[at : at + 4], "big") for at in (4, 8))
        return length < UNKNOWN_LENGTH and begin + length > len(data)
    if kind[0] == b"OggS":
        return _short_page(data)
    return _short_mpeg(data)


def _short_chunk(data: Content, wanted: bytes, order: Order) -> bool:
    """Whether the chunk that holds the samples reaches beyond the end. A chunk: its name, its length, so many bytes."""
    at, length = _found(data, wanted, order)
    return 0 < length < UNKNOWN_LENGTH and at + length > len(data)


def _found(data: Content, wanted: bytes, order: Order) -> tuple[int, int]:
    """Where the content of a chunk begins, and the length that it says; length 0: there is none."""
    at = 12
    while at + 8 <= len(data):
        length = int.from_bytes(data[at + 4 : at + 8], order)
        if data[at : at + 4] == wanted:
            return at + 8, length
        at += 8 + length + length % 2
    return at, 0


def _short_rf64(data: Content) -> bool:
    """The same of a WAV file beyond 4 GB: chunk ds64 holds the length of the samples, after that of all."""
    at, _ = _found(data, b"ds64", "little")
    begin, length = _found(data, b"data", "little")
    return length > 0 and begin + int.from_bytes(data[at + 8 : at + 16], "little") > len(data)


def _short_w64(data: Content) -> bool:
    """The same of Sony's Wave64: names of 16 bytes, lengths of 8 that count both, all at multiples of 8."""
    at = 40
    while at + 24 <= len(data):
        length = int.from_bytes(data[at + 16 : at + 24], "little")
        if data[at : at + 4] == b"data":
            return at + length > len(data)
        at += max(length + -length % 8, 24)
    return False


def _short_page(data: Content) -> bool:
    """Whether the last page reaches beyond the end: after 27 bytes come the number of segments, their lengths, they."""
    last = data.rfind(b"OggS")
    lengths = data[last + _PAGE : last + _PAGE + data[last + _PAGE - 1]] if last + _PAGE <= len(data) else b""
    return last + _PAGE > len(data) or last + _PAGE + data[last + _PAGE - 1] + sum(lengths) > len(data)


# Layer III in kbit/s by the index in a frame's header, of MPEG 1 and of 2 and 2.5; Hz by version and index.
_KBITS = {
    3: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 0),
    2: (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 0),
}
_HERTZ = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}


def _short_mpeg(data: Content) -> bool:
    """Whether the last frame of an MP3 file reaches beyond the end; False where frames do not follow each other."""
    at = 0
    if data[:3] == b"ID3" and len(data) >= 10:  # its length: four times seven bits
        at = 10 + sum((data[6 + i] & 127) << (21 - 7 * i) for i in range(4))
    while at + 4 <= len(data):
        length = _mpeg_frame(data[at : at + 4])
        if not length:
            return False
        at += length
    return at != len(data)


def _mpeg_frame(header: bytes) -> int:
    """Bytes of the frame of Layer III that this header (4 bytes) begins; 0: it is none."""
    version, layer = header[1] >> 3 & 3, header[1] >> 1 & 3
    if header[0] != 0xFF or header[1] < 0xE0 or layer != 1 or version == 1 or header[2] >> 2 & 3 == 3:
        return 0
    bits = 1000 * _KBITS[3 if version == 3 else 2][header[2] >> 4]
    padding = header[2] >> 1 & 1
    return (144 if version == 3 else 72) * bits // _HERTZ[version][header[2] >> 2 & 3] + padding if bits else 0
