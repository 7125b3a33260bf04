# SPDX-License-Identifier: Apache-2.0
"""What becomes of a score on its way to the softmax (cap, bias by distance, sinks), heads of out wider than the values,
and rows whose scales belong to channels of some tokens; on every path of an instruction set, against NumPy float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

import kernel_calls
from conftest import DEVICES, product_unit
from kernel_calls import WEIGHT_LEVELS
from reference_formats import rounded, rounded_by_channel
from slimrt._core import ops


@dataclass(frozen=True)
class Call(kernel_calls.Call):
    absorbed: bool = False  # values are whole rows of k: no block path


CALLS = {
    "decode": Call(4, 4, 64, 300, 1),
    "decode, grouped": Call(8, 2, 64, 333, 1),
    "decode, many pairs": Call(36, 2, 64, 133, 4),
    "decode, long": Call(4, 2, 16, 3000, 2),
    "decode, window": Call(6, 3, 20, 200, 3, window=70),
    "decode, absorbed": Call(4, 4, 12, 200, 1, absorbed=True),
    "prompt": Call(4, 2, 16, 60, 60),
    "prompt after rows": Call(6, 6, 24, 200, 40, window=90),
    "one row": Call(2, 2, 8, 1, 1),
}


def data(call: Call, seed: int = 0) -> list[np.ndarray]:
    """Queries loud enough for a cap of 2 to bend most scores; k; v; a bias by distance; sinks with some of the mass."""
    random = np.random.default_rng(seed)
    shapes = (call.queries, call.heads * call.dim), *[(call.rows, call.kv * call.dim)] * 2
    q, k, v = (random.normal(size=shape).astype(np.float32) for shape in shapes)
    bias = random.normal(size=(call.heads, call.rows)).astype(np.float32)
    return [2 * q, k, v, bias, random.normal(6, size=call.heads).astype(np.float32)]


def attended(call, q, k, v, cap=0.0, bias=None, sinks=None):
    """float64 [queries, heads, dim], log of the denominator, largest score; k [rows, kv, dim], v [rows, n, dim]."""
    q = q.astype(np.float64).reshape(call.queries, call.heads, call.dim) / np.sqrt(call.dim)
    out, lse, high = [], [], 1.0
    for head in range(call.heads):
        scores = q[:, head] @ k[:, head * k.shape[1] // call.heads].T
        high = max(high, np.abs(scores).max())
        if cap:
            scores = cap * np.tanh(scores / cap)
        if bias is not None:
            scores = scores + bias[head].astype(np.float64)[np.minimum(call.rows - 1 + call.distance, call.rows - 1)]
        scores = np.where(call.seen, scores, -np.inf)
        if sinks is not None:
            scores = np.concatenate([scores, np.full((call.queries, 1), np.float64(sinks[head]))], axis=1)
        top = scores.max(axis=1, keepdims=True)
        p = np.exp(scores - top)
        lse.append((top + np.log(p.sum(axis=1, keepdims=True)))[:, 0])
        out.append((p / p.sum(axis=1, keepdims=True))[:, : call.rows] @ v[:, head * v.shape[1] // call.heads])
    return np.stack(out, axis=1), np.stack(lse, axis=1), high


def stored(call: Call, rows: np.ndarray, dtype: str) -> np.ndarray:
    """float64 [rows, kv, dim], those before the fresh ones rounded."""
    out = rows.astype(np.float64)
    n = call.rows - call.queries
    out[:n] = rounded(rows[:n], dtype, call.kv)
    return out.reshape(call.rows, call.kv, call.dim)


def bound(isa: str, dtype: str, high: float, values: np.ndarray, absorbed: bool = False) -> float:
    """Of results: a few float32 roundings of scores up to `high`; with integer products over q8 rows those of queries
    and weights to 15 bits (2^-14 of the largest each), over rows of fewer bits (q4; on ARM where channels have scales)
    those of queries; and what a device rounds its factors to. Weights of absorbed q8 rows may have 8 bits: half a step
    of the largest each, at random."""
    integers = 0.0
    if dtype == "q8" and (absorbed or isa not in ("portable", "avx2")):
        integers = 2.0**-11
    elif dtype == "q4" and isa.startswith(("avx512", "amx")) or dtype in ("q4", "q3", "q2") and isa.startswith("neon"):
        integers = 2.0**-15
    error = (4e-6 + integers) * (1 + high)
    if absorbed and dtype == "q8":
        error += 8 / np.sqrt(12) / WEIGHT_LEVELS.get(isa, 2**24)
    return float((error + 4 * product_unit(isa, dtype) * (1 + high)) * np.abs(values).max())


EXTRAS = {"cap": "cap", "bias": "bias", "sinks": "sinks", "all": "cap bias sinks", "none": ""}


def run(call: Call, dtype: str, isa: str, threads: int, options: dict, scales: dict | None = None, **more):
    q, k, v, _, _ = data(call)
    plane = {"type": dtype, "stored_heads": call.kv}
    score = plane | {"rows": k, "q": q, "heads": call.kv, "dim": call.dim} | (scales or {})
    whole = {"heads": 1, "dim": call.kv * call.dim} if call.absorbed else {"heads": call.kv, "dim": call.dim}
    value = plane | {"rows": k if call.absorbed else v} | whole | more
    rest = (call.heads, call.queries, call.dim**-0.5, call.window, isa, threads)
    return ops.attention_of_terms([score], [value], *rest, **options)


@pytest.mark.parametrize("isa", DEVICES)
@pytest.mark.parametrize("dtype", ["f16", "q8", "q4"])
@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("name", CALLS)
def test_cap_bias_and_sinks(name, extras, dtype, isa):
    """In this order: the cap bends scale * q . k, the bias is added to that, and a sink joins the denominator."""
    call = CALLS[name]
    q, k, v, bias, sinks = data(call)
    known = {"cap": 2.0, "bias": bias, "sinks": sinks}
    wanted = {key: value for key, value in known.items() if key in EXTRAS[extras].split()}
    names = {"cap": "score_cap", "bias": "relative_bias", "sinks": "sinks"}
    keys = stored(call, k, dtype)
    values = keys.reshape(call.rows, 1, -1) if call.absorbed else stored(call, v, dtype)
    exact, _, high = attended(call, q, keys, values, **wanted)
    options = {names[key]: value for key, value in wanted.items()}
    for threads in (1, 2) if isa != "cuda" else (1,):
        (got,) = run(call, dtype, isa, threads, options)
        assert np.abs(got.reshape(exact.shape) - exact).max() <= bound(isa, dtype, high, values, call.absorbed)
    if wanted and call.rows > 1:  # and they matter
        plain, _, _ = attended(call, q, keys, values)
        assert np.abs(plain - exact).max() > 10 * bound("portable", dtype, high, values)


@pytest.mark.parametrize("isa", DEVICES)
@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("cap", [0.7, 50.0])
def test_caps_are_precise(cap, queries, isa):
    """A query that sees one row has its score for the log of the denominator: within a millionth of the cap."""
    heads, dim = 16, 8
    scores = np.geomspace(1e-3, 9, heads * queries) * cap * np.where(np.arange(heads * queries) % 2, 1, -1)
    q = np.zeros((queries, heads, dim), np.float32)
    q[..., 0] = scores.reshape(queries, heads)
    k = np.zeros((queries, heads * dim), np.float32)
    k[:, ::dim] = 1
    plane = {"type": "f32", "rows": k, "stored_heads": heads, "heads": heads, "dim": dim}
    _, lse = ops.attention_of_terms(
        [plane | {"q": q.reshape(queries, -1)}], [plane | {"out": np.zeros_like(k)}], heads, queries, 1.0, 1, isa, 1,
        score_cap=cap, lse=np.full((queries, heads), -np.inf, np.float32),
    )  # fmt: skip
    assert np.abs(lse - cap * np.tanh(q[..., 0].astype(np.float64) / cap)).max() < 1e-6 * cap


@pytest.mark.parametrize("isa", DEVICES)
@pytest.mark.parametrize("name", ["decode", "decode, grouped", "prompt after rows"])
def test_parts_merge_as_one(name, isa):
    """Earlier rows' result in out and lse, with sinks in one of the calls: as all rows at once. What stands in a head
    beyond the columns of the values stays as it is."""
    call = CALLS[name]
    q, k, v, _, sinks = data(call)
    keys, values = stored(call, k, "f32"), stored(call, v, "f32")
    wide = call.dim + 5
    random = np.random.default_rng(7)
    first_out = random.normal(size=(call.queries, call.heads, call.dim))
    first_lse = random.normal(size=(call.queries, call.heads)) + 6
    held = np.full((call.queries, call.heads, wide), 9.0, np.float32)
    held[..., : call.dim] = first_out
    rest = (call.heads, call.queries, call.dim**-0.5, call.window, isa, 1)
    plane = {"type": "f32", "stored_heads": call.kv, "heads": call.kv, "dim": call.dim}
    got, lse = ops.attention_of_terms(
        [plane | {"rows": k, "q": q}], [plane | {"rows": v, "out": held.reshape(call.queries, -1)}], *rest,
        sinks=sinks, lse=first_lse.astype(np.float32),
    )  # fmt: skip
    last_out, last_lse, high = attended(call, q, keys, values, sinks=sinks)
    sums = np.exp(first_lse)[..., None], np.exp(last_lse)[..., None]
    exact = (sums[0] * first_out + sums[1] * last_out) / (sums[0] + sums[1])
    got = got.reshape(call.queries, call.heads, wide)
    limit = bound(isa, "f32", high, values) + (2.0**-10 if isa == "cuda" else 0)
    assert np.abs(got[..., : call.dim] - exact).max() <= limit
    assert np.abs(lse - np.log(sums[0] + sums[1])[..., 0]).max() <= limit
    assert (got[..., call.dim :] == 9.0).all()


# ---------------------------------------------------------------- scales along tokens
SCALED = ["q8", "fp8_e4m3", "q4", "q3", "q2"]


def heads_of_width(x: np.ndarray, heads: int, columns: int) -> np.ndarray:
    """Of each head the first columns, and zeros beyond those that there are."""
    by_head = x.reshape(len(x), heads, -1)[:, :, :columns]
    return np.pad(by_head, ((0, 0), (0, 0), (0, columns - by_head.shape[2]))).reshape(len(x), -1)


@pytest.mark.parametrize("isa", DEVICES)
@pytest.mark.parametrize("group", [8, 32])
@pytest.mark.parametrize("dtype", [*SCALED, "f16", "fp8_e5m2"])
@pytest.mark.parametrize("shape", [(2, 7), (4, 64), (3, 80)])  # heads, dim
def test_recoded_rows_have_a_scale_for_each_channel_and_group(shape, dtype, group, isa):
    heads, dim = shape
    random = np.random.default_rng(dim)
    x = (random.normal(size=(96, heads * dim)) * 10.0 ** random.uniform(-2, 2, size=heads * dim)).astype(np.float32)
    for columns in (dim, dim - dim // 3, dim + 11):
        wanted = heads_of_width(x, heads, columns)
        got = ops.recoded(x, heads, "f32", dtype, group, heads * columns, 32, 96, isa)
        exact = rounded_by_channel(wanted[32:], dtype, group)
        size = np.abs(exact).reshape(-1, group, heads * columns).max(axis=1).repeat(group, axis=0)
        assert (np.abs(got - exact) <= 3e-7 * size).all()
    again = ops.recoded(x, heads, "f32", dtype, group, heads * dim, 32, 96, isa, 3)
    assert np.array_equal(again, ops.recoded(x, heads, "f32", dtype, group, heads * dim, 32, 96, isa))


@pytest.mark.parametrize("isa", DEVICES)
def test_recoding_row_by_row_is_a_load_and_a_store(isa):
    x = np.random.default_rng(1).normal(size=(70, 3 * 40)).astype(np.float32)
    for dtype in (*SCALED, "bf16"):
        exact = ops.cache_round_trip(ops.cache_round_trip(x, 3, "f16", isa), 3, dtype, isa)
        assert np.array_equal(ops.recoded(x, 3, "f16", dtype, 0, 120, 0, 70, isa), exact)
        assert np.array_equal(ops.recoded(x, 3, "f16", dtype, 0, 120, 33, 35, isa), exact[33:35])
        for columns in (25, 51):  # of 40
            exact = ops.cache_round_trip(heads_of_width(x, 3, columns), 3, dtype, isa)
            assert np.array_equal(ops.recoded(x, 3, "f32", dtype, 0, 3 * columns, 0, 70, isa), exact)
    for scale_tokens, begin, end in ((8, 4, 12), (8, 0, 9)):
        with pytest.raises(Exception, match="whole groups"):
            ops.recoded(x, 3, "f32", "q8", scale_tokens, 120, begin, end, isa)


@pytest.mark.parametrize("isa", DEVICES)
@pytest.mark.parametrize("dtype", SCALED)
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_what_is_not_a_number_stays_in_its_group(bad, dtype, isa):
    x = np.random.default_rng(2).normal(size=(64, 2 * 40)).astype(np.float32)
    x[9, 45] = bad
    got = ops.recoded(x, 2, "f32", dtype, 16, 80, 0, 64, isa)
    assert not np.isfinite(got[9, 45])
    good = np.isfinite(got)
    good[:16, 45] = True
    assert good.all()


@pytest.mark.parametrize("isa", DEVICES)
@pytest.mark.parametrize("dtype", SCALED)
@pytest.mark.parametrize(("heads", "queries"), [(4, 1), (6, 1), (4, 40)])
@pytest.mark.parametrize(("dim", "tokens"), [(40, 16), (64, 32), (96, 32)])
def test_attention_reads_rows_with_scales_along_tokens(dim, tokens, heads, queries, dtype, isa):
    """As KIVI has its keys: k by channel and some tokens, v by row. Of three queries a head of k two are multiplied
    together, then one."""
    call = Call(heads, 2, dim, 160 + queries, queries)
    q, k, v, bias, _ = data(call)
    keys, values = k.astype(np.float64), stored(call, v, dtype)
    keys[:160] = rounded_by_channel(k[:160], dtype, tokens)
    exact, _, high = attended(call, q, keys.reshape(call.rows, call.kv, call.dim), values, bias=bias)
    for threads in (1, 2):
        (got,) = run(call, dtype, isa, threads, {"relative_bias": bias}, scales={"scale_tokens": tokens})
        assert np.abs(got.reshape(exact.shape) - exact).max() <= bound(isa, dtype, high, values)


@pytest.mark.parametrize("isa", DEVICES)
@pytest.mark.parametrize("dtype", ["q8", "q3", "q2"])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("columns", [20, 24, 32])
def test_old_values_of_few_columns_merge_with_recent_ones(columns, queries, dtype, isa):
    """Old rows first, k by channel and v of the first columns alone, in wide heads of out; then recent ones of all
    columns: as if old values were zeros beyond those that there are."""
    call = Call(4, 2, 64, 160 + queries, queries)
    old, rest = 96, (call.heads, queries, call.dim**-0.5, 0, isa, 1)
    q, k, v, _, _ = data(call)
    narrow = heads_of_width(v, call.kv, columns)
    plane = {"stored_heads": call.kv, "heads": call.kv}
    of_old = [np.concatenate([x[:old], x[-queries:]]) for x in (k, narrow)]
    score = plane | {"type": dtype, "rows": of_old[0], "q": q, "dim": call.dim, "scale_tokens": 32}
    value = plane | {"type": dtype, "rows": of_old[1], "dim": columns, "out": np.zeros_like(q)}
    nothing = np.full((queries, call.heads), -np.inf, np.float32)
    out, lse = ops.attention_of_terms([score], [value], *rest, causal=False, lse=nothing)
    plane |= {"type": "f16", "dim": call.dim}
    (got, _) = ops.attention_of_terms(
        [plane | {"rows": k[old:], "q": q}], [plane | {"rows": v[old:], "out": out}], *rest, lse=lse
    )
    keys, values = stored(call, k, "f16"), stored(call, v, "f16")
    keys[:old] = rounded_by_channel(k[:old], dtype, 32).reshape(old, call.kv, call.dim)
    values[:old] = 0
    values[:old, :, :columns] = rounded(narrow[:old], dtype, call.kv).reshape(old, call.kv, columns)
    exact, _, high = attended(call, q, keys, values)
    assert np.abs(got.reshape(exact.shape) - exact).max() <= 2 * bound(isa, dtype, high, values)


def test_types_of_rows_are_told_with_their_sizes():
    from slimrt import _core

    types = {entry["name"]: (entry["bits"], entry["group"], entry["scale_bytes"]) for entry in _core.cache_types()}
    assert types == {"f32": (32, 0, 0), "f16": (16, 0, 0), "bf16": (16, 0, 0), "q8": (8, 0, 4),
                     "fp8_e4m3": (8, 0, 4), "fp8_e5m2": (8, 0, 0), "q4": (4, 32, 4),
                     "q3": (3, 32, 4), "q2": (2, 32, 4)}  # fmt: skip
