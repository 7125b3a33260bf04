# SPDX-License-Identifier: Apache-2.0
"""What a beam search reads of rows of logits, beside NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest

import slimrt
from conftest import GOLDEN, open_engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranking") / "model.gguf"
    slimrt.convert(GOLDEN / "llama_mha", path)
    return open_engine(path, "kv", "f32", n_ctx=64)


def rows_of(n: int, width: int) -> np.ndarray:
    rows = 4 * np.random.default_rng(width).standard_normal((n, width)).astype(np.float32)
    rows[:, ::3] = -np.inf
    return rows


@pytest.mark.parametrize("width", [2, 5, 63, 256, 1025, 58101])
def test_normalisers_are_those_of_numpy(engine, width):
    rows = rows_of(5, width)
    rows[1] += 80  # e^80 times as large: no overflow
    rows[2, : width // 2] -= 1000  # a long part that counts for nothing, and raises the largest in the middle
    wanted = np.logaddexp.reduce(rows.astype(np.float64), axis=-1)
    assert np.allclose(engine.log_normalisers(rows), wanted, rtol=0, atol=2e-5)


def test_rows_without_a_choice_and_broken_ones_are_told_apart(engine):
    rows = rows_of(4, 3000)
    rows[0] = -np.inf
    rows[1, 2999], rows[2, 7] = np.nan, np.inf
    found = engine.log_normalisers(rows)
    assert found[0] == -np.inf and np.isnan(found[1:3]).all() and np.isfinite(found[3])
    assert (engine.likeliest(rows[:1], 8) == -1).all()


@pytest.mark.parametrize("width", [1, 5, 255, 256, 257, 1000, 58101])
def test_the_likeliest_come_in_order_and_of_equals_the_first(engine, width):
    rows = rows_of(3, width)
    rows[1] = np.round(rows[1])  # many equals
    rows[2] = rows[2, -1]
    for count in (1, 8, 300):
        order = np.argsort(-rows, axis=-1, kind="stable")[:, :count]
        wanted = np.where(np.take_along_axis(rows, order, axis=-1) > -np.inf, order, -1)
        assert np.array_equal(engine.likeliest(rows, count), wanted)


def test_rows_are_two_dimensional(engine):
    with pytest.raises(ValueError, match=r"\[rows, vocabulary\]"):
        engine.log_normalisers(np.zeros(8, np.float32))
