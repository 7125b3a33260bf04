"""Sound as the models want it: one channel, float32, 16 kHz."""

from __future__ import annotations

import io
import mmap
import os
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slimrt.errors import AudioError, UnsupportedError
from slimrt.plumbing.arguments import whole
from slimrt.speech.complete import Content, cut_off

SAMPLE_RATE = 16000  # samples a second
_LOUDEST = 100.0  # full scale is 1: more is samples of whole numbers, taken for floats
_MOST_CHANNELS = 32  # where there are fewer samples than these, axes are the other way round

Samples = NDArray[np.float32]
Audio = str | os.PathLike[str] | BinaryIO | ArrayLike


def load_audio(audio: Audio, sample_rate: int = SAMPLE_RATE) -> Samples:
    """A sound as float32 (n,) at 16 kHz, full scale 1.

    Args:
        audio: a file that libsndfile reads (WAV, FLAC, Ogg, MP3, ...), by its path or opened in binary (a pipe too),
            or samples: (n,) or (n, channels), floats with full scale 1 or whole numbers with that of their type.
            Channels are averaged.
        sample_rate: of samples, Hz; a file knows its own.

    Raises:
        FileNotFoundError: no such file.
        AudioError: not audio, cut off, empty, or NaN, infinity or far too large values among the samples.
        UnsupportedError: the extra `audio` is needed and missing.
        ValueError: sample_rate is not positive.
    """
    if isinstance(audio, (str, os.PathLike)):
        name = str(audio)
        samples, sample_rate = _read(Path(audio))
    elif hasattr(audio, "read"):
        name = _name_of(audio)
        samples, sample_rate = _of_bytes(audio.read(), name)
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


def _name_of(file: Any) -> str:
    """What an open file is called, for people."""
    name = getattr(file, "name", None)
    return name.strip("<>") if isinstance(name, str) else "audio"


def _read(path: Path) -> tuple[Samples, int]:
    """Samples float32 (n,) or (n, channels), and their rate."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    if path.is_fifo():
        return _of_bytes(path.read_bytes(), str(path))
    if not path.is_file():
        raise AudioError(f"{path} is not a file{': name the sounds in the directory' if path.is_dir() else ''}")
    if path.stat().st_size == 0:
        raise AudioError(f"{path}: an empty file")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _decoded(path, data, str(path))


def _of_bytes(data: Any, name: str) -> tuple[Samples, int]:
    """The same of what a pipe or an open file holds."""
    if not isinstance(data, bytes):
        raise AudioError(f"{name}: opened as text; open it in binary ('rb')")
    if not data:
        raise AudioError(f"{name}: an empty file")
    return _decoded(io.BytesIO(data), data, name)


def _decoded(file: Path | io.BytesIO, data: Content, name: str) -> tuple[Samples, int]:
    """The same of a file whose content is `data`."""
    soundfile = _extra("soundfile")
    try:
        with soundfile.SoundFile(file) as sound:
            announced, rate = sound.frames, sound.samplerate
            samples = sound.read(dtype="float32")
    except (soundfile.SoundFileError, RuntimeError) as error:
        reason = str(error).rpartition(": ")[2].rstrip(".")
        raise AudioError(f"{name}: not a sound that can be read ({reason}); WAV, FLAC, Ogg and MP3 can") from None
    if len(samples) < announced or cut_off(data):
        raise AudioError(f"{name}: cut off after {len(samples) / rate:.2f} s; get the whole file")
    return samples, int(rate)


def _as_float(samples: NDArray[Any]) -> Samples:
    if samples.ndim not in (1, 2) or samples.dtype.kind not in "fiu":
        raise AudioError(
            "a sound is a file or an array of numbers, of shape (n,) or (n, channels), and a list is several of these; "
            f"got {samples.dtype} of shape {samples.shape}"
        )
    if samples.ndim == 2 and samples.shape[1] > max(len(samples), _MOST_CHANNELS):
        raise AudioError(f"samples of shape {samples.shape} have channels first: transpose them to (n, channels)")
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
    peak = float(np.abs(samples).max())
    if peak > _LOUDEST:
        raise AudioError(f"{name}: full scale is 1, and samples reach {peak:.6g}: divide them by theirs, such as 32768")


def _extra(module: str) -> ModuleType:
    """soundfile or soxr, which only those need who have sound."""
    try:
        return __import__(module)
    except (ImportError, OSError):  # soundfile: OSError where libsndfile is missing
        raise UnsupportedError(f"this sound needs {module}: pip install 'slimrt[audio]'") from None
