# SPDX-License-Identifier: Apache-2.0
"""Arrays of logits that append() makes: their memory is used again, but never while someone has them."""

from __future__ import annotations

import numpy as np
import pytest

import slimrt
from conftest import GOLDEN, open_engine

N_SEQS = 16


@pytest.fixture
def step(tmp_path):
    """step(rows, token): logits of a token at the begin of so many sequences."""
    slimrt.convert(GOLDEN / "llama_mha", tmp_path / "model.gguf", progress=False)
    engine = open_engine(tmp_path / "model.gguf", "kv", "f32", n_ctx=32, n_seqs=N_SEQS)
    sequences = [engine.new_sequence() for _ in range(N_SEQS)]

    def logits(rows: int, token: int) -> np.ndarray:
        for sequence in sequences:
            engine.truncate(sequence, 0)
        return engine.append([(sequence, np.array([token], np.int32)) for sequence in sequences[:rows]])

    return logits


def test_what_someone_has_stays_as_it_is(step):
    """Arrays, slices and buffers that outlive them."""
    whole, of_slice, of_buffer = (step(N_SEQS, token) for token in (1, 2, 3))
    kept = [whole, of_slice[3:5, ::2], memoryview(of_buffer[2:4])]
    wanted = [np.array(one) for one in kept]
    del whole, of_slice, of_buffer
    for token in range(4, 12):
        step(N_SEQS, token)
    for one, values in zip(kept, wanted, strict=True):
        np.testing.assert_array_equal(one, values)


def test_few_rows_do_not_keep_the_memory_of_many(step):
    many = step(N_SEQS, 1)
    address = many.ctypes.data
    del many
    few = step(1, 2)
    assert few.ctypes.data != address
    assert step(N_SEQS - 1, 3).ctypes.data == address
