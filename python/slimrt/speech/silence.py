"""Voice activity by energy, and the mapping of times in audio with silences removed to the original."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slimrt.speech.audio import SAMPLE_RATE, Samples

_FRAME = SAMPLE_RATE * 30 // 1000  # 30 ms
_BELOW_LOUD = 1e-4  # energy relative to loud frames: 40 dB lower is silence
_ABOVE_QUIET = 4.0  # energy relative to quiet frames: 6 dB above the background noise is speech
_MIN_ENERGY = 1e-8  # lower limit of the mean square (full scale 1) of speech: -80 dB

Span = tuple[int, int]


def frame_energy(samples: Samples) -> NDArray[np.float64]:
    """Mean square of each 30 ms frame, float64 (frames,); the last frame may be shorter."""
    full = len(samples) // _FRAME
    energy = np.square(samples[: full * _FRAME].reshape(full, _FRAME), dtype=np.float64).mean(axis=1)
    rest = samples[full * _FRAME :]
    return np.append(energy, np.square(rest, dtype=np.float64).mean()) if len(rest) else energy


def loud_spans(samples: Samples) -> list[Span]:
    """Where it is loud enough for speech: [start, end) in samples, in order.

    A frame is speech if its energy is within 40 dB of the loud frames (95 % quantile) and at least 6 dB above the quiet
    ones (10 % quantile), unless all are about equally loud.
    """
    if not len(samples):
        return []
    energy = frame_energy(samples)
    loud, quiet = np.quantile(energy, 0.95), np.quantile(energy, 0.1)
    floor = max(loud * _BELOW_LOUD, min(quiet * _ABOVE_QUIET, loud / _ABOVE_QUIET), _MIN_ENERGY)
    edges = np.flatnonzero(np.diff(energy >= floor, prepend=False, append=False)) * _FRAME
    return [(int(start), min(int(end), len(samples))) for start, end in edges.reshape(-1, 2)]


def joined(spans: Iterable[Span], n_samples: int, *, silence: int, pad: int, shortest: int = 0) -> list[Span]:
    """Merge spans with gaps shorter than `silence` or 2 * pad, drop short ones, and extend the others by `pad`.

    Args:
        n_samples: of the sound. silence, pad, shortest: samples; spans shorter than `shortest` are dropped.
    """
    whole: list[Span] = []
    for start, end in spans:
        if whole and start - whole[-1][1] < max(silence, 2 * pad):
            whole[-1] = (whole[-1][0], end)
        else:
            whole.append((start, end))
    return [(max(start - pad, 0), min(end + pad, n_samples)) for start, end in whole if end - start >= shortest]


@dataclass(frozen=True)
class Skipped:
    """A sound without its silences.

    Attributes:
        samples: the rest.
        spans: its parts in the original, [start, end) in samples.
    """

    samples: Samples
    spans: tuple[Span, ...]

    @classmethod
    def all_but(cls, samples: Samples, spans: Sequence[Span]) -> Skipped:
        """Keep only these spans of a sound."""
        kept = [samples[start:end] for start, end in spans]
        return cls(np.concatenate(kept) if kept else samples[:0], tuple(spans))

    @property
    def cuts(self) -> list[int]:
        """Indices into `samples` at which silence was removed."""
        return [int(cut) for cut in np.cumsum([end - start for start, end in self.spans])[:-1]]

    def original_time(self, time: float, *, ends: bool = False) -> float:
        """The time in the original, in seconds, of a time in `samples`. At a cut: with `ends` before the removed
        silence, else after it."""
        lengths = [end - start for start, end in self.spans]
        before = np.concatenate(([0], np.cumsum(lengths)))
        sample = time * SAMPLE_RATE
        span = bisect_right(before, sample) - 1
        if ends and span > 0 and sample <= before[span]:
            span -= 1
        span = min(max(span, 0), len(self.spans) - 1)
        return float((self.spans[span][0] + min(sample - before[span], lengths[span])) / SAMPLE_RATE)


def quietest(samples: Samples, start: int, end: int) -> int:
    """The middle of the quietest 0.3 s between two samples: a good place to cut."""
    energy = frame_energy(samples[start:end])
    if len(energy) < 10:
        return end
    around = np.convolve(energy, np.ones(10), "valid")
    return start + (int(around.argmin()) + 5) * _FRAME


def stretches(samples: Samples, longest: int, *, earliest: int, cuts: Sequence[int] = (), whole: int = 1) -> list[Span]:
    """Cut a sound into windows [start, end) of at most `longest` samples; none if it is empty.

    Args:
        earliest: minimum length of a window in samples, but for the last.
        cuts: where silence was removed: the last of these within reach is preferred, else the quietest place.
        whole: windows begin and end at multiples of this.
    """
    found, start = list[Span](), 0
    while len(samples) - start > longest:
        at = max((cut for cut in cuts if start + earliest <= cut <= start + longest), default=None)
        end = quietest(samples, start + earliest, start + longest) if at is None else at
        end -= end % whole
        found.append((start, end))
        start = end
    return [*found, (start, len(samples))] if start < len(samples) else found
