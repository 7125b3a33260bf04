"""Audio input, converted to what the models take: one channel, float32, 16 kHz."""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slimrt.errors import AudioError
from slimrt.plumbing.arguments import real, whole
from slimrt.plumbing.notes import warn
from slimrt.speech.decoding import Decoder, decoder
from slimrt.speech.resample import Resampler
from slimrt.speech.resample import Samples as Samples
from slimrt.speech.wav import Content

SAMPLE_RATE = 16000  # Hz
MAX_SECONDS = 4 * 3600.0  # default limit of one sound: 0.9 GB of samples
_LEAST_RATE = 2000  # Hz: below, there is no speech, and a small file would become a large sound
_MOST_RATE = 1_000_000  # Hz: beyond, filters take gigabytes; recorders reach 768 kHz
_LOUDEST = 100.0  # full scale is 1: a higher peak means integer samples stored as floats
_MOST_CHANNELS = 32  # with more channels than this, and than samples, the axes are swapped
_AT_ONCE = 1 << 16  # samples of an array checked at once


@dataclass(frozen=True)
class Sound:
    """Decoded audio.

    Attributes:
        samples: float32 (n,) at 16 kHz, full scale 1.
        warnings: sentences for the user, such as that the file is truncated.
    """

    samples: Samples
    warnings: tuple[str, ...] = ()


class TooLong(AudioError):
    """A sound is longer than max_seconds."""


Audio = str | os.PathLike[str] | BinaryIO | ArrayLike | Sound


def load_audio(audio: Audio, sample_rate: int = SAMPLE_RATE, *, max_seconds: float = MAX_SECONDS) -> Samples:
    """The samples of read_sound(), float32 (n,). Arguments and errors as there; its warnings become UserWarnings."""
    sound = read_sound(audio, sample_rate, max_seconds=max_seconds)
    for warning in sound.warnings:
        warn(warning)
    return sound.samples


def read_sound(
    audio: Audio,
    sample_rate: int = SAMPLE_RATE,
    *,
    max_seconds: float = MAX_SECONDS,
    on_block: Callable[[], object] | None = None,
) -> Sound:
    """Read audio as 16 kHz mono. A truncated file is read as far as it goes, with a warning.

    Args:
        audio: a file by its path or opened in binary mode (pipes too): WAV with uncompressed samples; with the extra
            `audio` also what libsndfile reads (FLAC, Ogg, MP3, ...) and audio tracks that FFmpeg reads (M4A, MP4, MKV,
            WebM, ...); or samples: (n,) or (n, channels), floats with full scale 1 or integers with that of their
            type. Channels are averaged. A Sound is returned as it is.
        sample_rate: Hz, of samples given as an array; ignored for files.
        max_seconds: longer audio is refused, before more than this is decoded; inf: no limit.
        on_block: called after each block that was decoded; an exception from it ends the reading.

    Raises:
        FileNotFoundError: no such file.
        AudioError: not audio, empty, truncated before the first sample, a sampling rate below 2 kHz, above 1 MHz or
            one that cannot be converted to 16 kHz, or samples that are NaN, infinite or far too large; TooLong: longer
            than max_seconds.
        UnsupportedError: the extra `audio` is needed and missing.
        ValueError: sample_rate or max_seconds is not positive.
    """
    if real("max_seconds", max_seconds) <= 0:
        raise ValueError(f"max_seconds must be positive, got {max_seconds}")
    if isinstance(audio, Sound):
        return audio
    made = partial(_Collector, max_seconds=max_seconds, on_block=on_block)
    if isinstance(audio, (str, os.PathLike)):
        return _read(Path(audio), made)
    if hasattr(audio, "read"):
        return _of_bytes(audio.read(), _name_of(audio), made)
    if whole("sample_rate", sample_rate) <= 0:
        raise ValueError(f"sample_rate must be positive, got {sample_rate}")
    return _of_samples(_as_float(np.asarray(audio)), made("audio", sample_rate))


def seconds(samples: Samples) -> float:
    """Duration of samples at 16 kHz."""
    return len(samples) / SAMPLE_RATE


def _name_of(file: Any) -> str:
    """The name of an open file, for messages."""
    name = getattr(file, "name", None)
    return name.strip("<>") if isinstance(name, str) else "audio"


def _read(path: Path, made: _MakeCollector) -> Sound:
    if not path.exists():
        hint = "; sounds are files here: download it first" if str(path).startswith(("http:/", "https:/")) else ""
        raise FileNotFoundError(f"{path}: no such file{hint}")
    if path.is_fifo():
        return _of_bytes(path.read_bytes(), str(path), made)
    if not path.is_file():
        raise AudioError(f"{path} is not a file{': name the sounds in the directory' if path.is_dir() else ''}")
    if path.stat().st_size == 0:
        raise AudioError(f"{path}: an empty file")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _of_file(path, data, str(path), made)


def _of_bytes(data: Any, name: str, made: _MakeCollector) -> Sound:
    """Read from a pipe or an open file."""
    if not isinstance(data, bytes):
        raise AudioError(f"{name}: opened as text; open it in binary ('rb')")
    if not data:
        raise AudioError(f"{name}: an empty file")
    return _of_file(io.BytesIO(data), data, name, made)


def _of_file(file: Path | io.BytesIO, data: Content, name: str, made: _MakeCollector) -> Sound:
    """Decode a file whose content is `data`."""
    source = decoder(file, data, name)
    gathered = made(name, source.rate)
    if source.announced is not None and not source.cut:
        gathered.allow(source.announced)
    for block in source.blocks():
        gathered.add(block.mean(axis=1, dtype=np.float32) if block.shape[1] > 1 else block[:, 0])
    samples = gathered.samples(source.cut)
    return Sound(samples, (_cut_off(name, gathered.n / source.rate, source),) if source.cut else ())


def _cut_off(name: str, lasts: float, source: Decoder) -> str:
    of = f" of {source.announced / source.rate:.2f} s" if source.announced else ""
    of = of if source.announced and source.announced / source.rate > lasts else ""
    return f"{name}: cut off after {lasts:.2f} s{of}; what there is was read"


def _of_samples(samples: Samples, gathered: _Collector) -> Sound:
    if samples.ndim == 2:
        samples = samples.mean(axis=1, dtype=np.float32)
    gathered.allow(len(samples))
    as_is = gathered.rate == SAMPLE_RATE
    take = gathered.look_at if as_is else gathered.add  # at 16 kHz samples are checked, not copied
    for start in range(0, len(samples), _AT_ONCE):
        take(samples[start : start + _AT_ONCE])
    made = gathered.samples()
    return Sound(np.ascontiguousarray(samples, np.float32) if as_is else made)


class _Collector:
    """Collects the samples of one channel: checks them and resamples them to 16 kHz.

    Attributes:
        n: samples so far, at the original rate. rate: that, Hz.
    """

    def __init__(self, name: str, rate: int, max_seconds: float, on_block: Callable[[], object] | None):
        if rate < _LEAST_RATE:
            raise AudioError(f"{name}: a sampling rate of {rate} Hz holds no speech: {_LEAST_RATE} Hz is the least")
        if rate > _MOST_RATE:
            raise AudioError(f"{name}: a sampling rate of {rate} Hz; {_MOST_RATE} Hz is the most: resample it first")
        self.n, self.rate = 0, rate
        self._name, self._max_seconds, self._on_block = name, max_seconds, on_block
        self._most = inf if max_seconds == inf else int(max_seconds * rate)
        self._bad, self._first_bad, self._peak = 0, 0, 0.0
        self._resampled = bytearray()  # grows in place: concatenating a list of blocks would take twice the memory
        try:
            self._resampler = None if rate == SAMPLE_RATE else Resampler(rate, SAMPLE_RATE)
        except ValueError as error:
            raise AudioError(f"{name}: {error}") from None

    def allow(self, n: int) -> None:
        """AudioError: n samples are more than max_seconds."""
        if n > self._most:
            raise TooLong(
                f"{self._name}: longer than {self._max_seconds:g} s: give max_seconds (--max-seconds) more, or cut it"
            )

    def add(self, samples: Samples) -> None:
        self.look_at(samples)
        at_16_khz = samples if self._resampler is None else self._resampler.push(samples)
        self._resampled += at_16_khz.tobytes()

    def look_at(self, samples: Samples) -> None:
        """Count and check samples."""
        if self._on_block is not None:
            self._on_block()
        self.allow(self.n + len(samples))
        finite = np.isfinite(samples)
        if finite.all():
            self._peak = max(self._peak, float(np.abs(samples).max(initial=0.0)))
        else:
            self._first_bad = self._first_bad if self._bad else self.n + int(finite.argmin())
            self._bad += int(np.count_nonzero(~finite))
        self.n += len(samples)

    def samples(self, cut: bool = False) -> Samples:
        """All samples at 16 kHz. AudioError: they cannot be used. cut: the file was truncated, for the message."""
        name = self._name
        if not self.n:
            raise AudioError(f"{name}: {'cut off before its first sample' if cut else 'no samples in it'}")
        if self._bad:
            raise AudioError(f"{name}: {self._bad} samples are NaN or infinite, the first at sample {self._first_bad}")
        if self._peak > _LOUDEST:
            raise AudioError(
                f"{name}: full scale is 1, and samples reach {self._peak:.6g}: divide them by theirs, such as 32768"
            )
        if self._resampler is not None:
            self._resampled += self._resampler.finish().tobytes()
        return np.frombuffer(self._resampled, np.float32)


_MakeCollector = Callable[[str, int], _Collector]
"""Of a sound with this name and sampling rate."""


def _as_float(samples: NDArray[Any]) -> Samples:
    if samples.ndim not in (1, 2) or samples.dtype.kind not in "fiu":
        raise AudioError(
            "a sound is a file or an array of numbers, of shape (n,) or (n, channels), and a list is several of these; "
            f"got {samples.dtype} of shape {samples.shape}"
        )
    if not samples.size:
        raise AudioError("audio: no samples in it")
    if samples.ndim == 2 and samples.shape[1] > max(len(samples), _MOST_CHANNELS):
        raise AudioError(f"samples of shape {samples.shape} have channels first: transpose them to (n, channels)")
    if samples.dtype.kind == "f":
        return samples.astype(np.float32, copy=False)
    kind = np.iinfo(samples.dtype)
    middle = (kind.max + 1) // 2 if kind.min == 0 else 0  # unsigned samples: zero is the middle of the range
    return ((samples.astype(np.float64) - middle) / (kind.max + 1 - middle)).astype(np.float32)
