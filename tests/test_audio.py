# SPDX-License-Identifier: Apache-2.0
"""Sound files, the log-mel spectrogram and silences."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import tracemalloc
from math import inf

import numpy as np
import pytest
import soundfile

from conftest import GOLDEN, third_party
from slimrt.errors import AudioError, UnsupportedError
from slimrt.speech.audio import SAMPLE_RATE, load_audio, read_sound
from slimrt.speech.complete import cut_off
from slimrt.speech.mel import log_mel, mel_filters
from slimrt.speech.resample import Resampler
from slimrt.speech.silence import Skipped, quietest
from slimrt.speech.vad import Vad

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
    soundfile.write(path, tone(0.1), SAMPLE_RATE)
    path.write_bytes(path.read_bytes().replace(b"fmt \x10\0\0\0\1\0", b"fmt \x10\0\0\0\x77\x77"))  # of no known code
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


NAMES = ["a.wav", "a.rf64", "a.w64", "a.flac", "a.aiff", "a.au", "a.ogg", "a.opus", "a.mp3"]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_cut_off_is_read_to_its_end_and_that_is_said(tmp_path, name):
    path = tmp_path / name
    kind = {"a.opus": {"format": "OGG", "subtype": "OPUS"}, "a.rf64": {"format": "RF64"}}.get(name, {})
    noise = np.random.default_rng(0).normal(0, 0.1, 20 * SAMPLE_RATE)  # long, and no codec makes it short: many pages
    soundfile.write(path, noise, SAMPLE_RATE, **kind)
    content, whole = path.read_bytes(), read_sound(path)
    assert abs(len(whole.samples) - len(noise)) <= 1000 and not whole.warnings
    for left in (len(content) // 2, len(content) * 2 // 3 + 1, len(content) - 2):
        path.write_bytes(content[:left])
        sound = read_sound(path)
        assert len(sound.samples) == pytest.approx(left / len(content) * 20 * SAMPLE_RATE, abs=1.5 * SAMPLE_RATE)
        np.testing.assert_allclose(sound.samples[:100000], whole.samples[:100000], atol=1e-6)
        assert len(sound.warnings) == 1 and f"{name}: cut off after" in sound.warnings[0]
    with pytest.warns(UserWarning, match="cut off after"):
        load_audio(path)
    path.write_bytes(content[:20])
    with pytest.raises(AudioError, match=f"{name}: (not a sound that can be read|cut off before|no samples)"):
        read_sound(path)


def test_a_tag_behind_the_sound_is_no_part_of_it(tmp_path, recwarn):
    """ID3v1, which old taggers put behind FLAC too, and padding."""
    path = tmp_path / "tone.flac"
    soundfile.write(path, tone(1.1), SAMPLE_RATE)
    whole = load_audio(path)
    for behind in (b"TAG" + bytes(125), bytes(1000)):
        assert np.array_equal(load_audio(io.BytesIO(path.read_bytes() + behind)), whole)
    assert len(whole) == len(tone(1.1)) and not recwarn


def test_headers_of_streams_and_broken_files_are_no_reason_to_read_on():
    assert not cut_off(b"RIFF\xff\xff\xff\xffWAVEdata\xff\xff\xff\xff12")  # the length was not known
    assert not cut_off(b"RIFF\0\0\0\0WAVEdata\0\0\0\0" + bytes(8))
    assert not cut_off(b"RIFF\0\0\0\0WAVEfmt \x02\0\0\0ab")  # no samples: another complaint
    assert cut_off(b"OggS" + bytes(9)) and cut_off(b"OggS" + bytes(22) + b"\x02\x01")  # within a page's header
    assert cut_off(b"OggS" + bytes(22) + b"\x01\x03ab") and not cut_off(b"OggS" + bytes(22) + b"\x01\x03abc")
    assert not cut_off(b"") and not cut_off(b"ID3" + bytes(20))
    frame = b"\xff\xfb\x10\xc4" + bytes(100)  # MPEG 1, layer III, 32 kbit/s, 44100 Hz: 104 bytes
    assert not cut_off(3 * frame) and not cut_off(2 * frame + b"TAG" + bytes(125))
    assert cut_off(2 * frame + frame[:50]) and cut_off(2 * frame + frame[:3])
    assert cut_off(b"ID3\4\0\0\0\0\1\2" + bytes(130) + frame[:-1])  # behind 130 bytes of names


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
    nothing = [([], "no samples"), (np.zeros((100, 0)), "no samples"), (np.zeros((0, 2)), "no samples")]
    for bad, why in [*nothing, (["a"], "array of numbers"), (np.zeros((2, 2, 2)), "array of numbers")]:
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


@pytest.fixture
def no_extra(monkeypatch):
    """As if the extra `audio` were not installed."""
    for module in ("soundfile", "av", "soxr"):
        monkeypatch.setitem(sys.modules, module, None)


def test_the_missing_extra_is_named(no_extra, tmp_path):
    for name, content, module in [("a.flac", b"fLaC", "soundfile"), ("a.m4a", b"\0\0\0\x20ftypM4A ", "av")]:
        (tmp_path / name).write_bytes(content + bytes(100))
        with pytest.raises(UnsupportedError, match=rf"{name}: .* needs {module}: pip install 'slimrt\[audio\]'"):
            load_audio(tmp_path / name)


@pytest.mark.parametrize("form", ["WAV", "WAVEX"])
@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE"])
def test_plain_wav_needs_no_library(tmp_path, request, form, subtype):
    path = tmp_path / "a.wav"
    stereo = np.stack((tone(0.5), tone(0.5, hertz=300) - 0.4), axis=1)
    soundfile.write(path, stereo, SAMPLE_RATE, subtype, format=form)
    theirs = soundfile.read(path, dtype="float32")[0]
    assert np.abs(theirs - stereo).max() < 0.01
    request.getfixturevalue("no_extra")
    np.testing.assert_allclose(load_audio(path), theirs.mean(axis=1), atol=1e-7)


def test_wav_with_a_header_of_its_own(no_extra, tmp_path):
    """Chunks before and behind the samples, one of odd length; a header that does not know the length."""
    path, samples = tmp_path / "a.wav", (tone(0.01) * 32767).astype("<i2")
    form = b"fmt \x10\0\0\0\1\0\1\0" + b"".join(n.to_bytes(4, "little") for n in (SAMPLE_RATE, 32000, 0x100002))
    for length in (samples.nbytes, 0, 0x7FFFF000, 0x80000000, 0xFFFFFFFF):  # of streams: sox, arecord, FFmpeg
        data = b"data" + length.to_bytes(4, "little") + samples.tobytes()
        behind = b"LIST\4\0\0\0abcd" if length == samples.nbytes else b""
        path.write_bytes(b"RIFF\0\0\0\0WAVE" + b"LIST\3\0\0\0abc\0" + form + data + behind)
        sound = read_sound(path)
        assert not sound.warnings
        np.testing.assert_allclose(sound.samples, tone(0.01), atol=1e-4)
    inside = b"WAVE" + form + b"data\0\0\0\0" + b"LIST\4\0\0\0abcd"  # nothing was recorded, and the file is whole
    path.write_bytes(b"RIFF" + len(inside).to_bytes(4, "little") + inside)
    with pytest.raises(AudioError, match="no samples in it"):
        read_sound(path)


def test_many_chunks_of_a_wav_file_take_no_memory():
    name_and_length = np.zeros((50000, 2), "<u4")
    name_and_length[:, 0] = np.arange(50000) + 0x20202020
    plain = io.BytesIO()
    soundfile.write(plain, tone(0.1), SAMPLE_RATE, format="WAV")
    data = plain.getvalue()[:12] + name_and_length.tobytes() + plain.getvalue()[12:]
    tracemalloc.start()
    try:
        assert len(load_audio(io.BytesIO(data))) == 1600
        assert tracemalloc.get_traced_memory()[1] < 2 * len(data) + 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 96000, 15999])
def test_resampling_is_that_of_soxr_in_whatever_blocks(no_extra, rate):
    n, lowest = rate * 5 // 2 + 17, min(rate, SAMPLE_RATE) / 2
    pitches = (60, 440, 1900, 0.88 * lowest, *([1.1 * lowest] if rate > SAMPLE_RATE else []))  # the last must go

    def chord(rate, n, pitches):
        return sum(0.1 * np.sin(2 * np.pi * f * np.arange(n) / rate + f) for f in pitches).astype(np.float32)

    x, resampler, made, at = chord(rate, n, pitches), Resampler(rate, SAMPLE_RATE), [], 0
    for size in (1, 5000, 70000, 3, 140000, n):
        made.append(resampler.push(x[at : at + size]))
        at += size
    made = np.concatenate([*made, resampler.finish()])
    assert len(made) == -(-n * SAMPLE_RATE // rate)
    inner = slice(1000, -1000)
    np.testing.assert_allclose(made[inner], chord(SAMPLE_RATE, len(made), pitches[:4])[inner], atol=1e-5)
    np.testing.assert_allclose(load_audio(x[:, None], rate), made, atol=2e-6)
    sys.modules.pop("soxr")
    theirs = pytest.importorskip("soxr").resample(x, rate, SAMPLE_RATE)
    np.testing.assert_allclose(made[inner], theirs[1000 : len(made) - 1000], atol=2e-4)  # theirs is not as precise


def test_rates_that_are_not_resampled():
    """At 1 Hz a WAV file of 28 KB would be a sound of four hours, and a float array of 0.9 GB; at 355 MHz the
    filters for one of 1 KB were 2 GB."""
    for rate in (1, 1999):
        with pytest.raises(AudioError, match=f"audio: a sampling rate of {rate} Hz holds no speech: 2000 Hz is"):
            load_audio(tone(0.1), rate)
    assert len(load_audio(tone(0.1, 2000), 2000)) == 1600
    with pytest.raises(AudioError, match="audio: a sampling rate of 355376000 Hz; 1000000 Hz is the most"):
        load_audio(tone(0.1), 355376000)
    assert len(load_audio(np.zeros(10**5, np.float32), 10**6)) == 1600
    with pytest.raises(AudioError, match="999983 Hz are not resampled to 16000 Hz: bring it to a usual rate"):
        load_audio(tone(0.1), 999983)


def written_by_ffmpeg(path, codec, rate, *, picture=False, options=None):
    """2 s of a tone, louder on the left."""
    av = pytest.importorskip("av")
    left = tone(2.0, rate)
    with av.open(str(path), "w", options=options or {}) as out:
        stream = out.add_stream(codec, rate=rate, layout="stereo")
        if picture:
            video = out.add_stream("mpeg4", rate=5, width=16, height=16, pix_fmt="yuv420p")
            frame = av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8), format="rgb24")
            out.mux([packet for one in (*[frame] * 10, None) for packet in video.encode(one)])
        frame = av.AudioFrame.from_ndarray(np.stack((left, left / 2)), format="fltp", layout="stereo")
        frame.sample_rate, frame.pts = rate, 0
        fitted = av.AudioResampler(stream.format.name, "stereo", rate, frame_size=960)
        for part in (*fitted.resample(frame), *fitted.resample(None), None):
            out.mux(stream.encode(part))


@pytest.mark.parametrize(
    ("name", "codec", "rate", "picture"),
    [("a.m4a", "aac", 44100, False), ("a.mp4", "aac", 16000, True), ("a.mkv", "aac", 48000, True),
     ("a.webm", "libopus", 48000, False), ("a.wv", "wavpack", 16000, False)],
)  # fmt: skip
def test_containers_are_read_by_ffmpeg(tmp_path, name, codec, rate, picture):
    path = tmp_path / name
    written_by_ffmpeg(path, codec, rate, picture=picture)
    sound = read_sound(path)
    assert len(sound.samples) == pytest.approx(2 * SAMPLE_RATE, abs=2000) and not sound.warnings
    spectrum = np.abs(np.fft.rfft(sound.samples[8000:24000]))
    assert spectrum.argmax() == 440 and spectrum[440] / 8000 == pytest.approx(0.375, abs=0.02)
    with path.open("rb") as file:
        np.testing.assert_array_equal(load_audio(io.BytesIO(file.read())), sound.samples)


def test_a_container_that_is_cut_off(tmp_path):
    path = tmp_path / "a.m4a"
    written_by_ffmpeg(path, "aac", 44100, options={"movflags": "faststart"})
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    sound = read_sound(path)
    assert 0.5 * SAMPLE_RATE < len(sound.samples) < 1.5 * SAMPLE_RATE
    assert "a.m4a: cut off after" in sound.warnings[0] and "of 2.00 s" in sound.warnings[0]
    written_by_ffmpeg(path, "aac", 44100)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(AudioError, match="its index is missing, which may stand at the end"):
        load_audio(path)


def test_a_playlist_opens_no_other_file(tmp_path):
    pytest.importorskip("av")
    soundfile.write(tmp_path / "secret.wav", tone(1.0), SAMPLE_RATE)
    entry = f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile://{tmp_path}/secret.wav\n#EXT-X-ENDLIST\n"
    for name, text in [("a.m3u8", entry), ("a.txt", f"ffconcat version 1.0\nfile {tmp_path}/secret.wav\n")]:
        (tmp_path / name).write_text(text)
        with pytest.raises(AudioError, match="not a sound that can be read"):
            load_audio(tmp_path / name)


def test_odd_rates_take_little_memory_and_leave_none():
    for rate in (44101, 8001):
        resampler = Resampler(rate, SAMPLE_RATE)  # what NumPy imports for it, it imports now
        filters = 16000 * resampler._taps * 4
        tracemalloc.start()
        Resampler(rate + 2, SAMPLE_RATE).push(tone(5.0, rate + 2))
        left, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert left < 1e5 and peak < 1.1 * filters + 20e6, (rate, left, peak)


def test_reading_ends_where_its_callback_says(tmp_path):
    """For sounds of 48 kHz as a file and as samples."""
    path, samples = tmp_path / "a.flac", np.zeros(100 * 48000, np.int16)
    soundfile.write(path, samples, 48000)

    def stop():
        blocks.append(1)
        if len(blocks) == 3:
            raise InterruptedError("nobody waits")

    for sound in (path, samples):
        blocks = []
        with pytest.raises(InterruptedError, match="nobody waits"):
            read_sound(sound, 48000, on_block=stop)


def test_nothing_is_decoded_beyond_the_limit(tmp_path):
    """A FLAC of silence is small, and would fill the memory."""
    path = tmp_path / "a.flac"
    soundfile.write(path, np.zeros(100 * 48000, np.int16), 48000)
    content = bytearray(path.read_bytes())
    assert len(content) < 20_000
    for known in (True, False):
        if not known:  # of its samples, 36 bits, the header may say nothing
            content[21] &= 0xF0
            content[22:26] = bytes(4)
            path.write_bytes(content)
        tracemalloc.start()
        with pytest.raises(AudioError, match=r"a.flac: longer than 5 s: give max_seconds \(--max-seconds\) more"):
            load_audio(path, max_seconds=5)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 3e6, peak  # of 19 MB; filters included
    tracemalloc.start()
    made = load_audio(path, max_seconds=inf)
    assert tracemalloc.get_traced_memory()[1] < 2 * made.nbytes  # those at 48 kHz alone would be three times as many
    tracemalloc.stop()
    assert len(made) == 100 * SAMPLE_RATE
    with pytest.raises(AudioError, match="audio: longer than 0.5 s"):
        load_audio(tone(0.6), max_seconds=0.5)
    for wrong in (0, float("nan")):
        with pytest.raises(ValueError, match="max_seconds must be"):
            load_audio(tone(0.6), max_seconds=wrong)


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
    spans = [(start / SAMPLE_RATE, end / SAMPLE_RATE) for start, end in Vad("energy").spans(sound)]
    np.testing.assert_allclose(spans, [(4.6, 7.4), (19.6, 20.9)], atol=0.04)
    assert Vad("energy").spans(np.zeros(SAMPLE_RATE, np.float32)) == []
    assert Vad("energy").spans(tone(3.0)) == [(0, 3 * SAMPLE_RATE)]


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
    spans = Vad("energy").spans(samples)
    assert len(samples) == 11 * SAMPLE_RATE and sum(end - start for start, end in spans) > 0.9 * len(samples)
