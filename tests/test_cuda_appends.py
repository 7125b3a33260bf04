# SPDX-License-Identifier: Apache-2.0
"""Steps on a CUDA device of several tokens of one sequence beside one of another: a chat's next turn among others'."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import GOLDEN, open_engine, relative
from test_cuda import IDS, bound, needs_device

STEPS = [(20, 9), (5, 1), (1, 3), (1, 1), (7, 2)]
CASES = [
    ("llama_mha", "kv"),
    ("llama_mha", "k"),
    ("llama_gqa_tied", "k+r"),
    ("gpt2_tanh", "v"),
    ("gpt2_tanh", "x"),
    ("stablelm", "xr"),
    ("minicpm3", "latent"),
]


@needs_device
@pytest.mark.parametrize("dtype", ["f16", "q8"])
@pytest.mark.parametrize(("name", "mode"), CASES, ids=[f"{name}-{mode}" for name, mode in CASES])
def test_appends_of_several_tokens(name, mode, dtype, convert):
    path = convert(GOLDEN / name)
    rows = []
    for device in ("cpu", "cuda"):
        engine = open_engine(path, mode, dtype, device=device, n_ctx=64, n_seqs=2)
        memory = engine.memory()
        ids, sequences = IDS.astype(np.int32), [engine.new_sequence() for _ in range(2)]
        at, logits = [0, 0], []
        for step in STEPS:
            items = [(s, ids[first : first + n]) for s, first, n in zip(sequences, at, step, strict=True)]
            logits.append(engine.append(items, all_logits=True))
            at = [first + n for first, n in zip(at, step, strict=True)]
        assert engine.memory() == memory  # nothing grows later
        rows.append(np.concatenate(logits))
    assert relative(rows[1], rows[0]) < bound(mode, dtype, path)


@needs_device
@pytest.mark.parametrize("dtype", ["f16", "q8"])
def test_thin_forks(dtype, convert):
    """Rows are shared, and the last block is copied before it is written to; steps of one token are recorded."""
    path, ids, rows = convert(GOLDEN / "llama_gqa_tied"), np.resize(IDS, 140).astype(np.int32), []
    for device in ("cpu", "cuda"):
        engine = open_engine(path, "kv", dtype, device=device, n_ctx=192, n_seqs=2)
        whole = engine.new_sequence()
        engine.append([(whole, ids)])
        thin = engine.thin(whole, 1, 2)
        logits = [engine.append([(thin, ids[i : i + 1]), (whole, ids[i : i + 1])]) for i in range(4)]
        rows.append(np.concatenate(logits))
    assert relative(rows[1], rows[0]) < bound("kv", dtype, path)
