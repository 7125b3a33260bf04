# SPDX-License-Identifier: Apache-2.0
"""Sound files, the log-mel spectrogram and silences."""

from __future__ import annotations

import io
import json
import os
import sys
import threading

import numpy as np
import pytest
import soundfile

from conftest import GOLDEN, third_party
from slimrt.errors import AudioError, UnsupportedError
from slimrt.speech.audio import SAMPLE_RATE, load_audio
from slimrt.speech.complete import cut_off
from slimrt.speech.mel import log_mel, mel_filters
from slimrt.speech.silence import Skipped, quietest, speech_spans

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others


def tone(seconds: float, rate: int = SAMPLE_RATE, hertz: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def reference_signal() -> np.ndarray:
    """A second whose pitch rises, over a little noise from a formula: the same on every machine."""
    t = np.arange(SAMPLE_RATE) / SAMPLE_RATE
    noise = np.modf(np.sin(np.arange(SAMPLE_RATE) * 12.9898) * 43758.5453)[0]
    return (0.4 * np.sin(2 * np.pi * (200 + 1500 * t) * t) + 0.01 * noise).astype(np.float32)


def test_arrays_of_every_kind():
    mono = tone(0.1)
    np.testing.assert_array_equal(load_audio(mono), mono)
    np.testing.assert_allclose(load_audio(np.stack((mono, np.zeros_like(mono)), axis=1)), mono / 2, atol=1e-7)
    np.testing.assert_allclose(load_audio((mono * 32768).astype(np.int16)), mono, atol=1 / 32768)
    np.testing.assert_allclose(load_audio((mono * 127 + 128).astype(np.uint8)), mono, atol=2 / 127)
    assert load_audio(mono.astype(np.float64).tolist()).dtype == np.float32


def test_a_file_at_8_khz_in_stereo(tmp_path):
    left = tone(1.0, 8000)
    soundfile.write(tmp_path / "stereo.wav", np.stack((left, left * 0.5), axis=1), 8000)
    samples = load_audio(tmp_path / "stereo.wav")
    assert samples.shape == (SAMPLE_RATE,) and samples.dtype == np.float32
    np.testing.assert_allclose(samples[800:-800], 0.75 * tone(1.0)[800:-800], atol=2e-3)


@pytest.mark.parametrize("name", ["a.flac", "a.ogg", "a.wav"])
def test_formats(tmp_path, name):
    soundfile.write(tmp_path / name, tone(0.5), SAMPLE_RATE)
    np.testing.assert_allclose(load_audio(str(tmp_path / name))[800:-800], tone(0.5)[800:-800], atol=0.05)


def test_files_that_cannot_be_used(tmp_path):
    path = tmp_path / "a.wav"
    with pytest.raises(FileNotFoundError, match="a.wav: no such file"):
        load_audio(path)
    path.write_bytes(b"")
    with pytest.raises(AudioError, match="an empty file"):
        load_audio(path)
    path.write_text("this is no sound at all")
    with pytest.raises(AudioError, match="a.wav: not a sound that can be read"):
        load_audio(path)
    soundfile.write(path, np.zeros(0), SAMPLE_RATE)
    with pytest.raises(AudioError, match="no samples"):
        load_audio(path)
    bad = tone(0.1)
    bad[5] = np.inf
    soundfile.write(path, bad, SAMPLE_RATE, subtype="FLOAT")
    with pytest.raises(AudioError, match="1 samples are NaN or infinite, the first at sample 5"):
        load_audio(path)
    with pytest.raises(AudioError, match="not a file"):
        load_audio(tmp_path)


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.aiff", "a.au", "a.ogg", "a.opus"])
def test_a_file_that_is_cut_off(tmp_path, name):
    path = tmp_path / name
    opus = {"format": "OGG", "subtype": "OPUS"} if name == "a.opus" else {}
    noise = np.random.default_rng(0).normal(0, 0.1, 20 * SAMPLE_RATE)  # long, and no codec makes it short: many pages
    soundfile.write(path, noise, SAMPLE_RATE, **opus)
    whole = path.read_bytes()
    assert abs(len(load_audio(path)) - len(noise)) <= 1000
    for left in (len(whole) // 2, len(whole) * 2 // 3 + 1, len(whole) - 2):
        path.write_bytes(whole[:left])
        with pytest.raises(AudioError, match=r"a\.(flac: |\w+: cut off after)"):
            load_audio(path)


def test_headers_of_streams_and_broken_files_are_no_reason_to_read_on():
    assert not cut_off(b"RIFF\xff\xff\xff\xffWAVEdata\xff\xff\xff\xff12")  # the length was not known
    assert not cut_off(b"RIFF\0\0\0\0WAVEdata\0\0\0\0" + bytes(8))
    assert not cut_off(b"RIFF\0\0\0\0WAVEfmt \x02\0\0\0ab")  # no samples: another complaint
    assert cut_off(b"OggS" + bytes(9)) and cut_off(b"OggS" + bytes(22) + b"\x02\x01")  # within a page's header
    assert cut_off(b"OggS" + bytes(22) + b"\x01\x03ab") and not cut_off(b"OggS" + bytes(22) + b"\x01\x03abc")
    assert not cut_off(b"") and not cut_off(b"ID3" + bytes(20))


def test_pipes_and_open_files(tmp_path):
    path, pipe = tmp_path / "a.flac", tmp_path / "pipe"
    soundfile.write(path, tone(1.0), SAMPLE_RATE)
    expected = load_audio(path)
    with path.open("rb") as file:
        np.testing.assert_array_equal(load_audio(file), expected)
    np.testing.assert_array_equal(load_audio(io.BytesIO(path.read_bytes())), expected)
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(path.read_bytes()))
    writer.start()
    np.testing.assert_array_equal(load_audio(pipe), expected)
    writer.join()
    with pytest.raises(AudioError, match="audio: an empty file"):
        load_audio(io.BytesIO())
    with pytest.raises(AudioError, match="opened as text"):
        load_audio(io.StringIO("x"))


def test_arrays_that_cannot_be_used():
    for bad, why in [([], "no samples"), (["a"], "array of numbers"), (np.zeros((2, 2, 2)), "array of numbers")]:
        with pytest.raises(AudioError, match=why):
            load_audio(bad)
    with pytest.raises(AudioError, match="channels first: transpose"):
        load_audio(np.stack([tone(0.1)] * 2))
    assert len(load_audio(np.zeros((1, 2), np.float32))) == 1  # a sound of one sample may be
    with pytest.raises(AudioError, match="full scale is 1, and samples reach 16383.5"):
        load_audio(tone(0.1, hertz=4000) * 32767)  # full scale of int16, taken for floats
    load_audio(tone(0.1) * 20)
    with pytest.raises(ValueError, match="sample_rate must be positive"):
        load_audio(tone(0.1), 0)


def test_the_missing_extra_is_named(monkeypatch, tmp_path):
    for module in ("soundfile", "soxr"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    with pytest.raises(UnsupportedError, match=r"needs soundfile: pip install 'slimrt\[audio\]'"):
        load_audio(tmp_path / "a.wav")
    with pytest.raises(UnsupportedError, match="needs soxr"):
        load_audio(tone(0.1), 8000)


@pytest.mark.parametrize("n_mels", [80, 128])
def test_filters_are_those_published(n_mels):
    published = np.load(third_party("whisper/mel_filters.npz"))[f"mel_{n_mels}"]
    np.testing.assert_allclose(mel_filters(n_mels), published, atol=1e-8)


@pytest.mark.parametrize("n_mels", [80, 128])
def test_log_mel_of_a_committed_vector(n_mels):
    """golden_speech/log_mel.json: frames of reference_signal() by openai/whisper's log_mel_spectrogram, float32."""
    golden = json.loads((GOLDEN.parent / "golden_speech" / "log_mel.json").read_text())[str(n_mels)]
    mel = log_mel(reference_signal(), n_mels)
    assert mel.shape == (100, n_mels) and mel.dtype == np.float32 and mel.flags.c_contiguous
    for frame, values in golden.items():
        np.testing.assert_allclose(mel[int(frame)], values, atol=1e-4)


@pytest.mark.oracle
@pytest.mark.parametrize("n_mels", [80, 128])
def test_log_mel_is_that_of_hugging_face(n_mels):
    extractor = pytest.importorskip("transformers").WhisperFeatureExtractor(feature_size=n_mels)
    samples = np.concatenate([reference_signal()] * 7)
    theirs = extractor(samples, sampling_rate=SAMPLE_RATE, return_tensors="np").input_features[0].T
    ours = log_mel(np.pad(samples, (0, 30 * SAMPLE_RATE - len(samples))), n_mels)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_log_mel_of_very_short_and_very_long_sounds():
    assert log_mel(np.zeros(100, np.float32), 80).shape == (0, 80)
    assert log_mel(tone(0.02), 80).shape == (2, 80)
    long = log_mel(np.tile(reference_signal(), 60), 80)  # more frames than are transformed at once
    np.testing.assert_allclose(long[4500:4590], long[500:590], atol=1e-5)
    assert log_mel(tone(1.0), 80, padding=480000).shape == (3100, 80)


def test_speech_is_where_the_energy_is():
    room = 0.001 * np.sin(np.arange(30 * SAMPLE_RATE) * 0.01).astype(np.float32)
    sound = room.copy()
    for start in (5, 6.5, 20):  # 1.5 s apart: one stretch
        sound[round(start * SAMPLE_RATE) :][: SAMPLE_RATE // 2] += tone(0.5)
    spans = [(start / SAMPLE_RATE, end / SAMPLE_RATE) for start, end in speech_spans(sound)]
    np.testing.assert_allclose(spans, [(4.6, 7.4), (19.6, 20.9)], atol=0.04)
    assert speech_spans(np.zeros(SAMPLE_RATE, np.float32)) == []
    assert speech_spans(tone(3.0)) == [(0, 3 * SAMPLE_RATE)]


def test_times_go_back_to_the_whole_sound():
    skipped = Skipped(np.zeros(3 * SAMPLE_RATE, np.float32), ((SAMPLE_RATE, 2 * SAMPLE_RATE), (160000, 160000 + 32000)))
    times = [skipped.original_time(time) for time in (0.0, 0.5, 1.0, 2.5, 9.0)]
    assert times == [1.0, 1.5, 10.0, 11.5, 12.0]
    assert skipped.original_time(1.0, ends=True) == 2.0


def test_the_quietest_place():
    sound = tone(4.0)
    sound[int(2.5 * SAMPLE_RATE) : int(2.9 * SAMPLE_RATE)] = 0
    assert quietest(sound, SAMPLE_RATE, 4 * SAMPLE_RATE) == pytest.approx(2.7 * SAMPLE_RATE, abs=0.06 * SAMPLE_RATE)


def test_real_speech_is_not_skipped():
    samples = load_audio(third_party("audio/jfk.wav"))
    spans = speech_spans(samples)
    assert len(samples) == 11 * SAMPLE_RATE and sum(end - start for start, end in spans) > 0.9 * len(samples)
