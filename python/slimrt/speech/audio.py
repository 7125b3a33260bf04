"""Sound as the models want it: one channel, float32, 16 kHz."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slimrt.arguments import whole
from slimrt.errors import AudioError, UnsupportedError

SAMPLE_RATE = 16000  # samples a second

Samples = NDArray[np.float32]
Audio = str | os.PathLike[str] | ArrayLike


def load_audio(audio: Audio, sample_rate: int = SAMPLE_RATE) -> Samples:
    """A sound as float32 (n,) at 16 kHz, full scale 1.

    Args:
        audio: a file that libsndfile reads (WAV, FLAC, Ogg, MP3, ...), or samples: (n,) or (n, channels), floats with
            full scale 1 or whole numbers with that of their type. Channels are averaged.
        sample_rate: of samples, Hz; a file knows its own.

    Raises:
        FileNotFoundError: no such file.
        AudioError: not audio, cut off, empty, or NaN or infinity among the samples.
        UnsupportedError: the extra `audio` is needed and missing.
        ValueError: sample_rate is not positive.
    """
    if isinstance(audio, (str, os.PathLike)):
        name = str(audio)
        samples, sample_rate = _read(Path(audio))
    else:
        name, samples = "audio", _as_float(np.asarray(audio))
        if whole("sample_rate", sample_rate) <= 0:
            raise ValueError(f"sample_rate must be positive, got {sample_rate}")
    if samples.ndim == 2:
        samples = samples.mean(axis=1, dtype=np.float32)
    _check(samples, name)
    if sample_rate != SAMPLE_RATE:
        samples = _extra("soxr").resample(samples, sample_rate, SAMPLE_RATE)
        if not len(samples):
            raise AudioError(f"{name}: too short to resample to {SAMPLE_RATE} Hz")
    return np.ascontiguousarray(samples, np.float32)


def seconds(samples: Samples) -> float:
    """How long they last."""
    return len(samples) / SAMPLE_RATE


def _read(path: Path) -> tuple[Samples, int]:
    """Samples float32 (n,) or (n, channels), and their rate."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    if not path.is_file():
        raise AudioError(f"{path} is not a file")
    if path.stat().st_size == 0:
        raise AudioError(f"{path}: an empty file")
    soundfile = _extra("soundfile")
    try:
        with soundfile.SoundFile(path) as file:
            announced, rate = file.frames, file.samplerate
            samples = file.read(dtype="float32")
    except (soundfile.SoundFileError, RuntimeError) as error:
        reason = str(error).rpartition(": ")[2].rstrip(".")
        raise AudioError(f"{path}: not a sound that can be read ({reason}); WAV, FLAC, Ogg and MP3 can") from None
    if len(samples) < announced or _cut_off(path):
        raise AudioError(f"{path}: cut off after {len(samples) / rate:.2f} s; get the whole file")
    return samples, int(rate)


def _cut_off(path: Path) -> bool:
    """Whether a RIFF file has less in it than its header says. libsndfile reads such a file to its end and says
    nothing; a header of a stream, written before the length was known, says 0 or 2^32 - 1 and is believed."""
    with path.open("rb") as file:
        head, size = file.read(12), path.stat().st_size
        if head[:4] != b"RIFF" or head[8:] != b"WAVE":
            return False
        at = 12
        while at + 8 <= size:
            file.seek(at)
            chunk = file.read(8)
            length = int.from_bytes(chunk[4:], "little")
            if chunk[:4] == b"data":
                return 0 < length < 0xFFFFFF00 and at + 8 + length > size
            at += 8 + length + length % 2
    return False


def _as_float(samples: NDArray[Any]) -> Samples:
    if samples.ndim not in (1, 2) or samples.dtype.kind not in "fiu":
        raise AudioError(
            f"samples are numbers of shape (n,) or (n, channels), got {samples.dtype} of shape {samples.shape}"
        )
    if samples.dtype.kind == "f":
        return samples.astype(np.float32, copy=False)
    kind = np.iinfo(samples.dtype)
    middle = (kind.max + 1) // 2 if kind.min == 0 else 0  # unsigned sound is silent in the middle of its range
    return ((samples.astype(np.float64) - middle) / (kind.max + 1 - middle)).astype(np.float32)


def _check(samples: Samples, name: str) -> None:
    if not len(samples):
        raise AudioError(f"{name}: no samples in it")
    bad = ~np.isfinite(samples)
    if bad.any():
        raise AudioError(f"{name}: {int(bad.sum())} samples are NaN or infinite, the first at sample {bad.argmax()}")


def _extra(module: str) -> ModuleType:
    """soundfile or soxr, which only those need who have sound."""
    try:
        return __import__(module)
    except (ImportError, OSError):  # soundfile: OSError where libsndfile is missing
        raise UnsupportedError(f"this sound needs {module}: pip install 'slimrt[audio]'") from None
