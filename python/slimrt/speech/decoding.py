"""Decoding of audio files in blocks: uncompressed WAV by wav.py, other formats by libsndfile or FFmpeg."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from slimrt.errors import AudioError, UnsupportedError
from slimrt.speech.complete import cut_off
from slimrt.speech.wav import Content, Frames, Wav

_AT_ONCE = 4096  # frames: at an error the decoder loses the block it was reading
_UNKNOWN = 1 << 48  # frames: libsndfile returns more than this if the length is unknown
_MEDIA = (b"ftyp", b"moov", b"mdat", b"\x1a\x45\xdf\xa3")  # magic of MP4 (after four bytes) and Matroska
_SLACK = 1.0  # seconds by which a container's stated duration may exceed the real one
_NO_PROTOCOLS = {"protocol_whitelist": "none"}  # security: playlists must not open other files or addresses


class Decoder:
    """An audio file being decoded.

    Attributes:
        rate: Hz.
        announced: frames according to the file; None: it does not say.
        cut: whether the file is truncated; final once the last block was read.
    """

    def __init__(self, rate: int, announced: int | None, cut: bool, blocks: Callable[[Decoder], Iterator[Frames]]):
        self.rate, self.announced, self.cut = rate, announced, cut
        self._blocks = blocks

    def blocks(self) -> Iterator[Frames]:
        """All readable blocks, float32 (frames, channels), full scale 1."""
        return self._blocks(self)


def decoder(file: Path | io.BytesIO, data: Content, name: str) -> Decoder:
    """A decoder for a file and its content, which must both stay open while it is read.

    Raises:
        AudioError: no decoder reads this format.
        UnsupportedError: the extra `audio` is needed and missing.
    """
    wav = Wav.of(data)
    if wav is not None:
        return Decoder(wav.rate, wav.n_announced, wav.n_announced > wav.n_frames, lambda _: wav.blocks(32 * _AT_ONCE))
    media = data[:4] in _MEDIA or data[4:8] in _MEDIA
    soundfile, av = _module("soundfile"), _module("av")
    if av is None and (soundfile is None or media):
        needed = "av" if media else "soundfile"
        raise UnsupportedError(f"{name}: this sound needs {needed}: pip install 'slimrt[audio]'")
    reason = "its index is missing, which may stand at the end" if media else "unknown format"
    if soundfile is not None and not media:
        try:
            return _soundfile_decoder(soundfile, file, data)
        except (soundfile.SoundFileError, RuntimeError) as error:
            reason = str(error).rpartition(": ")[2].rstrip(".")
    found = None if av is None else _av_decoder(av, file)
    if found is None:
        raise AudioError(f"{name}: not a sound that can be read ({reason}); WAV, FLAC, Ogg, MP3, M4A, MP4, MKV and "
                         "WebM can")  # fmt: skip
    return found


def _module(name: str) -> ModuleType | None:
    try:
        return __import__(name)
    except (ImportError, OSError):  # OSError: soundfile without libsndfile
        return None


def _soundfile_decoder(soundfile: ModuleType, file: Path | io.BytesIO, data: Content) -> Decoder:
    sound = soundfile.SoundFile(file)
    sound.seekable = lambda: False  # else soundfile seeks after each read, and libmpg123 complains on stderr

    announced = sound.frames if sound.frames < _UNKNOWN else None

    def blocks(decoder: Decoder) -> Iterator[Frames]:
        done = 0
        with sound:
            try:
                while len(block := sound.read(_next(announced, done), dtype="float32", always_2d=True)):
                    done += len(block)
                    yield block
            except (soundfile.SoundFileError, RuntimeError):  # FLAC that is truncated, damaged, or followed by a tag
                decoder.cut = decoder.cut or done != announced
        if announced is not None and done < announced:
            decoder.cut = True

    return Decoder(int(sound.samplerate), announced, cut_off(data), blocks)


def _next(announced: int | None, done: int) -> int:
    """Frames to read next: at most those left of the announced ones, since a tag after them would be an error, with
    which the last block would be lost."""
    left = 0 if announced is None else announced - done
    return min(left, _AT_ONCE) if left > 0 else _AT_ONCE


def _av_decoder(av: ModuleType, file: Path | io.BytesIO) -> Decoder | None:
    """The first audio stream of a container that FFmpeg can decode; None: there is none."""
    if isinstance(file, io.BytesIO):
        file.seek(0)  # libsndfile has looked at it
    try:
        container = av.open(file.open("rb") if isinstance(file, Path) else file, options=_NO_PROTOCOLS)
    except (av.error.FFmpegError, ValueError):
        return None
    stream = next((one for one in container.streams.audio if one.codec_context is not None), None)  # None: no decoder
    if stream is None or not stream.rate:
        container.close()
        return None
    lasts = 0.0 if stream.duration is None else float(stream.duration * stream.time_base)
    if not lasts and container.duration and not container.streams.video:  # video may last longer than the audio
        lasts = container.duration / av.time_base

    def blocks(decoder: Decoder) -> Iterator[Frames]:
        done = 0
        with container:
            try:
                for frame in _frames(av, container, stream):
                    block = np.ascontiguousarray(frame.to_ndarray().T, np.float32)
                    done += len(block)
                    yield block
            except (av.error.FFmpegError, ValueError):
                decoder.cut = True
        if done / decoder.rate < lasts - max(_SLACK, 0.05 * lasts):
            decoder.cut = True

    return Decoder(int(stream.rate), round(lasts * stream.rate) or None, False, blocks)


def _frames(av: ModuleType, container: Any, stream: Any) -> Iterator[Any]:
    """The frames of a stream as planar floats, rate and channels unchanged."""
    plain = av.AudioResampler(format="fltp")
    for frame in container.decode(stream):
        yield from plain.resample(frame)
    yield from plain.resample(None)
