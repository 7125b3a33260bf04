# SPDX-License-Identifier: Apache-2.0
"""Measure the small encoder-decoders in `models/` on what they were not trained on, and make the samples that ship.

    python training/measure_tasks.py models --fsdd DIR --months CSV

prints the figures of models/README.md; `--samples tests/digits` writes models/digits.wav, models/months.csv and the
clips of the tests instead.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from reference_series import CONTEXT, HORIZON, SEASONS, Series, seasonal_naive, series
from task_words import LONGEST, word

import slimrt
from slimrt.cli.forecast import read_series

WINDOW_SECONDS = 2.56
HELD_BACK_SEED = 99
TASKS = ["speech", "words", "series"]


def wrong(said: list[str], wanted: list[str]) -> int:
    """Words to put in, leave out or replace (Levenshtein)."""
    row = list(range(len(wanted) + 1))
    for i, one in enumerate(said, 1):
        last, row[0] = row[0], i
        for j, other in enumerate(wanted, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (one != other))
    return row[-1]


def score(pairs: Iterable[tuple[str, str]]) -> str:
    """Of (said, wanted) texts: words right, and texts wholly right."""
    mistakes = words = right = count = 0
    for said, wanted in pairs:
        found = wrong(said.split(), wanted.split())
        mistakes, words, right, count = mistakes + found, words + len(wanted.split()), right + (not found), count + 1
    return f"{1 - mistakes / words:.1%} of {words} words, {right / count:.1%} of {count} clips wholly"


def speech(models: Path, fsdd: Path | None) -> None:
    from reference_speech import RATE, WORDS, Espeak, clips

    with slimrt.Model(models / "tale-whisper.gguf", n_seqs=8) as model:

        def texts(sounds: list[Any]) -> list[str]:
            return ["".join(one.text for one in segments) for segments, _ in model.transcribe(sounds, language="en")]

        voices = clips(Espeak(), HELD_BACK_SEED, WINDOW_SECONDS, held_back=True, most=3)
        drawn = [one for one in islice(voices, 330) if one.words]
        wanted = [" ".join(word for word, _, _ in one.words) for one in drawn]
        print("tale-whisper, held-back voices:", score(zip(texts([one.samples for one in drawn]), wanted, strict=True)))
        silence = np.random.default_rng(1).normal(0, 0.01, 2 * RATE).astype(np.float32)
        print(f"tale-whisper, two seconds of hiss: {texts([silence])[0]!r}")
        if fsdd:
            paths = sorted(fsdd.glob("*.wav"))
            for speaker in sorted({path.stem.split("_")[1] for path in paths}):
                mine = [path for path in paths if speaker in path.stem]
                pairs = zip(
                    texts([str(path) for path in mine]), (WORDS[int(path.stem[0])] for path in mine), strict=True
                )
                print(f"tale-whisper, fsdd, {speaker}:", score(pairs))


def words(models: Path) -> None:
    rng = random.Random(HELD_BACK_SEED)
    with slimrt.Model(models / "tale-t5.gguf", n_seqs=32) as model:
        for letters in (4, 8, 12, LONGEST):
            given = [word(rng, letters) for _ in range(200)]
            got = [one.text.strip() for one in model.text2text(given)]
            right = sum(one == other[::-1] for one, other in zip(got, given, strict=True))
            print(f"tale-t5, words of {letters} letters: {right / len(given):.1%} of {len(given)} reversed")


def forecasts(models: Path, tables: Iterable[Path]) -> None:
    """Beside the last season repeated: all series, those of each season, and the end of each table of months."""
    rows, seasons = series(np.random.RandomState(HELD_BACK_SEED), 1000, CONTEXT + HORIZON)
    groups = {"any": seasons > 0} | {str(season): seasons == season for season in SEASONS}
    with slimrt.Model(models / "tale-chronos.gguf", n_seqs=40) as model:
        for season, some in groups.items():
            beside_naive(model, f"season {season}", rows[some], seasons[some])
        for seen in (CONTEXT // 2, CONTEXT // 4):
            beside_naive(model, f"{seen} values seen", rows[:, -seen - HORIZON :], seasons)
        for path in tables:
            (values,) = read_series(path.read_text(encoding="utf-8"), path.name, None).values()
            windows = np.lib.stride_tricks.sliding_window_view(values.astype(np.float32), 8 * 12 + HORIZON)[-25:]
            beside_naive(model, path.stem, windows, np.full(len(windows), 12))


def beside_naive(model: slimrt.Model, name: str, rows: Series, seasons: np.ndarray) -> None:
    """Print how the last HORIZON values of each row are forecast from those before them."""
    past, future = rows[:, :-HORIZON], rows[:, -HORIZON:]
    naive = [seasonal_naive(row, season, HORIZON) for row, season in zip(past, seasons, strict=True)]
    low, middle, high = np.moveaxis(model.predict_quantiles(past, HORIZON, (0.1, 0.5, 0.9)), 2, 0)
    ratio = np.abs(middle - future).mean(1) / np.abs(np.stack(naive) - future).mean(1)
    inside = ((low <= future) & (future <= high)).mean()
    print(
        f"tale-chronos, {name}, {len(rows)} forecasts: mean absolute error {np.exp(np.log(ratio).mean()):.3f} of the "
        f"last season's repeated (geometric mean), lower in {(ratio < 1).mean():.0%}; {inside:.1%} of the values "
        "between the 10 and 90 % quantiles"
    )


def write_months(path: Path) -> None:
    """Ten years of months, from a seed of their own."""
    rows, seasons = series(np.random.RandomState(HELD_BACK_SEED + 1), 20, 120)
    lines = [f"{2012 + i // 12}-{i % 12 + 1:02d},{value:.1f}" for i, value in enumerate(rows[seasons == 12][0])]
    path.write_text("\n".join(["month,visitors", *lines, ""]), encoding="utf-8")


def write_samples(models: Path, tests: Path) -> None:
    """Sounds at 8 kHz, the tests' clips named after what is said in them."""
    import soundfile
    import soxr
    from reference_speech import RATE, Espeak, clips, spoken

    espeak = Espeak()
    said = spoken(espeak, "three one four one five", "en-us+m4")
    soundfile.write(models / "digits.wav", soxr.resample(said, RATE, 8000), 8000, subtype="PCM_16")
    tests.mkdir(exist_ok=True)
    drawn = (one for one in clips(espeak, 5, WINDOW_SECONDS, held_back=True, most=4) if len(one.words) > 1)
    for one in islice(drawn, 5):
        kept = one.samples[: round((one.words[-1][2] + 0.1) * RATE)]
        name = "-".join(word for word, _, _ in one.words)
        soundfile.write(tests / f"{name}.wav", soxr.resample(kept, RATE, 8000), 8000, subtype="ULAW")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, help="where the files are")
    parser.add_argument("--fsdd", type=Path, help="recordings of people, named DIGIT_SPEAKER_NUMBER.wav")
    parser.add_argument("--months", type=Path, nargs="+", default=[], metavar="CSV", help="series of real months")
    parser.add_argument(
        "--samples", type=Path, metavar="DIR", help="write digits.wav, months.csv, and the tests' clips there; no more"
    )
    parser.add_argument("--only", choices=TASKS, nargs="+", default=TASKS, help="which models (default: all)")
    args = parser.parse_args()
    if args.samples:
        write_months(args.models / "months.csv")
        write_samples(args.models, args.samples)
        return
    for key in args.only:
        {"speech": lambda: speech(args.models, args.fsdd), "words": lambda: words(args.models),
         "series": lambda: forecasts(args.models, args.months)}[key]()  # fmt: skip


if __name__ == "__main__":
    main()
