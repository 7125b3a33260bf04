# SPDX-License-Identifier: Apache-2.0
"""Sound, series and texts beside an encoder over HTTP, with the `openai` client and by hand."""

from __future__ import annotations

import io
import threading
import wave
from pathlib import Path

import numpy as np
import pytest
import soundfile

import chronos2_models
import slimrt
from served import Answer, Served, served
from slimrt.speech.subtitles import written

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others
MODELS = Path(__file__).parent.parent / "models"
SOUND = MODELS / "digits.wav"
LISTEN = "/v1/audio/transcriptions"


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    with served(tmp_path_factory.mktemp("server"), "--parallel", "4", model=MODELS / "tale-whisper.gguf") as server:
        yield server


def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def form(server: Served, fields: dict[str, str], sound: bytes | None) -> Answer:
    """A form as a browser sends it."""
    parts = [f'--mark\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
             for name, value in fields.items()]  # fmt: skip
    if sound is not None:
        head = '--mark\r\nContent-Disposition: form-data; name="file"; filename="/etc/passwd"\r\n\r\n'
        parts += [head.encode(), sound, b"\r\n"]
    return server.ask(LISTEN, b"".join(parts) + b"--mark--\r\n", content_type="multipart/form-data; boundary=mark")


@pytest.fixture(scope="module")
def wanted():
    with slimrt.Model(MODELS / "tale-whisper.gguf") as model:
        return model.transcribe(SOUND, word_timestamps=True)


def test_transcripts_are_the_librarys(whisper, wanted):
    segments, info = wanted
    text = "".join(one.text for one in segments).strip()
    audio = client(whisper).audio
    assert text and audio.transcriptions.create(model="any", file=SOUND).text == text
    for form in ("text", "srt", "vtt"):
        found = audio.transcriptions.create(model="any", file=SOUND, response_format=form)
        assert found == written(form.replace("text", "txt"), segments)
    times = audio.transcriptions.create(
        model="any", file=SOUND, response_format="srt", timestamp_granularities=["word"]
    )
    assert times == written("srt", segments, True)
    verbose = audio.transcriptions.create(
        model="any", file=SOUND, response_format="verbose_json", timestamp_granularities=["word", "segment"]
    )
    assert verbose.duration == pytest.approx(info.duration)
    assert [one.text for one in verbose.segments] == [one.text for one in segments]
    assert [one.word for one in verbose.words] == [word.word for one in segments for word in one.words]


def test_a_stream_of_segments_is_the_transcript(whisper, wanted):
    events = list(client(whisper).audio.transcriptions.create(model="any", file=SOUND, stream=True))
    assert [one.type for one in events[:-1]] == ["transcript.text.delta"] * len(wanted[0])
    assert "".join(one.delta for one in events[:-1]).strip() == events[-1].text
    assert events[-1].type == "transcript.text.done"


def test_uploads_at_once_are_each_their_own(whisper, wanted):
    found = []

    def work() -> None:
        found.append(client(whisper).audio.transcriptions.create(model="any", file=SOUND).text)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["".join(one.text for one in wanted[0]).strip()] * 8


def test_sounds_wait_their_turn_only_so_long(tmp_path):
    """A stream pings while its sound is heard, in slow steps; others, streams too, are refused in time and not read."""
    before = (
        "import slimrt.generation.loop as l, slimrt.server.sounds as s, time; s.PING_EVERY = 0.2; read = s.read_sound\n"
        "step = l.Loop._compute; l.Loop._compute = lambda *a: (time.sleep(0.4), step(*a))\n"
        "s.read_sound = lambda *a, **k: (print('a sound is read', flush=True), read(*a, **k))[1]"
    )
    limits = ("--parallel", "1", "--queue-timeout", "1")
    with served(tmp_path, *limits, model=MODELS / "tale-whisper.gguf", before=before) as server:
        heard = list[Answer]()
        first = threading.Thread(target=lambda: heard.append(form(server, {"stream": "true"}, SOUND.read_bytes())))
        first.start()
        server.wait_until("texts_running", 1)
        for fields in ({}, {"stream": "true"}):
            answer = form(server, fields, SOUND.read_bytes())
            assert (answer.status, answer.error["code"]) == (503, "queue_timeout") and first.is_alive()
        first.join()
        told = heard[0].body
        assert told.startswith(b": ping\n\n") and b"transcript.text.done" in told and b"error" not in told
        assert form(server, {}, SOUND.read_bytes()).status == 200
        assert server.log.read_text().count("a sound is read") == 2


def test_a_stream_of_a_sound_pings_in_a_queue_longer_than_proxies_wait(tmp_path):
    before = (
        "import slimrt.generation.loop as l, slimrt.server.limits as m, slimrt.server.sounds as s, time\n"
        "m._PROXY, m.PING_EVERY, s.PING_EVERY = 0.4, 0.2, 0.2\n"
        "step = l.Loop._compute; l.Loop._compute = lambda *a: (time.sleep(0.4), step(*a))"
    )
    limits = ("--parallel", "1", "--queue-timeout", "0.8")
    with served(tmp_path, *limits, model=MODELS / "tale-whisper.gguf", before=before) as server:
        first = threading.Thread(target=lambda: form(server, {}, SOUND.read_bytes()))
        first.start()
        server.wait_until("texts_running", 1)
        told = form(server, {"stream": "true"}, SOUND.read_bytes())
        assert told.status == 200 and told.body.count(b": ping") >= 2 and b"queue_timeout" in told.body
        first.join()


def test_a_server_that_ends_waits_for_sounds_only_so_long(tmp_path):
    before = (
        "import functools, slimrt.generation.loop as l, slimrt.server.limits as m, time\n"
        "m.Limits = functools.partial(m.Limits, drain_timeout=0.5)\n"
        "step = l.Loop._compute; l.Loop._compute = lambda *a: (time.sleep(1), step(*a))"
    )
    with served(tmp_path, model=MODELS / "tale-whisper.gguf", before=before) as server:
        heard = list[Answer]()
        work = threading.Thread(target=lambda: heard.append(form(server, {}, SOUND.read_bytes())))
        work.start()
        server.wait_until("texts_running", 1)
        assert server.terminate(30) == 0
        work.join()
        assert (heard[0].status, heard[0].error["code"]) == (503, "draining")
        assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "html"}, "response_format"),
        ({"temperature": "hot"}, "temperature"),
        ({"stream": "perhaps"}, "stream"),
        ({"path": "/etc/passwd"}, "path"),
        ({"language": "klingon"}, "language"),
        ({"language": "fr"}, "language"),
        ({"timestamp_granularities[]": "syllable"}, "timestamp_granularities"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
        ({"timestamp_granularities": "segment", "response_format": "text"}, "timestamp_granularities"),
        ({"stream": "true", "response_format": "srt"}, "response_format"),
        ({"stream": "true", "response_format": "vtt"}, "response_format"),
        ({"stream": "true", "response_format": "verbose_json", "timestamp_granularities[]": "word"}, "response_format"),
    ],
)
def test_fields_that_are_wrong_are_named(whisper, fields, param):
    answer = form(whisper, fields, SOUND.read_bytes())
    assert answer.status == 400 and answer.error["param"] == param


def test_what_is_no_sound_is_refused(whisper):
    for content in (b"", b"RIFF", b"no sound at all" * 99):
        answer = form(whisper, {}, content)
        assert answer.status == 400 and answer.error["message"]
    answer = form(whisper, {"model": "any"}, None)
    assert (answer.status, answer.error["param"]) == (400, "file")
    assert whisper.ask(LISTEN, {"file": "/etc/passwd"}).status == 400
    refused = whisper.chat()
    assert refused.status == 400 and "is a Whisper model and cannot chat" in refused.error["message"]
    assert form(whisper, {}, SOUND.read_bytes()).status == 200


def test_a_body_may_be_as_large_as_a_sound_is(whisper):
    """Larger than a body of JSON may be; two and a half minutes of silence."""
    samples = np.zeros(16000 * 150, "<i2")
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(samples.tobytes())
    assert len(content.getvalue()) > 4 << 20
    assert form(whisper, {"temperature": "0"}, content.getvalue()).status == 200


def test_forecasts_are_the_librarys(tmp_path):
    series = [np.sin(np.arange(60) / 3).tolist(), [1.0, None, 3.0, 4.0] * 10]
    with served(tmp_path, model=MODELS / "tale-chronos.gguf") as server:
        asked = {"series": series, "prediction_length": 5, "quantile_levels": [0.1, 0.5]}
        answer = server.ask("/v1/forecasts", asked).json
        assert [one["index"] for one in answer["data"]] == [0, 1]
        with slimrt.Model(MODELS / "tale-chronos.gguf", n_seqs=4) as model:
            rows = [np.array(one, float) for one in series]
            wanted = model.predict_quantiles(rows, 5, [0.1, 0.5])
        for one, row in zip(answer["data"], wanted, strict=True):
            np.testing.assert_allclose([one["quantiles"][level] for level in ("0.1", "0.5")], row.T, rtol=1e-5)
        beyond = server.ask("/v1/forecasts", asked | {"quantile_levels": [0.02, 0.5]}).json
        assert beyond["quantile_levels"] == [0.02, 0.5] and beyond["answered_levels"] == [0.1, 0.5]
        for wrong in ({}, {"series": []}, {"series": [["a"]]}, {"series": [10**400, 1]}, {"prediction_length": 0},
                      {"horizon": 3}, {"quantile_levels": ["x"]}, {"quantile_levels": [10**400]}, {"num_samples": 3},
                      {"top_p": 1.0}, {"seed": -2}, {"cross_learning": True}):  # fmt: skip
            answer = server.ask("/v1/forecasts", {"series": [1, 2]} | wrong if wrong else {})
            assert (answer.status, answer.error["param"]) == (400, next(iter(wrong), "series"))


def test_sounds_and_forecasts_stay_within_the_plan(tmp_path, whisper):
    """28 KB at 1 Hz, a FLAC of three hours of silence, a sound for another model, and a megabyte of levels."""
    silence = io.BytesIO()
    soundfile.write(silence, np.zeros(3 * 3600 * 2000, np.int16), 2000, format="FLAC")
    slow = io.BytesIO()
    with wave.open(slow, "wb") as file:
        file.setparams((1, 2, 1, 0, "NONE", ""))
        file.writeframes(bytes(28000))
    for content, words in ((slow, "1 Hz holds no speech"), (silence, "a sound may last 3600 s here")):
        answer = form(whisper, {}, content.getvalue())
        assert (answer.status, answer.error["param"]) == (400, "file") and words in answer.error["message"]
    with served(tmp_path, model=MODELS / "tale-chronos.gguf") as server:
        answer = form(server, {}, slow.getvalue())
        assert answer.status == 400 and "is a Chronos-Bolt model" in answer.error["message"]
        levels = np.linspace(0.1, 0.9, 100_000).tolist()
        for more, param in (
            ({"quantile_levels": levels}, "quantile_levels"),
            ({"quantile_levels": levels[:99], "prediction_length": 60000}, "series"),
        ):
            answer = server.ask("/v1/forecasts", {"series": [[1.0, 2.0, 3.0, 4.0] * 5] * 100} | more)
            assert (answer.status, answer.error["param"]) == (400, param), answer.body


def test_forecasts_of_chronos_2(tmp_path):
    path, series = tmp_path / "model.gguf", [chronos2_models.waves(30, i) for i in (1, 2)]
    slimrt.convert(chronos2_models.write(tmp_path / "hf"), path, progress=False)
    with served(tmp_path, "--n-source", "64", model=path) as server, slimrt.Model(path, n_source=64) as model:
        for options in ({}, {"cross_learning": True}):
            asked = {"series": [one.tolist() for one in series], "prediction_length": 5, "quantile_levels": [0.5]}
            answer = server.ask("/v1/forecasts", asked | options).json
            wanted = model.predict_quantiles(series, 5, [0.5], **options)
            for one, row in zip(answer["data"], wanted, strict=True):
                np.testing.assert_allclose(one["quantiles"]["0.5"], row[:, 0], rtol=1e-4)
        answer = server.ask("/v1/forecasts", {"series": [series[0].tolist() * 2] * 8, "cross_learning": True})
        assert answer.status == 400 and "n_source" in answer.error["message"]
        assert server.ask("/v1/completions", {"prompt": "a"}).status == 400


def test_a_forecast_ends_when_nobody_waits_for_it(tmp_path):
    """In steps of half a second a hundred series, one at a time, would take a minute."""
    slow = "import slimrt.generation.loop as l, time; step = l.Loop._compute\n"
    slow += "l.Loop._compute = lambda *a: (time.sleep(0.5), step(*a))"
    with served(tmp_path, "--parallel", "1", model=MODELS / "tale-chronos.gguf", before=slow) as server:
        series = [[1.0, 2.0, 3.0, 4.0] * 10] * 100
        connection = server.begin({"series": series, "prediction_length": 5}, "/v1/forecasts")
        server.wait_until("texts_running", 1)
        connection.close()
        server.wait_until("places_taken", 0, seconds=5.0)
        server.wait_until("texts_running", 0, seconds=5.0)
        server.wait_until("texts_waiting", 0, seconds=5.0)
        assert server.ask("/v1/forecasts", {"series": [1.0, 2.0], "prediction_length": 5}).status == 200


def test_a_forecast_ends_when_its_time_is_over(tmp_path):
    slow = "import slimrt.generation.loop as l, time; step = l.Loop._compute\n"
    slow += "l.Loop._compute = lambda *a: (time.sleep(0.5), step(*a))"
    limits = ("--parallel", "1", "--request-timeout", "1")
    with served(tmp_path, *limits, model=MODELS / "tale-chronos.gguf", before=slow) as server:
        answer = server.ask("/v1/forecasts", {"series": [[1.0, 2.0, 3.0, 4.0] * 10] * 100, "prediction_length": 5})
        assert (answer.status, answer.error["code"]) == (503, "request_timeout")
        server.wait_until("places_taken", 0, seconds=5.0)
        server.wait_until("texts_running", 0, seconds=5.0)
        assert "never retrieved" not in server.log.read_text()


def test_texts_beside_an_encoder_are_completions(tmp_path):
    with served(tmp_path, model=MODELS / "tale-t5.gguf") as server, slimrt.Model(MODELS / "tale-t5.gguf") as model:
        prompts = ["Anna was a baker in a green valley.", "Fred was a farmer."]
        wanted = [one.text for one in model.text2text(prompts, max_tokens=20)]
        found = client(server).completions.create(model="any", prompt=prompts, max_tokens=20, temperature=0)
        assert [one.text for one in found.choices] == wanted
        asked = {"model": "any", "prompt": prompts[0], "max_tokens": 20, "temperature": 0}
        stream = client(server).completions.create(**asked, stream=True)
        assert "".join(one.choices[0].text for one in stream if one.choices) == wanted[0]
