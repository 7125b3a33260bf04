# SPDX-License-Identifier: Apache-2.0
"""The attention kernel over stored and fresh rows, for every instruction set, against NumPy float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from conftest import DEVICES, ISAS, product_unit
from kernel_calls import PAIRS, absorbed_rounding
from pairwise import pairwise
from reference import Rope
from reference_formats import rounded
from slimrt._core import ops
from test_kernels import rotation_of

TYPES = ["f32", "f16", "bf16", "q8", "fp8_e4m3", "fp8_e5m2", "q4", "q3", "q2"]


@dataclass
class Case:
    """One call: score_heads or value_heads 1 with more query heads: the whole row serves all of them."""

    n_heads: int
    score_heads: int
    value_heads: int
    dk: int
    dv: int
    rows: int
    queries: int
    window: int = 0
    rope: str = ""  # "", "neox", "interleaved": rotation on read
    bias: bool = False
    n_rot: int = 0
    loud: float = 1.0  # factor on the queries
    stored_heads: int = 0  # of the planes, where these are not the heads that are read

    def data(self, seed: int = 0):
        random = np.random.default_rng(seed)
        q = self.loud * random.normal(size=(self.queries, self.n_heads * self.dk))
        scores = random.normal(size=(self.rows, self.score_heads * self.dk))
        values = random.normal(size=(self.rows, self.value_heads * self.dv))
        bias = random.normal(size=self.score_heads * self.dk) if self.bias else None
        return [a if a is None else a.astype(np.float32) for a in (q, scores, values, bias)]

    def make_rope(self) -> Rope | None:
        n_rot = self.n_rot or self.dk
        inv_freq = 50.0 ** (-np.arange(0, n_rot, 2) / n_rot)
        return Rope(inv_freq, self.rope == "interleaved") if self.rope else None


CASES = {
    "mha": Case(4, 4, 4, 12, 12, 70, 1),
    "one row": Case(2, 2, 2, 8, 8, 1, 1),
    "prompt": Case(4, 4, 4, 16, 16, 33, 33),
    "gqa": Case(8, 2, 2, 20, 20, 300, 5),
    "mqa": Case(5, 1, 1, 64, 64, 129, 3),
    "dv differs": Case(4, 2, 4, 24, 10, 65, 2),
    "long": Case(2, 2, 2, 64, 64, 1500, 1),
    "long, split by rows": Case(4, 4, 4, 16, 16, 5000, 1),
    "long, grouped": Case(8, 4, 4, 16, 16, 5000, 2),
    "wide heads": Case(3, 3, 3, 128, 128, 257, 9),
    "heads of 256": Case(4, 2, 2, 256, 256, 200, 2, window=90),
    "heads of 512": Case(4, 1, 1, 512, 512, 133, 1, rope="neox"),
    "heads of 512, prompt": Case(4, 2, 2, 512, 512, 90, 40, rope="neox"),
    "odd": Case(3, 3, 3, 7, 5, 66, 4),
    "many queries": Case(6, 6, 6, 16, 16, 200, 90),
    "window": Case(4, 2, 2, 12, 12, 150, 40, window=13),
    "window of one": Case(2, 2, 2, 8, 8, 40, 3, window=1),
    "k absorbed": Case(4, 4, 1, 12, 48, 300, 1, rope="neox"),
    "k absorbed, many": Case(4, 4, 1, 12, 48, 90, 30, rope="interleaved"),
    "k materialised": Case(4, 4, 4, 12, 12, 90, 30, rope="neox", bias=True),
    "k with bias": Case(4, 4, 1, 16, 64, 200, 2, rope="interleaved", bias=True),
    "partial rotation": Case(4, 4, 1, 16, 64, 200, 2, rope="neox", n_rot=6),
    "x absorbed": Case(8, 1, 1, 40, 40, 260, 3),
    "v absorbed": Case(8, 1, 8, 64, 8, 260, 3),
    "loud": Case(4, 4, 4, 32, 32, 200, 3, loud=100.0),
    "blocks of 64": Case(4, 4, 4, 64, 64, 300, 1),
    "blocks of 128, grouped": Case(8, 2, 2, 128, 128, 300, 1),
    "blocks, three queries": Case(6, 2, 2, 80, 64, 333, 3, window=200),
    "blocks, many pairs": Case(36, 2, 2, 64, 128, 133, 4),
    "blocks, eight queries": Case(4, 4, 4, 64, 64, 333, 8),
    "blocks, sixteen queries": Case(3, 3, 3, 64, 80, 1333, 16, window=700),
    "blocks, seventeen queries": Case(3, 3, 3, 64, 64, 333, 17),
    "blocks, grouped by two": Case(4, 2, 2, 32, 32, 333, 7),
    "k of planes by head": Case(4, 4, 1, 12, 48, 300, 1, rope="neox", stored_heads=4),
    "x of planes by head": Case(8, 1, 1, 40, 40, 260, 3, stored_heads=4),
    "v of planes by head": Case(8, 1, 8, 64, 8, 260, 3, stored_heads=8),
}


def reads_four_bits(isa: str, dim: int) -> bool:
    """Whether few queries multiply 4-bit rows of this width as integers."""
    return isa.startswith(("avx512", "amx", "neon")) and dim % 64 == 0


def largest_codes(rows: np.ndarray) -> np.ndarray:
    """Of each element of 4-bit rows, the largest |code - 8| times the scale of its group."""
    groups = rows.reshape(len(rows), -1, min(32, rows.shape[1]))
    return np.repeat((groups.max(axis=2) - groups.min(axis=2)) * 8 / 15, groups.shape[2], axis=1)


def wanted(case: Case, dtype: str, unit: float = 0.0, isa: str = ""):
    """float64 out and lse, and the float32 error that scores of this size may cause. With q8 rows, also that of a query
    rounded to steps of its largest magnitude / 16256, and of the weights of 32 rows rounded to steps of their largest
    times its row's scale / 16256 (which adds up to 32 / 2 steps for each of the blocks, whose largest add up to 1);
    with q4 rows the same, of codes minus 8.
    unit: what queries, weights and fresh rows are rounded by on a device. isa: where few queries read rows as
    integers."""
    q, score_rows, value_rows, bias = (a if a is None else a.astype(np.float64) for a in case.data())
    n, total = case.queries, case.rows
    stored = total - n
    heads = (case.stored_heads or case.score_heads, case.stored_heads or case.value_heads)
    score_rows[:stored] = rounded(score_rows[:stored], dtype, heads[0])
    value_rows[:stored] = rounded(value_rows[:stored], dtype, heads[1])
    keys = (score_rows if bias is None else score_rows + bias).reshape(total, case.score_heads, case.dk)
    if case.rope:
        keys = case.make_rope()(keys, np.arange(total))
    values, heads = value_rows.reshape(total, case.value_heads, case.dv), q.reshape(n, case.n_heads, case.dk)
    position, row = stored + np.arange(n)[:, None], np.arange(total)[None, :]
    seen = (row <= position) & ((row > position - case.window) if case.window else True)
    out, lse = np.zeros((n, case.n_heads, case.dv)), np.zeros((n, case.n_heads))
    error, weight_error = np.zeros((n, case.n_heads, 1)), np.zeros((1, case.n_heads, 1))
    for head in range(case.n_heads):
        key = keys[:, head // (case.n_heads // case.score_heads)]
        value = values[:, head // (case.n_heads // case.value_heads)]
        scores = np.where(seen, heads[:, head] @ key.T / np.sqrt(case.dk), -np.inf)
        top = scores.max(axis=1, keepdims=True)
        p = np.exp(scores - top)
        lse[:, head] = (top + np.log(p.sum(axis=1, keepdims=True)))[:, 0]
        p /= p.sum(axis=1, keepdims=True)
        out[:, head] = p @ value
        size = (np.abs(heads[:, head]) @ np.abs(key).T / np.sqrt(case.dk)).max(axis=1)
        error[:, head, 0] = 2e-7 * (4 + np.sqrt(case.dk) + size) + 2 * unit * size
        weight_error[:, head] = 2 * unit * np.abs(value).max()
        if case.value_heads == 1 and n <= 4:
            stored_heads = case.stored_heads or 1
            weight_error[:, head] += absorbed_rounding(isa, dtype, p, value, stored_heads).max()
        if dtype == "q8" or (dtype == "q4" and reads_four_bits(isa, case.dk)):
            step = np.abs(heads[:, head]).max(axis=1) / 16256
            key_sizes, value_sizes = (np.abs(x) if dtype == "q8" else largest_codes(x) for x in (key, value))
            error[:, head, 0] += step / 2 * key_sizes.sum(axis=1).max() / np.sqrt(case.dk)
            weight_error[:, head] += 32 / 2 / 16256 * value_sizes.max()
    out_error = 4 * error + weight_error
    return out.reshape(n, -1), lse, np.repeat(out_error, case.dv, axis=2).reshape(n, -1), 4 * error[..., 0]


@pairwise(lambda name, dtype, isa: isa == "cuda" and dtype == "f16", name=CASES, dtype=TYPES, isa=DEVICES)
def test_attention(name, dtype, isa):
    case = CASES[name]
    out, lse, out_error, lse_error = wanted(case, dtype, product_unit(isa, dtype), isa)
    for threads in (1, 2) if isa != "cuda" else (1,):
        got, got_lse = run(case, dtype, isa, threads)
        assert got.shape == out.shape and got_lse.shape == lse.shape
        assert (np.abs(got - out) <= out_error).all(), np.abs(got - out).max()
        assert (np.abs(got_lse - lse) <= lse_error).all(), np.abs(got_lse - lse).max()


def run(case: Case, dtype: str, isa: str, threads: int = 1):
    q, score_rows, value_rows, bias = case.data()
    rotation = rotation_of(case.make_rope(), case.rows)
    return ops.attention(
        q, score_rows, value_rows, case.n_heads, case.score_heads, case.value_heads, dtype, case.queries,
        1 / np.sqrt(case.dk), case.window, isa, threads, bias=bias, stored_heads=case.stored_heads, **rotation,
    )[:2]  # fmt: skip


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["mha", "gqa", "window", "k absorbed", "x absorbed"])
def test_attention_repeats_to_the_bit(name, isa):
    """The same rows in the same order give the same bits, whatever the threads."""
    first, second = run(CASES[name], "f16", isa, 1), run(CASES[name], "f16", isa, 3)
    again = run(CASES[name], "f16", isa, 3)
    assert np.array_equal(second[0], again[0])
    rounding = 1e-4 if name == "k absorbed" and isa in PAIRS else 0  # of rows as integers, with others beside them
    assert np.abs(first[0] - second[0]).max() < 1e-5 + rounding


@pytest.mark.parametrize("isa", ISAS)
def test_fresh_rows_are_read_in_full_precision(isa):
    """A prompt alone stores nothing it reads: bf16 rows change nothing."""
    case = Case(4, 4, 4, 16, 16, 20, 20)
    assert np.array_equal(run(case, "bf16", isa)[0], run(case, "f32", isa)[0])


# ---------------------------------------------------------------- sparse_threshold
def peaked(sharpness: float, n_heads: int = 4, kv_heads: int = 2, dim: int = 64, rows: int = 700, queries: int = 1):
    """Queries whose weights lie on few rows, the first of them a sink with half of the mass or so."""
    random = np.random.default_rng(int(10 * sharpness) + queries)
    keys, values = (random.normal(size=(rows, kv_heads * dim)).astype(np.float32) for _ in range(2))
    q = (sharpness * random.normal(size=(queries, n_heads * dim))).astype(np.float32)
    group = n_heads // kv_heads
    for head in range(kv_heads):  # the sink's key: scores near the largest of any other row
        own = q[0].reshape(n_heads, dim)[head * group]
        others = keys[:, head * dim : (head + 1) * dim] @ own
        keys[0, head * dim : (head + 1) * dim] = own * (others.max() / (own @ own))
    return q, keys, values


@pairwise(
    rows=[("f32", 2, 1), ("f32", 1, 3), ("q8", 4, 2), ("q4", 2, 1)],
    sharpness=[0.3, 1.0, 4.0],
    threshold=[1e-4, 1e-2, 0.3],
    threads=[1, 3],
    isa=ISAS,
)
def test_skipped_mass_stays_within_the_budget(rows, sharpness, threshold, threads, isa):
    """With every value 1 in one column, what is missing there is the skipped mass itself; the denominator counts it.
    rows: their type and heads, and the queries."""
    (dtype, kv_heads, queries), n_heads, dim = rows, 4, 64
    q, keys, values = peaked(sharpness, n_heads, kv_heads, dim, queries=queries)
    values[:, ::dim] = 8.0  # the largest of its head: exact in q8; and of its group: in q4 to 2^-10
    rest = (n_heads, kv_heads, kv_heads, dtype, queries, 1 / np.sqrt(dim), 0, isa, threads)
    dense, dense_lse, none = ops.attention(q, keys, values, *rest)
    out, lse, (read, skipped) = ops.attention(q, keys, values, *rest, sparse_threshold=threshold)
    assert none == (0, 0) and read == (len(keys) - queries) * kv_heads and skipped <= read
    exact = 2e-3 if dtype == "q4" else 1e-5 + 2 * product_unit(isa, dtype)
    missing = 1 - out.reshape(queries, n_heads, dim)[..., 0] / 8
    assert (missing <= threshold + exact).all() and (missing >= -exact).all()
    assert np.abs(out - dense).max() <= threshold * np.abs(values).max() * 1.01 + 1e-5
    assert np.abs(lse - dense_lse).max() < 1e-4
    if sharpness == 4.0 and threshold >= 1e-2 and n_heads * queries <= 2 * kv_heads:  # few share a row
        assert skipped > 0.5 * read  # there is much to skip, and it is skipped


@pytest.mark.parametrize("isa", DEVICES[len(ISAS) :])
@pytest.mark.parametrize("threshold", [1e-2, 0.3])
@pytest.mark.parametrize("sharpness", [0.3, 6.0])
@pytest.mark.parametrize(("dtype", "kv_heads"), [("f16", 2), ("q8", 2), ("q4", 2), ("fp8_e4m3", 1)])
def test_tiles_of_a_device_are_skipped_within_the_budget(dtype, kv_heads, sharpness, threshold, isa):
    """As above for a query alone; but rows are skipped 32 at a time, by each warp of a part of the rows within its own
    budget, so never its first 32. Of large devices 128 parts of four warps share the rows: for that many there is
    nothing to skip in 4000 rows, nor would it be sooner there with fewer parts; of 48000 each has two times 32."""
    n_heads, dim, much = 2, 64, (sharpness, threshold) == (6.0, 0.3) and kv_heads == 2
    q, keys, values = peaked(sharpness, n_heads, kv_heads, dim, rows=48000 if much else 4000)
    values[:, ::dim] = 8.0
    rest = (n_heads, kv_heads, kv_heads, dtype, 1, 1 / np.sqrt(dim), 0, isa, 1)
    out, _, (rows, skipped) = ops.attention(q, keys, values, *rest, sparse_threshold=threshold)
    assert rows == (len(keys) - 1) * kv_heads and skipped <= rows
    missing = 1 - out.reshape(n_heads, dim)[:, 0] / 8
    exact = 4e-3 if dtype == "q4" else 4 * product_unit(isa, dtype)
    assert (missing <= threshold + exact).all() and (missing >= -exact).all()
    if much:
        assert skipped > 0.1 * rows
    assert ops.attention(q, keys, values, *rest)[2] == (0, 0)


@pytest.mark.parametrize("isa", ISAS)
def test_what_is_skipped_is_not_read(isa):
    """Values that are not numbers stay unseen in rows without weight, and are seen in one with weight."""
    q, keys, values = peaked(4.0, rows=300)
    rest = (4, 2, 2, "f32", 1, 1 / 8, 0, isa, 1)
    scores = (q.reshape(2, 2, 64) @ keys.reshape(300, 2, 64).transpose(1, 2, 0) / 8).max(axis=1)[:, :299]
    least, most = scores.argmin(axis=1), scores.argmax(axis=1)
    for head in range(2):
        values[least[head], 64 * head : 64 * head + 64] = np.nan
    assert np.isfinite(ops.attention(q, keys, values, *rest, sparse_threshold=1e-3)[0]).all()
    assert np.isnan(ops.attention(q, keys, values, *rest)[0]).all()
    values[most[0], :64] = np.nan
    assert np.isnan(ops.attention(q, keys, values, *rest, sparse_threshold=1e-3)[0][:, :64]).any()


@pytest.mark.parametrize("isa", ISAS)
def test_sparse_window(isa):
    case = Case(4, 2, 2, 64, 64, 500, 3, window=200, loud=4.0)
    q, keys, values, _ = case.data()
    rest = (4, 2, 2, "f16", 3, 1 / 8, 200, isa, 2)
    exact, _, error, _ = wanted(case, "f16")
    for threshold in (1e-3, 0.1):
        out, _, (rows, skipped) = ops.attention(q, keys, values, *rest, sparse_threshold=threshold)
        assert (np.abs(out - exact) <= threshold * np.abs(values).max() + error).all()
        assert (0 if threshold < 0.1 else 0.1 * rows) <= skipped < rows


@pytest.mark.parametrize("isa", DEVICES)
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", ["q8", "q4"])
def test_what_is_not_a_number_is_seen_through_integer_rows(dtype, where, queries, isa):
    """In a query, a key or a value: that head's results are NaN (of values in q4 those of the group), other heads' are
    not."""
    case = Case(4, 2, 2, 64, 64, 100, queries)
    q, keys, values, _ = case.data()
    {"q": q, "k": keys, "v": values}[where][0, 5] = np.nan  # head 0; of q also the first query
    out, _, _ = ops.attention(q, keys, values, 4, 2, 2, dtype, queries, 1 / 8, 0, isa)
    heads = np.isnan(out.reshape(queries, 4, 64)[:, :, : 64 if dtype == "q8" else 32]).all(axis=2)
    assert heads[0, 0] and not np.isnan(out.reshape(queries, 4, 64)[:, 2:]).any()
    assert heads[:, :2].all() or where == "q"
