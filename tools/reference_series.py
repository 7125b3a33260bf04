# SPDX-License-Identifier: Apache-2.0
"""Series of months: a yearly pattern, a trend and noise, and the forecast that any other has to beat."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

YEAR = 12
Series = NDArray[np.float32]


def series(random: np.random.RandomState, count: int, length: int) -> Series:
    """float32 (count, length). NumPy guarantees the stream of RandomState."""
    time = np.arange(length)
    months = (time + random.randint(0, YEAR, (count, 1))) % YEAR
    waves = random.standard_normal((count, 4, 1)) / (1 + np.arange(4))[:, None]
    phase = 2 * np.pi * random.uniform(size=(count, 4, 1))
    smooth = (waves * np.sin(2 * np.pi * np.arange(1, 5)[:, None] * np.arange(YEAR) / YEAR + phase)).sum(1)
    pattern = smooth + random.uniform(0, 0.5, (count, 1)) * random.standard_normal((count, YEAR))
    seasonal = np.take_along_axis(pattern, months, 1)
    trend = random.normal(0, 1.2, (count, 1)) * time / length
    noise = random.uniform(0.03, 0.4, (count, 1)) * random.standard_normal((count, length))
    level = random.uniform(-1, 4, (count, 1))
    return ((level + seasonal + trend + noise) * 10 ** random.uniform(-1, 3, (count, 1))).astype(np.float32)


def seasonal_naive(past: Series, horizon: int) -> Series:
    """The last year again: (count, length) to (count, horizon)."""
    return past[:, past.shape[1] - YEAR + np.arange(horizon) % YEAR]
