# SPDX-License-Identifier: Apache-2.0
"""Absorbed rows of which a budget of softmax weight spares some: what is passed over stays within the budget and stands
for its mean, what is read is exact. Against NumPy float64, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import ISAS
from kernel_calls import rows_together, takes_codes, weight_rounding
from pairwise import pairwise
from reference import Rope, rounded
from slimrt._core import ops
from test_kernels import rotation_of
from test_kernels_absorbed import Call

TYPES = ("f32", "f16", "bf16", "q8", "fp8_e4m3", "q4")
STRETCH = 1024  # rows that are weighed at a time, csrc/kernels/cpu/isa.h

SHAPES = {
    "a head": Call(1, 1, 128, 1500, 1),
    "odd": Call(3, 3, 7, 1100, 2),
    "80 columns": Call(5, 5, 80, 700, 1),
    "12 heads": Call(12, 12, 64, 2300, 1),
    "32 heads": Call(32, 32, 32, 1500, 2),
    "grouped": Call(12, 4, 32, 1400, 2),
    "a window": Call(4, 4, 64, 1900, 3, window=1170),
}


def scales_of(type_name: str, heads: int) -> int:
    return heads if type_name in ("q8", "fp8_e4m3", "q4") else 1


def known_rows(call: Call, k: np.ndarray, type_name: str) -> np.ndarray:
    known = k.astype(np.float64)
    if type_name != "f32":
        known[: -call.queries] = rounded(k[: -call.queries], type_name, scales_of(type_name, call.kv))
    return known


def run(call: Call, q, k, type_name: str, rope: Rope | None, isa: str, threads: int = 1, extra=None, **budget):
    """[queries, heads, columns] of every value term, and the rows met and passed over."""
    plane = {"rows": k, "type": type_name, "stored_heads": scales_of(type_name, call.kv)}
    score = plane | {"q": q, "heads": call.kv, "dim": call.dim} | rotation_of(rope, call.rows)
    values = [plane | {"heads": 1, "dim": call.kv * call.dim}]
    if extra is not None:
        values.append({"rows": extra, "type": "q4", "stored_heads": 1, "heads": 1, "dim": extra.shape[1]})
    out = ops.attention_of_terms(
        [score], values, call.heads, call.queries, call.dim**-0.5, call.window, isa, threads, **budget
    )
    arrays = [x.reshape(call.queries, call.heads, -1).astype(np.float64) for x in out[: len(values)]]
    return arrays, (out[-1] if budget else None)


def exact(p: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return np.einsum("hqn,nd->qhd", p, rows)


def own_error(isa: str, type_name: str, p: np.ndarray, known: np.ndarray, call: Call, size: float) -> np.ndarray:
    """[queries, heads]: what the kernels' own arithmetic may cost."""
    small = (1e-5 + 3e-4 * size) * np.abs(known).max()
    if not takes_codes(isa, type_name, call.dim):
        return np.full((call.queries, call.heads), small)
    return weight_rounding(isa, p, known, call.kv, type_name, rows_together(call.heads)).T + small


@pairwise(
    name=SHAPES,
    type_name=TYPES,
    rotation=["", "neox", "interleaved"],
    loud=[1.0, 3.0, 6.0],
    budget=[{"sparse_threshold": 1e-2}, {"sparse_threshold": 0.2}, {"sparse_delta": 0.02}, {"sparse_delta": 0.1}],
    kept=[False, True],
    threads=[1, 3],
    isa=ISAS,
)
def test_what_is_passed_over_is_within_the_budget(name, type_name, rotation, loud, budget, kept, threads, isa):
    """With rows of length 1 at most, the sum moves by no more than twice the weight that was passed over, and that is
    at most the budget; by squares it is at most delta times the square root of how many there were (Cauchy-Schwarz)."""
    call = SHAPES[name]
    n_rot = call.dim // 2 * 2 if rotation and call.dim % 2 == 0 else 0
    rope = Rope(50.0 ** (-np.arange(0, n_rot, 2) / n_rot), rotation == "interleaved") if n_rot else None
    q, k = call.data(loud)
    known = known_rows(call, k, type_name)
    p, size = call.weights(q, known, rope)
    (got,), (met, passed) = run(call, q, k, type_name, rope, isa, threads, **budget, keeps_means=kept)
    assert 0 <= passed <= met
    wanted = exact(p, known)
    rows = np.linalg.norm(known, axis=1).max()
    if "sparse_threshold" in budget:
        most = budget["sparse_threshold"]
    else:
        most = budget["sparse_delta"] * np.sqrt(call.rows)
    allowed = 2 * most * rows + np.sqrt(known.shape[1]) * own_error(isa, type_name, p, known, call, size)
    assert (np.linalg.norm(got - wanted, axis=-1) <= allowed).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_name", TYPES)
def test_a_budget_of_next_to_nothing_changes_next_to_nothing(type_name, isa):
    call = SHAPES["12 heads"]
    q, k = call.data(1.0)
    known = known_rows(call, k, type_name)
    p, size = call.weights(q, known, None)
    (got,), (met, passed) = run(call, q, k, type_name, None, isa, sparse_delta=1e-9)
    assert passed == 0 and met == call.heads * (call.rows - 1)
    assert (np.abs(got - exact(p, known)).max(axis=-1) <= own_error(isa, type_name, p, known, call, size)).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_name", ["f32", "q8", "q4"])
@pytest.mark.parametrize("loud_rows", [3, 200])  # read from lists, and (of q8) by tiles
def test_what_is_passed_over_counts_as_its_mean(type_name, loud_rows, isa):
    """Some rows have most of the weight; of the others, which all say nearly the same, none is read."""
    call = Call(8, 8, 64, 900, 1)
    random = np.random.default_rng(5)
    q = random.normal(size=(1, 512)).astype(np.float32)
    same = random.normal(size=512)
    k = (same + 1e-2 * random.normal(size=(900, 512))).astype(np.float32)
    loud = random.permutation(128)[:3] if loud_rows == 3 else 300 + np.arange(loud_rows)
    k[loud] += (8 if loud_rows == 3 else 2.5) * q[0] / 8  # every head's score is raised
    k[-1] = same  # the query's own
    known = known_rows(call, k, type_name)
    p, size = call.weights(q, known, None)
    quiet = np.setdiff1d(np.arange(899), loud)
    mass = p[:, 0, quiet].sum(axis=1)
    squares = (p[:, 0, quiet] ** 2).sum(axis=1)
    assert mass.min() > 0.02  # else nothing is shown
    delta = float(1.2 * np.sqrt(squares.max()))
    (got,), (met, passed) = run(call, q, k, type_name, None, isa, sparse_delta=delta)
    assert passed > 0.9 * 8 * len(quiet), (met, passed)
    left_out = exact(p * ~np.isin(np.arange(900), quiet), known)
    error = np.linalg.norm(got - exact(p, known), axis=-1)
    assert (error < 0.1 * np.linalg.norm(left_out - exact(p, known), axis=-1)).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_name", TYPES)
def test_kept_means_are_those_of_whole_stretches(type_name, isa):
    """Even weights, all of which are passed over, so that means alone are read: those of 1024 rows, wherever the parts
    end that threads compute. Where these end with stretches, sums that are not kept are the same to the last bit."""
    call = Call(4, 4, 32, 4 * STRETCH + 1, 1)
    q, k = call.data(0.3)
    k[:-1] += np.repeat(np.random.default_rng(3).normal(size=(4, 128)), STRETCH, axis=0)
    known = known_rows(call, k, type_name)
    p, _ = call.weights(q, known, None)
    stretches = np.arange(5) * STRETCH
    sizes = np.diff(np.append(stretches, call.rows))
    means = np.add.reduceat(known, stretches) / sizes[:, None]
    wanted = exact(np.add.reduceat(p, stretches, axis=-1), means)
    for threads in (1, 3):
        (got,), (met, passed) = run(call, q, k, type_name, None, isa, threads, sparse_delta=0.5, keeps_means=True)
        assert met == passed == 4 * 4 * STRETCH
        assert np.abs(got - wanted).max() < 2e-3 * np.abs(wanted).max()
    assert np.abs(wanted - exact(p, known)).max() > 2e-2 * np.abs(wanted).max()  # it shows which mean was read
    (kept,), (summed,) = (
        run(call, q, k, type_name, None, isa, sparse_delta=0.5, keeps_means=keeps)[0] for keeps in (True, False)
    )
    assert np.array_equal(kept, summed)


@pytest.mark.parametrize("isa", ISAS)
def test_squares_bound_how_many_rows_are_read(isa):
    """However diffuse the weights: those that are kept are larger than any passed over, so fewer than 1 / delta^2."""
    call = Call(4, 4, 32, 8 * STRETCH + 1, 1)
    q, k = call.data(0.1)
    _, (met, passed) = run(call, q, k, "q8", None, isa, sparse_delta=0.05)
    assert met == 4 * 8 * STRETCH
    assert met - passed <= 4 * 8 * 400 and passed > 0.7 * met


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_name", ["f16", "q8", "q4", "q2"])
def test_whole_rows_wider_than_a_tile(type_name, isa):
    """Many rows here and there of one stored head, whose codes of few bits are unpacked a block at a time."""
    call = Call(17, 17, 128, STRETCH + 200, 1)
    q, k = call.data(4.0)
    rows = {"rows": k, "type": type_name, "stored_heads": 1}
    score, value = rows | {"q": q, "heads": call.kv, "dim": call.dim}, rows | {"heads": 1, "dim": k.shape[1]}
    got, (met, passed) = ops.attention_of_terms(
        [score], [value], call.heads, 1, call.dim**-0.5, 0, isa, 2, sparse_delta=1e-3
    )
    assert passed > 0 and met - passed > 50 * call.heads
    known = k.astype(np.float64)
    known[:-1] = rounded(k[:-1], type_name, 1)
    p, _ = call.weights(q, known, None)
    assert np.abs(got.reshape(1, call.heads, -1) - exact(p, known)).max() < 0.02


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kept", [{"sparse_delta": 0.03}, {"sparse_threshold": 0.05}])
def test_a_residual_is_passed_over_with_its_rows(kept, isa):
    """Both planes of a row are read or neither, and both means stand for what was not."""
    call = SHAPES["12 heads"]
    q, k = call.data(3.0)
    random = np.random.default_rng(2)
    residual = random.normal(size=(call.rows, 96)).astype(np.float32)
    (got, beside), (_, passed) = run(call, q, k, "q8", None, isa, 2, extra=residual, **kept)
    assert passed > 0
    known = known_rows(call, k, "q8")
    p, size = call.weights(q, known, None)
    read = residual.astype(np.float64)
    read[:-1] = rounded(residual[:-1], "q4", 1)
    for out, rows in ((got, known), (beside, read)):
        error = np.linalg.norm(out - exact(p, rows), axis=-1)
        assert (error <= 0.05 * np.linalg.norm(rows, axis=1).max()).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_name", ["f32", "q8"])
def test_what_is_not_a_number_is_not_passed_over(type_name, isa):
    call = Call(4, 4, 32, 500, 1)
    q, k = call.data(1.0)
    q[0, 33] = np.nan  # of the second head
    (got,), _ = run(call, q, k, type_name, None, isa, sparse_delta=0.05)
    assert np.isnan(got[0, 1]).all() and np.isfinite(got[0, [0, 2, 3]]).all()
