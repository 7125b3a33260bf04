# SPDX-License-Identifier: Apache-2.0
"""Transcribing with an engine that says what a script says: windows, temperatures, language, batches, words."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import soundfile

from scripted import (
    DE,
    EN,
    END,
    N_VOCAB,
    NO_SPEECH,
    NO_TIMES,
    PREVIOUS,
    START,
    TRANSCRIBE,
    TRANSLATE,
    ScriptedEngine,
    after_instructions,
    at,
    likely,
    said,
    scripted_model,
    whisper_fields,
    whisper_file,
    write_gguf,
)
from slimrt.errors import AudioError, ContextOverflowError, UnsupportedError
from slimrt.generation.loop import loop_of
from slimrt.speech.audio import SAMPLE_RATE, read_sound
from slimrt.speech.languages import code_of
from slimrt.speech.mel import log_mel
from slimrt.speech.pauses import cut_at_segment, cut_at_sentences, usual_duration

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others


def sound(*parts: tuple[float, float]) -> np.ndarray:
    """(seconds, amplitude) of a tone each, float32 at 16 kHz."""
    waves = [np.sin(np.arange(round(s * SAMPLE_RATE)) * 0.3) * amplitude for s, amplitude in parts]
    return np.concatenate(waves).astype(np.float32)


class Speaker(ScriptedEngine):
    """Says script(n) in the n-th window that is encoded; the text is as likely as `logit` makes it."""

    def __init__(self, script, *, n_seqs=1, n_ctx=448, logit=20.0, language=EN, silence=0.0):
        super().__init__(self._say, n_seqs=n_seqs, n_ctx=n_ctx, n_vocab=N_VOCAB, architecture="whisper",
                         encoder={"n_source": 1500, "inputs": "mel", "n_inputs": 80})  # fmt: skip
        self._script, self._logit, self._language, self._silence = script, logit, language, silence
        self.windows: list[np.ndarray] = []
        self.prompts: list[list[int]] = []

    def encode(self, items, *, states=False) -> None:
        super().encode(items)
        for sequence, window in items:
            assert window.shape == (3000, 80) and window.dtype == np.float32
            self.windows.append(window)
            self.live[sequence][0] = len(self.windows) - 1

    def _say(self, window, tokens):
        if tokens[-1] == START:
            row = likely(self._language)
            row[NO_SPEECH] = 20.0 + np.log(self._silence / (1 - self._silence)) if self._silence else -50.0
            return row
        so_far = after_instructions(tokens)
        if so_far == []:
            self.prompts.append(tokens)
        text = [*self._script(window), END] if so_far is not None else [0]
        return likely(text[len(so_far)] if so_far is not None and len(so_far) < len(text) else END, self._logit)

    def alignment(self, sequence, tokens, heads):
        assert self.live[sequence][1] == [] and heads == [(0, 0), (0, 1)]
        weights = np.full((len(heads), len(tokens), 1500), 1e-4, np.float32)
        for i in range(len(tokens)):  # from the token before the text on, each looks at the next 0.2 s
            start = 10 * max(i - tokens.tolist().index(NO_TIMES), 0)
            weights[:, i, start : start + 10] = 0.1
        weights[:, -2, start - 10 :] = 0.1  # what foretells the end looks at all that is left
        return weights


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return whisper_file(tmp_path_factory.mktemp("whisper") / "whisper.gguf")


def constant(tokens: list[int]):
    return lambda window: tokens


HELLO = [at(0.2), *said(" hello there"), at(1.4)]


def test_a_short_sound(path):
    engine = Speaker(constant(HELLO))
    segments, info = scripted_model(path, engine).transcribe(sound((2.0, 0.3)))
    assert [(s.id, s.start, s.end, s.text) for s in segments] == [
        (0, pytest.approx(0.2), pytest.approx(1.4), " hello there")
    ]
    assert segments[0].tokens == tuple(HELLO) and segments[0].temperature == 0.0 and segments[0].words is None
    assert segments[0].avg_logprob == pytest.approx(0.0, abs=1e-4) and segments[0].no_speech_prob < 1e-9
    assert (info.language, info.duration, info.duration_heard) == ("en", 2.0, 2.0) and info.language_probability > 0.99
    assert engine.prompts == [[START, EN, TRANSCRIBE]] and not engine.live
    assert engine.windows[0][199].max() > 0 and (engine.windows[0][200:] == 0).all()  # nothing is heard after the end


def test_what_is_to_be_known_of_a_file_is_told_once(path, tmp_path):
    soundfile.write(tmp_path / "a.wav", sound((2.0, 0.3)), SAMPLE_RATE)
    (tmp_path / "a.wav").write_bytes((tmp_path / "a.wav").read_bytes()[:32044])
    model = scripted_model(path, Speaker(constant(HELLO)))
    with pytest.warns(UserWarning, match="cut off after 1.00 s of 2.00 s") as told:
        _, info = model.transcribe(tmp_path / "a.wav")
    assert told[0].filename == __file__ and info.warnings == (str(told[0].message),) and info.duration == 1.0
    with warnings.catch_warnings(action="error"):
        _, info = model.transcribe(read_sound(tmp_path / "a.wav"))
    assert len(info.warnings) == 1
    with pytest.raises(AudioError, match="longer than 0.5 s"):
        model.transcribe(sound((1.0, 0.3)), max_seconds=0.5)


def test_language_and_task_are_forced_or_detected(path):
    engine = Speaker(constant(HELLO), language=DE)
    _, info = scripted_model(path, engine).transcribe(sound((1.0, 0.3)))
    assert info.language == "de" and engine.prompts == [[START, DE, TRANSCRIBE]] and engine.encodes == [1]
    engine = Speaker(constant(HELLO), language=DE)
    _, info = scripted_model(path, engine).transcribe(sound((1.0, 0.3)), language="en", task="translate")
    assert (info.language, info.language_probability) == ("en", 1.0) and engine.prompts == [[START, EN, TRANSLATE]]


def test_windows_go_on_at_the_last_time(path):
    first = [at(0), *said(" one"), at(10), at(10), *said(" two"), at(25), at(25), *said(" cut o")]
    script = [first, [at(0), *said(" cut off"), at(5)]]
    engine = Speaker(lambda window: script[window])
    done = []
    segments, _ = scripted_model(path, engine).transcribe(
        sound((40.0, 0.3)), on_progress=lambda *report: done.append(report)
    )
    assert [(s.start, s.end, s.text) for s in segments] == [(0, 10, " one"), (10, 25, " two"), (25, 30, " cut off")]
    assert len(engine.windows) == 2 and done == [("transcribe", 2500, 4000), ("transcribe", 4000, 4000)]
    told = [at(0), *said(" one"), at(10), at(10), *said(" two"), at(25)]
    assert engine.prompts[1] == [PREVIOUS, *told, START, EN, TRANSCRIBE]


def test_previous_text_is_left_out_when_asked_and_prompts_go_in(path):
    first = [at(0), *said(" one"), at(10), at(10), *said(" two")]
    script = [first, HELLO]
    engine = Speaker(lambda window: script[window])
    model = scripted_model(path, engine)
    model.transcribe(sound((35.0, 0.3)), condition_on_previous_text=False, initial_prompt="names")
    assert engine.prompts[0] == [PREVIOUS, *said(" names"), START, EN, TRANSCRIBE]
    assert engine.prompts[1] == [START, EN, TRANSCRIBE]


def test_without_timestamps_a_segment_is_a_window(path):
    engine = Speaker(constant(said("word")))
    segments, _ = scripted_model(path, engine).transcribe(sound((33.0, 0.3)), timestamps=False)
    assert [(s.start, s.end, s.text) for s in segments] == [(0, 30, "word"), (30, 33, "word")]
    assert engine.prompts[0] == [START, EN, TRANSCRIBE, NO_TIMES]


def test_a_text_that_repeats_itself_is_tried_again(path):
    engine = Speaker(constant([at(0), *said(" and" * 50), at(9)]))
    segments, _ = scripted_model(path, engine).transcribe(sound((1.0, 0.3)), temperature=(0.0, 0.5), seed=1)
    assert segments[0].temperature == 0.5 and segments[0].compression_ratio > 2.4
    assert len(engine.prompts) == 1 and engine.encodes == [1]  # the prompt is not computed again
    segments, _ = scripted_model(path, engine).transcribe(sound((1.0, 0.3)), compression_ratio_threshold=None)
    assert segments[0].temperature == 0.0


def test_several_at_once_are_tried_again_from_the_same_prompt(path):
    """Beams and drawn texts take the rows of the window's own sequence, which gets them back."""
    engine = Speaker(constant([at(0), *said(" and" * 50), at(9)]), n_seqs=2)
    segments, _ = scripted_model(path, engine).transcribe(
        sound((1.0, 0.3)), num_beams=2, best_of=2, temperature=(0.0, 0.5, 0.7), initial_prompt="and", seed=1
    )
    assert segments[0].temperature == 0.7 and segments[0].tokens == (at(0), *said(" and" * 50), at(9))
    assert len(engine.prompts) == 3 and engine.prompts[0] == engine.prompts[1] == engine.prompts[2]
    assert engine.encodes == [1] and not engine.live


def test_an_unlikely_text_is_tried_again_unless_it_is_silence(path):
    short = [at(0), *said(" hm")]
    engine = Speaker(constant(short), logit=7.6)  # against e^0 of each other token that may come
    options = {"temperature": [0.0, 0.1], "logprob_threshold": -0.3, "seed": 0}
    segments, _ = scripted_model(path, engine).transcribe(sound((1.0, 0.3)), **options)
    assert segments[0].temperature == 0.1 and segments[0].avg_logprob < -0.3
    silent = Speaker(constant(short), logit=7.6, silence=0.9)
    segments, _ = scripted_model(path, silent).transcribe(sound((1.0, 0.3)), **options)
    assert segments == [] and len(silent.prompts) == 1 and len(silent.appends) < 10
    segments, _ = scripted_model(path, silent).transcribe(sound((1.0, 0.3)), **options | {"no_speech_threshold": None})
    assert [s.text for s in segments] == [" hm"] and segments[0].no_speech_prob == pytest.approx(0.9, abs=0.01)
    sure = Speaker(constant(HELLO), silence=0.9)
    assert len(scripted_model(path, sure).transcribe(sound((1.0, 0.3)))[0]) == 1  # a likely text is kept


def test_what_is_drawn_is_reproducible(path):
    engine = Speaker(constant(HELLO), logit=8.0)
    model = scripted_model(path, engine)
    first = model.transcribe(sound((1.0, 0.3)), temperature=1.0, seed=5)
    assert first == model.transcribe(sound((1.0, 0.3)), temperature=1.0, seed=5) and first[1].seed == 5
    assert first[0] != model.transcribe(sound((1.0, 0.3)), temperature=1.0, seed=6)[0]


def test_beams_and_the_best_of_several(path):
    engine = Speaker(constant(HELLO), n_seqs=5)
    model = scripted_model(path, engine)
    assert model.transcribe(sound((1.0, 0.3)), num_beams=5)[0][0].tokens == tuple(HELLO)
    assert engine.most <= 6 and not engine.live
    drawn = model.transcribe(sound((1.0, 0.3)), temperature=0.4, best_of=5, seed=2)[0]
    assert drawn[0].tokens == tuple(HELLO) and not engine.live
    with pytest.raises(ValueError, match="n_seqs=6"):
        model.transcribe(sound((1.0, 0.3)), num_beams=6)


def test_a_prefix_begins_the_first_window_alone(path):
    """Given tokens are said, and what follows obeys the rules as if the model had said them."""
    engine = Speaker(lambda window: [at(0), *said(" Hello there"), at(1.4)] if window == 0 else HELLO)
    segments, _ = scripted_model(path, engine).transcribe(
        sound((31.0, 0.3)), prefix=" Hello ", condition_on_previous_text=False, word_timestamps=True
    )
    assert [(s.start, s.text) for s in segments] == [(0.0, " Hello there"), (pytest.approx(30.2), " hello there")]
    assert segments[0].tokens == (at(0), *said(" Hello there"), at(1.4))
    assert [word.word for word in segments[0].words] == [" Hello", " there"]
    engine = Speaker(constant(said(" Hello there")))
    segments, _ = scripted_model(path, engine).transcribe(sound((1.0, 0.3)), prefix="Hello", timestamps=False)
    assert [s.text for s in segments] == [" Hello there"]


@pytest.mark.parametrize("name", ["prefix", "initial_prompt", "hotwords"])
def test_a_blank_text_is_none(path, name):
    """A lone space is a token, with which the text of a window must not begin."""
    plain, blank = Speaker(constant(HELLO)), Speaker(constant(HELLO))
    scripted_model(path, plain).transcribe(sound((1.0, 0.3)))
    scripted_model(path, blank).transcribe(sound((1.0, 0.3)), **{name: " \n"})
    assert blank.prompts == plain.prompts and blank.appends == plain.appends


def test_a_prefix_and_prompts_that_are_too_long_are_cut_to_what_fits(path):
    engine = Speaker(constant(HELLO))
    everything = {name: f"{name} " * 99 for name in ("prefix", "initial_prompt", "hotwords")}
    segments, _ = scripted_model(path, engine).transcribe(sound((1.0, 0.3)), **everything, temperature=0.0)
    assert segments[0].text.startswith(" prefix prefix") and not engine.live  # the engine checks its n_ctx


def test_hotwords_stand_before_every_window(path):
    script = [[at(0), *said(" one"), at(29)], HELLO]
    for conditioned, shown in ((True, script[0]), (False, [])):
        engine = Speaker(lambda window: script[window])
        scripted_model(path, engine).transcribe(
            sound((31.0, 0.3)), hotwords="names", condition_on_previous_text=conditioned
        )
        assert engine.prompts[0] == [PREVIOUS, *said(" names"), START, EN, TRANSCRIBE]
        assert engine.prompts[1] == [PREVIOUS, *said(" names"), *shown, START, EN, TRANSCRIBE]


@pytest.mark.parametrize("clips, windows", [
    ([5], [(5, 30), (35, 5)]), ((0, 10, 20.5, 30), [(0, 10), (20.5, 9.5)]), ([38, 50], [(38, 2)]), ([41], []),
])  # fmt: skip
def test_clips(path, clips, windows):
    """The sound is louder from second to second, so that a window shows where it begins."""
    engine = Speaker(constant([at(0), *said(" x"), at(1)]))
    whole = np.concatenate([sound((1.0, 0.02 * (1 + i))) for i in range(40)])
    segments, info = scripted_model(path, engine).transcribe(whole, clip_timestamps=clips, no_speech_threshold=None)
    assert [s.start for s in segments] == pytest.approx([start for start, _ in windows])
    assert [int((window.max(axis=1) > 0).sum()) for window in engine.windows] == pytest.approx(
        [100 * length for _, length in windows], abs=2
    )
    assert info.duration == 40.0 and info.duration_heard == pytest.approx(sum(length for _, length in windows))


def test_suppressed_tokens(path):
    def said_with(**options):
        engine = Speaker(constant([at(0), *said(" b#"), at(1)]))
        heard = scripted_model(path, engine).transcribe(sound((1.0, 0.3)), temperature=0.0, **options)[0]
        return "".join(segment.text for segment in heard)

    assert "#" not in said_with() and "#" not in said_with(suppress_tokens=[-1, ord("b")])  # the file's list
    assert "b" in said_with() and "b" not in said_with(suppress_tokens=[-1, ord("b")])
    assert said_with(suppress_tokens=[]) == " b#"


def test_blanks_are_suppressed_unless_asked_for(path):
    for blank, first in ((True, "a"), (False, " ")):
        engine = Speaker(constant(said(" a") if not blank else said("a")))
        segments, _ = scripted_model(path, engine).transcribe(
            sound((1.0, 0.3)), timestamps=False, suppress_blank=blank, temperature=0.0
        )
        assert segments[0].text[0] == first
    engine = Speaker(constant(said(" a")))
    segments, _ = scripted_model(path, engine).transcribe(sound((1.0, 0.3)), timestamps=False, temperature=0.0)
    assert not segments or segments[0].text[0] != " "


def test_languages_by_name_and_options_by_their_name_elsewhere(path):
    model = scripted_model(path, Speaker(constant(HELLO)))
    assert model.transcribe(sound((1.0, 0.3)), language="German")[1].language == "de"
    assert [code_of(name) for name in ("Mandarin", "castilian", "Haitian Creole", "?")] == ["zh", "es", "ht", "?"]
    for theirs, ours in (("beam_size", "num_beams"), ("vad_filter", "vad"), ("without_timestamps", "timest")):
        with pytest.raises(TypeError, match=f"no {theirs}: here it is called {ours}"):
            model.transcribe(sound((1.0, 0.3)), **{theirs: 1})


def test_callbacks_hear_of_every_segment_and_sound(path):
    told, done = [], []
    engine = Speaker(constant(HELLO), n_seqs=2)
    sounds = [sound((31.0, 0.3)), sound((1.0, 0.3)), sound((3.0, 0.0), (1.0, 0.3), (4.0, 0.0))]
    results = scripted_model(path, engine).transcribe(
        sounds, skip_silence=True, on_segment=lambda *told_now: told.append(told_now),
        on_result=lambda i, segments, info: done.append((i, segments, info)),
    )  # fmt: skip
    assert sorted(done, key=lambda one: one[0]) == [(i, *result) for i, result in enumerate(results)]
    assert done[0][0] == 1  # a long one does not hold the others up
    for i, (segments, _) in enumerate(results):
        assert [segment for index, segment in told if index == i] == segments


def test_several_sounds_are_one_batch(path):
    sounds = [sound((1.0 + i, 0.3)) for i in range(5)] + [sound((31.0, 0.3))]
    engine = Speaker(constant(HELLO), n_seqs=4)
    results = scripted_model(path, engine).transcribe(sounds, seed=3)
    assert [info.duration for _, info in results] == [1, 2, 3, 4, 5, 31]
    assert engine.encodes[0] == 4 and max(engine.appends) == 4 and not engine.live
    for one, result in zip(sounds, results, strict=True):
        alone = scripted_model(path, Speaker(constant(HELLO))).transcribe(one, seed=3)
        assert alone[0] == result[0]
    # its first window says that nothing comes after 1.4 s: the second one is at 30 s, not there
    assert [round(segment.start, 3) for segment in results[-1][0]] == [0.2, 30.2]
    assert scripted_model(path, engine).transcribe([]) == []


def test_the_spectrogram_of_one_sound_is_made_before_the_steps_of_all(path, monkeypatch):
    """That of an hour takes 0.6 s, for which the texts of others would wait."""
    model, seen = scripted_model(path, Speaker(constant(HELLO))), []

    def seeing(*args, **options):
        seen.append(loop_of(model._runtime)._stepper is None)
        return log_mel(*args, **options)

    monkeypatch.setattr("slimrt.speech.whisper.log_mel", seeing)
    assert model.transcribe(sound((1.0, 0.3)))[0][0].text == " hello there" and seen == [True]


def test_word_timestamps(path):
    engine = Speaker(constant([at(0), *said(" ab cd."), at(2), at(2), *said(" e"), at(3)]))
    segments, _ = scripted_model(path, engine).transcribe(sound((4.0, 0.3)), word_timestamps=True)
    words = [(w.word, round(w.start, 2), round(w.end, 2)) for s in segments for w in s.words]
    assert words == [(" ab", 0.0, 0.6), (" cd.", 0.6, 1.2), (" e", 1.4, 1.8)]
    assert [len(s.words) for s in segments] == [2, 1] and not engine.live
    assert all(w.probability > 0.99 for s in segments for w in s.words)


class Pausing(Speaker):
    """Is silent for 4 s before the eighth token, whose attention is there already."""

    def alignment(self, sequence, tokens, heads):
        weights = super().alignment(sequence, tokens, heads)
        late = tokens.tolist().index(NO_TIMES) + 7
        weights[:, late:] = np.roll(weights[:, late:], 200, axis=2)
        weights[:, late, 70:270] = 0.1
        return weights


@pytest.mark.parametrize(
    ("text", "times"),
    [(" ab cd. e f", [(0.0, 0.6), (0.6, 1.2), (4.6, 5.8), (5.8, 6.2)]),  # behind a sentence: twice the usual 0.6 s
     (" ab cdx e f", [(0.0, 0.6), (0.6, 1.4), (5.1, 5.8), (5.8, 6.2)])],  # where a segment begins at 5.4 s
)  # fmt: skip
def test_no_word_lasts_through_a_pause(path, text, times):
    """As in openai/whisper."""
    cut = [] if "." in text else [at(1.4), at(5.4)]
    engine = Pausing(constant([at(0), *said(text[:7]), *cut, *said(text[7:]), at(6)]))
    segments, _ = scripted_model(path, engine).transcribe(sound((8.0, 0.3)), word_timestamps=True)
    words = [word for segment in segments for word in segment.words]
    assert "".join(word.word for word in words) == text
    np.testing.assert_allclose([(word.start, word.end) for word in words], times, atol=1e-6)


def test_times_of_words_beside_pauses():
    """By hand: a usual word lasts 0.4 s."""
    assert usual_duration([(0, 0.4), (0.4, 0.4), (0.4, 0.8), (0.8, 6)]) == 0.4 and usual_duration([(1, 1)]) == 0.0
    assert usual_duration([(0, 2.0)]) == 0.7
    assert cut_at_sentences([" a", ".", " b"], [(0, 3), (3, 5), (5, 5.4)], 0.4)[1] == (3, 3.8)
    for times, (start, end), before, expected in (
        ([(1, 6)], (0, 9), 0, [(5.2, 6)]),  # the first word behind a pause
        ([(1, 4), (4, 6)], (0, 9), 0, [(4.4, 5.2), (5.2, 6)]),  # and the second
        ([(5.5, 6)], (5, 9), 0, [(5.5, 6)]),
        ([(1, 1.9)], (1.7, 9), 1, [(1.5, 1.9)]),  # it begins long before its segment
        ([(1, 1.4), (1.4, 4)], (1, 2), 1, [(1, 1.4), (1.4, 2)]),  # it ends long behind it
        ([], (1, 2), 0, []),
    ):
        found = np.array(cut_at_segment(times, start, end, before, 0.4))
        np.testing.assert_allclose(found, np.array(expected), atol=1e-9, err_msg=str(times))


def test_heads_of_a_larger_model_tell_no_times_of_words(tmp_path, monkeypatch):
    """Whoever takes layers out of a model leaves its list as it was: the later half stands in, which is said."""
    told: list[str] = []
    monkeypatch.setattr("slimrt.speech.transcribe.tell", told.append)
    heads = {"slimrt.whisper.alignment_heads": [7, 0, 0, 1]}
    path = write_gguf(tmp_path / "w.gguf", "whisper", whisper_fields() | heads)
    model = scripted_model(path, Speaker(constant(HELLO)))
    segments, _ = model.transcribe(sound((4.0, 0.3)), word_timestamps=True)
    assert [word.word for word in segments[0].words] == [" hello", " there"]
    assert len(told) == 1 and "w.gguf names head 0 of layer 7 for the times of words, and has 1 layer" in told[0]
    model.transcribe(sound((4.0, 0.3)))
    assert len(told) == 1


def test_silences_are_skipped_and_times_are_of_the_whole_sound(path):
    engine = Speaker(constant([at(0.4), *said(" a"), at(1.4), at(2.2), *said(" b"), at(3.2)]))
    whole = sound((10.0, 0.0), (1.0, 0.3), (20.0, 0.0), (1.0, 0.3), (5.0, 0.0))
    segments, info = scripted_model(path, engine).transcribe(whole, skip_silence=True)
    assert len(engine.windows) == 1 and info.duration == 37.0 and info.duration_heard == pytest.approx(3.6, abs=0.2)
    assert [s.start for s in segments] == [pytest.approx(10.0, abs=0.1), pytest.approx(31.0, abs=0.15)]
    nothing, info = scripted_model(path, engine).transcribe(sound((5.0, 0.0)), skip_silence=True)
    assert nothing == [] and info.duration_heard == 0.0


def test_unusable_sounds_and_options(path):
    model = scripted_model(path, Speaker(constant(HELLO)))
    with pytest.raises(AudioError, match="no samples"):
        model.transcribe(np.zeros(0, np.float32))
    with pytest.raises(AudioError, match="1 samples are NaN or infinite, the first at sample 7"):
        model.transcribe(np.where(np.arange(99) == 7, np.nan, 0.1))
    with pytest.raises(FileNotFoundError, match="absent.wav"):
        model.transcribe("absent.wav")
    with pytest.raises(UnsupportedError, match="^language 'fr' is none that this model knows: en"):
        model.transcribe(sound((1.0, 0.3)), language="fr")
    for bad in ({"temperature": -1.0}, {"num_beams": 0}, {"max_initial_timestamp": -1.0}, {"temperature": ()},
                {"max_initial_timestamp": float("inf")},
                {"patience": 0.0}, {"patience": 2.0}, {"length_penalty": 2.0}, {"best_of": 2, "temperature": 0.0},
                {"num_beams": 2, "temperature": 0.4}, {"clip_timestamps": "x"}, {"clip_timestamps": "nan"},
                {"length_penalty": np.nan},
                {"logprob_threshold": np.nan}, {"suppress_tokens": [-2]}, {"suppress_tokens": [10**6]},
                {"clip_timestamps": [2, 1]}, {"clip_timestamps": [-1]},
                {"clip_timestamps": [1], "skip_silence": True}):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(bad))):
            model.transcribe(sound((1.0, 0.3)), **bad)
    for wrong in (
        {"beams": 3},
        {"suppress_tokens": ["a"]},
        {"hotwords": ["a"]},
        {"on_segment": 1},
        {"suppress_tokens": 3},
        {"suppress_tokens": "-1"},
        {"clip_timestamps": 3},
        {"word_timestamps": "yes"},
        {"condition_on_previous_text": "x"},
        {"timestamps": None},
        {"suppress_blank": 1},
        {"skip_silence": "no"},
        {"vad_parameters": 3},
    ):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            model.transcribe(sound((1.0, 0.3)), **wrong)
    small = scripted_model(path, Speaker(constant(HELLO), n_ctx=8))
    with pytest.raises(ContextOverflowError, match="a context of 8 tokens leaves no room"):
        small.transcribe(sound((1.0, 0.3)))
    with pytest.raises(UnsupportedError, match="is a Whisper model and cannot forecast.*transcribe"):
        model.predict_quantiles([1.0, 2.0])
    with pytest.raises(UnsupportedError, match="cannot continue a text"):
        model.generate("hello")


def test_moonshine_cuts_long_sounds_where_they_are_quiet(tmp_path):
    lengths = []

    def say(source, tokens):
        if len(tokens) == 1:
            lengths.append(len(source) / 16000)
        return likely(ord("a") if len(tokens) < 3 else END)

    engine = ScriptedEngine(say, architecture="moonshine", decoder_start_token_id=START, n_ctx=194, n_vocab=N_VOCAB,
                            encoder={"n_source": 1248, "inputs": "audio", "n_inputs": 1})  # fmt: skip
    model = scripted_model(write_gguf(tmp_path / "m.gguf", "moonshine", whisper_fields()), engine)
    segments, _ = model.transcribe(sound((20.0, 0.3), (1.0, 0.0), (30.0, 0.3), (1.0, 0.0), (5.0, 0.3)))
    assert [segment.text for segment in segments] == [" aa"] * len(segments) and max(lengths) <= 30.0
    assert segments[0].end == pytest.approx(20.5, abs=0.4) and segments[-1].end == 57.0
    assert all(a.end == b.start for a, b in zip(segments, segments[1:], strict=False))


def test_an_exception_from_on_progress_stops_and_frees(path):
    engine = Speaker(constant(HELLO))

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scripted_model(path, engine).transcribe([sound((1.0, 0.3))] * 2, on_progress=stop)
    assert not engine.live
