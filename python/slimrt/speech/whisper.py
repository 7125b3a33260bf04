"""Whisper on one sound of any length: windows, temperature fallback, language detection, previous text."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from slimrt import core
from slimrt.generation.search import (
    Append,
    Encode,
    Engine,
    Hypothesis,
    Logits,
    Task,
    beam_search,
    follow,
    together,
)
from slimrt.plumbing.numbers import log_normaliser
from slimrt.speech.audio import Samples, seconds
from slimrt.speech.mel import FRAMES_PER_SECOND, HOP, Mel, log_mel
from slimrt.speech.options import Transcription
from slimrt.speech.pauses import cut_at_segment
from slimrt.speech.records import Segment, Word
from slimrt.speech.rules import WhisperRules, compression_ratio, pieces
from slimrt.speech.silence import Span, stretches
from slimrt.speech.vocabulary import WhisperTokens
from slimrt.speech.words import Aligner, spoken_words

Heard = Callable[[float], object]
Told = Callable[[Segment], object]


class SpeechEngine(Engine, Aligner, Protocol):
    """The methods of core.Engine that Whisper needs."""


@dataclass(frozen=True)
class WhisperModel:
    """The parameters in a Whisper model's file.

    Attributes:
        n_mels: channels of the spectrogram. n_frames: mel frames of a window, 30 s in real models.
        n_ctx: tokens that a sequence may hold. n_vocab: width of the logits.
        suppress, begin_suppress: ids that never come, or not first; None: the file does not say.
        heads: alignment heads of the decoder's cross-attention, (layer, head).
    """

    tokens: WhisperTokens
    n_mels: int
    n_frames: int
    n_ctx: int
    n_vocab: int
    suppress: tuple[int, ...]
    begin_suppress: tuple[int, ...] | None
    heads: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Decoded:
    """A decoded window. no_speech: probability of silence; probabilities: of each token."""

    tokens: tuple[int, ...]
    text: str
    temperature: float
    avg_logprob: float
    no_speech: float
    compression_ratio: float
    probabilities: tuple[float, ...]


@dataclass
class Whisper:
    """The transcription of one sound.

    Args:
        heard: called with the seconds of sound that are done. told: called with each segment, in order.
        seed: for sampling.
    """

    engine: SpeechEngine
    model: WhisperModel
    options: Transcription
    seed: int
    heard: Heard
    told: Told
    language: str = field(init=False)
    language_probability: float = field(init=False)
    _segments: list[Segment] = field(default_factory=list)
    _previous: list[int] = field(default_factory=list)
    _last_word_end: float = 0.0  # end of the last word, seconds

    def __post_init__(self) -> None:
        tokens = self.model.tokens
        self._rules = WhisperRules(
            tokens,
            self.model.n_vocab,
            timestamps=self.options.timestamps,
            suppress=self._suppressed(),
            begin_suppress=self.model.begin_suppress if self.options.suppress_blank else (),
            max_initial=self.options.max_initial_timestamp,
        )
        self.language = self.options.language or "en"
        self.language_probability = 0.0 if tokens.languages and self.options.language is None else 1.0
        self._times = tokens.timestamps if self.options.timestamps else None
        self._previous, self._hotwords, self._prefix = (
            tokens.encode(" " + text.strip()) if text and not text.isspace() else []
            for text in (self.options.initial_prompt, self.options.hotwords, self.options.prefix)
        )

    def _suppressed(self) -> Sequence[int]:
        """Ids that never come: the file's list, or the user's; the user's may include the file's by -1."""
        asked = self.options.suppress_tokens
        if asked is None:
            return self.model.suppress
        named = [id for id in asked if id >= 0]
        return [*named, *self.model.suppress] if len(named) < len(asked) else named

    def transcribe(self, samples: Samples, prepared: Mel | None = None) -> Task[list[Segment]]:
        """Transcribe samples (n,) at 16 kHz. Each window begins where the previous one was done. prepared: what
        prepare(samples) returned, if it was called already."""
        mel, window = self.prepare(samples) if prepared is None else prepared, self.model.n_frames
        for seek, end in self._clips(samples):
            while seek < end:
                seek += yield from self._transcribe_window(mel, seek, min(window, end - seek))
                self.heard(min(min(seek, end) / FRAMES_PER_SECOND, seconds(samples)))
        return self._segments

    def prepare(self, samples: Samples) -> Mel:
        """The log-mel spectrogram, with a window of silence after the sound."""
        return log_mel(samples, self.model.n_mels, padding=self.model.n_frames * HOP)

    def windows(self, samples: Samples, cuts: Sequence[int]) -> list[Span]:
        """Cut a sound into windows that can be transcribed in any order, [start, end) in samples: at pauses, or where
        silence was removed."""
        longest = self.model.n_frames * HOP
        found = []
        for start, end in ((HOP * first, HOP * last) for first, last in self._clips(samples)):
            mine = stretches(samples[start:end], longest, earliest=longest * 3 // 4, cuts=[x - start for x in cuts],
                             whole=HOP)  # fmt: skip
            found += [(start + first, start + last) for first, last in mine]
        return found

    def window(self, mel: Mel, start: int, end: int) -> Task[list[Segment]]:
        """Transcribe one window of windows(). mel: of the whole sound, from prepare()."""
        yield from self._transcribe_window(mel, start // HOP, (end - start) // HOP, alone=True)
        return self._segments

    def detect(self, samples: Samples) -> Task[dict[str, float]]:
        """Detect the language from the first window of a sound: probabilities, most likely first."""
        sequence, mel = self.engine.new_sequence(), log_mel(samples, self.model.n_mels)[: self.model.n_frames]
        try:
            yield Encode(sequence, _padded(mel, self.model.n_frames))
            return (yield from self._detect(sequence))
        finally:
            self.engine.free_sequence(sequence)

    def _detect(self, sequence: int) -> Task[dict[str, float]]:
        """The same for an encoded window: softmax over the language tokens after <|startoftranscript|>. It sets
        `language`."""
        languages = self.model.tokens.languages
        row = (yield Append([(sequence, [self.model.tokens.start])]))[0]
        self.engine.truncate(sequence, 0)
        scores = row[list(languages.values())]
        likely = np.exp(scores.astype(np.float64) - log_normaliser(scores)).tolist()
        found = dict(sorted(zip(languages, likely, strict=True), key=lambda one: -one[1]))
        self.language, self.language_probability = next(iter(found.items()))
        return found

    def _clips(self, samples: Samples) -> list[tuple[int, int]]:
        """The clips to transcribe, in mel frames."""
        clips = self.options.clips(len(samples) // HOP / FRAMES_PER_SECOND)
        return [(round(start * FRAMES_PER_SECOND), round(end * FRAMES_PER_SECOND)) for start, end in clips]

    def _transcribe_window(self, mel: Mel, seek: int, size: int, alone: bool = False) -> Task[int]:
        """Transcribe `size` mel frames and add the segments; returns the frames done. alone: that is all of them."""
        sequence = self.engine.new_sequence()
        try:
            yield Encode(sequence, _padded(mel[seek : seek + size], self.model.n_frames))
            if not self.language_probability:
                yield from self._detect(sequence)
            decoded = yield from self._decode(sequence)
            return self._take(sequence, decoded, seek, size, alone)
        finally:
            self.engine.free_sequence(sequence)

    def _decode(self, sequence: int) -> Task[Decoded]:
        """Decode a window, with rising temperature while the thresholds reject the result."""
        options, tokens = self.options, self.model.tokens
        room = self.model.n_ctx // 2
        prompt = [tokens.start]
        if tokens.previous is not None and room > 1 and (self._previous or self._hotwords):
            hot = self._hotwords[: room - 1]
            shown = self._previous[-(room - 1 - len(hot)) :] if len(hot) < room - 1 else []
            prompt = [tokens.previous, *hot, *shown, tokens.start]
        rest = tokens.instructions(self.language, options.task, options.timestamps)
        prefix, self._prefix = self._given_beginning(self.model.n_ctx - len(prompt) - len(rest) - room // 2), []
        rest += prefix
        row = (yield Append([(sequence, prompt)]))[0]
        silence = 0.0 if tokens.no_speech is None else float(np.exp(row[tokens.no_speech] - log_normaliser(row)))
        if rest:
            row = (yield Append([(sequence, rest)]))[0]
        length = len(prompt) + len(rest)
        limit = max(min(room, self.model.n_ctx - length), 1)
        decoded = None
        for temperature in options.temperatures:
            if decoded is not None:
                yield from self._restore(sequence, prompt, rest, decoded.temperature)
            found = yield from self._search(sequence, row.copy(), temperature, limit, _RulesAfter(self._rules, prefix))
            decoded = self._window_result(found, prefix, temperature, silence)
            if not self._failed(decoded):
                break
        assert decoded is not None  # there is at least one temperature
        return decoded

    def _restore(self, sequence: int, prompt: Sequence[int], rest: Sequence[int], temperature: float) -> Task[None]:
        """Reset a sequence to its prompt after a search at this temperature. If several texts were decoded at once they
        took its rows, so that the prompt is computed again."""
        if self._width(temperature) == 1:
            self.engine.truncate(sequence, len(prompt) + len(rest))
            return
        self.engine.truncate(sequence, 0)
        for part in (prompt, rest):
            if part:
                yield Append([(sequence, part)])

    def _width(self, temperature: float) -> int:
        """How many texts of a window are decoded at once at this temperature."""
        return self.options.best_of if temperature else self.options.num_beams

    def _given_beginning(self, room: int) -> list[int]:
        """The given beginning of the first window's text, at most `room` tokens: <|0.00|> and the prefix."""
        given = [*([] if self._times is None else [self._times]), *self._prefix]
        return given[: max(room, 0)] if self._prefix else []

    def _search(
        self, sequence: int, row: Logits, temperature: float, limit: int, rules: _RulesAfter
    ) -> Task[Hypothesis]:
        """Decode a window's text: greedy or beam search at temperature 0, else the best of best_of samples."""
        options, ends = self.options, frozenset({self.model.tokens.end})
        if temperature == 0.0 and self._width(temperature) > 1:
            found = yield from beam_search(
                self.engine, sequence, row, rules, ends, limit, num_beams=options.num_beams,
                length_penalty=options.length_penalty, early_stopping=True, patience=options.patience,
            )  # fmt: skip
            return found[0]
        samplers = [self._sampler(temperature) for _ in range(self._width(temperature))]
        if len(samplers) == 1:
            return (yield from follow(sequence, row, rules, samplers[0], ends, limit, rules.may))
        forks: list[int] = []
        try:
            forks += [self.engine.fork(sequence) for _ in samplers]
            self.engine.truncate(sequence, 0)  # the cache has room for the forks only
            found = yield from together(
                [
                    follow(fork, row.copy(), rules, sampler, ends, limit)
                    for fork, sampler in zip(forks, samplers, strict=True)
                ]
            )
        finally:
            for fork in forks:
                self.engine.free_sequence(fork)
        return max(found, key=lambda one: one.score(options.length_penalty))

    def _sampler(self, temperature: float) -> core.Sampler:
        """A sampler of the whole distribution, with a seed of its own."""
        if temperature == 0.0:
            return core.Sampler(temperature=0.0)
        self.seed = random.Random(self.seed).getrandbits(62)
        return core.Sampler(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=self.seed)

    def _window_result(self, found: Hypothesis, prefix: Sequence[int], temperature: float, silence: float) -> Decoded:
        """The decoded window: the given prefix, whose probabilities are 1, and what was found."""
        tokens = (*prefix, *found.tokens)
        text = self.model.tokens.text(tokens).strip()
        probabilities = (*(1.0 for _ in prefix), *(float(np.exp(one)) for one in found.logprobs[: len(found.tokens)]))
        return Decoded(tokens, text, temperature, found.score(), silence, compression_ratio(text), probabilities)

    def _failed(self, decoded: Decoded) -> bool:
        """Whether to try again: the text is repetitive, or unlikely (unless because of silence)."""
        options = self.options
        unlikely = options.logprob_threshold is not None and decoded.avg_logprob < options.logprob_threshold
        if unlikely and options.no_speech_threshold is not None and decoded.no_speech > options.no_speech_threshold:
            return False
        most = options.compression_ratio_threshold
        return unlikely or (most is not None and decoded.compression_ratio > most)

    def _silent(self, decoded: Decoded) -> bool:
        options = self.options
        if options.no_speech_threshold is None or decoded.no_speech <= options.no_speech_threshold:
            return False
        return options.logprob_threshold is None or decoded.avg_logprob <= options.logprob_threshold

    def _take(self, sequence: int, decoded: Decoded, seek: int, size: int, alone: bool) -> int:
        """Add the segments of a window; returns the frames that are done."""
        if self._silent(decoded):
            return size
        parts, done = pieces(decoded.tokens, self._times, size, whole=alone)
        offset = seek / FRAMES_PER_SECOND
        words = self._words(sequence, parts, decoded, offset, size)
        for index, (start, end, tokens) in enumerate(parts):
            text = self.model.tokens.text(tokens)
            if start == end or not text.strip():
                continue
            self._previous += tokens
            segment = Segment(
                    len(self._segments), offset + start, offset + end, text, tuple(tokens), decoded.temperature,
                    decoded.avg_logprob, decoded.compression_ratio, decoded.no_speech, words[index] if words else None,
            )  # fmt: skip
            self._segments.append(segment)
            self.told(segment)
        if not self.options.condition_on_previous_text or decoded.temperature > 0.5:
            self._previous = []
        return done if done > 0 else size

    def _words(
        self,
        sequence: int,
        parts: Sequence[tuple[float, float, list[int]]],
        decoded: Decoded,
        offset: float,
        size: int,
    ) -> list[tuple[Word, ...]]:
        """The words of each part; empty if word_timestamps is off."""
        if not self.options.word_timestamps:
            return []
        tokens = self.model.tokens
        text = [token for _, _, part in parts for token in part if token < tokens.end]
        likely = [p for token, p in zip(decoded.tokens, decoded.probabilities, strict=True) if token < tokens.end]
        spoken, usual = spoken_words(
            self.engine, sequence, tokens, self.model.heads, self.language, self.options.task, text, likely, size
        )
        result: list[tuple[Word, ...]] = []
        at = left = 0
        for start, end, part in parts:
            left += sum(token < tokens.end for token in part)
            mine: list[Word] = []
            while at < len(spoken) and left > 0:
                left -= len(spoken[at].tokens)
                mine.append(spoken[at].word)
                at += 1
            given = [(offset + word.start, offset + word.end) for word in mine]
            times = cut_at_segment(given, offset + start, offset + end, self._last_word_end, usual)
            result.append(tuple(Word(w.word, *time, w.probability) for w, time in zip(mine, times, strict=True)))
            self._last_word_end = times[-1][1] if times else self._last_word_end
        return result


@dataclass(frozen=True)
class _RulesAfter:
    """The rules for tokens after a given beginning."""

    rules: WhisperRules
    given: Sequence[int]

    def __call__(self, row: Logits, tokens: Sequence[int]) -> None:
        self.rules(row, [*self.given, *tokens] if self.given else tokens)

    def may(self, tokens: Sequence[int]) -> tuple[NDArray[np.uint32], int]:
        return self.rules.may([*self.given, *tokens] if self.given else tokens)


def _padded(mel: Mel, n_frames: int) -> Mel:
    """A window padded with zeros to full length."""
    return np.ascontiguousarray(np.pad(mel, ((0, n_frames - len(mel)), (0, 0))))
