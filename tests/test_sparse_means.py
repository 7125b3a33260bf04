# SPDX-License-Identifier: Apache-2.0
"""Means of whole stretches of rows, kept for attention that spares some: they are those of a sequence's own rows,
whatever was done to it and to the sequences that share its blocks. A sequence loaded elsewhere has its means summed
anew, so its logits are the same to the last bit."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import GOLDEN, RANK, derived, ids_of, open_engine, relative
from folds import as_converted
from reference import Reference
from slimrt import _core

STRETCH = 1024  # csrc/core/dtype.h
DELTA = 0.2  # what the golden models' weak attention spares is then nearly all of it, so that means are what is read
CASES = [("llama_mha", "k"), ("llama_gqa_tied", "k+r"), ("bloom", "x"), ("phi2", "xr"), ("deepseek2", "latent")]


class Sequences:
    """Sequences of an engine beside another one, into which each is loaded and read once."""

    def __init__(self, path, mode: str, **options) -> None:
        options = {"n_ctx": 3 * STRETCH, "n_threads": 1, "sparse_delta": DELTA} | options
        self.engine = open_engine(path, mode, "q8", **{"n_seqs": 3} | options)
        self.fresh = open_engine(path, mode, "q8", **options | {"n_seqs": 1})

    def append(self, sequence: int, ids) -> np.ndarray:
        return self.engine.append([(sequence, np.asarray(ids, np.int32))])

    def new(self, ids) -> int:
        sequence = self.engine.new_sequence()
        self.append(sequence, ids)
        self.append(sequence, [5])  # reads what was stored, so that all means are known
        return sequence

    def check(self, sequence: int) -> None:
        alone = self.fresh.load_sequence(self.engine.save_sequence(sequence))
        wanted = self.fresh.append([(alone, np.array([7], np.int32))])
        self.fresh.free_sequence(alone)
        assert np.array_equal(self.append(sequence, [7]), wanted)


@pytest.fixture
def opened(convert):
    return lambda name, mode, **options: Sequences(convert(GOLDEN / name), mode, **options)


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_they_follow_the_rows_of_their_sequence(name, mode, opened):
    some = opened(name, mode)
    first = some.new(ids_of(1, 2 * STRETCH + 300))
    some.check(first)
    second = some.engine.fork(first)
    some.check(second)
    some.engine.truncate(second, STRETCH + 500)  # the blocks of its second stretch are shared up to here
    some.append(second, ids_of(2, STRETCH))
    for one in (second, first, second):
        some.check(one)
    some.engine.truncate(first, STRETCH - 1)  # whose blocks are its own from here on, and are written again
    some.append(first, ids_of(3, STRETCH + 200))
    for one in (first, second):
        some.check(one)
    some.engine.free_sequence(second)
    some.check(some.new(ids_of(4, 2 * STRETCH)))  # takes what was given back


def test_without_room_for_means_rows_are_summed(opened):
    """Forks that share all but their last rows have more stretches of their own than the cache has room for means."""
    some = opened("llama_mha", "k", n_seqs=12, cache_tokens=4 * STRETCH)
    whole = some.new(ids_of(1, STRETCH - 20))
    forks = [some.engine.fork(whole) for _ in range(9)]
    for i, fork in enumerate(forks):
        some.append(fork, ids_of(2 + i, 60))
    for fork in forks:
        some.check(fork)


def mean_values(cache, length: int):
    """What queries see, of stored V the mean of each stretch."""
    seen_by = cache.seen_by

    def seen(positions: np.ndarray) -> dict[str, np.ndarray]:
        rows = seen_by(positions)
        v = rows["v"].copy()
        for first in range(0, length, STRETCH):
            some = slice(first, min(length, first + STRETCH))
            v[some] = v[some].mean(axis=0)
        return rows | {"v": v}

    return seen


@pytest.mark.parametrize(("name", "mode"), [("llama_mha", "k"), ("llama_gqa_tied", "k+r"), ("phi2", "xr")])
def test_they_stand_for_what_is_passed_over(name, mode, convert):
    """A budget that spares all stored rows, beside the reference in float64 with means in place of these."""
    ids = ids_of(1, 2 * STRETCH + 40)
    engine = open_engine(convert(GOLDEN / name), mode, "f32", n_ctx=3 * STRETCH, sparse_delta=0.99999)
    sequence = engine.new_sequence()
    engine.append([(sequence, ids[:-2])])
    reference = Reference(GOLDEN / name)
    caches = reference.new_cache("kv", None)
    reference.append(ids[:-2], caches)
    for i, token in enumerate(ids[-2:]):
        for cache in caches:
            cache.seen_by = mean_values(cache, len(ids) - 2 + i)
        assert relative(engine.append([(sequence, ids[-2:][i : i + 1])]), reference.append([token], caches)) < 1e-4
        for cache in caches:
            del cache.seen_by  # its own again
    counts = engine.sparse_counts()
    assert counts["skipped"] == counts["rows"] > 0


@pytest.mark.unsanitized  # long prompts, to see that a plan holds
@pytest.mark.parametrize(("name", "mode"), CASES)
@pytest.mark.parametrize("sparse", [{}, {"sparse_delta": 0.01}, {"sparse_threshold": 0.01}])
def test_plan_counts_them(name, mode, sparse, convert):
    """About four bytes for each column of 1024 rows; nothing where all rows are read."""
    path, options = convert(GOLDEN / name), {"n_ctx": 2 * STRETCH + 40, "n_seqs": 2, "n_threads": 1}
    made = as_converted(derived(path, mode, "q8"), "q8", "q8")
    engine, dense = (open_engine(path, mode, "q8", derived=made, **options, **more) for more in (sparse, {}))
    memory = engine.memory()
    asked = options | sparse | {"cache_type_k": "q8", "cache_type_v": "q8"}
    if mode == "k+r":
        asked |= {"rank": RANK, "residual_type": "q8"}
    planned = _core.plan(str(path), cache=mode, **asked)
    assert {key: planned[key] for key in memory} == memory
    share = memory["cache"] / dense.memory()["cache"] - 1
    assert 2 / STRETCH < share < 5 / STRETCH if sparse else share == 0  # beside scales of narrow heads less
    for _ in range(2):
        engine.append([(engine.new_sequence(), ids_of(1, 2 * STRETCH))])
    for sequence in range(2):
        engine.append([(sequence, np.array([7], np.int32))])
    assert engine.memory() == memory
