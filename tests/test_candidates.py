# SPDX-License-Identifier: Apache-2.0
"""Choices from the likeliest tokens alone, which a device finds: those made from the row."""

from __future__ import annotations

import re

import numpy as np
import pytest

from gguf_shapes import Shape, write_random
from slimrt import _core
from slimrt.errors import ModelFormatError, UnsupportedError

N = 3000
SETTINGS = {
    "the defaults": {},
    "greedy": {"temperature": 0.0},
    "as many as a device finds": {"top_k": 256, "top_p": 1.0, "min_p": 0.0, "temperature": 2.0},
    "one": {"top_k": 1},
    "all filters": {"top_k": 90, "typical_p": 0.8, "top_p": 0.9, "min_p": 0.02, "temperature": 1.4},
    "XTC": {"top_k": 60, "xtc_probability": 0.5, "xtc_threshold": 0.05, "top_p": 1.0, "min_p": 0.0},
    "bans": {"logit_bias": [(i, -np.inf) for i in range(0, 100, 3)], "temperature": 0.0},
    "biases": {"logit_bias": [(i, -1.5) for i in range(50)], "top_k": 3},
    "penalties": {"repeat_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2, "top_k": 5},
    "greedy with penalties": {"repeat_penalty": 3.0, "temperature": 0.0},
    "DRY": {"dry_multiplier": 2.0, "dry_breakers": [[9]], "top_k": 4},
    "all that lowers": {"dry_multiplier": 2.0, "repeat_penalty": 1.2, "logit_bias": [(7, -3.0), (2900, -9.0)]},
}
WHOLE = {
    "no top_k": {"top_k": 0},
    "more than a device finds": {"top_k": 257},
    "penalties on too many": {"top_k": 256, "repeat_penalty": 1.1},
    "the deviation of all": {"top_n_sigma": 1.0},
    "mirostat": {"mirostat": 2},
    "a bias that raises": {"logit_bias": [(5, 0.5)], "temperature": 0.0},
    "penalties that raise": {"frequency_penalty": -0.1},
    "a penalty that raises": {"presence_penalty": -0.1},
    "a factor that raises": {"repeat_penalty": 0.9},
    "a bias for another vocabulary": {"logit_bias": [(N, -1.0)]},
}
TEXT = [int(x) for x in np.random.default_rng(4).integers(0, 60, 100)] + [8, 9, 1, 2, 3, 4, 5, 1, 2, 3, 4]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    shape = Shape(d=32, n_layers=1, n_heads=2, n_ctx=32, d_ff=32, n_vocab=N)
    return _core.Engine(str(write_random(tmp_path_factory.mktemp("candidates") / "model.gguf", shape)), n_ctx=32)


def likeliest(row: np.ndarray, n: int) -> np.ndarray:
    """int32 (1, 2 n): the n largest, NaN before all others, of equal ones the lowest ids; then their ids, ascending."""
    keys = np.where(np.isnan(row), -np.inf, -row)
    ids = np.sort(np.lexsort((~np.isnan(row), keys))[:n]).astype(np.int32)
    return np.concatenate((row[ids].view(np.int32), ids))[None]


def rows(seed: int) -> list[np.ndarray]:
    """Logits that the text's tokens (below 60) have much of; also with many equals, with few that are left, and none
    above 0."""
    random = np.random.default_rng(seed)
    row = (3 * random.standard_normal(N)).astype(np.float32)
    row[:60] += np.float32(4)
    few = np.where(random.random(N) < 0.01, row, -np.inf).astype(np.float32)
    return [row, np.round(row), np.round(row / 4) * np.float32(0), few, row - np.float32(40)]


@pytest.mark.parametrize("name", SETTINGS)
def test_as_many_as_decide_give_the_choices_of_the_row(engine, name):
    chosen = set()
    for seed in range(40):
        alone, some = (_core.Sampler(seed=seed, **SETTINGS[name]) for _ in range(2))
        for accepted in (TEXT, [3, 3, 17]):
            alone.accept(accepted), some.accept(accepted)
            for row in rows(seed):
                n = some.n_deciding(N)
                assert 0 < n <= 256
                expected = engine.sample(row[None], [alone])
                assert engine.sample_candidates(likeliest(row, n), [some]) == expected
                chosen.add(expected[0][0])
    assert len(chosen) > 10


def test_every_lowered_token_counts(engine):
    """The likeliest 41 are banned: one candidate fewer would leave one choice fewer."""
    row = np.linspace(50, 0, N, dtype=np.float32)
    sampler = _core.Sampler(
        temperature=1e6, top_k=2, top_p=1.0, min_p=0.0, logit_bias=[(i, -np.inf) for i in range(41)]
    )
    assert sampler.n_deciding(N) == 43
    found = {engine.sample_candidates(likeliest(row, 43), [sampler])[0][0] for _ in range(64)}
    assert found == {41, 42}
    with pytest.raises(ValueError, match="42 candidates do not decide"):
        engine.sample_candidates(likeliest(row, 42), [sampler])


@pytest.mark.parametrize("name", WHOLE)
def test_choices_that_need_the_row(engine, name):
    sampler = _core.Sampler(**WHOLE[name])
    sampler.accept(TEXT)
    assert sampler.n_deciding(N) == 0
    with pytest.raises(ValueError, match="256 candidates do not decide"):
        engine.sample_candidates(likeliest(rows(0)[0], 256), [sampler])


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize(
    "options", [{}, {"logit_bias": [(2000, -np.inf)]}, {"repeat_penalty": 1.5, "temperature": 0.0}]
)
def test_broken_rows_raise_what_they_raise_whole(engine, broken, options):
    row = rows(1)[0]
    row[2000] = broken
    for sample, of in ((engine.sample, row[None]), (engine.sample_candidates, likeliest(row, 106))):
        sampler = _core.Sampler(**options)
        sampler.accept([2000])
        kind = "is .infinity" if np.isinf(broken) and "logit_bias" not in options else "are NaN"
        (error,) = sample(of, [sampler])
        assert isinstance(error, ModelFormatError) and re.search(kind, str(error))


def test_a_device_finds_candidates(engine):
    sequence = engine.new_sequence()
    with pytest.raises(UnsupportedError, match="the host has these rows"):
        engine.append([(sequence, np.asarray([5], np.int32))], candidates=True)
    assert engine.length(sequence) == 0
    engine.free_sequence(sequence)


def test_rows_without_a_choice_and_candidates_of_other_shapes(engine):
    samplers = [_core.Sampler()]
    (error,) = engine.sample_candidates(likeliest(np.full(N, -np.inf, np.float32), 256), samplers)
    assert isinstance(error, ValueError) and "every logit is -infinity" in str(error)
    for shape in ((2, 512), (1, 511), (512,)):
        with pytest.raises(ValueError, match=r"candidates must be int32 \[1, 2 n\]"):
            engine.sample_candidates(np.zeros(shape, np.int32), samplers)
