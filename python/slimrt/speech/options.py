"""The keywords of Model.transcribe, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from types import NoneType
from typing import Any, TypedDict

from slimrt.generation.options import OnProgress
from slimrt.plumbing.arguments import check_bool, check_function, check_seed, exponent, positive, real, whole
from slimrt.speech.audio import MAX_SECONDS
from slimrt.speech.languages import code_of
from slimrt.speech.records import Segment, TranscriptionInfo
from slimrt.speech.vad import Vad, VadParameters

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
OnSegment = Callable[[int, Segment], object]
OnResult = Callable[[int, list[Segment], TranscriptionInfo], object]


class DetectOptions(TypedDict, total=False):
    """The keywords of detect_language. See Model.detect_language."""

    vad: str
    vad_parameters: VadParameters | None
    skip_silence: bool
    max_seconds: float


class TranscribeOptions(DetectOptions, total=False):
    """The keywords of transcribe. See Model.transcribe."""

    language: str | None
    task: str
    timestamps: bool
    word_timestamps: bool
    num_beams: int
    best_of: int
    patience: float
    length_penalty: float
    temperature: float | Sequence[float]
    compression_ratio_threshold: float | None
    logprob_threshold: float | None
    no_speech_threshold: float | None
    condition_on_previous_text: bool
    initial_prompt: str | None
    hotwords: str | None
    prefix: str | None
    max_initial_timestamp: float | None
    suppress_blank: bool
    suppress_tokens: Sequence[int] | None
    clip_timestamps: Sequence[float] | str
    batch_size: int | None
    seed: int | None
    on_progress: OnProgress | None
    on_segment: OnSegment | None
    on_result: OnResult | None


@dataclass(frozen=True)
class Transcription:
    """The keywords of TranscribeOptions with their defaults, checked.

    Raises:
        ValueError, TypeError: an option out of its range, or of a wrong type.
    """

    language: str | None = None
    task: str = "transcribe"
    timestamps: bool = True
    word_timestamps: bool = False
    num_beams: int = 1
    best_of: int = 1
    patience: float = 1.0
    length_penalty: float = 1.0
    temperature: float | Sequence[float] = TEMPERATURES
    compression_ratio_threshold: float | None = 2.4
    logprob_threshold: float | None = -1.0
    no_speech_threshold: float | None = 0.6
    condition_on_previous_text: bool = True
    initial_prompt: str | None = None
    hotwords: str | None = None
    prefix: str | None = None
    max_initial_timestamp: float | None = 1.0
    suppress_blank: bool = True
    suppress_tokens: Sequence[int] | None = None
    clip_timestamps: Sequence[float] | str = ()
    skip_silence: bool = False
    vad: str = "none"
    vad_parameters: VadParameters | None = None
    batch_size: int | None = None
    max_seconds: float = MAX_SECONDS
    seed: int | None = None
    on_progress: OnProgress | None = None
    on_segment: OnSegment | None = None
    on_result: OnResult | None = None

    def __post_init__(self) -> None:
        for name in ("timestamps", "word_timestamps", "condition_on_previous_text", "suppress_blank", "skip_silence"):
            check_bool(name, getattr(self, name))
        for name in ("num_beams", "best_of"):
            positive(name, getattr(self, name))
        for name in ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold"):
            if getattr(self, name) is not None:
                real(name, getattr(self, name))
        latest = self.max_initial_timestamp
        if latest is not None and not 0 <= real("max_initial_timestamp", latest) < inf:
            raise ValueError(f"max_initial_timestamp must be 0 or more, or None for no limit, got {latest}")
        exponent("length_penalty", self.length_penalty)
        if not 0 < real("patience", self.patience) < inf:
            raise ValueError(f"patience must be above 0, got {self.patience}")
        for name in ("language", "initial_prompt", "hotwords", "prefix"):
            if not isinstance(getattr(self, name), (str, NoneType)):
                raise TypeError(f"{name} must be a text, got {getattr(self, name)!r}")
        for id in _listed("suppress_tokens", () if self.suppress_tokens is None else self.suppress_tokens):
            whole("suppress_tokens", id)
        if self.language is not None:
            object.__setattr__(self, "language", code_of(self.language))  # the dataclass is frozen
        self._check_clips()
        self._check_search()
        if self.batch_size is not None:
            positive("batch_size", self.batch_size)
        check_seed(self.seed)
        for name in ("on_progress", "on_segment", "on_result"):
            check_function(name, getattr(self, name))

    def _check_search(self) -> None:
        """Check the temperatures, and that no option is given that none of them uses."""
        if not self.temperatures or not all(0 <= one < inf for one in self.temperatures):
            raise ValueError(f"temperature must be 0 or more, or several of these, got {self.temperature}")
        if self.num_beams > 1 and 0.0 not in self.temperatures:
            raise ValueError(f"num_beams={self.num_beams} search at temperature 0, and none of {self.temperature} is 0")
        if self.best_of > 1 and max(self.temperatures) == 0:
            raise ValueError(
                f"best_of={self.best_of} texts are sampled at temperatures above 0: give one with temperature"
            )
        if self.patience != 1 and self.num_beams == 1:
            raise ValueError(f"patience={self.patience} is for beam search: give num_beams too")
        if self.length_penalty != 1 and max(self.num_beams, self.best_of) == 1:
            raise ValueError(f"length_penalty={self.length_penalty} compares texts: give num_beams or best_of too")

    def _check_clips(self) -> None:
        times = self._clip_times()
        if any(later <= earlier for earlier, later in pairwise(times)) or min(times, default=0.0) < 0:
            raise ValueError(f"clip_timestamps are seconds, each later than the one before, got {times}")
        if times and self.voice is not None:
            name = "skip_silence" if self.skip_silence else "vad"
            raise ValueError(f"clip_timestamps and {name} both say what to leave out: give one of them")

    def _clip_times(self) -> list[float]:
        """clip_timestamps as numbers, also if given as text."""
        given: Any = self.clip_timestamps
        if isinstance(given, str):
            try:
                given = [float(part) for part in given.split(",")]
            except ValueError:
                raise ValueError(f"clip_timestamps must be seconds separated by commas, got '{given}'") from None
        return [real("clip_timestamps", time) for time in _listed("clip_timestamps", given)]

    def clips(self, duration: float) -> list[tuple[float, float]]:
        """The clips to transcribe, (start, end) in seconds: all of the duration, or what clip_timestamps names."""
        times = [min(time, duration) for time in self._clip_times()] or [0.0]
        ends = times if len(times) % 2 == 0 else [*times, duration]
        return list(zip(ends[::2], ends[1::2], strict=True))

    @property
    def voice(self) -> Vad | None:
        """The voice activity detection used to skip silence; None: nothing is skipped."""
        return Vad.of("energy" if self.skip_silence and self.vad == "none" else self.vad, self.vad_parameters)

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Temperatures to try in turn while the thresholds reject the result."""
        several = self.temperature if isinstance(self.temperature, Sequence) else (self.temperature,)
        return tuple(real("temperature", one) for one in several)

    @property
    def sequences(self) -> int:
        """Sequences used at once for one sound."""
        return max(self.num_beams if 0.0 in self.temperatures else 1, self.best_of)


def _listed(name: str, given: Any) -> list[Any]:
    """The values of a list. TypeError: it is a single value or text."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"{name} must be a list, got {given!r}")
    return list(given)
