# SPDX-License-Identifier: Apache-2.0
"""Minutes of sound through the small Whisper that ships, whose window is 2.56 s: nothing lost, nothing moved.

Spoken clips lie in cells of a window's length, so that what the model hears does not depend on where others ended; the
scripted tests of test_transcribe.py are about windows that begin anywhere.
"""

from __future__ import annotations

import difflib
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import slimrt
from slimrt.speech.audio import SAMPLE_RATE, load_audio

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

TESTS = Path(__file__).parent
MODEL = TESTS.parent / "models" / "tale-whisper.gguf"
CELL = 2.56  # seconds of a window
LEAD = 0.1  # seconds from the beginning of a cell to the first sound in it: with 0.3 more words are misheard
CLIPS = ("five-one-five", "two-zero", "zero-four")  # of tests/digits those that it hears and times right in a cell
SILENT = {10: 3, 25: 5}  # cells of silence before these clips
Truth = list[tuple[str, float, float]]


def spoken(name: str) -> np.ndarray:
    """A clip without the silence around it."""
    samples = load_audio(TESTS / "digits" / f"{name}.wav")
    loud = np.flatnonzero(np.abs(samples) > 0.02)
    return samples[loud[0] : loud[-1] + 1]


def composed(count: int, seed: int = 0) -> tuple[np.ndarray, Truth]:
    """Clips in a random order, and (text, start, end) of each in seconds."""
    rng, clips = np.random.default_rng(seed), {name: spoken(name) for name in CLIPS}
    names = [CLIPS[i] for i in rng.integers(len(CLIPS), size=count)]
    cells = sum(SILENT[i] for i in SILENT if i < count) + count
    samples, truth, at = np.zeros(round(cells * CELL * SAMPLE_RATE), np.float32), [], 0.0
    for i, name in enumerate(names):
        at += SILENT.get(i, 0) * CELL
        first, clip = round((at + LEAD) * SAMPLE_RATE), clips[name]
        samples[first : first + len(clip)] = clip
        truth.append((name.replace("-", " "), at + LEAD, at + LEAD + len(clip) / SAMPLE_RATE))
        at += CELL
    return samples, truth


@pytest.fixture(scope="module")
def model():
    with slimrt.Model(MODEL, n_seqs=3) as opened:
        yield opened


@pytest.mark.parametrize("conditioned", [True, False])
def test_two_minutes_are_complete_and_in_their_places(model, conditioned):
    samples, truth = composed(48)
    assert len(samples) > 120 * SAMPLE_RATE
    segments, info = model.transcribe(samples, condition_on_previous_text=conditioned)
    assert [segment.text.strip() for segment in segments] == [text for text, _, _ in truth]
    off = np.abs([(one.start - start, one.end - end) for one, (_, start, end) in zip(segments, truth, strict=True)])
    assert off[:, 0].max() < 0.3 and (off[:, 1] < 0.3).mean() > 0.95 and off.max() < CELL  # one end is not told
    assert [segment.id for segment in segments] == list(range(len(segments)))
    assert info.duration == info.duration_heard == len(samples) / SAMPLE_RATE


def test_skipped_silences_move_nothing(model):
    """Without its silences the sound is cut elsewhere, and some words are misheard; where they are is as before."""
    samples, truth = composed(48)
    segments, info = model.transcribe(samples, skip_silence=True)
    words = [word for text, _, _ in truth for word in text.split()]
    heard = [word for segment in segments for word in segment.text.split()]
    assert difflib.SequenceMatcher(a=words, b=heard, autojunk=False).ratio() > 0.85
    assert info.duration - info.duration_heard == pytest.approx(sum(SILENT.values()) * CELL, abs=2.0)
    assert all(one.end <= other.start for one, other in pairwise(segments))
    for segment in segments:
        assert any(segment.start > start - 0.3 and segment.start < end for _, start, end in truth), segment
        assert any(segment.end > start and segment.end < end + 0.3 for _, start, end in truth), segment


def test_windows_together_are_heard_as_one_by_one(model):
    """Clips end where the cells do, so that windows that are cut beforehand are those that are met one by one."""
    samples, truth = composed(12)
    cells = np.arange(round(len(samples) / SAMPLE_RATE / CELL))
    clips = np.stack((cells * CELL, (cells + 1) * CELL - 0.02), axis=1).ravel().tolist()
    one_by_one, _ = model.transcribe(samples, clip_timestamps=clips, condition_on_previous_text=False)
    assert [one.text.strip() for one in one_by_one] == [text for text, _, _ in truth]
    for size in (1, 3):
        together, _ = model.transcribe(samples, clip_timestamps=clips, batch_size=size)
        assert [(o.id, o.text, o.start, o.end) for o in together] == [
            (o.id, o.text, o.start, o.end) for o in one_by_one
        ]


def test_sounds_of_different_length_are_heard_together_as_they_are_alone(model):
    sounds = [composed(count, seed)[0] for seed, count in enumerate((20, 2, 9, 1, 5))]
    for sound, (segments, _) in zip(sounds, model.transcribe(sounds), strict=True):
        alone, _ = model.transcribe(sound)
        assert [(one.start, one.end, one.tokens) for one in segments] == [(o.start, o.end, o.tokens) for o in alone]
        assert [one.avg_logprob for one in segments] == pytest.approx([o.avg_logprob for o in alone], abs=1e-3)


def test_memory_is_that_of_the_sound(model):
    """The engine takes no more for a longer sound, and Python keeps its spectrogram: 80 floats every 10 ms."""
    before, peaks = model.memory(), []
    for count in (8, 24):
        samples, _ = composed(count)
        tracemalloc.start()
        model.transcribe(samples)
        peaks.append((tracemalloc.get_traced_memory()[1], samples.nbytes))
        tracemalloc.stop()
    assert model.memory() == before
    (short, short_bytes), (long, long_bytes) = peaks
    assert long - short < long_bytes - short_bytes  # the spectrogram is half as large as float32 samples
