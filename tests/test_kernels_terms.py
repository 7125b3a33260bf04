# SPDX-License-Identifier: Apache-2.0
"""Attention over several terms, scaled rows and rows with one scale, as modes k+r and xr read them; against NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

import kernel_calls
from conftest import DEVICES, product_unit
from pairwise import pairwise
from reference import Rope
from reference_formats import rounded, rounded_by_channel
from slimrt._core import ops
from test_kernels import rope_table

TYPES = ["f32", "f16", "bf16", "q8", "fp8_e4m3", "fp8_e5m2", "q4", "q3", "q2"]


@dataclass(frozen=True)
class Call(kernel_calls.Call):
    n_rot: int = 0
    interleaved: bool = False

    @property
    def rope(self) -> Rope:
        return Rope(50.0 ** (-np.arange(0, self.n_rot, 2) / self.n_rot), self.interleaved)

    def table(self) -> dict:
        return {"table": rope_table(self.rope, self.rows), "n_rot": self.n_rot, "interleaved": self.interleaved}

    def random(self, *shape: int, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).normal(size=shape).astype(np.float32)

    def read(self, rows: np.ndarray, dtype: str, stored_heads: int) -> np.ndarray:
        """float64, the stored ones rounded."""
        out = rows.astype(np.float64)
        out[: -self.queries] = rounded(rows[: -self.queries], dtype, stored_heads)
        return out


CALLS = {
    "one query": Call(4, 4, 12, 70, 1, n_rot=12),
    "grouped": Call(6, 2, 20, 300, 3, n_rot=20, window=130),
    "grouped, many": Call(6, 2, 32, 140, 40, n_rot=32, interleaved=True),
    "partial": Call(4, 4, 16, 200, 2, n_rot=6),
    "partial, q4 groups begin within heads": Call(4, 4, 48, 100, 2, n_rot=12),
    "one kv head": Call(3, 1, 64, 90, 4, n_rot=64),
    "nothing stored": Call(4, 2, 16, 20, 20, n_rot=16),
    "long": Call(4, 4, 16, 3000, 1, n_rot=16),
}


def softmax(call: Call, scores: np.ndarray) -> np.ndarray:
    scores = np.where(call.seen, scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def attended(call: Call, p: np.ndarray, values: list[np.ndarray]) -> list[np.ndarray]:
    """p [heads, queries, rows] and values [rows, value heads, dim] each -> [queries, heads * dim] each."""
    outs = []
    for value in values:
        group = call.heads // value.shape[1]
        heads = [p[head] @ value[:, head // group] for head in range(call.heads)]
        outs.append(np.concatenate(heads, axis=1))
    return outs


def check(call: Call, isa: str, terms: tuple[list[dict], list[dict]], scores: np.ndarray, values: list[np.ndarray]):
    """Scores of this size and sums of this length are off by at most a few roundings of float32 for each operand; an
    error e of a score moves a weight by e at most, and so the result by 2 e of the largest value. A device rounds the
    terms of a score, whose sum is random, and weights. Absorbed rows of q8 meet queries of 15 bits, whose weights are
    those of a residual too, and these and rows of q4 weights as integers."""
    dtype = max((term["type"] for term in terms[0]), key=lambda name: product_unit(isa, name))
    p = softmax(call, scores)
    wanted = attended(call, p, values)
    size = max(float(np.abs(scores).max()), 1.0)
    for threads in (1, 2) if isa != "cuda" else (1,):
        got = ops.attention_of_terms(*terms, call.heads, call.queries, call.dim**-0.5, call.window, isa, threads)
        for out, exact, value, term in zip(got, wanted, values, terms[1], strict=True):
            assert out.shape == exact.shape
            error = 2e-7 * (8 + np.sqrt(call.dim) + 2 * size) * 4 * np.abs(value).max()
            error += 2 * product_unit(isa, dtype) * (1 + 2 * size) * np.abs(value).max()
            if terms[1][0]["type"] == "q8" and terms[1][0]["heads"] == 1:
                error += 1e-4 * size * np.abs(value).max()
            rows, heads, stored = value.reshape(len(value), -1), p.reshape(-1, call.rows), term["stored_heads"]
            if term["heads"] == 1 and kernel_calls.takes_codes(isa, term["type"], rows.shape[1] // stored):
                error += kernel_calls.weight_rounding(isa, heads, rows, stored, term["type"]).max()
            assert np.abs(out - exact).max() <= error, np.abs(out - exact).max()


@pairwise(
    lambda name, extras, dtype, isa: isa == "cuda" and dtype == "f16" and "factors" in extras,
    name=CALLS,
    extras=["", "scale", "scale bias", "scale factors", "scale factors of heads", "bias"],
    dtype=TYPES,
    isa=DEVICES,
)
def test_rows_of_k_by_head_and_whole_with_a_residual(name, extras, dtype, isa):
    """One scale a row (q4: groups within each head), read by head for scores and as a whole for values, where the
    residual has a type of its own. Many queries read values by head from a plane by themselves."""
    c = CALLS[name]
    width, stored_heads = c.kv * c.dim, c.kv if dtype == "q4" else 1
    q, k, rest = (c.random(n, w, seed=w + n) for n, w in
                  ((c.queries, c.heads * c.dim), (c.rows, width), (c.rows, 7)))  # fmt: skip
    score = {"rows": k, "q": q, "type": dtype, "stored_heads": stored_heads, "heads": c.kv, "dim": c.dim, **c.table()}
    read = c.read(k, dtype, stored_heads)
    keys = read
    if "scale" in extras:
        score["row_scale"] = np.exp(c.random(width, seed=1))
        keys = keys * score["row_scale"].astype(np.float64)
    if "factors" in extras:
        score["factors"] = np.exp(c.random(c.rows, c.kv if "heads" in extras else 1, seed=2))
        keys = keys * np.repeat(score["factors"].astype(np.float64), width // score["factors"].shape[1], axis=1)
    if "bias" in extras:
        score["bias"] = c.random(width, seed=3)
        keys = keys + score["bias"].astype(np.float64)
    keys = c.rope(keys.reshape(c.rows, c.kv, c.dim), np.arange(c.rows))
    queries = q.astype(np.float64).reshape(c.queries, c.heads, c.dim) / np.sqrt(c.dim)
    scores = np.stack([queries[:, h] @ keys[:, h // (c.heads // c.kv)].T for h in range(c.heads)])
    whole = {"rows": k, "type": dtype, "stored_heads": stored_heads, "heads": 1, "dim": width}
    by_head = whole | {"heads": c.kv, "dim": c.dim}
    residual = {"rows": rest, "type": "q4", "stored_heads": 1, "heads": 1, "dim": 7}
    rest = c.read(rest, "q4", 1)[:, None]
    check(c, isa, ([score], [whole, residual]), scores, [read[:, None], rest])
    check(c, isa, ([score], [by_head]), scores, [read.reshape(c.rows, c.kv, c.dim)])


@pairwise(
    lambda name, turned, dtype, isa: isa == "cuda" and dtype == "f16" and turned,
    name=CALLS,
    turned=[False, True],
    dtype=TYPES,
    isa=DEVICES,
)
def test_rows_of_k_beside_v_of_other_heads_and_a_residual(name, turned, dtype, isa):
    """Three planes are values of every head: k, which scores are made of, V of heads that keep it, and a residual."""
    c = CALLS[name]
    width, kept = c.kv * c.dim, 3 * c.dim
    q, k, v, rest = (c.random(c.queries if i == 0 else c.rows, w, seed=w + i) for i, w in
                     enumerate((c.heads * c.dim, width, kept, 7)))  # fmt: skip
    by_head = {"rows": k, "type": dtype, "stored_heads": c.kv, "heads": c.kv, "dim": c.dim}
    read = c.read(k, dtype, c.kv)
    keys = read.reshape(c.rows, c.kv, c.dim)
    keys = c.rope(keys, np.arange(c.rows)) if turned else keys
    queries = q.astype(np.float64).reshape(c.queries, c.heads, c.dim) / np.sqrt(c.dim)
    scores = np.stack([queries[:, h] @ keys[:, h // (c.heads // c.kv)].T for h in range(c.heads)])
    whole = by_head | {"heads": 1, "dim": width}
    beside = {"rows": v, "type": dtype, "stored_heads": 3, "heads": 1, "dim": kept}
    residual = {"rows": rest, "type": "q4", "stored_heads": 1, "heads": 1, "dim": 7}
    values = [read[:, None], c.read(v, dtype, 3)[:, None], c.read(rest, "q4", 1)[:, None]]
    score = by_head | {"q": q} | (c.table() if turned else {})
    check(c, isa, ([score], [whole, beside, residual]), scores, values)


@pairwise(
    lambda name, scaled, dtype, isa: isa == "cuda" and dtype == "f16" and scaled,
    name=CALLS,
    scaled=[False, True],
    dtype=TYPES,
    isa=DEVICES,
)
def test_first_columns_by_head_and_the_row_as_a_whole(name, scaled, dtype, isa):
    """Scores of the rotated columns, which come first in a row, and of the whole row. Heads of q are wider than what
    is read of them."""
    c = CALLS[name]
    rotated, width = c.kv * c.n_rot, c.kv * c.n_rot + 37
    q = c.random(c.queries, c.heads * (c.n_rot + 3), seed=4)
    wide_q, row = c.random(c.queries, c.heads * width, seed=5), c.random(c.rows, width, seed=6)
    wide_q /= np.sqrt(width)
    plane = {"rows": row, "type": dtype, "stored_heads": 1}
    first = plane | {"q": q, "heads": c.kv, "dim": c.n_rot, **c.table()}
    read = c.read(row, dtype, 1)
    keys = read[:, :rotated]
    if scaled:
        first["row_scale"] = np.exp(c.random(rotated, seed=1))
        keys = keys * first["row_scale"].astype(np.float64)
    keys = c.rope(keys.reshape(c.rows, c.kv, c.n_rot), np.arange(c.rows))
    queries = q.astype(np.float64).reshape(c.queries, c.heads, -1)[..., : c.n_rot]
    wide = wide_q.astype(np.float64).reshape(c.queries, c.heads, width)
    group = c.heads // c.kv
    scores = [queries[:, h] @ keys[:, h // group].T + wide[:, h] @ read.T for h in range(c.heads)]
    second = plane | {"q": wide_q, "heads": 1, "dim": width}
    value = plane | {"heads": 1, "dim": width}
    check(c, isa, ([first, second], [value]), np.stack(scores) / np.sqrt(c.dim), [read[:, None]])


@pytest.mark.parametrize("isa", DEVICES)
@pytest.mark.parametrize("dtype", ["q8", "q4", "q3", "q2"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "n_rot", "queries"), [(32, 32, 1), (64, 64, 1), (128, 128, 3), (96, 64, 2)])
def test_rows_with_scales_by_channel_are_turned_as_they_are_read(dim, n_rot, queries, interleaved, dtype, isa):
    """As mode lowrank has its keys: stored before RoPE, a block of tokens with one scale for each channel."""
    c = Call(4, 2, dim, 160 + queries, queries, n_rot=n_rot, interleaved=interleaved)
    q, k, v = (c.random(n, heads * dim, seed=heads + n) for n, heads in ((queries, 4), (c.rows, 2), (c.rows + 1, 2)))
    v = v[1:]
    plane = {"type": dtype, "stored_heads": c.kv, "heads": c.kv, "dim": dim}
    score = plane | {"rows": k, "q": q, "scale_tokens": 32, **c.table()}
    keys = k.astype(np.float64)
    keys[:160] = rounded_by_channel(k[:160], dtype, 32)
    keys = c.rope(keys.reshape(c.rows, c.kv, dim), np.arange(c.rows))
    heads = q.astype(np.float64).reshape(queries, c.heads, dim) / np.sqrt(dim)
    scores = np.stack([heads[:, h] @ keys[:, h // 2].T for h in range(c.heads)])
    value = plane | {"rows": v, "type": "f16"}
    check(c, isa, ([score], [value]), scores, [c.read(v, "f16", c.kv).reshape(c.rows, c.kv, dim)])
