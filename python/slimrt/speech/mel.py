"""The log-mel spectrogram, Whisper's input.

Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision" (2022), section 2.2: 80 (or 128) mel
channels of 25 ms windows every 10 ms. The mel scale is that of M. Slaney's Auditory Toolbox (1998), linear below 1 kHz
and logarithmic above.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from slimrt.speech.audio import SAMPLE_RATE, Samples

WINDOW = 400  # samples of one frame: 25 ms
HOP = 160  # samples from one frame to the next: 10 ms
FRAMES_PER_SECOND = SAMPLE_RATE // HOP
_BINS = WINDOW // 2 + 1
_LOWEST = 1e-10  # lower limit of the power
_RANGE = 8.0  # dynamic range in decades: values further below the maximum are clamped
_CHUNK = 512  # frames transformed at once: their spectra take 3 MB; those of an hour would take 2 GB

Mel = NDArray[np.float32]


def log_mel(samples: Samples, n_mels: int, padding: int = 0) -> Mel:
    """The log-mel spectrogram of a sound, float32 (len // 160 frames, n_mels), values of about -1 to 1.

    Args:
        samples: (n,), 16 kHz.
        n_mels: 80 or 128.
        padding: samples of silence appended.

    The sound is mirrored at both ends, so that frame i is centred on sample 160 i; the last frame is dropped.
    """
    n_frames = (len(samples) + padding) // HOP
    if n_frames == 0:
        return np.zeros((0, n_mels), np.float32)
    length = max(len(samples) + padding, WINDOW // 2 + 1)
    window, filters = _hann(), mel_filters(n_mels).T
    result = np.full((n_frames, n_mels), np.log10(np.float32(_LOWEST)), np.float32)
    heard = n_frames  # frames to compute: later ones hold padding only, unless the end of the sound is mirrored there
    if padding > 2 * WINDOW:
        heard = min(-(-(len(samples) + WINDOW // 2) // HOP), n_frames)
    for start in range(0, heard, _CHUNK):
        stop = min(start + _CHUNK, heard)
        part = _reflected(samples, length, start * HOP - WINDOW // 2, (stop - 1) * HOP + WINDOW // 2)
        frames = np.lib.stride_tricks.sliding_window_view(part, WINDOW)[::HOP]
        spectrum = np.fft.rfft(frames * window)
        power = (spectrum.real**2 + spectrum.imag**2).astype(np.float32)
        result[start : start + len(frames)] = np.log10(np.maximum(power @ filters, _LOWEST))
    np.maximum(result, result.max() - _RANGE, out=result)
    result += 4.0
    result /= 4.0
    return result


def _reflected(samples: Samples, length: int, start: int, stop: int) -> Samples:
    """Samples [start, stop) of a sound padded with silence up to `length`, mirrored at both ends."""
    if 0 <= start and stop <= len(samples):
        return samples[start:stop]
    index = np.abs(np.arange(start, stop))
    index = np.where(index < length, index, 2 * (length - 1) - index)
    part, heard = np.zeros(stop - start, np.float32), index < len(samples)
    part[heard] = samples[index[heard]]
    return part


@cache
def mel_filters(n_mels: int) -> NDArray[np.float32]:
    """Triangular filters over the bins of the spectrum, float32 (n_mels, 201), each of area 1 in Hz (Slaney's norm).

    Their corners are n_mels + 2 points, equally spaced on the mel scale from 0 to 8000 Hz.
    """
    corners = _mel_to_hz(np.linspace(0.0, _hz_to_mel(SAMPLE_RATE / 2), n_mels + 2))
    bins = np.linspace(0.0, SAMPLE_RATE / 2, _BINS)
    low, middle, high = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    triangles = np.maximum(0.0, np.minimum((bins - low) / (middle - low), (high - bins) / (high - middle)))
    return (triangles * (2.0 / (high - low))).astype(np.float32)


# Slaney's mel scale: 3 mel every 200 Hz up to 1 kHz (15 mel), then 27 mel for a factor of 6.4.
_MEL_PER_HZ = 3.0 / 200.0
_BREAK_HZ, _BREAK_MEL = 1000.0, 15.0
_MEL_PER_LOG = 27.0 / np.log(6.4)


def _hz_to_mel(hz: float) -> float:
    return hz * _MEL_PER_HZ if hz < _BREAK_HZ else _BREAK_MEL + _MEL_PER_LOG * float(np.log(hz / _BREAK_HZ))


def _mel_to_hz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    above = _BREAK_HZ * np.exp((mel - _BREAK_MEL) / _MEL_PER_LOG)
    return np.where(mel < _BREAK_MEL, mel / _MEL_PER_HZ, above)


@cache
def _hann() -> NDArray[np.float64]:
    """The periodic (not symmetric) Hann window of 400 samples."""
    return 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(WINDOW) / WINDOW)
