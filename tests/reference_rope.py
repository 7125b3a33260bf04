# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding in float64, for reference.py."""

from __future__ import annotations

from dataclasses import dataclass
from math import pi

import numpy as np
from numpy.typing import NDArray

from reference_formats import Array


@dataclass
class Rope:
    """Rotary embedding: pair i of a head turns by position * inv_freq[i]; cos and sin are times `scale`."""

    inv_freq: Array
    interleaved: bool  # pairs (2i, 2i+1), else (i, i + n_rot/2)
    scale: float = 1.0

    def __call__(self, x: Array, positions: NDArray[np.int64]) -> Array:
        """x [n, heads, head_dim] -> the same, its first n_rot columns rotated."""
        half = len(self.inv_freq)
        angle = np.outer(positions, self.inv_freq)[:, None, :]
        cos, sin = np.cos(angle) * self.scale, np.sin(angle) * self.scale
        first = slice(0, 2 * half, 2) if self.interleaved else slice(0, half)
        second = slice(1, 2 * half, 2) if self.interleaved else slice(half, 2 * half)
        out = x.copy()
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., first] * sin + x[..., second] * cos
        return out


def yarn(
    inv_freq: Array, factor: float, original_ctx: int, base: float, fast: float, slow: float, whole_ramp: bool = True
) -> Array:
    """Turns fewer than `slow` times within the original context: interpolated; more than `fast` times: kept; a ramp
    between, which may begin and end between pairs."""
    half = len(inv_freq)

    def pair_turning(times: float) -> float:
        return 2 * half * np.log(original_ctx / (times * 2 * pi)) / (2 * np.log(base))

    first, last = pair_turning(fast), pair_turning(slow)
    if whole_ramp:
        first, last = np.floor(first), np.ceil(last)
    low, high = max(first, 0), min(last, 2 * half - 1)
    kept = 1 - np.clip((np.arange(half) - low) / max(high - low, 0.001), 0, 1)
    return inv_freq / factor * (1 - kept) + inv_freq * kept
