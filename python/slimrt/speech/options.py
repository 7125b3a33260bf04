"""How a sound is transcribed: the keywords of Model.transcribe, and their checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from slimrt.arguments import check_function, check_seed, real, whole
from slimrt.options import OnProgress

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


class TranscribeOptions(TypedDict, total=False):
    """The keywords of transcribe. See Model.transcribe."""

    language: str | None
    task: str
    timestamps: bool
    word_timestamps: bool
    num_beams: int
    best_of: int
    length_penalty: float
    temperature: float | Sequence[float]
    compression_ratio_threshold: float | None
    logprob_threshold: float | None
    no_speech_threshold: float | None
    condition_on_previous_text: bool
    initial_prompt: str | None
    max_initial_timestamp: float | None
    suppress_tokens: Sequence[int] | None
    skip_silence: bool
    seed: int | None
    on_progress: OnProgress | None


@dataclass(frozen=True)
class Transcription:
    """The same with their defaults, checked.

    Raises:
        ValueError, TypeError: an option out of its range, or of a wrong kind.
    """

    language: str | None = None
    task: str = "transcribe"
    timestamps: bool = True
    word_timestamps: bool = False
    num_beams: int = 1
    best_of: int = 1
    length_penalty: float = 1.0
    temperature: float | Sequence[float] = TEMPERATURES
    compression_ratio_threshold: float | None = 2.4
    logprob_threshold: float | None = -1.0
    no_speech_threshold: float | None = 0.6
    condition_on_previous_text: bool = True
    initial_prompt: str | None = None
    max_initial_timestamp: float | None = 1.0
    suppress_tokens: Sequence[int] | None = None
    skip_silence: bool = False
    seed: int | None = None
    on_progress: OnProgress | None = None

    def __post_init__(self) -> None:
        for name in ("num_beams", "best_of"):
            if whole(name, getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold"):
            if getattr(self, name) is not None:
                real(name, getattr(self, name))
        if self.max_initial_timestamp is not None and real("max_initial_timestamp", self.max_initial_timestamp) < 0:
            raise ValueError(f"max_initial_timestamp must not be negative, got {self.max_initial_timestamp}")
        real("length_penalty", self.length_penalty)
        if not self.temperatures or min(self.temperatures) < 0:
            raise ValueError(f"temperature must be 0 or more, or several of these, got {self.temperature}")
        check_seed(self.seed)
        check_function("on_progress", self.on_progress)

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Tried one after the other while the thresholds call the result a failure."""
        several = self.temperature if isinstance(self.temperature, Sequence) else (self.temperature,)
        return tuple(real("temperature", one) for one in several)

    @property
    def sequences(self) -> int:
        """That one sound takes at once."""
        return max(self.num_beams if 0.0 in self.temperatures else 1, self.best_of)
