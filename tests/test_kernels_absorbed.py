# SPDX-License-Identifier: Apache-2.0
"""Absorbed rows, which few queries meet as integers: whole rows are values for every head, and a query is turned in
place of rows. Against NumPy float64, on every instruction set."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest

import kernel_calls
from conftest import ISAS
from kernel_calls import PAIRS, WEIGHT_LEVELS, pair_rounding, rows_together, takes_codes, weight_rounding
from pairwise import pairwise
from reference import Rope
from reference_formats import rounded
from remembered import remembered
from slimrt._core import ops
from test_kernels import rotation_of

TYPES = ["q8", "f16", "bf16", "fp8_e4m3", "fp8_e5m2", "q4", "q3", "q2", "f32"]


class Call(kernel_calls.Call):
    """A query head for each stored one, whose rows rotate on read."""

    def data(self, loud: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng(seed)
        shapes = (self.queries, self.heads * self.dim), (self.rows, self.kv * self.dim)
        q, k = (random.normal(size=shape).astype(np.float32) for shape in shapes)
        return loud * q, k

    def weights(self, q: np.ndarray, k: np.ndarray, rope: Rope | None) -> tuple[np.ndarray, np.ndarray]:
        """[heads, queries, rows], of rows as they are read; and the largest score."""
        keys = k.reshape(self.rows, self.kv, self.dim)
        if rope:
            keys = rope(keys, np.arange(self.rows))
        queries = q.astype(np.float64).reshape(self.queries, self.heads, self.dim) / np.sqrt(self.dim)
        group = self.heads // self.kv
        scores = np.stack([queries[:, h] @ keys[:, h // group].T for h in range(self.heads)])
        size = float(np.abs(scores).max())
        scores = np.where(self.seen, scores, -np.inf)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return p / p.sum(axis=-1, keepdims=True), size


SHAPES = {
    "a head": Call(1, 1, 128, 97, 1),
    "odd": Call(3, 3, 7, 66, 2),
    "80 columns": Call(5, 5, 80, 333, 1),
    "96 columns": Call(6, 6, 96, 257, 3),
    "12 heads": Call(12, 12, 64, 700, 1),
    "32 heads": Call(32, 32, 32, 129, 4),
    "32 heads, more than 256 rows": Call(32, 32, 16, 700, 2),
    "32 heads, a window": Call(32, 32, 32, 900, 1, window=601),
    "40 heads": Call(40, 40, 34, 161, 1),
    "grouped": Call(12, 4, 64, 400, 2),
    "a window": Call(4, 4, 64, 500, 3, window=170),
    "a window within a block": Call(4, 4, 48, 300, 1, window=9),
}


def known_rows(call: Call, k: np.ndarray, stored_heads: int, dtype: str = "q8") -> np.ndarray:
    known = k.astype(np.float64)
    known[: -call.queries] = rounded(k[: -call.queries], dtype, stored_heads)
    return known


def run(call: Call, q, k, stored_heads: int, rope: Rope | None, isa: str, threads: int, dtype: str) -> np.ndarray:
    plane = {"rows": k, "type": dtype, "stored_heads": stored_heads}
    score = plane | {"q": q, "heads": call.kv, "dim": call.dim} | rotation_of(rope, call.rows)
    whole = plane | {"heads": 1, "dim": call.kv * call.dim}
    (out,) = ops.attention_of_terms(
        [score], [whole], call.heads, call.queries, call.dim**-0.5, call.window, isa, threads
    )
    return out.reshape(call.queries, call.heads, -1).astype(np.float64)


@pairwise(
    name=SHAPES,
    rotation=["", "neox", "interleaved", "partial"],
    loud=[0.3, 1.0, 3.0, 50.0],  # the last: weights that are next to nothing, or nothing
    one_scale=[False, True],
    threads=[1, 3],
    dtype=TYPES,
    isa=ISAS,
)
def test_whole_rows_for_every_head(name, rotation, loud, one_scale, threads, dtype, isa):
    call = SHAPES[name]
    n_rot = 0 if call.dim % 2 or not rotation else call.dim // 4 * 2 if rotation == "partial" else call.dim
    rope = Rope(50.0 ** (-np.arange(0, n_rot, 2) / n_rot), rotation == "interleaved") if n_rot else None
    stored_heads = 1 if one_scale else call.kv
    q, k = call.data(loud)
    known = known_rows(call, k, stored_heads, dtype)
    p, size = call.weights(q, known, rope)
    got = run(call, q, k, stored_heads, rope, isa, threads, dtype)
    turned = (
        3e-4 if dtype == "q8" else 1e-5
    )  # a query of 16 bits is off by 2^-14 of its largest element or so, at random
    if takes_codes(isa, dtype, call.kv * call.dim // stored_heads):
        rounding = weight_rounding(isa, p, known, stored_heads, dtype, rows_together(call.heads))
    else:
        rounding = pair_rounding(isa, dtype, p, known)
    off = ~(errors(got, p, known) <= rounding + (1e-5 + turned * size) * np.abs(known).max())
    assert not off.any(), np.argwhere(off)


def errors(got: np.ndarray, p: np.ndarray, known: np.ndarray) -> np.ndarray:
    """[heads, queries]: the largest of a result, [queries, heads, width], beside weights [heads, queries, rows]."""
    wanted = (p.reshape(-1, len(known)) @ known).reshape(*p.shape[:2], -1)
    return np.abs(got.swapaxes(0, 1) - wanted).max(axis=2)


def off_by(got: np.ndarray, wanted: np.ndarray) -> float:
    """Of heads, the largest relative error in the mean square."""
    error = ((got - wanted) ** 2).sum(axis=-1) / (wanted**2).sum(axis=-1)
    return float(np.sqrt(error.max()))


SINK_CALL = Call(8, 8, 64, 1000, 1)


@lru_cache(maxsize=2)
def with_a_sink(sink: float, place: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, rows that are values, and rows that are keys, of which one has that share of all weights."""
    q, k = SINK_CALL.data(1.0, seed=3)
    scores = k.copy()
    if sink:  # a key along every query, 1/1000 of the others' size
        k[place] = 1e-3 * q[0] / np.linalg.norm(q[0].reshape(8, 64), axis=1).repeat(64)
        exact, _ = SINK_CALL.weights(q, k.astype(np.float64), None)
        mass = np.log(sink / (1 - sink) * (1 - exact[:, 0, place]) / exact[:, 0, place])
        factor = (mass / 1e-3 * 8).repeat(64) / np.linalg.norm(q[0].reshape(8, 64), axis=1).repeat(64)
        scores[place] = k[place] * (1 + factor)
    return q, k, scores


@remembered
def beside_a_sink(sink: float, place: int, dtype: str) -> tuple[np.ndarray, np.ndarray, float]:
    """Of rows of a type: the row's share of each head's weights, the result, and how far rounding puts it off."""
    q, k, scores = with_a_sink(sink, place)
    p, _ = SINK_CALL.weights(q, known_rows(SINK_CALL, scores, 8, dtype), None)
    wanted = p[:, 0] @ known_rows(SINK_CALL, k, 8, dtype)
    return p[:, 0, place], wanted, off_by(wanted, p[:, 0] @ k)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TYPES[:-1])
@pytest.mark.parametrize("sink", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("place", [0, 300])
def test_a_sink_leaves_the_others_as_exact(sink, place, dtype, isa):
    """One row has that share of all weights, and almost nothing to say: what the others say is off by 1 % at most, and
    by no more than 1.3 times what rounding rows to their type costs, or what is left of it without integers."""
    q, k, scores = with_a_sink(sink, place)
    heads = {"heads": 8, "dim": 64, "type": dtype, "stored_heads": 8}
    (out,) = ops.attention_of_terms(
        [{"rows": scores, "q": q} | heads], [{"rows": k, "type": dtype, "stored_heads": 8, "heads": 1, "dim": 512}],
        8, 1, 0.125, 0, isa, 2,
    )  # fmt: skip
    share, wanted, element = beside_a_sink(sink, place, dtype)
    if sink:
        few = dtype.startswith(("fp8", "q2", "q3", "q4"))  # bits, in which the sink's own key is off
        assert np.abs(share - sink).max() < (0.15 if few else 0.02)
    kernel = off_by(out.reshape(8, 512).astype(np.float64), wanted)
    assert kernel <= 1e-2
    assert np.hypot(kernel, element) <= 1.3 * element
    if not takes_codes(isa, dtype, SINK_CALL.dim):
        assert kernel < (3e-4 if isa in PAIRS else 2e-5)
    elif isa not in WEIGHT_LEVELS:
        assert kernel < 1e-3


def many_rows(rows: int, n_heads: int) -> tuple[Call, np.ndarray, np.ndarray]:
    call = Call(n_heads, n_heads, 512 // n_heads, rows, 1)
    return call, *call.data(1.0, seed=4)


@remembered
def of_many_rows(rows: int, n_heads: int, dtype: str) -> tuple[np.ndarray, float]:
    """The result, and how far rounding values to a type puts it off."""
    call, q, k = many_rows(rows, n_heads)
    p, _ = call.weights(q, k.astype(np.float64), None)
    wanted = p[:, 0] @ known_rows(call, k, 8, dtype)
    return wanted, off_by(wanted, p[:, 0] @ k)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["q8", "q4"])
@pytest.mark.parametrize(
    ("rows", "n_heads"),
    [(4000, 8), pytest.param(12000, 32, marks=[pytest.mark.unsanitized, pytest.mark.unemulated])],
)
def test_many_rows_are_as_exact(rows, n_heads, dtype, isa):
    """What weights of few bits lose does not grow with a context, whose sum of squares does: beside scores that vary by
    1, of which a few stand out of every block. 32 heads read twice as many rows at a time as 8."""
    call, q, k = many_rows(rows, n_heads)
    heads = {"heads": n_heads, "dim": call.dim, "type": "f32", "stored_heads": n_heads}
    whole = {"rows": k, "type": dtype, "stored_heads": 8, "heads": 1, "dim": 512}
    (out,) = ops.attention_of_terms([{"rows": k, "q": q} | heads], [whole], n_heads, 1, call.dim**-0.5, 0, isa, 2)
    wanted, element = of_many_rows(rows, n_heads, dtype)
    kernel = off_by(out.reshape(n_heads, -1).astype(np.float64), wanted)
    assert np.hypot(kernel, element) <= 1.3 * element


@lru_cache(maxsize=4)
def with_loud_rows(loud: float, seen: bool) -> tuple[Call, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Queries, rows that are keys, and rows that are values, a few of which are so many times as large; and weights."""
    call = Call(32, 32, 32, 600, 1)
    q, k = call.data(1.0, seed=5)
    _, values = call.data(1.0, seed=6)
    places = [0, 259, 300]
    values[places] *= loud
    if not seen:
        k[places] = -q[0]
    return call, q, k, values, call.weights(q, k.astype(np.float64), None)[0][:, 0]


@pytest.mark.parametrize("isa", [*ISAS, *(isa for isa in ops.backends() if isa.startswith("amx"))])
@pytest.mark.parametrize("dtype", ["q8", "q4"])
@pytest.mark.parametrize(("loud", "seen"), [(10, True), (30, False), (1000, False)])
def test_loud_rows_leave_the_others_as_exact(loud, seen, dtype, isa):
    """Rows many times as large as the others, whatever their weights: beside their scales those of the others, or their
    weights times these, would be nothing."""
    call, q, k, values, p = with_loud_rows(loud, seen)
    keys = {"rows": k, "q": q, "type": "f32", "stored_heads": 32, "heads": 32, "dim": 32}
    whole = {"rows": values, "type": dtype, "stored_heads": 32, "heads": 1, "dim": 1024}
    (out,) = ops.attention_of_terms([keys], [whole], 32, 1, 32**-0.5, 0, isa, 2)
    wanted = p @ known_rows(call, values, 32, dtype)
    element = off_by(wanted, p @ values)
    kernel = off_by(out.reshape(32, -1).astype(np.float64), wanted)
    assert np.hypot(kernel, element) <= 1.3 * element


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("stored_heads", [1, 4])
def test_what_is_not_a_number_is_seen_by_every_head(stored_heads, isa):
    """In a key that is a value too: of the columns that share its scale. In a query: in its head's result."""
    call = Call(4, 4, 64, 300, 1)
    for bad in (np.nan, np.inf):
        q, k = call.data(1.0)
        values = k.copy()
        values[40, 70] = bad  # head 1
        heads = {"type": "q8", "stored_heads": stored_heads}
        score, value = {"rows": k, "q": q, "heads": 4, "dim": 64}, {"rows": values, "heads": 1, "dim": 256}
        (out,) = ops.attention_of_terms([heads | score], [heads | value], 4, 1, 0.125, 0, isa, 1)
        columns = slice(64, 128) if stored_heads == 4 else slice(None)
        out = out.reshape(4, 256)
        assert np.isnan(out[:, columns]).all()
        assert np.isfinite(np.delete(out, columns, axis=1)).all()
        q[0, 130] = bad  # head 2
        (out,) = ops.attention_of_terms([heads | score], [heads | value | {"rows": k}], 4, 1, 0.125, 0, isa, 1)
        out = out.reshape(4, 256)
        assert np.isnan(out[2]).all() and np.isfinite(np.delete(out, 2, axis=0)).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(("heads", "dim", "stored_heads"), [(12, 768, 12), (5, 400, 5), (25, 320, 5), (4, 256, 1)])
def test_scores_of_whole_rows(heads, dim, stored_heads, queries, isa):
    """Mode x: a head's query is as wide as a row, which has a scale for each stored head."""
    stored, random = 333, np.random.default_rng(heads)
    rows = random.normal(size=(stored + queries, dim)).astype(np.float32)
    rows[:, : dim // stored_heads] *= 9
    q = random.normal(size=(queries, heads * dim)).astype(np.float32) / 9
    plane = {"rows": rows, "type": "q8", "stored_heads": stored_heads, "heads": 1, "dim": dim}
    call = Call(heads, 1, dim, stored + queries, queries)
    known = known_rows(call, rows, stored_heads)
    p, size = call.weights(q, known, None)
    rounding = weight_rounding(isa, p, known, stored_heads)
    for threads in (1, 3):
        (got,) = ops.attention_of_terms([plane | {"q": q}], [plane], heads, queries, dim**-0.5, 0, isa, threads)
        got = got.reshape(queries, heads, dim)
        assert (errors(got, p, known) <= rounding + (1e-5 + 3e-4 * size) * np.abs(known).max()).all()
