"""WAV files with uncompressed samples, read without a library: integers of 8 to 32 bits, floats of 32 and 64."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Content = bytes | mmap.mmap
Frames = NDArray[np.float32]

UNKNOWN_LENGTH = 0x7FFFF000  # headers of streams, written before the length is known, say this or more, or 0
_WHOLE, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE  # format codes of samples
_CHUNKS = (b"fmt ", b"data")
_FORMATS = {(_WHOLE, 8), (_WHOLE, 16), (_WHOLE, 24), (_WHOLE, 32), (_FLOAT, 32), (_FLOAT, 64)}


@dataclass(frozen=True)
class Wav:
    """A WAV file with uncompressed samples.

    Attributes:
        rate: Hz. channels; bits: of a sample.
        start, n_frames: first byte of the samples, and frames in the file.
        n_announced: frames according to the header; n_frames if that does not know.
    """

    data: Content
    rate: int
    channels: int
    bits: int
    is_float: bool
    start: int
    n_frames: int
    n_announced: int

    @classmethod
    def of(cls, data: Content) -> Wav | None:
        """Parse a header. None: not a WAV file, or its samples are compressed."""
        if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
            return None
        chunks = _chunks(data)
        begin, length = chunks.get(b"fmt ", (0, 0))
        if b"data" not in chunks or length < 16:
            return None
        fields = [int.from_bytes(data[begin + at : begin + to], "little") for at, to in _FIELDS]
        code, channels, rate, frame, bits = fields
        if code == _EXTENSIBLE and length >= 26:  # the real code is the beginning of a GUID
            code = int.from_bytes(data[begin + 24 : begin + 26], "little")
        if (code, bits) not in _FORMATS or not rate or not channels or frame != channels * bits // 8:
            return None
        start, promised = chunks[b"data"]
        there = len(data) - start
        known = promised < UNKNOWN_LENGTH and (promised > 0 or _ends_with_the_file(data))
        n_frames = (min(promised, there) if known or promised else there) // frame
        n_announced = promised // frame if known else n_frames
        return cls(data, rate, channels, bits, code == _FLOAT, start, n_frames, n_announced)

    def blocks(self, n_samples: int) -> Iterator[Frames]:
        """The samples, float32 (frames, channels), full scale 1, about n_samples of all channels at once."""
        width, n_frames = self.channels * self.bits // 8, max(n_samples // self.channels, 1)
        for at in range(0, self.n_frames, n_frames):
            count = min(n_frames, self.n_frames - at)
            begin = self.start + at * width
            yield self._decoded(self.data[begin : begin + count * width]).reshape(count, self.channels)

    def _decoded(self, data: bytes) -> Frames:
        if self.is_float:
            return np.frombuffer(data, f"<f{self.bits // 8}").astype(np.float32)
        if self.bits == 8:  # unsigned: 128 is zero
            return (np.frombuffer(data, np.uint8).astype(np.float32) - 128.0) / 128.0
        if self.bits == 24:  # the upper three bytes of a 32-bit number
            wide = np.zeros((len(data) // 3, 4), np.uint8)
            wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
            data = wide.tobytes()
        size = 16 if self.bits == 16 else 32
        return np.frombuffer(data, f"<i{size // 8}").astype(np.float32) / np.float32(2.0 ** (size - 1))


# Byte ranges in a format chunk: code, channels, rate, bytes of a frame, bits of a sample.
_FIELDS = ((0, 2), (2, 4), (4, 8), (12, 14), (14, 16))


def _ends_with_the_file(data: Content) -> bool:
    """Whether the header has the right length of the file; that of a stream has not."""
    return 8 + int.from_bytes(data[4:8], "little") == len(data)


def _chunks(data: Content) -> dict[bytes, tuple[int, int]]:
    """Start and length (according to the header) of the content of the chunks that tell of samples, up to these; the
    first of each name."""
    found: dict[bytes, tuple[int, int]] = {}
    at = 12
    while at + 8 <= len(data) and b"data" not in found:
        length = int.from_bytes(data[at + 4 : at + 8], "little")
        if (name := data[at : at + 4]) in _CHUNKS:  # a small file may have millions of others
            found.setdefault(name, (at + 8, length))
        at += 8 + length + length % 2
    return found
