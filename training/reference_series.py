# SPDX-License-Identifier: Apache-2.0
"""Seasonal series, as months, weeks and days of sales or weather go, and the forecast that any other has to beat."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

CONTEXT, HORIZON = 192, 24
SEASONS = np.array([4, 6, 7, 12, 24])  # quarters, weeks of six and seven days, months, hours
SHARES = (0.1, 0.1, 0.15, 0.45, 0.2)
Series = NDArray[np.float32]
Numbers = NDArray[np.float64]


def series(random: np.random.RandomState, count: int, length: int) -> tuple[Series, NDArray[np.int64]]:
    """Series float32 (count, length) and their seasons (count,). NumPy guarantees the stream of RandomState.

    A pattern that comes again every season, a trend that may bend, in every third series a jump of the level, noise
    that may last from step to step and have outliers; two of five grow exponentially and swing in proportion.
    """

    def uniform(low: float, high: float) -> Numbers:
        return random.uniform(low, high, (count, 1))

    time, season = np.arange(length), random.choice(SEASONS, (count, 1), p=SHARES)
    smooth, steps = np.zeros((count, length)), (time + random.randint(0, 24, (count, 1))) % season
    for wave in range(1, 5):
        size = random.standard_normal((count, 1)) / wave
        smooth += size * np.sin(2 * np.pi * (wave * steps / season + uniform(0, 1)))
    rough = np.take_along_axis(random.standard_normal((count, SEASONS.max())), steps, 1)
    pattern = uniform(0, 1) * (smooth + uniform(0, 0.5) * rough)
    bend = np.maximum(time - uniform(0, 1) * length, 0) * (uniform(0, 1) < 0.4)
    trend = (random.normal(0, 2, (count, 1)) * time + random.normal(0, 3, (count, 1)) * bend) / CONTEXT
    jump = random.normal(0, 1, (count, 1)) * (time >= uniform(0, 1) * length) * (uniform(0, 1) < 1 / 3)
    whole = pattern + trend + jump + uniform(0.03, 0.4) * _noise(random, count, length)
    level, strength = uniform(-1, 4), uniform(0.1, 0.4)
    whole = np.where(uniform(0, 1) < 0.4, np.exp(strength * whole), level + whole)
    return (whole * 10 ** uniform(-1, 3)).astype(np.float32), season[:, 0]


def _noise(random: np.random.RandomState, count: int, length: int) -> Numbers:
    """(count, length) of deviation 1, but that in a series of five one value in 50 is five times as far off."""
    noise = random.standard_normal((count, length))
    carried = random.uniform(0, 0.7, (count, 1)) * (random.uniform(size=(count, 1)) < 0.5)
    for at in range(1, length):
        noise[:, at] = carried[:, 0] * noise[:, at - 1] + np.sqrt(1 - carried[:, 0] ** 2) * noise[:, at]
    far = (random.uniform(size=(count, length)) < 0.02) & (random.uniform(size=(count, 1)) < 0.2)
    return np.where(far, 5 * noise, noise)


def seasonal_naive(past: Series, season: int, horizon: int) -> Series:
    """The last season again: (..., length) to (..., horizon)."""
    return past[..., past.shape[-1] - season + np.arange(horizon) % season]
