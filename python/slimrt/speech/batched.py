"""Long audio as windows decoded in one batch, each without the text of the window before it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from numpy.typing import NDArray

from slimrt.generation.loop import Loop
from slimrt.generation.search import Task
from slimrt.generation.tickets import Call
from slimrt.speech.audio import SAMPLE_RATE
from slimrt.speech.listening import Source, Transcript
from slimrt.speech.moonshine import Moonshine
from slimrt.speech.options import Transcription
from slimrt.speech.records import Segment
from slimrt.speech.whisper import Heard, Told, Whisper

Make = Callable[[Transcription, int, Heard, Told], Whisper | Moonshine]
"""Makes the decoder of one sound or window, from options, a seed and callbacks."""


def in_batches(loop: Loop, make: Make, sources: Sequence[Source], needs: int, at_once: int) -> list[Transcript]:
    """Transcribe sounds window by window, at_once windows in a batch, each of which uses `needs` sequences."""
    sounds, width = [_Windows(make, source) for source in sources], needs * at_once
    loop.run(((1, sound.detect()) for sound in sounds), Call(width=width))
    loop.run(((needs, sound.window(k)) for sound in sounds for k in range(sound.n_windows)), Call(width=width))
    return [sound.result for sound in sounds]


class _Windows:
    """The windows of one sound, decoded in any order and reported in theirs."""

    result: Transcript

    def __init__(self, make: Make, source: Source):
        self._make, self._source, self._options = make, source, source.options
        self._model = make(self._options, source.seed, ignored, ignored)
        self._windows = self._model.windows(source.samples, source.cuts)
        self._done: dict[int, list[Segment]] = {}
        self._turn, self._heard = 0, 0
        self._segments: list[Segment] = []
        self._language: tuple[str | None, float] = (None, 0.0)

    @property
    def n_windows(self) -> int:
        return len(self._windows)

    def detect(self) -> Task[None]:
        """Detect the language from the first window; a sound without windows is finished."""
        if isinstance(self._model, Whisper):
            if self._windows and not self._model.language_probability:
                start, end = self._windows[0]
                yield from self._model.detect(self._source.samples[start:end])
            self._language = self._model.language, self._model.language_probability
            self._options = replace(self._options, language=self._model.language)
        self._report()

    def window(self, k: int) -> Task[None]:
        """Decode the k-th window, with a seed of its own."""
        seed = random.Random((self._source.seed << 32) + k).getrandbits(62)
        options = replace(self._options, prefix=None) if k else self._options
        start, end = self._windows[k]
        self._done[k] = yield from self._make(options, seed, ignored, ignored).window(self._prepared, start, end)
        self._heard += end - start
        self._source.heard(self._heard / SAMPLE_RATE)
        self._report()

    @cached_property
    def _prepared(self) -> NDArray[Any]:
        return self._model.prepare(self._source.samples)

    def _report(self) -> None:
        """Report the segments of all windows whose predecessors are reported."""
        while self._turn in self._done:
            for segment in self._done.pop(self._turn):
                self._segments.append(self._source.told(replace(segment, id=len(self._segments))))
            self._turn += 1
        if self._turn == len(self._windows):
            self.__dict__.pop("_prepared", None)  # frees the spectrogram, which is large
            self.result = self._source.finished(self._segments, *self._language)


def ignored(_: object) -> None:
    """A callback that does nothing: of single windows, since _report() passes segments on in order."""
