# SPDX-License-Identifier: Apache-2.0
"""How much rounding adds to a row: the noise N of docs/cache-math.md, measured through the runtime's own kernels.

A formula would do for floats (ROUNDING), but with scales shared by channels the noise depends on how the channels vary
together; rows of the calibration text, which are at hand, tell it within a few percent.
"""

from __future__ import annotations

from math import log

import numpy as np
from numpy.typing import NDArray

from slimrt.folding.planes import Rounds

# Unit roundoff of what a cache row, or a product of it, is stored in.
ROUNDOFF = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
# Rounding to nearest is uniform within half a spacing: variance (2 u 2^e)^2 / 12 for a value m 2^e, 1 <= m < 2, that
# is u^2 / (3 m^2) of its energy. With log m uniform, E[1 / m^2] = 3 / (8 ln 2): noise in u^2 of the channel's energy.
ROUNDING = 1 / (8 * log(2))


def of_float(type_name: str) -> float:
    """Variance of rounding to a float type, over the energy of what is rounded."""
    return ROUNDING * ROUNDOFF[type_name] ** 2


def of_sum(length: int) -> float:
    """Variance of a float32 sum of so many products, over its energy: partial sums have half of it on average."""
    return length / 2 * of_float("f32")


def of_reading(row: np.ndarray, weight: np.ndarray, result: np.ndarray) -> NDArray[np.float64]:
    """Variance [e_out] of the float32 sums k W.

    The terms of an inverse cancel: partial sums wander as a Brownian bridge from nothing to a small result, and have a
    sixth of the terms' energy on average, and a third of the result's (together the half of `of_sum` where all of it
    stays).

    Args:
        row: E[k_j^2] of each channel [e_in].
        weight: W [e_in, e_out].
        result: E (k W)^2 of each channel [e_out].
    """
    return np.asarray(len(row) * of_float("f32") * (row @ weight**2 / 6 + result / 3))


def energy(rows: np.ndarray) -> NDArray[np.float64]:
    """Mean square of each channel [width] of rows [n, width]."""
    return np.asarray(np.einsum("ij,ij->j", rows, rows, dtype=np.float64)) / len(rows)


def squares(rows: np.ndarray, plane: Rounds, depth: int) -> NDArray[np.float64]:
    """Variance [n, width] of what is added to rows float32 [n, width] until they are read back, element by element.

    Args:
        depth: products in the float32 sums that made the rows.
    """
    rounding = np.square(plane.round(rows) - rows, dtype=np.float64)
    return np.asarray(rounding + np.square(rows, dtype=np.float64) * (of_float("f32") + of_sum(depth)))


def of_plane(rows: np.ndarray, plane: Rounds, depth: int) -> NDArray[np.float64]:
    """`squares` of a channel [width], over all rows."""
    return np.asarray(squares(rows, plane, depth).mean(axis=0))


def of_product(
    rows: np.ndarray, plane: Rounds, depth: int, weight: np.ndarray, result: np.ndarray
) -> NDArray[np.float64]:
    """Variance [e_out] of what stored rows float32 [n, e_in] give when they are read back and multiplied.

    Args:
        plane: how they are stored. depth: products in the float32 sums that made them.
        weight: W [e_in, e_out], stored in float32. result: E (k W)^2 of each channel [e_out].
    """
    row = energy(rows)
    stored = of_plane(rows, plane, depth) + row * of_float("f32")
    return np.asarray(stored @ weight**2 + of_reading(row, weight, result))
