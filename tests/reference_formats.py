# SPDX-License-Identifier: Apache-2.0
"""What numbers become in the types that cache rows may have: float64 of what is read back. For reference.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def rounded(x: Array, dtype: str | None, heads: int = 1) -> Array:
    """x [n, heads * dim] as it is after being stored in `dtype` (round to nearest even); None: exact.

    q8, fp8_e4m3, q4, q3 and q2 have scales for each row and head."""
    if dtype is None:
        return x
    single = np.asarray(x, np.float32)
    if dtype in SCALED:
        return SCALED[dtype](single.reshape(*single.shape[:-1], heads, single.shape[-1] // heads)).reshape(single.shape)
    if dtype == "fp8_e5m2":
        value = to_fp8(single, 2, -14)
        return np.where(np.abs(value) >= 2.0**16, np.copysign(np.inf, value), value)
    if dtype == "f32":
        return single.astype(np.float64)
    if dtype == "f16":
        return single.astype(np.float16).astype(np.float64)
    if dtype == "bf16":
        bits = single.view(np.uint32).astype(np.uint64)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
        return bits.astype(np.uint32).view(np.float32).astype(np.float64)
    raise ValueError(dtype)


def rounded_by_channel(x: Array, dtype: str, tokens: int) -> Array:
    """x [n, width] with scales for each channel of `tokens` rows: a column of such a group is coded as a head is."""
    groups = np.asarray(x).reshape(-1, tokens, np.shape(x)[1]).swapaxes(1, 2)
    return rounded(np.ascontiguousarray(groups), dtype).swapaxes(1, 2).reshape(np.shape(x))


def to_q8(x: NDArray[np.float32]) -> Array:
    """Codes of -127 to 127 times the largest magnitude / 127."""
    scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(scale == 0, 0.0, np.rint(x / scale)).astype(np.float64) * scale


def to_fp8(x: Array, mantissa: int, smallest: int) -> Array:
    """To so many bits after the first, from 2^smallest on; below it in equal steps."""
    x = x.astype(np.float64)
    exponent = np.maximum(np.frexp(x)[1] - 1, smallest)
    step = 2.0 ** (exponent - mantissa)
    return np.rint(x / step) * step


def to_e4m3(x: NDArray[np.float32]) -> Array:
    """The largest magnitude brought to [128, 256) by a power of 2."""
    power = 2.0 ** (np.maximum(np.frexp(np.abs(x).max(axis=-1, keepdims=True))[1] - 1, -100) - 7)
    return to_fp8(x / power, 3, -6) * power


def to_few(x: NDArray[np.float32], bits: int) -> Array:
    """Groups of 32: minimum + scale * a code of so many bits, both float16 and rounded outwards."""
    out = np.empty(x.shape)
    for first in range(0, x.shape[-1], 32):
        group = x[..., first : first + 32]
        low = -half_above(-group.min(axis=-1, keepdims=True))
        scale = half_above((group.max(axis=-1, keepdims=True) - low) / np.float32(2**bits - 1))
        with np.errstate(invalid="ignore", divide="ignore"):
            code = np.where(scale > 0, np.minimum(np.rint((group - low) / scale), 2**bits - 1), 0)
        out[..., first : first + 32] = low.astype(np.float64) + code.astype(np.float64) * scale
    return out


def half_above(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The smallest float16 that is not below x."""
    half = x.astype(np.float16)
    return np.where(half < x, np.nextafter(half, np.float16(np.inf)), half).astype(np.float32)


SCALED: dict[str, Callable[[NDArray[np.float32]], Array]] = {  # [..., dim] float32 -> float64
    "q8": to_q8,
    "fp8_e4m3": to_e4m3,
    "q4": partial(to_few, bits=4),
    "q3": partial(to_few, bits=3),
    "q2": partial(to_few, bits=2),
}
