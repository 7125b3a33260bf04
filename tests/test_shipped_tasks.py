# SPDX-License-Identifier: Apache-2.0
"""The small encoder-decoders this project trains and ships: what they were taught, in mode kv and in mode e."""

from __future__ import annotations

import csv
import random
import runpy
import string
from pathlib import Path

import numpy as np
import pytest

import slimrt
from conftest import third_party
from scripted import scripted_model
from slimrt import _core
from slimrt.errors import ContextOverflowError
from slimrt.speech.audio import load_audio

TESTS = Path(__file__).parent
SHIPPED = TESTS.parent / "models"
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# tests/digits: voices that training never heard, named after what they say.
CLIPS = ("five-one-five", "four-two-eight-four", "two-zero", "zero-four", "zero-seven")
LEVELS = tuple(i / 10 for i in range(1, 10))
MODES = {
    "kv f32": {"cache": "kv", "cache_type_k": "f32", "cache_type_v": "f32", "cross": "kv", "cross_type": "f32"},
    "e f16": {"cache": "kv", "cross": "e", "cross_type": "f16"},
}


def opened(name: str, mode: str, **options) -> slimrt.Model:
    """A shipped model whose caches are these."""
    path = SHIPPED / f"{name}.gguf"
    return scripted_model(path, _core.Engine(str(path), n_ctx=64, **MODES[mode], **options))


def texts(model: slimrt.Model, paths: list[Path]) -> list[str]:
    heard = model.transcribe([str(path) for path in paths], language="en", temperature=0.0)
    return ["".join(one.text for one in segments).strip() for segments, _ in heard]


@pytest.mark.unsanitized  # beams and samples of smaller models are seen there
@pytest.mark.parametrize("options", [{"num_beams": 2}, {"temperature": 1.0, "best_of": 2, "seed": 0}])
def test_as_many_sequences_as_texts_have_room_for_them(options):
    """Long sounds, with the text before as a prompt: texts at once cross blocks of 32 rows after they have parted."""
    sound = np.tile(np.pad(load_audio(SHIPPED / "digits.wav"), (0, 8000)), 30)
    with slimrt.Model(SHIPPED / "tale-whisper.gguf", n_seqs=2) as model:
        segments, info = model.transcribe(sound, **options)
    assert segments[-1].end > info.duration - 5 and len(segments) > 30


@pytest.mark.unsanitized  # of Python: whose turn it is
def test_sounds_wait_where_the_cache_has_room_for_one_text_at_a_time():
    """None of them can give its rows up; searches that may lack some do not begin. What is drawn at random goes on to
    the limit, beyond the first block of 32 rows."""
    sound = np.tile(np.pad(load_audio(SHIPPED / "digits.wav"), (0, 8000)), 3)
    drawn = {"temperature": 20.0, "seed": 1, "timestamps": False, "condition_on_previous_text": False,
             "compression_ratio_threshold": None, "logprob_threshold": None, "no_speech_threshold": None}  # fmt: skip
    said = []
    for tokens in (0, 64):
        with slimrt.Model(SHIPPED / "tale-whisper.gguf", n_seqs=3, cache_tokens=tokens) as model:
            results = model.transcribe([sound, sound, sound], **drawn)
        said.append([[one.tokens for one in segments] for segments, _ in results])
    assert said[0] == said[1] and max(len(one) for segments in said[0] for one in segments) == 32
    with slimrt.Model(SHIPPED / "tale-whisper.gguf", n_seqs=3, cache_tokens=64) as model:
        for options in ({"num_beams": 2}, {"temperature": 1.0, "best_of": 2}):
            with pytest.raises(ContextOverflowError, match="2 texts at once of up to 64 tokens take 4 blocks"):
                model.transcribe(sound, **options)


@pytest.fixture(scope="module")
def by_mode():
    """What both modes hear in all the clips and in the sound that ships, by name."""
    paths = [SHIPPED / "digits.wav", *(TESTS / "digits" / f"{name}.wav" for name in CLIPS)]
    found = {}
    for mode in MODES:
        with opened("tale-whisper", mode, n_seqs=4) as model:
            found[mode] = dict(zip(("digits", *CLIPS), texts(model, paths), strict=True))
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CLIPS)
def test_digits_are_written_down(mode, name, by_mode):
    assert by_mode[mode][name] == name.replace("-", " ")


@pytest.mark.parametrize("mode", MODES)
def test_a_sound_longer_than_a_window(mode, by_mode):
    assert by_mode[mode]["digits"] == "three one four one five"


def test_e_in_f16_hears_what_kv_in_f32_hears(by_mode):
    assert by_mode["kv f32"] == by_mode["e f16"]


def test_times_are_those_of_the_sound():
    with slimrt.Model(SHIPPED / "tale-whisper.gguf") as model:
        segments, info = model.transcribe(str(SHIPPED / "digits.wav"))
    assert info.language == "en"
    assert abs(segments[0].start - 0.15) < 0.15 and abs(segments[-1].end - (info.duration - 0.5)) < 0.2
    assert all(one.end <= other.start + 0.02 for one, other in zip(segments, segments[1:], strict=False))


def test_silence_is_left_empty():
    with slimrt.Model(SHIPPED / "tale-whisper.gguf") as model:
        segments, _ = model.transcribe(np.random.RandomState(1).normal(0, 0.01, 32000).astype(np.float32))
    assert segments == []


@pytest.mark.unsanitized
def test_people_are_understood_alike_in_both_modes():
    """fsdd: two people at 8 kHz, whom training never heard."""
    paths = sorted(third_party("audio/fsdd").glob("*.wav"))
    found = {}
    for mode in MODES:
        with opened("tale-whisper", mode, n_seqs=16) as model:
            found[mode] = texts(model, paths)
    assert found["kv f32"] == found["e f16"]
    right = sum(text == WORDS[int(path.stem[0])] for text, path in zip(found["e f16"], paths, strict=True))
    print(f"fsdd: {right} of {len(paths)}")
    assert right >= 0.65 * len(paths)  # models/README.md: 68 %


@pytest.mark.parametrize("mode", MODES)
def test_words_are_reversed(mode):
    rng = random.Random(3)
    words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 12))) for _ in range(30)] + ["lantern"]
    with opened("tale-t5", mode, n_seqs=8) as model:
        got = [one.text for one in model.text2text(words)]
    wrong = {word for one, word in zip(got, words, strict=True) if one != word[::-1]}
    assert wrong <= {"lpijijphjuao"}  # models/README.md: 1 % of words of 12 letters are


@pytest.fixture(scope="module")
def forecasts():
    """Of held-back series past (n, time), future and the last season repeated (n, 24), quantiles (n, 24, 9) by mode."""
    made = runpy.run_path(str(TESTS.parent / "training" / "reference_series.py"))
    rows, seasons = made["series"](np.random.RandomState(4321), 240, made["CONTEXT"] + made["HORIZON"])
    past, future = np.split(rows, [made["CONTEXT"]], axis=1)
    naive = [made["seasonal_naive"](row, season, future.shape[1]) for row, season in zip(past, seasons, strict=True)]
    found = {}
    for mode in MODES:
        with opened("tale-chronos", mode, n_seqs=16) as model:
            found[mode] = model.predict_quantiles(past, future.shape[1], LEVELS)
    return past, future, np.stack(naive), found


@pytest.mark.parametrize("mode", MODES)
def test_forecasts_beat_the_last_season_repeated(mode, forecasts):
    _, future, naive, found = forecasts
    ratio = np.abs(found[mode][..., 4] - future).mean(1) / np.abs(naive - future).mean(1)
    inside = (found[mode][..., 0] <= future) & (future <= found[mode][..., -1])
    share, covered = np.exp(np.log(ratio).mean()), inside.mean()
    print(f"{mode}: {share:.3f} of seasonal naive's error, {covered:.1%} between the 10 and 90 % quantiles")
    assert share < 0.8 and 0.75 < covered < 0.85


def test_quantiles_never_cross(forecasts):
    """The training lays them apart by sums of positive numbers: rows read in another order, or steps of a long horizon
    joined wrongly, cross. A series of one value, too, and far beyond the trained length."""
    past, _, _, found = forecasts
    for quantiles in found.values():
        steps = np.diff(quantiles)
        assert (steps >= 0).all() and np.median(steps / past.std(1)[:, None, None]) > 1e-3  # and they are not one
    with opened("tale-chronos", "e f16", n_seqs=16) as model:
        for series, horizon in ((past[:3], 100), ([[5.0]], 24), ([[2.0] * 60], 24)):
            assert (np.diff(model.predict_quantiles(series, horizon, LEVELS)) >= 0).all()


def test_e_in_f16_forecasts_what_kv_in_f32_forecasts(forecasts):
    past, _, _, found = forecasts
    apart = np.abs(found["e f16"] - found["kv f32"]).max((1, 2)) / past.std(1)
    print(f"at most {apart.max():.1e} deviations apart, typically {np.median(apart):.1e}")
    assert 0 < apart.max() < 8 * 2**-11  # float16 rounds by 2^-11 of a value, and these are up to a few deviations


def test_a_forecaster_says_what_it_is_for(run):
    for verb in ("text2text", "translate", "generate"):
        code, _, err = run(verb, str(SHIPPED / "tale-chronos.gguf"), "-p", "hello")
        assert code == 1 and "forecast" in err and "predict_quantiles()" in err


def test_the_sample_series_goes_on(run):
    """The command of README.md: summers stay above winters."""
    code, out, _ = run("forecast", str(SHIPPED / "tale-chronos.gguf"), str(SHIPPED / "months.csv"), "-n", "24")
    rows = list(csv.DictReader(out.splitlines()))
    middle = np.array([float(row["0.5"]) for row in rows]).reshape(2, 12)
    assert code == 0 and len(rows) == 24
    with (SHIPPED / "months.csv").open() as file:
        before = np.array([float(row["visitors"]) for row in csv.DictReader(file)]).reshape(-1, 12)
    for year in middle:
        assert np.corrcoef(year, before[-3:].mean(0))[0, 1] > 0.95


@pytest.mark.parametrize("name", ["tale-whisper", "tale-t5", "tale-chronos"])
def test_files_are_small(name):
    assert (SHIPPED / f"{name}.gguf").stat().st_size < 3 << 20
