# SPDX-License-Identifier: Apache-2.0
"""Spoken digits for the toy Whisper: espeak-ng in many voices, made to sound like rooms, telephones and microphones.

Needs `pip install espeakng-loader soxr` (the espeak-ng library and its voices, GPL-3.0: used to make sounds, not
shipped). Everything is drawn from a seed; espeak-ng's own noise goes on from one word to the next, so that a seed gives
the same sounds in a fresh process only. Digits are spoken one by one, so that it is known when each begins and ends.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import soxr
from numpy.typing import NDArray

RATE = 16000
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ACCENTS = ("en-us", "en", "en-gb-scotland", "en-us-nyc", "en-gb-x-rp", "en-gb-x-gbcwmd", "en-029")
SPEAKERS = (
    "m1 m2 m3 m4 m5 m6 m7 m8 f1 f2 f3 f4 f5 Alex Andy Annie Gene Michael Mike adam belinda benjamin boris caleb david "
    "ed edward grandma grandpa iven john linda max paul quincy rob robert shelby steph travis zac"
).split()
HELD_BACK = ("m4", "f3", "adam", "linda", "robert", "zac")  # speakers that training never hears

_RETRIEVAL, _PARAMETER_RATE, _PARAMETER_PITCH, _PARAMETER_RANGE = 2, 1, 3, 4
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)

Samples = NDArray[np.float32]


@dataclass(frozen=True)
class Clip:
    """A sound and what is said in it: (word, start, end) in seconds."""

    samples: Samples
    words: tuple[tuple[str, float, float], ...]


class Espeak:
    """The espeak-ng library. One at a time: it has global state."""

    def __init__(self) -> None:
        import espeakng_loader

        self._library = ctypes.CDLL(espeakng_loader.get_library_path())
        data = espeakng_loader.get_data_path().encode()
        self._rate = self._library.espeak_Initialize(_RETRIEVAL, 0, data, 0x8000)  # 0x8000: return, do not exit
        if self._rate <= 0:
            raise RuntimeError(f"espeak-ng does not start with the data in {data.decode()}")
        self._heard: list[Samples] = []
        self._callback = _CALLBACK(self._hear)
        self._library.espeak_SetSynthCallback(self._callback)

    def _hear(self, wave: ctypes._Pointer[ctypes.c_short], count: int, events: int) -> int:
        if wave and count > 0:
            self._heard.append(np.ctypeslib.as_array(wave, (count,)).astype(np.float32) / 32768)
        return 0

    def say(self, text: str, voice: str, *, speed: int = 160, pitch: int = 50, melody: int = 50) -> Samples:
        """A text as float32 (n,) at 16 kHz, without silence around it.

        Args:
            voice: such as "en-us+m3". speed: words a minute, 80 to 450. pitch, melody: 0 to 99.
        """
        if self._library.espeak_SetVoiceByName(voice.encode()) != 0:
            raise ValueError(f"espeak-ng has no voice {voice}")
        parameters = ((_PARAMETER_RATE, speed), (_PARAMETER_PITCH, pitch), (_PARAMETER_RANGE, melody))
        for parameter, value in parameters:
            self._library.espeak_SetParameter(parameter, value, 0)
        self._heard.clear()
        data = text.encode()
        self._library.espeak_Synth(data, len(data) + 1, 0, 1, 0, 1, None, None)
        return _trimmed(soxr.resample(np.concatenate(self._heard), self._rate, RATE))


def _trimmed(samples: Samples) -> Samples:
    loud = np.flatnonzero(np.abs(samples) > 0.01 * np.abs(samples).max())
    return samples[loud[0] : loud[-1] + 1]


@cache
def voices(held_back: bool) -> tuple[str, ...]:
    """The voices of training, or those it never hears, in every accent."""
    return tuple(f"{accent}+{one}" for accent in ACCENTS for one in SPEAKERS if (one in HELD_BACK) == held_back)


def clips(espeak: Espeak, seed: int, seconds: float, *, held_back: bool = False, most: int = 5) -> Iterator[Clip]:
    """Sounds of this length without end, of one to `most` digits each; one in twelve has none."""
    rng = random.Random(seed)
    while True:
        yield _clip(espeak, rng, seconds, held_back, most)


def spoken(espeak: Espeak, words: str, voice: str, pause: float = 0.15) -> Samples:
    """Words one after another in a quiet room, half a second of it behind them."""
    gap, parts = np.zeros(round(pause * RATE), np.float32), []
    for word in words.split():
        said = espeak.say(word, voice)
        parts += [gap, 0.7 * said / np.abs(said).max()]
    samples = np.concatenate([*parts, np.zeros(RATE // 2, np.float32)])
    return samples + np.random.default_rng(1).normal(0, 1e-3, len(samples)).astype(np.float32)


def takes(espeak: Espeak, seed: int, count: int) -> Iterator[dict[str, Samples]]:
    """The ten words as `count` voices of training say them, each in a room of its own, with a short echo behind."""
    rng = random.Random(seed)
    for _ in range(count):
        voice, how, stretch = _manner(rng, held_back=False)
        room, take = rng.getrandbits(63), {}
        for word in WORDS:
            spoken = soxr.resample(espeak.say(word, voice, **how), RATE, RATE * stretch)
            spoken = np.pad(spoken / max(float(np.abs(spoken).max()), 1e-4), (0, RATE // 20))
            take[word] = _in_a_room(spoken, random.Random(room), np.random.default_rng(room))
        yield take


def _manner(rng: random.Random, held_back: bool) -> tuple[str, dict[str, int], float]:
    """A voice, how it speaks, and a stretch of its spectrum, as throats of other lengths have."""
    voice, stretch = rng.choice(voices(held_back)), rng.uniform(0.82, 1.22)
    how = {"speed": rng.randrange(110, 260), "pitch": rng.randrange(15, 85), "melody": rng.randrange(20, 80)}
    return voice, how, stretch


def _clip(espeak: Espeak, rng: random.Random, seconds: float, held_back: bool, most: int) -> Clip:
    noise = np.random.default_rng(rng.getrandbits(63))
    silent = rng.random() < 1 / 12
    voice, how, stretch = _manner(rng, held_back)
    samples, words, at = np.zeros(round(seconds * RATE), np.float32), [], rng.uniform(0.05, 0.5)
    for _ in range(0 if silent else rng.choice([1, 1, *range(1, most + 1)])):
        word = rng.choice(WORDS)
        spoken = espeak.say(word, voice, **how)
        spoken = soxr.resample(spoken, RATE, RATE * stretch)
        start, end = round(at * RATE), round(at * RATE) + len(spoken)
        if end > len(samples) - RATE // 10:
            break
        samples[start:end] += spoken / max(float(np.abs(spoken).max()), 1e-4) * rng.uniform(0.6, 1.0)
        words.append((word, start / RATE, end / RATE))
        at = end / RATE + rng.uniform(0.03, 0.45)
    return Clip(_recorded(samples, rng, noise), tuple(words))


def _recorded(samples: Samples, rng: random.Random, noise: np.random.Generator) -> Samples:
    """As a microphone in a room has it: echoes, a band, a hiss or hum, a level."""
    return _with_hiss(_in_a_room(samples, rng, noise), rng, noise)


def _in_a_room(samples: Samples, rng: random.Random, noise: np.random.Generator) -> Samples:
    n = len(samples)
    if rng.random() < 0.5:
        decay = rng.uniform(0.01, 0.08)
        taps = noise.normal(size=round(4 * decay * RATE)) * np.exp(-np.arange(round(4 * decay * RATE)) / (decay * RATE))
        echo = np.fft.irfft(np.fft.rfft(samples, 2 * n) * np.fft.rfft(taps, 2 * n))[:n]
        samples = samples + rng.uniform(0.05, 0.4) * (echo / max(float(np.abs(echo).max()), 1e-4)).astype(np.float32)
    if rng.random() < 0.5:  # a telephone, or other recordings at 8 kHz
        samples = soxr.resample(soxr.resample(samples, RATE, 8000), 8000, RATE)[:n]
        samples = np.pad(samples, (0, n - len(samples)))
    tilt = rng.uniform(-0.6, 0.9)
    return samples - np.float32(tilt) * np.concatenate((np.zeros(1, np.float32), samples[:-1]))


def _with_hiss(samples: Samples, rng: random.Random, noise: np.random.Generator) -> Samples:
    n = len(samples)
    hiss = noise.normal(size=n)
    colour = rng.random()
    hiss = np.fft.irfft(np.fft.rfft(hiss) / (1 + np.arange(n // 2 + 1) / n * 40) ** colour, n)
    level = 10 ** rng.uniform(-4.0, -1.3)
    samples = samples / max(float(np.abs(samples).max()), 1e-3) + level * hiss / max(float(hiss.std()), 1e-9)
    gain = 10 ** rng.uniform(-1.3, 0.0)
    return np.clip(gain * samples, -1, 1).astype(np.float32)
