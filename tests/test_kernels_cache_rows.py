# SPDX-License-Identifier: Apache-2.0
"""The stored types of cache rows: what comes back from a plane, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import DEVICES, ISAS
from pairwise import pairwise
from reference_formats import rounded
from slimrt._core import ops

TYPES = ["f32", "f16", "bf16", "q8", "fp8_e4m3", "fp8_e5m2", "q4", "q3", "q2"]
FEW_BITS = {"q4": 4, "q3": 3, "q2": 2}
SHAPES = [(1, 1, 1), (3, 2, 7), (40, 4, 64), (70, 3, 80), (33, 2, 128), (5, 1, 200)]  # rows, heads, dim

each_isa = pytest.mark.parametrize("isa", DEVICES)
each_type = pytest.mark.parametrize("dtype", TYPES)


def rows_of(n: int, heads: int, dim: int, seed: int = 0) -> np.ndarray:
    """Heads of very different sizes, some with an outlier."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(n, heads, dim)) * 10.0 ** random.uniform(-3, 2, size=(n, heads, 1))
    x[:, :, 0] *= random.choice([1.0, 30.0], size=(n, heads))
    return x.reshape(n, heads * dim).astype(np.float32)


@pairwise(lambda shape, dtype, isa: isa == "cuda" and dtype == "f16", shape=SHAPES, dtype=TYPES, isa=DEVICES)
def test_rows_are_rounded_as_the_reference_does(shape, dtype, isa):
    """What comes back from a plane, and what `round` makes without one: the same to the bit, so that what is computed
    from rows before they are stored holds for them afterwards."""
    n, heads, dim = shape
    x = rows_of(n, heads, dim)
    stored, wanted = ops.cache_round_trip(x, heads, dtype, isa), rounded(x, dtype, heads)
    if dtype in FEW_BITS:  # minimum + code * scale is rounded to float32 once or twice
        size = np.abs(x.reshape(n, heads, dim)).max(axis=-1, keepdims=True) + np.zeros((n, heads, dim))
        assert (np.abs(stored - wanted) <= 2e-7 * size.reshape(stored.shape)).all()
    else:
        assert np.array_equal(stored, wanted.astype(np.float32))
    for threads in (1, 3):
        assert np.array_equal(ops.quantize_dequantize(x, heads, dtype, isa, threads), stored)
    assert np.array_equal(ops.quantize_dequantize(x, heads, "f32", isa), x)


@each_isa
def test_errors_are_at_most_half_a_step(isa):
    n, heads, dim = 64, 4, 96
    x = rows_of(n, heads, dim, seed=1)
    by_head = x.reshape(n, heads, dim).astype(np.float64)

    def error(dtype: str) -> np.ndarray:
        return np.abs(ops.cache_round_trip(x, heads, dtype, isa).reshape(n, heads, dim) - by_head)

    high = np.abs(by_head).max(axis=-1, keepdims=True)
    assert (error("q8") <= high / 127 / 2 * (1 + 1e-5)).all()
    assert (error("fp8_e4m3") <= np.maximum(2.0**-4 * np.abs(by_head), high * 2.0**-17)).all()
    assert (error("fp8_e5m2") <= np.maximum(2.0**-3 * np.abs(by_head), 2.0**-17)).all()
    groups = by_head.reshape(n, heads, 3, 32)
    width = groups.max(axis=-1) - groups.min(axis=-1)
    # minimum and scale are float16, rounded outwards: by up to 2^-10 of their sizes
    width = width + 2.0**-10 * np.abs(groups.min(axis=-1)) + 2.0**-24
    for dtype, bits in FEW_BITS.items():
        step = width / (2**bits - 1) * (1 + 2.0**-10) + 2.0**-24
        assert (error(dtype).reshape(groups.shape) <= step[..., None] / 2 * (1 + 1e-5)).all()


@each_isa
@pytest.mark.parametrize("value", [0.0, 1.0, -3.7, 1e-3, 200.3])
def test_constant_heads_are_kept(value, isa):
    x = np.full((3, 2 * 64), value, np.float32)
    assert np.abs(ops.cache_round_trip(x, 2, "q8", isa) - x).max() <= 2.0**-23 * abs(value)
    # A minimum is float16; what is left of the constant is a scale, a float16 too, times the highest code, or less.
    for dtype in FEW_BITS:
        assert np.abs(ops.cache_round_trip(x, 2, dtype, isa) - x).max() <= 2.0**-19 * abs(value) + 3 * 2.0**-24


@each_isa
@each_type
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_a_number_stays_so(bad, dtype, isa):
    """The element itself, and with a scale the head (or group) around it; other heads are untouched."""
    x = rows_of(4, 3, 40, seed=2)
    x[1, 45] = bad
    got = ops.cache_round_trip(x, 3, dtype, isa).reshape(4, 3, 40)
    assert not np.isfinite(got[1, 1, 5])
    good = np.isfinite(got)
    good[1, 1] = True
    assert good.all()


@each_isa
def test_fp8_saturates_nowhere(isa):
    """e5m2 has infinities beyond its largest number, 57344; e4m3 is scaled, so nothing is beyond it."""
    x = np.array([[57344.0, 61439.0, 61440.0, -1e9, 1e-9]], np.float32)
    assert ops.cache_round_trip(x, 1, "fp8_e5m2", isa).tolist() == [[57344.0, 57344.0, np.inf, -np.inf, 0.0]]
    big = np.array([[3e38, -1e38, 1.0]], np.float32)
    assert not np.isfinite(ops.cache_round_trip(big, 1, "fp8_e4m3", isa)[0, 0])  # the power of 2 above it is no float
    assert np.isfinite(ops.cache_round_trip(big / 4, 1, "fp8_e4m3", isa)).all()


@each_type
def test_isas_agree_to_the_bit(dtype):
    x = rows_of(50, 3, 72, seed=3)
    first, *others = (ops.cache_round_trip(x, 3, dtype, isa) for isa in ISAS)
    for other in others:
        assert (
            np.abs(first - other).max() <= 1e-7 * np.abs(x).max() if dtype in FEW_BITS else np.array_equal(first, other)
        )
