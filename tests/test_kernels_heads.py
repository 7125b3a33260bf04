# SPDX-License-Identifier: Apache-2.0
"""Products of heads: each with its rows of a weight, or several with the same rows (grouped-query attention)."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import DEVICES
from slimrt._core import ops
from weight_formats import block_size, random_bytes


def head_by_head(x: np.ndarray, weight: np.ndarray, type_name: str, rows: int, isa: str, group: int) -> np.ndarray:
    """x [tokens, heads, k], each head times its rows of the weight; every `group` heads have the same ones."""
    weights = np.split(weight.reshape(-1), x.shape[1] // group)
    heads = [x[:, head].copy() for head in range(x.shape[1])]
    products = [ops.linear(x, weights[i // group], type_name, rows, None, isa, 1) for i, x in enumerate(heads)]
    return np.concatenate(products, axis=1)


@pytest.mark.parametrize("group", [1, 2, 5])
@pytest.mark.parametrize("isa", DEVICES)
@pytest.mark.parametrize("type_name", ["f32", "f16", "bf16", "q8_0", "q4_k"])
def test_each_head_is_what_it_is_alone(type_name, isa, group):
    """To the bit; on CUDA of a few tokens: the sums of more are divided by how many tiles there are."""
    stacked, rows, block = 3, 37, block_size(type_name)
    k = -(-70 // block) * block
    raw = random_bytes(type_name, stacked * rows, k)
    for tokens in (1, 8) if isa == "cuda" else (1, 8, 40, 130):
        x = np.random.default_rng(tokens).normal(size=(tokens, stacked * group, k)).astype(np.float32)
        alone = head_by_head(x, raw, type_name, rows, isa, group)
        for threads in (1, 2, 5):
            flat, weight = x.reshape(tokens, -1), raw.reshape(-1)
            got = ops.linear_per_head(flat, weight, type_name, rows, stacked * group, isa, threads, group)
            assert np.array_equal(got, alone), (tokens, threads)
