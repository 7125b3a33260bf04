# SPDX-License-Identifier: Apache-2.0
"""Weights whose rows lie side by side, 16 at a time: what they hold, and their products, beside float64."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import ISAS, PRODUCT_ISAS, SIXTEENS, WIDE_SIXTEENS, lies_side_by_side
from slimrt._core import ops
from test_kernels import EPS, activation_rounding
from test_kernels_heads import head_by_head
from weight_formats import block_size, dequantised, half_bytes, random_bytes, random_weight

TYPES = [*SIXTEENS, *WIDE_SIXTEENS]
each_held = pytest.mark.parametrize(
    ("type_name", "isa"), [(t, i) for t in TYPES for i in ISAS if lies_side_by_side(t, i)]
)


def interleaved(raw: np.ndarray, type_name: str, k: int) -> tuple[str, np.ndarray]:
    held, sides = ops.interleave(type_name, raw.reshape(-1), k)
    assert held == f"{type_name}_r16" and sides.size == raw.size  # not a byte more
    return held, sides


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_name", TYPES)
def test_rows_are_read_as_they_were(type_name, isa):
    k = 5 * block_size(type_name)
    raw, weight = random_weight(type_name, 48, k)
    held, sides = interleaved(raw, type_name, k)
    ids = np.random.default_rng(0).permutation(48).astype(np.int32)
    got = ops.gather(sides, held, 48, k, ids, isa)
    assert np.array_equal(got, weight[ids].astype(np.float32))


@pytest.mark.parametrize("type_name", TYPES)
def test_words_of_16_rows_follow_one_another(type_name):
    """The first row's first whole word is the first of all, the second row's the next; what is left comes last."""
    raw = random_bytes(type_name, 16, block_size(type_name))
    _, sides = interleaved(raw, type_name, block_size(type_name))
    odd = raw.shape[1] % 4
    if odd:
        at = half_bytes(type_name)[0]
        assert np.array_equal(sides[-16 * odd :].reshape(16, odd), raw[:, at : at + odd])
    if type_name in ("q4_1", "q2_k", "q4_k", "q5_k", "iq4_xs"):  # no bit of which is elsewhere
        assert np.array_equal(sides.reshape(-1, 16, 4).swapaxes(0, 1).reshape(16, -1), raw)
    with pytest.raises(ValueError, match="no multiple of 16 rows"):
        ops.interleave(type_name, raw[:15].reshape(-1), block_size(type_name))
    with pytest.raises(ValueError, match="f32 weights are not interleaved"):
        ops.interleave("f32", np.zeros(64, np.uint8), 1)


@pytest.mark.parametrize(("type_name", "isa"), [(t, i) for t in TYPES for i in PRODUCT_ISAS if lies_side_by_side(t, i)])
def test_products(type_name, isa):
    """Of a token, of few and of many, with rows that fill panels and that do not, on one thread and two."""
    shapes = [(16, 1, 1, 1), (48, 11, 1, 2), (16, 3, 2, 1), (112, 2, 5, 2), (48, 9, 33, 2), (80, 5, 9, 1)]
    for rows, blocks, tokens, threads in shapes:
        k = blocks * block_size(type_name)
        raw, weight = random_weight(type_name, rows, k, seed=rows)
        held, sides = interleaved(raw, type_name, k)
        random = np.random.default_rng(k)
        x = random.normal(size=(tokens, k)).astype(np.float32)
        bias = random.normal(size=rows).astype(np.float32) if blocks % 2 else None
        got = ops.linear(x, sides, held, rows, bias, isa, threads)
        wanted = x.astype(np.float64) @ weight.T + (0 if bias is None else bias)
        sigma = activation_rounding(x, weight, type_name) + k * EPS * (np.abs(x) @ np.abs(weight.T))
        assert (np.abs(got - wanted) <= 6 * sigma).all(), (rows, k, tokens)


@pytest.mark.parametrize("bits", [0x00, 0x7F, 0x80, 0xFF])
@each_held
def test_products_of_extreme_rows(type_name, isa, bits):
    """The smallest and largest codes, zero rows, one huge value among small ones."""
    k, rows = 2 * block_size(type_name), 16
    raw = random_bytes(type_name, rows, k)
    scales = np.isin(np.arange(raw.shape[1]) % (raw.shape[1] // 2), half_bytes(type_name))
    filled = {value: np.where(scales, raw, value).astype(np.uint8) for value in (0x00, 0x7F, 0x80, 0xFF)}
    weights = {value: dequantised(codes, type_name) for value, codes in filled.items()}
    held, sides = interleaved(filled[bits], type_name, k)
    x = np.zeros((4, k), np.float32)
    x[1], x[2], x[3] = 1.0, -1.0, 1e-3
    x[3, 5] = 1e4
    largest = np.max([np.abs(w) for w in weights.values()], axis=0)  # float32 rounds at the size of a block's range
    sigma = activation_rounding(x, weights[bits], type_name) + 8 * EPS * (np.abs(x) @ largest.T)
    for times in (1, 3):
        got = ops.linear(np.tile(x, (times, 1)), sides, held, rows, None, isa, 1)
        for part in got.reshape(times, 4, rows):
            assert (part[0] == 0).all()
            assert (np.abs(part - x.astype(np.float64) @ weights[bits].T) <= 6 * sigma).all()


@each_held
def test_tokens_share_the_weights_and_nothing_else(type_name, isa):
    k = 3 * block_size(type_name)
    raw, weight = random_weight(type_name, 48, k)
    held, sides = interleaved(raw, type_name, k)
    x = np.random.default_rng(1).normal(size=(9, k)).astype(np.float32)
    x[4, :] *= 1e3
    alone = np.concatenate([ops.linear(row, sides, held, 48, None, isa, 1) for row in x[:, None]])
    size = 4 * np.abs(x) @ np.abs(weight.T)  # minima cancel
    for tokens in range(2, 10):
        got = ops.linear(x[:tokens], sides, held, 48, None, isa, 1 + tokens % 2)
        assert (np.abs(got - alone[:tokens]) <= 8 * EPS * size[:tokens]).all(), tokens
    x[5, 7] = np.nan
    got = ops.linear(x, sides, held, 48, None, isa, 1)
    assert np.isnan(got[5]).all() and np.isfinite(np.delete(got, 5, axis=0)).all()


@pytest.mark.parametrize("isa", ISAS)
def test_experts(isa):
    """Each has whole sixteens of rows."""
    experts, width, inner, taken, tokens = 4, 64, 32, 2, 5
    random = np.random.default_rng(0)
    shapes = ((inner, width), (inner, width), (width, inner))
    made = [random_weight("q5_0", experts * rows, k, seed=i) for i, (rows, k) in enumerate(shapes)]
    x = random.normal(size=(tokens, width)).astype(np.float32)
    ids = np.stack([random.permutation(experts)[:taken] for _ in range(tokens)]).astype(np.int32)
    shares = random.random(size=(tokens, taken)).astype(np.float32)
    weights = [interleaved(raw, "q5_0", k)[::-1] for (raw, _), (_, k) in zip(made, shapes, strict=True)]
    got = ops.experts("silu", x, weights, experts, inner, ids, shares, isa, 2, (), None)
    as_floats = [(values.astype(np.float32).view(np.uint8).reshape(-1), "f32") for _, values in made]
    wanted = ops.experts("silu", x, as_floats, experts, inner, ids, shares, isa, 2, (), None)
    assert np.abs(got - wanted).max() < 0.02 * np.abs(wanted).max()


@each_held
def test_threads_and_heads_change_no_bit(type_name, isa):
    """What a thread takes of a weight, or of a head, is whole sixteens."""
    heads, rows, k = 3, 48, 2 * block_size(type_name)
    raw = random_bytes(type_name, heads * rows, k)
    held, sides = interleaved(raw, type_name, k)
    for tokens in (1, 9, 40):
        x = np.random.default_rng(tokens).normal(size=(tokens, 2 * heads, k)).astype(np.float32)
        whole = ops.linear(x[:, 0].copy(), sides, held, heads * rows, None, isa, 1)
        for threads in (1, 2, 5):
            for group in (1, 2):
                own = x[:, : group * heads]
                alone = head_by_head(own, sides, held, rows, isa, group)
                own = own.reshape(tokens, -1)
                got = ops.linear_per_head(own, sides, held, rows, group * heads, isa, threads, group)
                assert np.array_equal(got, alone)
            got = ops.linear(x[:, 0].copy(), sides, held, heads * rows, None, isa, threads)
            assert np.array_equal(got, whole)
