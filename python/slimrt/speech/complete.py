"""Detection of truncated audio files, many of which libsndfile reads as far as they go without an error."""

from __future__ import annotations

from typing import Literal

from slimrt.speech.wav import UNKNOWN_LENGTH, Content

Order = Literal["little", "big"]
_PAGE = 27  # bytes of an Ogg page header before the table of segment lengths (RFC 3533, section 6)


def cut_off(data: Content) -> bool:
    """Whether a WAV, RF64, W64, AIFF, AU, Ogg or MP3 file is shorter than its headers say; False for other formats."""
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
    """Whether the chunk of samples exceeds the file. A chunk is a name, a length, and as many bytes."""
    at, length = _found(data, wanted, order)
    return 0 < length < UNKNOWN_LENGTH and at + length > len(data)


def _found(data: Content, wanted: bytes, order: Order) -> tuple[int, int]:
    """Where the content of a chunk begins, and its length according to the header; length 0: there is none."""
    at = 12
    while at + 8 <= len(data):
        length = int.from_bytes(data[at + 4 : at + 8], order)
        if data[at : at + 4] == wanted:
            return at + 8, length
        at += 8 + length + length % 2
    return at, 0


def _short_rf64(data: Content) -> bool:
    """The same for RF64 (WAV beyond 4 GB): chunk ds64 holds the 64-bit sizes of the file and of the samples."""
    at, _ = _found(data, b"ds64", "little")
    begin, length = _found(data, b"data", "little")
    return length > 0 and begin + int.from_bytes(data[at + 8 : at + 16], "little") > len(data)


def _short_w64(data: Content) -> bool:
    """The same for Sony's Wave64: names of 16 bytes, 64-bit lengths that include both, aligned to 8 bytes."""
    at = 40
    while at + 24 <= len(data):
        length = int.from_bytes(data[at + 16 : at + 24], "little")
        if data[at : at + 4] == b"data":
            return at + length > len(data)
        at += max(length + -length % 8, 24)
    return False


def _short_page(data: Content) -> bool:
    """Whether the last Ogg page exceeds the file: the header of 27 bytes ends with the number of segments, and is
    followed by their lengths and the segments."""
    last = data.rfind(b"OggS")
    lengths = data[last + _PAGE : last + _PAGE + data[last + _PAGE - 1]] if last + _PAGE <= len(data) else b""
    return last + _PAGE > len(data) or last + _PAGE + data[last + _PAGE - 1] + sum(lengths) > len(data)


# MPEG Layer III: kbit/s by index in the frame header, for MPEG 1 (3) and 2, 2.5 (2); Hz by version and index.
_KBITS = {
    3: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 0),
    2: (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 0),
}
_HERTZ = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}


def _short_mpeg(data: Content) -> bool:
    """Whether the last frame of an MP3 file exceeds the file; False if frames are not contiguous."""
    at = 0
    if data[:3] == b"ID3" and len(data) >= 10:  # an ID3 tag: its length has 4 * 7 bits
        at = 10 + sum((data[6 + i] & 127) << (21 - 7 * i) for i in range(4))
    while at + 4 <= len(data):
        length = _mpeg_frame(data[at : at + 4])
        if not length:
            return False
        at += length
    return at != len(data)


def _mpeg_frame(header: bytes) -> int:
    """Length in bytes of the Layer III frame with this header (4 bytes); 0: it is none."""
    version, layer = header[1] >> 3 & 3, header[1] >> 1 & 3
    if header[0] != 0xFF or header[1] < 0xE0 or layer != 1 or version == 1 or header[2] >> 2 & 3 == 3:
        return 0
    bits = 1000 * _KBITS[3 if version == 3 else 2][header[2] >> 4]
    padding = header[2] >> 1 & 1
    return (144 if version == 3 else 72) * bits // _HERTZ[version][header[2] >> 2 & 3] + padding if bits else 0
