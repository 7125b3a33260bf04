# SPDX-License-Identifier: Apache-2.0
"""Every kernel, for every instruction set of this machine, against NumPy float64 and the gguf package."""

from __future__ import annotations

import os
from itertools import product
from typing import Any

import gguf
import numpy as np
import pytest

from conftest import DEVICES, ISAS, PRODUCT_ISAS, product_unit, rms
from reference import ACTIVATIONS, Rope, layer_norm, rms_norm
from reference_formats import rounded
from slimrt._core import ops
from weight_formats import (
    HALVES,
    HELD,
    PLAIN,
    block_size,
    dequantised,
    ggml,
    half_bytes,
    narrowed,
    random_bytes,
    random_weight,
)

EPS = 2.0**-24  # half a unit in the last place of float32

# Multiplied as they are stored, with CUDA some more; others are unpacked at load.
NATIVE = ["q4_0", "q8_0", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4", "tq2_0", *HELD]
ON_CUDA = ["q4_1", "q5_0", "q5_1", "q2_k", "q3_k"]
ODD = [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 48, 64, 100, 1000]


# What the emulator was told to be, and the best instruction set there.
EMULATED = {
    "cortex-a53": "neon",
    "cortex-a72": "neon",
    "cortex-a55": "neon_dot",
    "cortex-a76": "neon_dot",
    "neoverse-n1": "neon_dot",
    "neoverse-v1": "neon_i8mm",
    "neoverse-n2": "neon_i8mm",
    "cortex-a710": "neon_dot",
    "max": "neon_dot",
    "max,sve=off,sme=off": "neon_dot",
}


@pytest.mark.skipif(os.environ.get("QEMU_CPU") not in EMULATED, reason="not one of the emulated CPUs")
def test_the_best_instruction_set_of_a_cpu():
    assert ISAS[0] == EMULATED[os.environ["QEMU_CPU"]]


def on_devices(type_names: list[str]) -> list[Any]:
    """(type, device) for each of them, on CUDA also for what only that multiplies as it is stored."""
    cuda = (pytest.param(name, "cuda", marks=DEVICES[-1].marks) for name in type_names + ON_CUDA)
    return [*product(type_names, PRODUCT_ISAS), *cuda]


def test_the_portable_kernels_are_always_there():
    assert ISAS[-1] == "portable" and len(set(ISAS)) == len(ISAS)  # best first


# ---------------------------------------------------------------- conversions
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_name", [*PLAIN, *HALVES, *HELD])
def test_unpack_is_bit_exact(type_name, isa):
    block = block_size(type_name)
    for blocks in (1, 2, 5, 33):
        raw, values = random_weight(type_name, 1, blocks * block, seed=blocks)
        got = ops.unpack(type_name, raw.reshape(-1), blocks * block, isa).reshape(-1)
        assert got.dtype == np.float32
        assert np.array_equal(got, values.reshape(-1).astype(np.float32)), (type_name, blocks)


@pytest.mark.parametrize(
    ("type_name", "held"),
    [("q5_0", "q8_0"), ("q3_k", "q6_k"), ("tq1_0", "tq2_0"), ("iq3_xxs", "iq3_xxs_n"), ("iq3_s", "iq3_s_n")]
    + [(name, "iq2_n") for name in ("iq2_xxs", "iq2_xs", "iq2_s")],
)
def test_what_is_held_in_another_type_is_the_same(type_name, held):
    """Every place of a grid is met about forty times."""
    raw, values = random_weight(type_name, 40, 4096)
    name, found = ops.repack(type_name, raw.reshape(-1))
    assert name == held
    assert np.array_equal(dequantised(found.reshape(40, -1), held), values)
    with pytest.raises(ValueError, match="q8_0 weights are held as they are"):
        ops.repack("q8_0", np.zeros(34, np.uint8))


@pytest.mark.parametrize("isa", ISAS)
def test_every_power_and_code_of_mxfp4(isa):
    """Down to 2^-128, up to what is infinite."""
    pairs = np.tile(np.arange(16, dtype=np.uint8) * 17, (256, 1))
    raw = np.concatenate([np.arange(256, dtype=np.uint8)[:, None], pairs], axis=1)
    with np.errstate(over="ignore"):
        wanted = gguf.quants.dequantize(raw, ggml("mxfp4"))
    assert wanted[0, 1] == 2.0**-128 and np.isinf(wanted[255, 7])
    got = ops.unpack("mxfp4", raw.reshape(-1), 256 * 32, isa).reshape(256, 32)
    assert np.array_equal(got, wanted)
    x = np.zeros((9, 32), np.float32)
    x[:, 1] = 1.0  # code 1, which stands for 1
    for tokens in (1, 3, 9):
        products = ops.linear(x[:tokens], raw[:240].reshape(-1), "mxfp4", 240, None, isa, 1)  # sums may overflow above
        assert np.allclose(products, wanted[:240, 1], rtol=1e-6, atol=2.0**-140)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_name", ["f16", "bf16"])
def test_unpack_of_every_16_bit_number(type_name, isa):
    bits = np.arange(65536, dtype=np.uint16)
    with np.errstate(invalid="ignore"):  # signalling NaN
        wanted = bits.view(np.float16).astype(np.float32)
    if type_name == "bf16":
        wanted = (bits.astype(np.uint32) << 16).view(np.float32)
    got = ops.unpack(type_name, bits.view(np.uint8), bits.size, isa).reshape(-1)
    assert np.array_equal(got, wanted, equal_nan=True)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_name", PLAIN)
def test_narrow_rounds_to_nearest_even(type_name, isa):
    random = np.random.default_rng(3)
    bits = random.integers(0, 2**32, 4099, dtype=np.uint32)
    halfway = (np.arange(512, dtype=np.uint32) << 13 | 0x38001000) ^ np.uint32(0)  # ties of float16
    edges = np.array([0, -0.0, 1e-8, 6e-8, 65503, 65504, 65519.9, 65520, 1e30, -1e30, np.inf, -np.inf], np.float32)
    x = np.concatenate([bits.view(np.float32), halfway.view(np.float32), edges])
    x = x[~np.isnan(x)]
    got = np.asarray(ops.narrow(type_name, x, isa), np.uint8)
    with np.errstate(over="ignore"):
        assert np.array_equal(got, narrowed(x, type_name))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_name", PLAIN)
def test_narrow_keeps_nan(type_name, isa):
    x = np.array([np.nan, 1.0, -np.nan], np.float32)
    raw = np.asarray(ops.narrow(type_name, x, isa), np.uint8)
    assert np.array_equal(np.isnan(ops.unpack(type_name, raw, 3, isa).reshape(-1)), [True, False, True])


# ---------------------------------------------------------------- products
def activation_rounding(x: np.ndarray, weight: np.ndarray, type_name: str) -> np.ndarray:
    """Standard deviation of x w^T when x is rounded to int8 by groups (32; K types: 256), uniform error."""
    group = max(block_size(type_name), 32)
    size = np.abs(x).reshape(len(x), -1, group).max(axis=2, keepdims=True)
    step = np.broadcast_to(size / 127, (len(x), x.shape[1] // group, group)).reshape(x.shape)
    return np.sqrt((step**2 / 12) @ (weight**2).T)


@pytest.mark.parametrize("isa", DEVICES)
@pytest.mark.parametrize("type_name", PLAIN)
@pytest.mark.parametrize("k", [1, 3, 8, 17, 33, 48, 100, 257])
def test_linear_of_plain_types(type_name, k, isa):
    for rows, tokens, threads in ((1, 1, 1), (3, 2, 1), (17, 5, 2), (33, 19, 2), (5, 64, 1)):
        raw, weight = random_weight(type_name, rows, k, seed=k)
        random = np.random.default_rng(rows)
        x = random.normal(size=(tokens, k)).astype(np.float32)
        bias = random.normal(size=rows).astype(np.float32) if rows % 2 else None
        got = ops.linear(x, raw.reshape(-1), type_name, rows, bias, isa, threads)
        wanted = x.astype(np.float64) @ weight.T + (0 if bias is None else bias)
        size = np.abs(x) @ np.abs(weight.T)
        bound = (k + 2) * EPS * (size + 1 + np.abs(wanted)) + product_unit(isa, type_name) * size
        assert got.shape == (tokens, rows)
        assert (np.abs(got - wanted) <= bound).all(), (rows, tokens, np.abs(got - wanted).max())


def wide_rounding(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Standard deviation of x W^T when both are rounded to a multiple of 1/8191 of the largest of 32 in a row."""

    def variance(a: np.ndarray) -> np.ndarray:
        padded = np.pad(np.abs(a.astype(np.float64)), ((0, 0), (0, -a.shape[1] % 32)))
        steps = padded.reshape(len(a), -1, 32).max(2) / 8191
        return np.repeat(steps**2 / 12, 32, axis=1)[:, : a.shape[1]]

    squares = x.astype(np.float64) ** 2, weight.astype(np.float64) ** 2
    return np.sqrt(variance(x) @ squares[1].T + squares[0] @ variance(weight).T + variance(x) @ variance(weight).T)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_name", ["f16", "bf16"])
@pytest.mark.parametrize(("k", "rows", "tokens"), [(512, 70, 131), (2048, 48, 192), (300, 33, 600)])
def test_linear_of_many_tokens_is_far_finer_than_16_bit_floats(type_name, k, rows, tokens, isa):
    """Less error than rounding only the activations to float16 would make, an eighth of bfloat16's."""
    raw, weight = random_weight(type_name, rows, k, seed=k)
    x = np.random.default_rng(k).normal(size=(tokens, k)).astype(np.float32)
    got = ops.linear(x, raw.reshape(-1), type_name, rows, None, isa, 2)
    error = got - x.astype(np.float64) @ weight.T
    assert rms(error / wide_rounding(x, weight)) < 1.05, "more than rounding both to 14 bits explains"
    assert (
        rms(error) < rms((rounded(x, "f16") - x) @ weight.T)
        and rms(error) < rms((rounded(x, "bf16") - x) @ weight.T) / 8
    )


@pytest.mark.parametrize("isa", DEVICES)
@pytest.mark.parametrize("type_name", PLAIN)
def test_linear_of_many_tokens_with_extreme_rows(type_name, isa):
    """Zero rows, one huge value among small ones, all of one sign: no overflow; NaN and infinity are not lost."""
    weight = np.random.default_rng(0).normal(size=(33, 96)).astype(np.float32)
    weight[1], weight[2], weight[3], weight[4, 7] = 0, 1, -1, 1000
    weight = rounded(weight, type_name).astype(np.float64)
    x = np.random.default_rng(1).normal(size=(130, 96)).astype(np.float32)
    x[0], x[1], x[2], x[3, 5] = 0, 1, -1, 1e4
    got = ops.linear(x, narrowed(weight, type_name), type_name, 33, None, isa, 1)
    size = np.abs(x) @ np.abs(weight.T)
    bound = 98 * EPS * size + 8 * wide_rounding(x, weight) + product_unit(isa, type_name) * size
    assert (np.abs(got - x @ weight.T) <= bound).all()
    assert (got[0] == 0).all() and (got[:, 1] == 0).all()
    for bad in (np.nan, np.inf):
        x[4, 6] = bad
        got = ops.linear(x, narrowed(weight, type_name), type_name, 33, None, isa, 1)
        assert not np.isfinite(got[4, [0, 2, 3]]).any() and np.isfinite(got[5:]).all()


@pytest.mark.parametrize(("type_name", "isa"), on_devices(NATIVE))
def test_linear_of_quantised_types(type_name, isa):
    shapes = [
        (1, 1, 1, 1),
        (33, 11, 1, 2),
        (3, 3, 2, 1),
        (17, 2, 5, 2),
        (40, 8, 33, 2),
        (64, 5, 7, 1),
        (70, 5, 3, 1),
        (70, 9, 6, 2),
    ]
    if isa == "cuda":
        shapes.append((130, 2, 257, 1))  # unpacked, where cuBLASLt is there
    for rows, blocks, tokens, threads in shapes:
        k = blocks * block_size(type_name)
        raw, weight = random_weight(type_name, rows, k, seed=rows)
        random = np.random.default_rng(k)
        x = random.normal(size=(tokens, k)).astype(np.float32)
        bias = random.normal(size=rows).astype(np.float32) if blocks % 2 else None
        got = ops.linear(x, raw.reshape(-1), type_name, rows, bias, isa, threads)
        wanted = x.astype(np.float64) @ weight.T + (0 if bias is None else bias)
        size = np.abs(x) @ np.abs(weight.T)
        sigma = activation_rounding(x, weight, type_name) + (k * EPS + product_unit(isa, type_name)) * size
        assert (np.abs(got - wanted) <= 6 * sigma).all(), (rows, k, tokens)
        if got.size > 500:
            assert rms((got - wanted) / sigma) < 1.25, "more than int8 activations explain"


@pytest.mark.parametrize("bits", [0x00, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize(("type_name", "isa"), on_devices(NATIVE))
def test_linear_of_extreme_rows(type_name, bits, isa):
    """Zero rows, the largest and smallest codes, one huge value among small ones: no overflow, no saturation."""
    k, rows = 2 * block_size(type_name), 19
    raw = random_bytes(type_name, rows, k)
    scales = np.isin(np.arange(raw.shape[1]) % (raw.shape[1] // 2), half_bytes(type_name))
    filled = {value: np.where(scales, raw, value).astype(np.uint8) for value in (0x00, 0x7F, 0x80, 0xFF)}
    weights = {value: dequantised(codes, type_name) for value, codes in filled.items()}
    weight = weights[bits].astype(np.float64)
    x = np.zeros((4, k), np.float32)
    x[1], x[2], x[3] = 1.0, -1.0, 1e-3
    x[3, 5] = 1e4
    wanted = x.astype(np.float64) @ weight.T
    largest = np.max([np.abs(w) for w in weights.values()], axis=0)  # float32 rounds at the size of a block's range
    sigma = activation_rounding(x, weight, type_name) + (8 * EPS + product_unit(isa, type_name)) * (
        np.abs(x) @ largest.T
    )
    for times in (1, 3):  # few tokens, and enough for panels
        got = ops.linear(np.tile(x, (times, 1)), filled[bits].reshape(-1), type_name, rows, None, isa, 1)
        for part in got.reshape(times, *wanted.shape):
            assert (part[0] == 0).all()
            assert (np.abs(part - wanted) <= 6 * sigma).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_name", NATIVE)
def test_linear_of_a_few_tokens_is_each_alone(type_name, isa):
    """But for the order of sums: tokens share the weights, nothing else."""
    for rows, blocks in ((37, 1), (16, 3), (51, 9)):
        k = blocks * block_size(type_name)
        raw, weight = random_weight(type_name, rows, k, seed=rows)
        x = np.random.default_rng(rows).normal(size=(9, k)).astype(np.float32)
        x[4, :] *= 1e3
        flat = raw.reshape(-1)
        alone = np.concatenate([ops.linear(row, flat, type_name, rows, None, isa, 1) for row in x[:, None]])
        size = np.abs(x) @ np.abs(weight.T) * (4 if type_name in ("q4_k", "q5_k") else 1)  # minima cancel
        for tokens in range(2, 10):
            got = ops.linear(x[:tokens], flat, type_name, rows, None, isa, 1 + tokens % 2)
            assert (np.abs(got - alone[:tokens]) <= 8 * EPS * size[:tokens]).all(), (rows, k, tokens)


@pytest.mark.parametrize("type_name", [name for name in HALVES if name not in NATIVE])
def test_linear_says_which_types_it_does_not_multiply(type_name):
    says_it_does_not_multiply(type_name, ISAS[0])


def says_it_does_not_multiply(type_name: str, isa: str) -> None:
    raw = random_bytes(type_name, 2, 256)
    with pytest.raises(ValueError, match="native"):
        ops.linear(np.zeros((1, 256), np.float32), raw.reshape(-1), type_name, 2, None, isa, 1)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_name", ["f32", "f16", "q8_0", "q4_k"])
def test_linear_does_not_depend_on_threads(type_name, isa):
    raw = random_bytes(type_name, 67, 256)
    x = np.random.default_rng(0).normal(size=(9, 256)).astype(np.float32)
    one, three = (ops.linear(x, raw.reshape(-1), type_name, 67, None, isa, n) for n in (1, 3))
    assert np.array_equal(one, three)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tokens", [1, 5, 50, 130])
def test_linear_together_is_each_alone(tokens, isa):
    """Types that pack x alike, differently and not at all; more rows than threads share in one item."""
    x = np.random.default_rng(tokens).normal(size=(tokens, 256)).astype(np.float32)
    kinds = [("q4_k", 67), ("q6_k", 300), ("q4_k", 33), ("f16", 40), ("f32", 16), ("q8_0", 1), ("bf16", 5)]
    weights = [(random_bytes(t, rows, 256, seed=rows).reshape(-1), t, rows) for t, rows in kinds]
    for threads in (1, 3):
        together = ops.linear_together(x, weights, isa, threads)
        for got, (raw, type_name, rows) in zip(together, weights, strict=True):
            assert np.array_equal(got, ops.linear(x, raw, type_name, rows, None, isa, 1)), (type_name, rows)


# ---------------------------------------------------------------- element by element
@pytest.mark.parametrize("isa", DEVICES)
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("width", ODD)
def test_norm(kind, width, isa):
    random = np.random.default_rng(width)
    x = random.normal(size=(5, width)) * [[1], [1e-4], [1e4], [1], [0]] + [[0], [0], [0], [30], [0]]
    x = x.astype(np.float32)
    weight, bias = random.normal(size=(2, width)).astype(np.float32)
    got = ops.norm(kind, x, weight, bias if kind == "layer" else None, 1e-5, isa)
    exact = x.astype(np.float64)
    wanted = rms_norm(exact, weight, 1e-5) if kind == "rms" else layer_norm(exact, weight, bias, 1e-5)
    spread = np.sqrt(np.mean(np.square(exact - exact.mean(1, keepdims=True)), axis=1, keepdims=True) + 1e-5)
    size = np.abs(exact).max(1, keepdims=True) / (spread if kind == "layer" else 1)  # cancellation in x - mean
    bound = 16 * EPS * (np.abs(wanted) + (size + 1) * np.abs(weight) + np.abs(bias))
    bound = bound if kind == "layer" else 16 * EPS * np.abs(wanted)
    assert (np.abs(got - wanted) <= bound).all()


@pytest.mark.parametrize("isa", DEVICES)
@pytest.mark.parametrize("width", ODD)
def test_inverse_rms_and_multiply(width, isa):
    random = np.random.default_rng(width)
    x = (random.normal(size=(5, width)) * [[1], [1e-4], [1e4], [1], [0]]).astype(np.float32)
    wanted = 1 / np.sqrt(np.mean(np.square(x, dtype=np.float64), axis=1, keepdims=True) + 1e-5)
    assert (np.abs(ops.inverse_rms(x, 1e-5, isa) - wanted) <= 16 * EPS * wanted).all()
    y = random.normal(size=width).astype(np.float32)
    assert np.array_equal(ops.multiply(x, y, isa), x * y)


@pytest.mark.parametrize("isa", DEVICES)
@pytest.mark.parametrize("kind", sorted(ACTIVATIONS))
@pytest.mark.parametrize("n", [1, 7, 16, 33, 4001])
def test_activation_and_gate(kind, n, isa):
    x = np.linspace(-30, 30, n, dtype=np.float32).reshape(1, n) if n > 1 else np.array([[0.7]], np.float32)
    up = np.random.default_rng(n).normal(size=x.shape).astype(np.float32)
    wanted = ACTIVATIONS[kind](x.astype(np.float64))
    bound = 1e-6 * np.abs(wanted) + 3e-7 * np.minimum(np.abs(x), 4)
    assert (np.abs(ops.activate(kind, x, isa) - wanted) <= bound).all()
    up[:, ::3] *= 9
    factor = np.clip(up.astype(np.float64), -7, 7) + 1 if kind == "clamped_swish" else up
    size = np.abs(up) + (kind == "clamped_swish")  # 1 is added in float32
    assert (
        np.abs(ops.gate(kind, x, up, isa) - wanted * factor) <= (bound + 1e-7 * np.maximum(1, np.abs(wanted))) * size
    ).all()


@pytest.mark.parametrize("isa", DEVICES)
@pytest.mark.parametrize("kind", sorted(ACTIVATIONS.keys() - {"relu_squared"}))  # of 1e30 there is no square
def test_activation_of_extremes(kind, isa):
    x = np.array([[-1e30, -200, -88.8, 0, 88.8, 200, 1e30]], np.float32)
    got = ops.activate(kind, x, isa)[0]
    assert np.isfinite(got).all()
    most = 7 if kind == "clamped_swish" else np.inf
    assert (np.abs(got[:3]) < 1e-30).all() and got[3] == 0 and np.allclose(got[4:], np.minimum(x[0, 4:], most))


@pytest.mark.parametrize("isa", DEVICES)
def test_clamp(isa):
    """NaN stays."""
    x = np.array(
        [[-3.0, -0.5, 0.0, 0.25, 7.0, np.inf, -np.inf, np.nan], [1, -1, 2, -2, 0.5, 1e-30, 3, -1.5]], np.float32
    )
    assert np.array_equal(ops.clamp(x, 1.5, isa), np.clip(x, -1.5, 1.5), equal_nan=True)


@pytest.mark.parametrize("isa", DEVICES)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("head_dim", "n_rot"), [(2, 2), (6, 4), (12, 12), (20, 20), (64, 32), (80, 80), (128, 128)])
def test_rope(head_dim, n_rot, interleaved, isa):
    random = np.random.default_rng(head_dim)
    rope = Rope(100.0 ** (-np.arange(0, n_rot, 2) / n_rot), interleaved, scale=1.1)
    positions = np.array([0, 5, 2, 99, 98], np.int32)
    x = random.normal(size=(5, 3 * head_dim)).astype(np.float32)
    got = ops.rope(x, 3, rope_table(rope, 100), n_rot, interleaved, positions, isa)
    wanted = rope(x.astype(np.float64).reshape(5, 3, head_dim), positions).reshape(5, -1)
    assert np.abs(got - wanted).max() < 2e-6


def rotation_of(rope: Rope | None, n_ctx: int) -> dict[str, Any]:
    """How a score term's rows turn as they are read, as ops takes it; nothing where they do not."""
    if rope is None:
        return {}
    return {"table": rope_table(rope, n_ctx), "n_rot": 2 * len(rope.inv_freq), "interleaved": rope.interleaved}


def rope_table(rope: Rope, n_ctx: int) -> np.ndarray:
    """[n_ctx, n_rot]: cos and sin of each pair, side by side."""
    angle = np.outer(np.arange(n_ctx), rope.inv_freq)
    return (np.stack([np.cos(angle), np.sin(angle)], axis=2) * rope.scale).reshape(n_ctx, -1).astype(np.float32)
