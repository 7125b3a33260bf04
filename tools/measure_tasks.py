# SPDX-License-Identifier: Apache-2.0
"""Measure the small encoder-decoders in `models/` on what they were not trained on, and make the samples that ship.

    python tools/measure_tasks.py models --fsdd DIR

prints the figures of models/README.md; `--samples tests/digits` writes models/digits.wav and the clips of the tests
instead.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np
from reference_series import seasonal_naive, series
from task_series import CONTEXT, HORIZON
from task_words import LONGEST, word

import slimrt

WINDOW_SECONDS = 2.56
HELD_BACK_SEED = 99


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

        def texts(sounds: list) -> list[str]:
            return ["".join(one.text for one in segments) for segments, _ in model.transcribe(sounds, language="en")]

        drawn = islice(clips(Espeak(), HELD_BACK_SEED, WINDOW_SECONDS, held_back=True, most=3), 330)
        drawn = [one for one in drawn if one.words]
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


def months(models: Path) -> None:
    rows = series(np.random.RandomState(HELD_BACK_SEED), 60, CONTEXT + HORIZON)
    past, future = rows[:, :CONTEXT], rows[:, CONTEXT:]
    with slimrt.Model(models / "tale-chronos.gguf", n_seqs=40) as model:
        found = model.predict_quantiles(past, HORIZON, (0.1, 0.5, 0.9), seed=1)
    naive = np.abs(seasonal_naive(past, HORIZON) - future).mean(1)
    ratio = np.abs(found[..., 1] - future).mean(1) / naive
    inside = ((future >= found[..., 0]) & (future <= found[..., 2])).mean()
    print(
        f"tale-chronos, {len(rows)} series: mean absolute error of the median {np.exp(np.log(ratio).mean()):.3f} of "
        f"seasonal naive's (geometric mean), lower in {(ratio < 1).mean():.0%}; {inside:.1%} of the values "
        "between the 10 and 90 % quantiles"
    )


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
    parser.add_argument(
        "--samples", type=Path, metavar="DIR", help="write digits.wav, and the tests' clips there; no more"
    )
    parser.add_argument("--only", choices=["speech", "words", "series"], nargs="+", default=["speech", "words"])
    args = parser.parse_args()
    if args.samples:
        write_samples(args.models, args.samples)
        return
    for key in args.only:
        {"speech": lambda: speech(args.models, args.fsdd), "words": lambda: words(args.models),
         "series": lambda: months(args.models)}[key]()  # fmt: skip


if __name__ == "__main__":
    main()
