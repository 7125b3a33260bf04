# SPDX-License-Identifier: Apache-2.0
"""Thin forks: sequences that share the first and the last blocks of another and lack the rows between them."""

from __future__ import annotations

import numpy as np
import pytest

import slimrt
from conftest import GOLDEN, ids_of, open_engine, relative
from reference import Reference

BLOCK = 32


@pytest.fixture
def engine_of(convert):
    def opened(name, mode="kv", **options):
        return open_engine(convert(GOLDEN / name), mode, "f32", **{"n_ctx": 192, "n_seqs": 4} | options)

    return opened


def append(engine, *items) -> np.ndarray:
    return engine.append([(sequence, np.asarray(ids, np.int32)) for sequence, ids in items])


@pytest.mark.parametrize("name", ["llama_gqa_tied", "llama_mha", "qwen3"])
@pytest.mark.parametrize(("length", "first", "last"), [(150, 1, 2), (128, 0, 1), (161, 2, 2), (97, 1, 1)])
def test_it_reads_what_it_has_at_the_positions_of_the_whole(name, length, first, last, engine_of):
    """Beside the reference, whose queries see the same rows."""
    engine, ids, more = engine_of(name), ids_of(1, length), ids_of(2, 5)
    whole = engine.new_sequence()
    append(engine, (whole, ids))
    thin = engine.thin(whole, first, last)
    begin = (-(-length // BLOCK) - last) * BLOCK
    assert engine.length(thin) == length - (begin - first * BLOCK) and engine.length(whole) == length
    reference = Reference(GOLDEN / name)
    caches = reference.new_cache("kv", None)
    reference.append(ids, caches)
    for cache in caches:
        seen_by = cache.seen_by
        cache.seen_by = lambda positions, seen_by=seen_by: {
            name: np.concatenate([rows[: first * BLOCK], rows[begin:]]) for name, rows in seen_by(positions).items()
        }
    for token in more:
        assert relative(append(engine, (thin, [token])), reference.append([token], caches)) < 1e-4


def test_both_go_on_by_themselves(engine_of):
    """Blocks are shared until one of them writes, and given back."""
    engine, ids, more = engine_of("llama_gqa_tied"), ids_of(1, 150), ids_of(2, 8)
    free = engine.free_blocks()
    alone, whole = engine.new_sequence(), engine.new_sequence()
    append(engine, (alone, ids), (whole, ids))
    held = engine.free_blocks()
    thin = engine.thin(whole, 1, 2)
    assert engine.free_blocks() == held and engine.blocks(thin)[0] == 3
    for token in more:
        of_thin, of_whole = append(engine, (thin, [token]), (whole, [token]))
        assert relative(of_whole, append(engine, (alone, [token]))[0]) < 2e-5
        assert relative(of_thin, of_whole) > 1e-4, "it reads fewer rows"
    again = engine.fork(thin)
    engine.truncate(thin, engine.length(thin) - 3)
    append(engine, (thin, more[-3:]))
    assert relative(append(engine, (again, [7])), append(engine, (thin, [7]))) < 2e-5
    for sequence in (thin, again, whole, alone):
        engine.free_sequence(sequence)
    assert engine.free_blocks() == free


def test_the_context_ends_where_that_of_the_whole_does(engine_of):
    engine = engine_of("llama_gqa_tied")
    whole = engine.new_sequence()
    append(engine, (whole, ids_of(1, 190)))
    thin = engine.thin(whole, 1, 1)
    assert engine.has_room([(thin, 2)]) and not engine.has_room([(thin, 3)])
    with pytest.raises(slimrt.ContextOverflowError, match="190 tokens are cached and 3 more"):
        append(engine, (thin, [5, 6, 7]))
    append(engine, (thin, [5, 6]))
    engine.truncate(thin, 0)
    append(engine, (thin, ids_of(1, 190)))
    assert relative(append(engine, (thin, [5])), append(engine, (whole, [5]))) < 2e-5, "empty it is as any other"


def test_what_cannot_be(engine_of):
    engine = engine_of("llama_gqa_tied")
    whole = engine.new_sequence()
    append(engine, (whole, ids_of(1, 100)))
    for first, last in ((2, 2), (0, 4), (-1, 1), (1, 0)):
        with pytest.raises(ValueError, match="a sequence of 100 tokens has 4 blocks: nothing is between"):
            engine.thin(whole, first, last)
    with pytest.raises(ValueError, match="no sequence 99"):
        engine.thin(99, 1, 1)
    thin = engine.thin(whole, 1, 1)
    with pytest.raises(slimrt.UnsupportedError, match="save the sequence that it is of"):
        engine.save_sequence(thin)
    engine.truncate(thin, BLOCK)
    rows = engine.save_rows(whole, BLOCK)
    with pytest.raises(slimrt.UnsupportedError, match="load into the sequence that it is of"):
        engine.load_rows(thin, rows)
    for name, mode in (("llama_mha", "k"), ("llama_gqa_tied", "k+r")):
        other = engine_of(name, mode)
        with pytest.raises(slimrt.UnsupportedError, match="cache mode kv in all layers"):
            other.thin(other.new_sequence(), 1, 1)
    window = engine_of("mistral_window")
    with pytest.raises(slimrt.UnsupportedError, match="behind a window"):
        window.thin(window.new_sequence(), 1, 1)
