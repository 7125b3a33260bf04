# SPDX-License-Identifier: Apache-2.0
"""Attention calls by their sizes, for tests of the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Call:
    """heads: of queries; kv: of k; rows in all, the last `queries` fresh."""

    heads: int
    kv: int
    dim: int
    rows: int
    queries: int
    window: int = 0

    @property
    def distance(self) -> np.ndarray:
        """Of a row from a query, [queries, rows]."""
        return np.arange(self.rows) - (self.rows - self.queries + np.arange(self.queries))[:, None]

    @property
    def seen(self) -> np.ndarray:
        """Whether a query sees a row, [queries, rows]."""
        return (self.distance <= 0) & ((self.distance > -self.window) if self.window else True)


# What the largest weight of rows_together() is as an integer, where weights of absorbed q8 and q4 rows become integers.
WEIGHT_LEVELS = {"avx512": 255, "neon": 255, "neon_dot": 255, "neon_i8mm": 255, "avx2": 32767}


def takes_codes(isa: str, dtype: str, dim: int) -> bool:
    """Whether absorbed rows of stored heads of `dim` columns are multiplied as they are coded."""
    return dtype == "q8" or (dtype == "q4" and dim % 32 == 0 and WEIGHT_LEVELS.get(isa) == 255)


def rows_together(n_heads: int) -> int:
    """Rows of codes that are summed together when all heads read them."""
    return 256 if n_heads >= 32 else 128


def weight_rounding(
    isa: str, p: np.ndarray, rows: np.ndarray, stored_heads: int = 1, dtype: str = "q8", together: int = 128
) -> np.ndarray:
    """How far p @ rows, whole q8 or q4 rows, may be off since weights times scales are rounded, each by up to half a
    step: six standard deviations of such a sum, of so many rows together. p [..., rows], weights, any number of them at
    once; rows [rows, width]."""
    if isa not in WEIGHT_LEVELS:
        return np.zeros(p.shape[:-1])
    if dtype == "q4":  # scales of 32 columns; codes are about the ninth of sixteen
        heads = rows.reshape(len(rows), -1, 32)
        low = heads.min(axis=2, keepdims=True)
        heads = heads - low - (heads.max(axis=2, keepdims=True) - low) * 8 / 15
    else:
        heads = rows.reshape(len(rows), stored_heads, -1)
    scale = np.maximum(np.abs(heads).max(axis=2), 1e-30)  # 127 times, or 8
    error = np.zeros((*p.shape[:-1], *heads.shape[1:]))
    for first in range(0, len(rows), together):
        some = slice(first, first + together)
        step = (p[..., some, None] * scale[some]).max(axis=-2) / WEIGHT_LEVELS[isa]
        error += step[..., None] * np.sqrt(((heads[some] / scale[some, :, None]) ** 2).sum(axis=0) / 12)
    return 6 * error.max(axis=(-2, -1))


# Where rows of other types than q8 and f32 become integers of 16 bits, 128 at a time, when all heads read them.
PAIRS = ("avx512", "avx2")


def pair_rounding(isa: str, dtype: str, p: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """How far p @ rows may be off since weights and columns are rounded so that the sum of their squares is 65000^2 and
    32700^2: six standard deviations. p [..., rows], weights; rows [rows, width]."""
    if isa not in PAIRS or dtype in ("q8", "f32"):
        return np.zeros(p.shape[:-1])
    error = np.zeros((*p.shape[:-1], rows.shape[1]))
    for first in range(0, len(rows), 128):
        weights, some = p[..., first : first + 128], rows[first : first + 128]
        squares = (weights**2).sum(axis=-1)
        step = np.maximum(np.sqrt(squares) / 65000, weights.max(axis=-1) / 32767)
        error += (step**2 + squares / 32700**2)[..., None] * (some**2).sum(axis=0) / 12
    return 6 * np.sqrt(error.max(axis=-1))


def absorbed_rounding(isa: str, dtype: str, p: np.ndarray, rows: np.ndarray, stored_heads: int) -> np.ndarray:
    """How far p @ rows may be off where rows of this type, but q8, are absorbed. p [..., rows]; rows [rows, width]."""
    if dtype != "q8" and takes_codes(isa, dtype, rows.shape[1] // stored_heads):
        return weight_rounding(isa, p, rows, stored_heads, dtype)
    return pair_rounding(isa, dtype, p, rows)
