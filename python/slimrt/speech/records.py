"""The results of transcription."""

from __future__ import annotations

from dataclasses import dataclass

from slimrt.results import Record


@dataclass(frozen=True)
class Word(Record):
    """A word, with the space before it. start, end: seconds; probability: the mean of its tokens' probabilities."""

    word: str
    start: float
    end: float
    probability: float


@dataclass(frozen=True)
class Segment(Record):
    """A segment of a transcript.

    Attributes:
        id: its number, from 0.
        start, end: seconds.
        text: without timestamps. tokens: ids, timestamp tokens included.
        temperature: with which its window was decoded.
        avg_logprob, compression_ratio, no_speech_prob: of the window; no_speech_prob is 0.0 if the model has none.
        words: None if word_timestamps was not asked for.
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
    """Information on a whole sound.

    Attributes:
        language: code, as given or detected; None: the model does not detect it.
        language_probability: 1.0 if the language was given, 0.0 if there was nothing to transcribe.
        duration: seconds. duration_heard: seconds transcribed, without skipped silence and outside clip_timestamps.
        seed: reproduces the result.
        warnings: sentences about the file, such as that it is truncated.
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
