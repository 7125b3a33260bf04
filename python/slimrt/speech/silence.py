"""Where a sound is loud enough to be speech, by its energy, and the way back from a sound without its silences."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slimrt.speech.audio import SAMPLE_RATE, Samples

_FRAME = SAMPLE_RATE * 30 // 1000  # 30 ms
_BELOW_LOUD = 1e-4  # energy, over that of the loud frames: 40 dB less is silence
_ABOVE_QUIET = 4.0  # energy, over that of the quietest frames: 6 dB more than the room is speech
_HEARABLE = 1e-8  # mean square, full scale 1, below which nothing is speech: -80 dB

Span = tuple[int, int]


def frame_energy(samples: Samples) -> NDArray[np.float64]:
    """Mean square of each 30 ms, float64 (frames,); the last frame may be shorter."""
    full = len(samples) // _FRAME
    energy = np.square(samples[: full * _FRAME].reshape(full, _FRAME), dtype=np.float64).mean(axis=1)
    rest = samples[full * _FRAME :]
    return np.append(energy, np.square(rest, dtype=np.float64).mean()) if len(rest) else energy


def loud_spans(samples: Samples) -> list[Span]:
    """Where it is loud enough to be speech: [start, end) in samples, in order.

    A frame is speech when its energy is within 40 dB of the loud ones (95 % quantile) and 6 dB above the quiet ones
    (10 % quantile), unless all are about alike.
    """
    if not len(samples):
        return []
    energy = frame_energy(samples)
    loud, quiet = np.quantile(energy, 0.95), np.quantile(energy, 0.1)
    floor = max(loud * _BELOW_LOUD, min(quiet * _ABOVE_QUIET, loud / _ABOVE_QUIET), _HEARABLE)
    edges = np.flatnonzero(np.diff(energy >= floor, prepend=False, append=False)) * _FRAME
    return [(int(start), min(int(end), len(samples))) for start, end in edges.reshape(-1, 2)]


def joined(spans: Iterable[Span], n_samples: int, *, silence: int, pad: int, shortest: int = 0) -> list[Span]:
    """Spans with all between them that is shorter than `silence`, or than what is kept on either side of it.

    Args:
        n_samples: of the sound. silence, pad, shortest: samples; what is shorter than the last is left out.
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
        samples: what is left.
        spans: where it was in the original, [start, end) in samples.
    """

    samples: Samples
    spans: tuple[Span, ...]

    @classmethod
    def all_but(cls, samples: Samples, spans: Sequence[Span]) -> Skipped:
        """A sound without what is outside these spans; nothing at all where there are none."""
        kept = [samples[start:end] for start, end in spans]
        return cls(np.concatenate(kept) if kept else samples[:0], tuple(spans))

    @property
    def cuts(self) -> list[int]:
        """Samples of what is left at which silence was taken out."""
        return [int(cut) for cut in np.cumsum([end - start for start, end in self.spans])[:-1]]

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


def stretches(samples: Samples, longest: int, *, earliest: int, cuts: Sequence[int] = (), whole: int = 1) -> list[Span]:
    """A sound cut into [start, end) of at most `longest` samples; no samples, no stretches.

    Args:
        earliest: samples of a stretch before which it does not end, unless the sound does.
        cuts: where silence was taken out: the last of these that is in reach is taken, else it is where it is quietest.
        whole: they begin and end at multiples of this.
    """
    found, start = list[Span](), 0
    while len(samples) - start > longest:
        at = max((cut for cut in cuts if start + earliest <= cut <= start + longest), default=None)
        end = quietest(samples, start + earliest, start + longest) if at is None else at
        end -= end % whole
        found.append((start, end))
        start = end
    return [*found, (start, len(samples))] if start < len(samples) else found
