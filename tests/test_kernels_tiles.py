# SPDX-License-Identifier: Apache-2.0
"""Products with many tokens and attention of many queries by tiles of bf16, absorbed rows by tiles of int8 and
bf16: AMX's, or those of a build with the emulator."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest

from conftest import rms
from reference import Rope
from slimrt._core import ops
from test_kernels import activation_rounding
from test_kernels_absorbed import Call, known_rows
from test_kernels_absorbed import run as attend
from weight_formats import block_size, random_bytes, random_weight

TILES = [isa for isa in ops.backends() if isa.startswith("amx")]
EPS = 2.0**-24
FLOATS = {"f16": 2.0**-15, "bf16": 2.0**-16}  # what two bf16 for each factor leave of a product
CODED = ["q8_0", "q6_k", "tq2_0"]  # others are left to AVX-512, or interleaved

pytestmark = pytest.mark.skipif(not TILES, reason="neither AMX here nor the emulator in this build")
each_isa = pytest.mark.parametrize("isa", TILES)

# Tokens and rows that fill tiles, pairs of them and blocks of them, and one less and more; k in whole blocks.
SHAPES = [(128, 32), (129, 1), (143, 15), (144, 16), (145, 17), (159, 31), (161, 33), (512, 130), (513, 48), (545, 129)]
SHAPES += [(1040, 7)]


@lru_cache(maxsize=len(SHAPES))  # for the next instruction set
def product(type_name: str, k: int, tokens: int, rows: int) -> tuple[np.ndarray, ...]:
    """x, the weight's bytes, their product in float64, and that of their magnitudes."""
    raw, weight = random_weight(type_name, rows, k, seed=rows)
    x = np.random.default_rng(tokens).normal(size=(tokens, k)).astype(np.float32)
    return x, raw.reshape(-1), x.astype(np.float64) @ weight.T, np.abs(x).astype(np.float64) @ np.abs(weight.T)


@each_isa
@pytest.mark.parametrize("type_name", FLOATS)
@pytest.mark.parametrize("k", [1, 31, 32, 33, 100, 255, 257, 600])
def test_floats_are_multiplied_as_two_bf16(type_name, k, isa):
    for tokens, rows in SHAPES:
        x, raw, wanted, size = product(type_name, k, tokens, rows)
        got = ops.linear(x, raw, type_name, rows, None, isa, 1 + rows % 2)
        bound = (FLOATS[type_name] + (k + 4) * EPS) * size
        assert (np.abs(got - wanted) <= bound).all(), (tokens, rows)


@each_isa
@pytest.mark.parametrize("type_name", CODED)
def test_codes_are_multiplied_as_bf16(type_name, isa):
    """Half a unit of bf16 away on either side at most, and less on the whole than activations of eight bits are."""
    for blocks, (tokens, rows) in enumerate(SHAPES):
        k = block_size(type_name) * (1 + blocks % 5)
        raw, weight = random_weight(type_name, rows, k, seed=rows)
        x = np.random.default_rng(tokens).normal(size=(tokens, k)).astype(np.float32)
        got = ops.linear(x, raw.reshape(-1), type_name, rows, None, isa, 1 + rows % 2)
        error = got - x.astype(np.float64) @ weight.T
        size = np.abs(x).astype(np.float64) @ np.abs(weight.T)
        assert (np.abs(error) <= (2.0**-7 + 2.0**-16 + (k + 4) * EPS) * size).all(), (tokens, rows)
        if got.size > 5000:
            assert rms(error) < 0.6 * rms(activation_rounding(x, weight, type_name))


@each_isa
@pytest.mark.parametrize("type_name", ["q4_0", "q5_0", "q3_k", "q4_k", "q5_k", "iq4_nl", "iq4_xs", "mxfp4"])
def test_interleaved_rows_are_multiplied_as_bf16(type_name, isa):
    for blocks, (tokens, rows) in enumerate([(128, 16), (129, 32), (513, 144), (70, 112)]):
        k = block_size(type_name) * (1 + 2 * blocks)
        raw, weight = random_weight(type_name, rows, k, seed=rows)
        held, sides = ops.interleave(type_name, raw.reshape(-1), k)
        x = np.random.default_rng(tokens).normal(size=(tokens, k)).astype(np.float32)
        got = ops.linear(x, sides, held, rows, None, isa, 1 + blocks % 2)
        lowest = np.abs(weight).max()  # a code and a minimum cancel, in float32
        size = np.abs(x).astype(np.float64) @ (np.abs(weight.T) + lowest * 64 * EPS)
        error = got - x.astype(np.float64) @ weight.T
        assert (np.abs(error) <= (2.0**-7 + 2.0**-16 + (k + 4) * EPS) * size).all(), (tokens, rows)
        assert got.size < 5000 or rms(error) < 0.6 * rms(activation_rounding(x, weight, type_name))


@each_isa
@pytest.mark.parametrize("type_name", ["f16", "bf16", "q8_0", "q6_k"])
def test_numbers_that_are_none_stay_in_their_row(type_name, isa):
    raw, weight = random_weight(type_name, 33, 512, seed=3)
    x = np.random.default_rng(0).normal(size=(160, 512)).astype(np.float32)
    x[0], x[1] = 0, 1e4
    plain = ops.linear(x, raw.reshape(-1), type_name, 33, None, isa, 1)
    assert (plain[0] == 0).all()
    for bad in (np.nan, np.inf, -np.inf):
        x[17, 300] = bad
        got = ops.linear(x, raw.reshape(-1), type_name, 33, None, isa, 1)
        assert not np.isfinite(got[17, weight[:, 300] != 0]).any()
        assert np.array_equal(np.delete(got, 17, 0), np.delete(plain, 17, 0))


@each_isa
def test_tokens_and_threads_change_no_bit(isa):
    """A token's sums are added in the same order, however many stand beside it."""
    for type_name in ("f16", "bf16", "q8_0", "q6_k", "tq2_0"):
        raw = random_bytes(type_name, 200, 768, seed=2)
        x = np.random.default_rng(1).normal(size=(700, 768)).astype(np.float32)
        all_tokens = ops.linear(x, raw.reshape(-1), type_name, 200, None, isa, 1)
        for n, threads in ((128, 1), (159, 3), (530, 2)):
            some = ops.linear(x[:n], raw.reshape(-1), type_name, 200, None, isa, threads)
            assert np.array_equal(some, all_tokens[:n]), (type_name, n)


def rope_of(call: Call) -> Rope:
    return Rope(50.0 ** (-np.arange(0, call.dim, 2) / call.dim), False)


@each_isa
@pytest.mark.parametrize("one_scale", [False, True])
@pytest.mark.parametrize("loud", [0.3, 3.0, 50.0])
@pytest.mark.parametrize(
    "call",
    [
        Call(16, 16, 64, 700, 1), Call(17, 17, 80, 333, 1), Call(32, 32, 64, 900, 1, window=601),
        Call(33, 33, 100, 257, 1), Call(12, 4, 64, 400, 3), Call(40, 40, 34, 161, 4), Call(24, 24, 64, 650, 4),
    ],
)  # fmt: skip
def test_absorbed_rows_are_multiplied_as_by_vectors(call, loud, one_scale, isa):
    """Bit by bit: the products are integers, and all else is the same."""
    assert call.heads * call.queries >= 16  # fewer are left to vectors
    q, k = call.data(loud)
    stored_heads = 1 if one_scale else call.kv
    said = [attend(call, q, k, stored_heads, rope_of(call), one, 2, "q8") for one in (isa, "avx512")]
    assert np.isfinite(said[0]).all() and np.array_equal(*said)


@lru_cache(maxsize=1)  # for the next instruction set
def of_four_bits(call: Call, loud: float, stored_heads: int) -> tuple[np.ndarray, ...]:
    """Queries, rows far from 0, what AVX-512 makes of them, what float64 does, and how far off that may be."""
    q, k = call.data(loud)
    k += 5 * np.random.default_rng(1).normal(size=k.shape[-1] // 32).astype(np.float32).repeat(32)
    rope, known = rope_of(call), known_rows(call, k, stored_heads, "q4")
    groups = known.reshape(len(known), -1, 32)
    furthest = np.repeat((groups.max(axis=-1) - groups.min(axis=-1)) * 8 / 15, 32, axis=-1)
    p, size = call.weights(q, known, rope)
    turned = 1e-5 * (1 + size) * np.abs(known).max()
    p = p.swapaxes(0, 1).reshape(-1, call.rows)  # of each query and head
    by_vectors = attend(call, q, k, stored_heads, rope, "avx512", 2, "q4")
    return q, k, by_vectors, p @ known, 2.0**-8 * (p @ furthest) + turned


@each_isa
@pytest.mark.parametrize("one_scale", [False, True])
@pytest.mark.parametrize("loud", [0.3, 3.0, 50.0])
@pytest.mark.parametrize(
    "call",
    [
        Call(16, 16, 64, 700, 1), Call(17, 17, 96, 333, 1), Call(32, 32, 64, 900, 1, window=601),
        Call(33, 33, 32, 257, 1), Call(12, 4, 64, 400, 3), Call(40, 40, 32, 161, 4),
    ],
)  # fmt: skip
def test_absorbed_rows_of_four_bits_are_multiplied_as_bf16(call, loud, one_scale, isa):
    """Codes around the middle of their group, by tiles; the middles themselves, as here far from 0, by floats."""
    assert call.heads * call.queries >= 16  # fewer are left to vectors
    stored_heads = 1 if one_scale else call.kv
    q, k, by_vectors, wanted, allowed = of_four_bits(call, loud, stored_heads)
    got = attend(call, q, k, stored_heads, rope_of(call), isa, 2, "q4")
    assert not np.array_equal(got, by_vectors)  # they are multiplied otherwise
    off = ~(np.abs(got.reshape(wanted.shape) - wanted) <= allowed)
    assert not off.any(), np.argwhere(off)


@each_isa
@pytest.mark.parametrize(
    ("call", "columns", "dtype", "cap"),
    [
        (Call(1, 1, 32, 2100, 130), 48, "f32", 0.0), (Call(1, 1, 32, 2100, 130), 48, "q8", 3.0),
        (Call(2, 1, 64, 2087, 66), 64, "f16", 0.0), (Call(1, 1, 96, 2100, 300, window=700), 16, "f16", 3.0),
        (Call(1, 1, 32, 4200, 258), 80, "f32", 0.0),
    ],
)  # fmt: skip
def test_many_queries_meet_rows_as_two_bf16(call, columns, cap, dtype, isa):
    """Behind 2048 rows and more, of 128 queries and more of a head or of heads that share K and V."""
    random = np.random.default_rng(columns)
    q, k, v = (
        random.normal(size=shape).astype(np.float32)
        for shape in ((call.queries, call.heads * call.dim), (call.rows, call.kv * call.dim), (call.rows, columns))
    )
    stored = {"type": dtype, "stored_heads": 1, "heads": call.kv}
    terms = [stored | {"rows": k, "q": q, "dim": call.dim}], [stored | {"rows": v, "dim": columns}]
    got, by_vectors = (
        ops.attention_of_terms(*terms, call.heads, call.queries, 0.3, call.window, one, 2, score_cap=cap)[0]
        for one in (isa, "avx512")
    )
    assert not np.array_equal(got, by_vectors)  # they are multiplied otherwise
    if dtype == "q8":  # where a code is at a tie it may be either
        assert rms(got - by_vectors) < 5e-6 * np.abs(v).max()
        return
    k, v = (known_rows(call, rows, 1, dtype) for rows in (k, v))
    scores = 0.3 * q.astype(np.float64).reshape(call.queries, call.heads, call.dim).transpose(1, 0, 2) @ k.T
    scores = np.where(call.seen, cap * np.tanh(scores / cap) if cap else scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    wanted = (p / p.sum(axis=-1, keepdims=True)) @ v
    error = np.abs(got.reshape(call.queries, call.heads, -1).transpose(1, 0, 2) - wanted)
    assert error.max() < 3e-5 * np.abs(v).max() and rms(error) < 3e-6 * np.abs(v).max()
