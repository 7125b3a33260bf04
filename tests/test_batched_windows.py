# SPDX-License-Identifier: Apache-2.0
"""Windows of one long sound decoded together, and its language alone; with an engine that says what a script says."""

from __future__ import annotations

import numpy as np
import pytest

from scripted import DE, EN, PREVIOUS, START, TRANSCRIBE, at, said, scripted_model, whisper_file
from slimrt.errors import UnsupportedError
from slimrt.speech.audio import SAMPLE_RATE
from test_transcribe import HELLO, Speaker, constant, sound

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return whisper_file(tmp_path_factory.mktemp("whisper") / "whisper.gguf")


def three_parts() -> np.ndarray:
    """75 s with pauses around 26 and 53 s, where windows of 30 s may end."""
    return sound((25.5, 0.3), (1.0, 0.0), (26.0, 0.3), (1.0, 0.0), (21.5, 0.3))


def numbered(window):
    """The first window is heard once more before: for its language."""
    return [at(0.2), *said(f" window {window}"), at(1.0)]


def test_windows_are_decoded_together_and_told_in_order(path):
    """The first of them is the last to be done."""
    engine = Speaker(lambda n: [at(0.2), *said(" longer" * (6 - 2 * n) + f" {n}"), at(1.0)], n_seqs=3, language=DE)
    told, done = [], []
    segments, info = scripted_model(path, engine).transcribe(
        three_parts(), batch_size=3, initial_prompt="Names", temperature=0,
        on_segment=lambda i, segment: told.append(segment), on_progress=lambda *report: done.append(report[1:]),
    )  # fmt: skip
    assert engine.encodes == [1, 3] and engine.most == 3 and not engine.live
    assert [segment.text.split()[-1] for segment in segments] == ["1", "2", "3"] and told == segments
    assert [segment.id for segment in segments] == [0, 1, 2]
    starts = [segment.start for segment in segments]
    assert starts[0] == pytest.approx(0.2) and 25.7 < starts[1] < 26.7 and 52.7 < starts[2] < 53.7
    assert (info.language, info.duration, info.duration_heard) == ("de", 75.0, 75.0) and info.language_probability > 0.9
    assert engine.prompts == [[PREVIOUS, *said(" Names"), START, DE, TRANSCRIBE]] * 3  # and no text of another window
    assert [one for one, _ in done] == sorted(one for one, _ in done) and done[-1] == (7500, 7500)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_text_is_that_of_the_windows_one_by_one(path, size):
    engine = Speaker(numbered, n_seqs=4, logit=4.0)
    model = scripted_model(path, engine)
    options = {"seed": 5, "language": "en", "temperature": 0.5, "condition_on_previous_text": False}
    segments, _ = model.transcribe(three_parts(), batch_size=size, **options)
    alone, _ = scripted_model(path, Speaker(numbered, logit=4.0)).transcribe(three_parts(), batch_size=1, **options)
    assert segments == alone and engine.encodes[0] == min(size, 3)


def test_what_a_window_cuts_off_is_kept(path):
    """In turn, the next window would hear it again."""
    cut = [at(0), *said(" one"), at(10), at(10), *said(" cut o")]
    engine = Speaker(constant(cut), n_seqs=2)
    segments, _ = scripted_model(path, engine).transcribe(sound((29.0, 0.3)), batch_size=2)
    assert [(one.start, one.end, one.text) for one in segments] == [(0, 10, " one"), (10, 29, " cut o")]


def test_several_sounds_share_the_batch_and_empty_ones_are_done_at_once(path):
    engine = Speaker(numbered, n_seqs=4)
    done = []
    silence = np.zeros(SAMPLE_RATE, np.float32)
    results = scripted_model(path, engine).transcribe(
        [silence, three_parts(), sound((2.0, 0.3))], batch_size=4, vad="energy", language="en",
        on_result=lambda i, segments, info: done.append(i),
    )  # fmt: skip
    assert [len(segments) for segments, _ in results] == [0, 3, 1] and sorted(done) == [0, 1, 2]
    assert results[0][1].duration_heard == 0 and engine.encodes == [4] and results[2][0][0].text == " window 3"


def test_prefix_and_clips_and_words(path):
    engine = Speaker(constant([at(0.2), *said(" hello there"), at(1.4)]), n_seqs=2)
    segments, info = scripted_model(path, engine).transcribe(
        three_parts(), batch_size=2, language="en", prefix="So", clip_timestamps=[10, 20, 40], word_timestamps=True
    )
    assert len(engine.prompts) == 2 and segments[0].text.startswith(" So")  # the first window's goes on after it
    assert [round(segment.start, 1) for segment in segments] == [10.0, 40.2, 63.2] and info.duration_heard == 45.0
    assert segments[1].words[0].start == pytest.approx(40.0) and segments[1].words[0].word == " hello"


def test_too_few_sequences_are_told(path):
    model = scripted_model(path, Speaker(constant(HELLO), n_seqs=4))
    with pytest.raises(
        ValueError, match="batch_size 3 needs 6 sequences at once, the model has 4: load it with n_seqs=6"
    ):
        model.transcribe(three_parts(), batch_size=3, num_beams=2)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        model.transcribe(three_parts(), batch_size=0)


def test_an_interruption_frees_all_windows(path):
    def script(window):
        if window == 2:
            raise KeyboardInterrupt
        return HELLO

    engine = Speaker(script, n_seqs=3)
    with pytest.raises(KeyboardInterrupt):
        scripted_model(path, engine).transcribe(three_parts(), batch_size=3, language="en")
    assert not engine.live


def test_the_language_alone(path):
    engine = Speaker(constant(HELLO), language=DE, n_seqs=2)
    model = scripted_model(path, engine)
    language, likely = model.detect_language(three_parts())
    assert language == "de" and list(likely)[0] == "de" and set(likely) == {"de", "en"}
    assert sum(likely.values()) == pytest.approx(1.0) and likely["de"] > 0.9
    assert engine.encodes == [1] and engine.appends == [1] and not engine.live
    assert [one for one, _ in model.detect_language([three_parts(), sound((1.0, 0.3))], vad="energy")] == ["de", "de"]
    with pytest.raises(TypeError, match="detect_language has no language"):
        model.detect_language(three_parts(), language="en")
    engine._language = EN
    assert model.detect_language(sound((1.0, 0.3)))[0] == model.transcribe(sound((1.0, 0.3)))[1].language == "en"


def test_a_model_of_one_language_detects_none(path, monkeypatch):
    model = scripted_model(path, Speaker(constant(HELLO)))
    monkeypatch.setattr("slimrt.speech.vocabulary.LANGUAGES", {})
    with pytest.raises(UnsupportedError, match="is for English only"):
        model.detect_language(sound((1.0, 0.3)))
