"""Voice activity detection: by energy, or by Silero's network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from types import NoneType
from typing import Any, TypedDict

from slimrt.plumbing.arguments import real, unknown
from slimrt.speech.audio import SAMPLE_RATE, Samples
from slimrt.speech.silence import Span, joined, loud_spans
from slimrt.speech.silero import CHUNK, speech_probabilities

METHODS = ("none", "energy", "silero")
_HYSTERESIS = 0.15  # speech ends when its probability falls this far below the threshold
_LOWEST = 0.01


class VadParameters(TypedDict, total=False):
    """Parameters of voice activity detection: see Vad."""

    threshold: float
    min_speech_duration_ms: float
    min_silence_duration_ms: float
    speech_pad_ms: float


@dataclass(frozen=True)
class Vad:
    """Voice activity detection, with faster-whisper's names and defaults.

    Args:
        method: "energy" or "silero".
        threshold: probability from which a chunk is speech; for "silero" only.
        min_speech_duration_ms: shorter speech is ignored. min_silence_duration_ms: shorter silence is kept.
            speech_pad_ms: kept on either side of speech.

    Raises:
        ValueError, TypeError: an unknown method or parameter, or one out of its range.
    """

    method: str
    threshold: float = 0.5
    min_speech_duration_ms: float = 0.0
    min_silence_duration_ms: float = 2000.0
    speech_pad_ms: float = 400.0

    def __post_init__(self) -> None:
        if not 0 < real("threshold", self.threshold) <= 1:
            raise ValueError(f"threshold must be above 0 and at most 1, got {self.threshold}")
        for name in ("min_speech_duration_ms", "min_silence_duration_ms", "speech_pad_ms"):
            if not 0 <= real(name, getattr(self, name)) < inf:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")

    @classmethod
    def of(cls, method: str, parameters: Mapping[str, Any] | None) -> Vad | None:
        """From the options vad and vad_parameters; None for "none"."""
        if not isinstance(parameters, (Mapping, NoneType)):
            raise TypeError(f"vad_parameters must map names to numbers, got {parameters!r}")
        given = dict(parameters or {})
        if method not in METHODS:
            raise ValueError(unknown("vad", method, METHODS))
        for name in given:
            if name not in VadParameters.__annotations__:
                raise ValueError(unknown("vad_parameters'", name, VadParameters.__annotations__))
        if method == "none" and given:
            raise ValueError(f"{', '.join(given)}: say which vad is meant, 'silero' or 'energy'")
        if method == "energy" and "threshold" in given:
            raise ValueError("threshold is a probability of vad 'silero'; 'energy' has none")
        return None if method == "none" else cls(method, **given)

    def spans(self, samples: Samples) -> list[Span]:
        """Where there is speech: [start, end) in samples, in order, not overlapping.

        Raises:
            UnsupportedError: the extra `vad` is needed and missing.
        """
        found = loud_spans(samples) if self.method == "energy" else self._spoken(samples)
        silence, pad, shortest = (
            round(ms * SAMPLE_RATE / 1000)
            for ms in (self.min_silence_duration_ms, self.speech_pad_ms, self.min_speech_duration_ms)
        )
        return joined(found, len(samples), silence=silence, pad=pad, shortest=shortest)

    def _spoken(self, samples: Samples) -> list[Span]:
        """Speech begins at a chunk above the threshold, and ends at one clearly below it (hysteresis)."""
        spans: list[Span] = []
        start, leave = None, max(self.threshold - _HYSTERESIS, _LOWEST)
        for i, probability in enumerate(speech_probabilities(samples)):
            if start is None and probability >= self.threshold:
                start = i * CHUNK
            elif start is not None and probability < leave:
                spans.append((start, i * CHUNK))
                start = None
        return spans if start is None else [*spans, (start, len(samples))]
