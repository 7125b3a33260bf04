"""Sounds being transcribed, and the callbacks that report on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slimrt.speech.audio import Samples, Sound, seconds
from slimrt.speech.options import Transcription
from slimrt.speech.records import Segment, TranscriptionInfo, Word
from slimrt.speech.silence import Skipped

Transcript = tuple[list[Segment], TranscriptionInfo]


class Progress:
    """Reports the progress of a batch of sounds, added up, in hundredths of a second."""

    def __init__(self, options: Transcription, durations: Sequence[float]):
        self._report = options.on_progress
        self._done = [0.0] * len(durations)
        self._total = sum(durations)

    def heard(self, index: int, time: float) -> None:
        if time <= self._done[index]:
            return
        self._done[index] = time
        if self._report is not None:
            self._report("transcribe", round(100 * sum(self._done)), round(100 * self._total))


@dataclass(frozen=True)
class Source:
    """The index-th sound of a batch.

    Attributes:
        skipped: the sound without its silences; None: nothing is skipped.
        seed: for sampling.
    """

    sound: Sound
    skipped: Skipped | None
    seed: int
    options: Transcription
    progress: Progress
    index: int

    @property
    def samples(self) -> Samples:
        """The samples to transcribe, without skipped silences."""
        return self.sound.samples if self.skipped is None else self.skipped.samples

    @property
    def cuts(self) -> Sequence[int]:
        """Indices into `samples` at which silence was removed."""
        return () if self.skipped is None else self.skipped.cuts

    def heard(self, time: float) -> None:
        """Report that `time` seconds of the samples are done."""
        self.progress.heard(self.index, time if self.skipped is None else self.skipped.original_time(time, ends=True))

    def told(self, segment: Segment) -> Segment:
        """Report the next segment, with its times in the original sound; returns it."""
        segment = segment if self.skipped is None else _moved(segment, self.skipped)
        if self.options.on_segment is not None:
            self.options.on_segment(self.index, segment)
        return segment

    def finished(self, segments: list[Segment], language: str | None, probability: float) -> Transcript:
        """Report the end of the sound; returns the transcript."""
        duration = seconds(self.sound.samples)
        self.progress.heard(self.index, duration)  # including skipped parts at its end
        spoken = sum(end - start for start, end in self.options.clips(seconds(self.samples)))
        info = TranscriptionInfo(language, probability, duration, spoken, self.seed, self.sound.warnings)
        if self.options.on_result is not None:
            self.options.on_result(self.index, segments, info)
        return segments, info


def _moved(segment: Segment, skipped: Skipped) -> Segment:
    words = segment.words and tuple(
        Word(word.word, skipped.original_time(word.start), skipped.original_time(word.end, ends=True), word.probability)
        for word in segment.words
    )
    start, end = skipped.original_time(segment.start), skipped.original_time(segment.end, ends=True)
    return replace(segment, start=start, end=end, words=words)
