"""Where a sound is loud enough to be speech, by its energy, and the way back from a sound without its silences."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slimrt.speech.audio import SAMPLE_RATE, Samples

_FRAME = SAMPLE_RATE * 30 // 1000  # 30 ms
_BELOW_LOUD = 1e-4  # energy, over that of the loud frames: 40 dB less is silence
_ABOVE_QUIET = 4.0  # energy, over that of the quietest frames: 6 dB more than the room is speech
_HEARABLE = 1e-8  # mean square, full scale 1, below which nothing is speech: -80 dB
_PAUSE = 2.0  # seconds of silence that stay
_MARGIN = 0.4  # seconds kept around speech


def frame_energy(samples: Samples) -> NDArray[np.float64]:
    """Mean square of each 30 ms, float64 (frames,); the last frame may be shorter."""
    full = len(samples) // _FRAME
    energy = np.square(samples[: full * _FRAME].reshape(full, _FRAME), dtype=np.float64).mean(axis=1)
    rest = samples[full * _FRAME :]
    return np.append(energy, np.square(rest, dtype=np.float64).mean()) if len(rest) else energy


def speech_spans(samples: Samples, pause: float = _PAUSE, margin: float = _MARGIN) -> list[tuple[int, int]]:
    """Where there is speech: [start, end) in samples, in order, apart from each other.

    A frame is speech when its energy is within 40 dB of the loud ones (95 % quantile) and 6 dB above the quiet ones
    (10 % quantile), unless all are about alike. Silences up to `pause` seconds count as speech, and so does a `margin`
    around it.
    """
    energy = frame_energy(samples)
    loud, quiet = np.quantile(energy, 0.95), np.quantile(energy, 0.1)
    floor = max(loud * _BELOW_LOUD, min(quiet * _ABOVE_QUIET, loud / _ABOVE_QUIET), _HEARABLE)
    active: list[int] = np.flatnonzero(energy >= floor).tolist()
    spans: list[tuple[int, int]] = []
    around = int(margin * SAMPLE_RATE)
    for frame in active:
        start, end = max(frame * _FRAME - around, 0), min((frame + 1) * _FRAME + around, len(samples))
        if spans and start - spans[-1][1] < (pause - 2 * margin) * SAMPLE_RATE:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
    return spans


@dataclass(frozen=True)
class Skipped:
    """A sound without its silences.

    Attributes:
        samples: what is left.
        spans: where it was in the original, [start, end) in samples.
    """

    samples: Samples
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def silences_of(cls, samples: Samples) -> Skipped:
        """Everything of a sound but its silences; nothing at all of one without speech."""
        spans = speech_spans(samples)
        kept = [samples[start:end] for start, end in spans]
        return cls(np.concatenate(kept) if kept else samples[:0], tuple(spans))

    def original_time(self, time: float, *, ends: bool = False) -> float:
        """The second of the original at this second of what is left; ends: of two at a cut, the earlier."""
        lengths = [end - start for start, end in self.spans]
        before = np.concatenate(([0], np.cumsum(lengths)))
        sample = time * SAMPLE_RATE
        span = bisect_right(before, sample) - 1
        if ends and span > 0 and sample <= before[span]:
            span -= 1
        span = min(max(span, 0), len(self.spans) - 1)
        return float((self.spans[span][0] + min(sample - before[span], lengths[span])) / SAMPLE_RATE)


def quietest(samples: Samples, start: int, end: int) -> int:
    """The middle of the quietest 0.3 s between two samples: where a cut does least harm."""
    energy = frame_energy(samples[start:end])
    if len(energy) < 10:
        return end
    around = np.convolve(energy, np.ones(10), "valid")
    return start + (int(around.argmin()) + 5) * _FRAME
