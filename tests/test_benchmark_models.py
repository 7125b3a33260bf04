# SPDX-License-Identifier: Apache-2.0
"""The models that benchmarks make up have what a conversion writes: they measure what users have."""

from __future__ import annotations

import sys

import pytest

import slimrt
from conftest import TESTS
from slimrt.core import GgufFile
from slimrt.modelfile.gguf import read_gguf

sys.path.insert(0, str(TESTS.parent / "benchmarks"))
import converted
import models

pytestmark = pytest.mark.unsanitized
SHAPE = models.SHAPES["tiny"]
SAID = tuple(f"slimrt.cache.{key}" for key in ("modes", "types", "ranks", "residual_types"))


@pytest.fixture
def made(monkeypatch, tmp_path):
    """Makes the tiny shape for a cache, "" for none."""
    monkeypatch.setenv("SLIMRT_BENCH_MODELS", str(tmp_path))
    return lambda cache: models.make(SHAPE, cache=converted.Cache.of(cache, SHAPE) if cache else None)


def contents(path):
    """Types and shapes of its tensors, and what it says of the cache."""
    file = GgufFile(str(path))
    model = read_gguf(file)
    return file.tensors(), [list(model.value(key, [])) for key in SAID]


@pytest.mark.parametrize("cache", ["k+r:q8", "k+r:f16", "k:f32"])
def test_folds_are_those_of_a_conversion(made, cache, tmp_path):
    mode, _, type = cache.partition(":")
    wanted = tmp_path / "wanted.gguf"
    slimrt.convert(made(""), wanted, cache=mode, cache_type=type, calibration="none", progress=False)
    assert contents(made(cache)) == contents(wanted)


def test_a_residual_may_be_said(made):
    cache = converted.Cache.of("k+r:q8:q8/8", SHAPE)
    assert (cache.rank, cache.residual_type) == (SHAPE.kv_width // 8, "q8")
    with slimrt.Model(made("k+r:q8:q8/8"), cache="auto", n_ctx=64, progress=False, allow_lossy=True) as model:
        assert {(one["rank"], one["residual_type"]) for one in model.info()["layers"]} == {(32, "q8")}


def test_a_plain_model_serves_what_needs_no_fold(made):
    assert made("kv:q8") == made("")
