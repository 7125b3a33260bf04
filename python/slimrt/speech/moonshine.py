"""Moonshine on one sound: its input are the samples themselves, in windows of at most 30 s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from slimrt import core
from slimrt.generation.search import Append, Encode, Engine, Hypothesis, Logits, Task, beam_search, follow
from slimrt.speech.audio import SAMPLE_RATE, Samples, seconds
from slimrt.speech.options import Transcription
from slimrt.speech.records import Segment
from slimrt.speech.rules import compression_ratio
from slimrt.speech.silence import Span, stretches
from slimrt.speech.whisper import Heard, Told
from slimrt.tokenizer.tokenizer import Tokenizer

LONGEST = 30  # seconds of a window
_TOKENS_PER_SECOND = 6.5  # limit: more would be a repetition loop (Jeffries et al. 2024, section 3)
_SHORTEST = SAMPLE_RATE // 10  # samples that the first convolution needs


@dataclass(frozen=True)
class Moonshine:
    """The transcription of one sound. start: the decoder's first token; n_ctx: the most tokens of a sequence."""

    engine: Engine
    tokenizer: Tokenizer
    start: int
    n_ctx: int
    options: Transcription
    heard: Heard
    told: Told

    def transcribe(self, samples: Samples, _: object = None) -> Task[list[Segment]]:
        """Transcribe; one segment for each window of at most 30 s, cut where the sound is quietest."""
        segments: list[Segment] = []
        for begin, end in self.windows(samples, ()):
            for segment in (yield from self.window(samples, begin, end)):
                segments.append(replace(segment, id=len(segments)))
                self.told(segments[-1])
            self.heard(end / SAMPLE_RATE)
        return segments

    def prepare(self, samples: Samples) -> Samples:
        """The input of window(): the samples themselves."""
        return samples

    def windows(self, samples: Samples, cuts: Sequence[int]) -> list[Span]:
        """Split a sound into windows: [start, end) in samples."""
        longest = LONGEST * SAMPLE_RATE
        return stretches(samples, longest, earliest=longest // 2, cuts=cuts)

    def window(self, samples: Samples, start: int, end: int) -> Task[list[Segment]]:
        """The segment of a window; empty if there is no text. As Whisper's it begins with a space, so that the texts of
        windows can be joined."""
        sequence = self.engine.new_sequence()
        try:
            part = samples[start:end]
            yield Encode(sequence, np.pad(part, (0, max(_SHORTEST - len(part), 0)))[:, None])
            row = (yield Append([(sequence, [self.start])]))[0]
            found = yield from self._search(sequence, row, seconds(part))
        finally:
            self.engine.free_sequence(sequence)
        text = self.tokenizer.decode(found.tokens, skip_special_tokens=True).strip()
        times = start / SAMPLE_RATE, end / SAMPLE_RATE
        segment = Segment(0, *times, f" {text}", found.tokens, 0.0, found.score(), compression_ratio(text), 0.0)
        return [segment] if text else []

    def _search(self, sequence: int, row: Logits, duration: float) -> Task[Hypothesis]:
        limit = max(min(round(duration * _TOKENS_PER_SECOND), self.n_ctx - 1), 1)
        ends = frozenset(self.tokenizer.eog_ids)
        if self.options.num_beams == 1:
            return (yield from follow(sequence, row, _anything, core.Sampler(temperature=0.0), ends, limit))
        found = yield from beam_search(
            self.engine, sequence, row, _anything, ends, limit,
            num_beams=self.options.num_beams, length_penalty=self.options.length_penalty, early_stopping=True,
            patience=self.options.patience,
        )  # fmt: skip
        return found[0]


def _anything(row: Logits, tokens: object) -> None:
    """No rules: Moonshine's logits are used as they are."""
