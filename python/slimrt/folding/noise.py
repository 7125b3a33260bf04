# SPDX-License-Identifier: Apache-2.0
"""The noise that rounding adds to a row: N in docs/cache-math.md, measured with the runtime's own kernels.

For floats a formula would suffice (ROUNDING), but with scales shared by channels the noise depends on how the channels
vary together; measured on rows of the calibration text it is accurate to a few percent.
"""

from __future__ import annotations

from math import log

import numpy as np
from numpy.typing import NDArray

from slimrt.folding.planes import Rounds

# Unit roundoff of the float types of cache rows, and of products.
ROUNDOFF = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
# Rounding to nearest is uniform within half a spacing: variance (2 u 2^e)^2 / 12 for a value m 2^e, 1 <= m < 2, that
# is u^2 / (3 m^2) of its energy. With log m uniform, E[1 / m^2] = 3 / (8 ln 2): noise in u^2 of the channel's energy.
ROUNDING = 1 / (8 * log(2))


def of_float(type_name: str) -> float:
    """Variance of rounding to a float type, relative to the energy (mean square) of the rounded values."""
    return ROUNDING * ROUNDOFF[type_name] ** 2


def of_sum(length: int) -> float:
    """Rounding variance of a float32 sum of `length` products, relative to its energy: the partial sums have half of
    that energy on average."""
    return length / 2 * of_float("f32")


def of_reading(row: np.ndarray, weight: np.ndarray, result: np.ndarray) -> NDArray[np.float64]:
    """Rounding variance [e_out] of the float32 sums k W, where W is derived from an inverse.

    Its terms cancel: the partial sums behave like a Brownian bridge from 0 to a small result. On average their energy
    is a sixth of the terms' energy and a third of the result's (without cancellation together the half of `of_sum`).

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
    """Noise variance [n, width] of each element of rows float32 [n, width] when they are read back: from rounding by
    the plane, and from the float32 sums that computed them.

    Args:
        depth: number of products in these sums.
    """
    rounding = np.square(plane.round(rows) - rows, dtype=np.float64)
    return np.asarray(rounding + np.square(rows, dtype=np.float64) * (of_float("f32") + of_sum(depth)))


def of_plane(rows: np.ndarray, plane: Rounds, depth: int) -> NDArray[np.float64]:
    """`squares` of each channel [width], averaged over the rows."""
    return np.asarray(squares(rows, plane, depth).mean(axis=0))


def of_product(
    rows: np.ndarray, plane: Rounds, depth: int, weight: np.ndarray, result: np.ndarray
) -> NDArray[np.float64]:
    """Noise variance [e_out] of k W, with stored rows k float32 [n, e_in] that are read back and multiplied.

    Args:
        plane: rounds the rows. depth: number of products in the float32 sums that computed them.
        weight: W [e_in, e_out], stored in float32. result: E (k W)^2 of each channel [e_out].
    """
    row = energy(rows)
    stored = of_plane(rows, plane, depth) + row * of_float("f32")
    return np.asarray(stored @ weight**2 + of_reading(row, weight, result))
