"""What transcribing returns."""

from __future__ import annotations

from dataclasses import dataclass

from slimrt.results import Record


@dataclass(frozen=True)
class Word(Record):
    """A word, with the space before it. start, end: seconds; probability: mean of its tokens'."""

    word: str
    start: float
    end: float
    probability: float


@dataclass(frozen=True)
class Segment(Record):
    """A stretch of speech.

    Attributes:
        id: its number, from 0.
        start, end: seconds.
        text, tokens: tokens with the times told.
        temperature: that the window was decoded with.
        avg_logprob, compression_ratio, no_speech_prob: of the window; no_speech_prob 0.0 where the model tells none.
        words: None where not asked for.
    """

    id: int
    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    words: tuple[Word, ...] | None = None

    def __str__(self) -> str:
        return f"[{self.start:.2f} -> {self.end:.2f}] {self.text.strip()}"


@dataclass(frozen=True)
class TranscriptionInfo(Record):
    """About a whole sound.

    Attributes:
        language: code, as given or detected; None of a model that does not tell.
        language_probability: 1.0 where it was given, 0.0 where nothing was heard.
        duration: seconds. duration_heard: of them, without skipped silence or what is outside clip_timestamps.
        seed: that reproduces it.
        warnings: what its file's reader should know, in sentences: that it is cut off.
    """

    language: str | None
    language_probability: float
    duration: float
    duration_heard: float
    seed: int
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        told = f"language {self.language} ({self.language_probability:.0%}), " if self.language else ""
        return f"{told}{self.duration:.2f} s, of which {self.duration_heard:.2f} s were heard"
