# SPDX-License-Identifier: Apache-2.0
"""What encoders and their decoders add to the kernels: biases by distance, attention that sees all rows, windows of a
convolution, tanh; against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import DEVICES, product_unit
from kernel_calls import weight_rounding
from pairwise import pairwise
from reference_formats import rounded
from slimrt._core import ops

RNG = np.random.default_rng(5)


def softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x - x.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def attention(q, k, v, heads, bias, causal, n_stored, scale):
    """float64 [n, heads * dim]; bias [heads, distance + n - 1] of a row `distance` after its query."""
    n, dim = len(q), q.shape[1] // heads
    first = n_stored if causal else 0
    distance = np.arange(len(k))[None] - (first + np.arange(n))[:, None]
    out = np.empty((n, heads * dim))
    for h in range(heads):
        columns = slice(h * dim, (h + 1) * dim)
        scores = scale * q[:, columns] @ k[:, columns].T
        if bias is not None:
            origin = bias.shape[1] - 1 if causal else bias.shape[1] // 2
            scores += bias[h][np.minimum(origin + distance, bias.shape[1] - 1)]
        if causal:
            scores = np.where(distance > 0, -np.inf, scores)
        out[:, columns] = softmax(scores) @ v[:, columns]
    return out


@pairwise(
    lambda isa, threads, type, causal, **_: isa == "cuda" and threads == 1 and type == "f16" and causal,
    isa=DEVICES,
    threads=[1, 3],
    type=["f32", "f16", "q8"],
    causal=[True, False],
    biased=[True, False],
    queries=[1, 3, 50],
)
def test_attention_with_a_bias_by_distance_and_of_all_rows(isa, threads, type, causal, biased, queries):
    heads, dim, stored = 3, 16, 150
    k, v = (RNG.normal(size=(stored + queries, heads * dim)).astype(np.float32) for _ in range(2))
    q = RNG.normal(size=(queries, heads * dim)).astype(np.float32)
    n = stored + queries
    bias = RNG.normal(size=(heads, n if causal else 2 * n - 1)).astype(np.float32) if biased else None
    common = {"type": type, "stored_heads": heads, "heads": heads, "dim": dim}
    (got,) = ops.attention_of_terms(
        [{"rows": k, "q": q} | common], [{"rows": v} | common], heads, queries, 0.3, 0, isa, threads, bias, causal
    )
    seen = n if causal else stored
    known_k, known_v = (x[:seen].astype(np.float64) for x in (k, v))
    for known, rows in ((known_k, k), (known_v, v)):
        known[:stored] = rounded(rows[:stored], type, heads)
    wanted = attention(q.astype(np.float64), known_k, known_v, heads, bias, causal, stored, 0.3)
    # float32 sums of up to 200 terms; queries meet q8 rows as integers of 15 bits (2^-14 of the largest q each)
    bound = (2e-5 if type != "q8" else 2e-4) + 4 * product_unit(isa, type)
    assert np.abs(got - wanted).max() < bound * np.abs(wanted).max()


@pytest.mark.parametrize("isa", DEVICES)
@pytest.mark.parametrize("heads, dim", [(8, 512), (6, 384), (20, 1280), (2, 64)])
def test_whole_rows_of_q8_with_one_scale_serve_all_heads(isa, heads, dim):
    """Mode e: every head reads the whole row, one query each, as integers."""
    stored = 100
    rows = RNG.normal(size=(stored + 1, dim)).astype(np.float32)
    q = RNG.normal(size=(1, heads * dim)).astype(np.float32)
    common = {"rows": rows, "type": "q8", "stored_heads": 1, "heads": 1, "dim": dim}
    scale = dim**-0.5
    (got,) = ops.attention_of_terms([common | {"q": q}], [common], heads, 1, scale, 0, isa, 2, None, False)
    known = rounded(rows[:stored], "q8", 1)
    for h in range(heads):
        columns = slice(h * dim, (h + 1) * dim)
        p = softmax(scale * known @ q[0, columns].astype(np.float64))
        # 15 bits of q: 2^-14 of the largest, over values of size 1 to 4
        assert np.abs(got[0, columns] - p @ known).max() < 2e-4 + weight_rounding(isa, p, known)


@pytest.mark.parametrize("isa", DEVICES)
@pytest.mark.parametrize("dim", [1024, 1088, 1280, 5120])
def test_products_of_wide_rows_as_large_as_can_be(isa, dim):
    """Every column of q and of a row is the largest: sums of integers hold that too."""
    stored, heads = 40, 4
    signs = RNG.choice([-1.0, 1.0], dim).astype(np.float32)
    rows = np.tile(signs, (stored + 1, 1))
    rows[::2] *= 0.5  # all of its codes are as large, of a smaller scale
    values = RNG.normal(size=rows.shape).astype(np.float32)
    scores = {"rows": rows, "q": np.tile(signs * 4 / dim, (1, heads)), "type": "q8", "stored_heads": 1, "heads": 1}
    value = {"rows": values, "type": "f32", "stored_heads": 1, "heads": 1, "dim": dim}
    (got,) = ops.attention_of_terms([scores | {"dim": dim}], [value], heads, 1, 1.0, 0, isa, 1, None, False)
    wanted = softmax(rows[:stored].astype(np.float64) @ signs * 4 / dim) @ values[:stored]
    assert np.abs(got.reshape(heads, dim) - wanted).max() < 1e-3


@pytest.mark.parametrize("isa", DEVICES)
@pytest.mark.parametrize("width, stride, padding", [(3, 1, 1), (3, 2, 1), (7, 3, 0), (1, 1, 0), (5, 2, 4)])
def test_unfold_is_a_convolution_s_windows(isa, width, stride, padding):
    x = RNG.normal(size=(23, 6)).astype(np.float32)
    padded = np.pad(x, ((padding, padding), (0, 0)))
    rows = (len(padded) - width) // stride + 1
    wanted = np.stack([padded[i * stride : i * stride + width].ravel() for i in range(rows)])
    assert np.array_equal(ops.unfold(x, width, stride, padding, rows, isa), wanted)


@pytest.mark.parametrize("isa", DEVICES)
def test_tanh_loses_nothing_near_zero(isa):
    x = np.concatenate([[0.0, -30.0, 30.0, 1e-30], np.geomspace(1e-8, 20, 400), -np.geomspace(1e-8, 20, 400)])
    x = x.astype(np.float32)[None]
    got, wanted = ops.activate("tanh", x, isa)[0], np.tanh(x[0].astype(np.float64))
    assert np.abs(got - wanted).max() <= 3e-7 and np.allclose(got, wanted, rtol=4e-7, atol=0)
