# SPDX-License-Identifier: Apache-2.0
"""Mode lowrank: sequences side by side, cut, interrupted, saved and forked, in any order. Against float64."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import slimrt
from conftest import GOLDEN, derived, ids_of, open_engine, relative
from reference import Reference
from test_lowrank import SAME, USUAL, appended_at_once, engine_of, near
from test_regions import N_CTX, Operations, run_operations
from test_windows import appended, interrupted


@pytest.mark.parametrize("more", ["", "+predict"])
def test_sequences_in_one_step(more, convert):
    """Of different ages, in prompts and in steps of a token each."""
    path, levels = convert(GOLDEN / "llama_gqa_tied"), f"f32@0.5+f32@0.75*0.2+f32*0.3{more}"
    model = Reference(path, folds=derived(path, "lowrank"))
    texts = [ids_of(seed, n) for seed, n in ((3, 150), (4, 36), (5, 230))]
    engine, caches = engine_of(path, levels, n_seqs=3, n_batch=24), [model.new_cache("lowrank", levels) for _ in texts]
    sequences = [engine.new_sequence() for _ in texts]
    for items in (texts, [ids_of(6, 20)] * 3):
        got = engine.append(list(zip(sequences, items, strict=True)))
        wanted = [model.append(ids, cache)[-1] for ids, cache in zip(items, caches, strict=True)]
        assert relative(got, np.array(wanted)) < SAME
    for token in range(40):
        got = engine.append([(sequence, np.array([3 + token], np.int32)) for sequence in sequences])
        assert relative(got, np.array([model.append([3 + token], cache)[-1] for cache in caches])) < SAME


@pytest.mark.parametrize("more", ["", "+predict"])
@pytest.mark.parametrize("length", [0, 3, 100, 159, 164, 165, 250, 299])
def test_truncated_among_aged_rows(length, more, convert):
    """Of a block that is cut the rest is recent again, without the columns that it has lost."""
    path, ids, then, levels = convert(GOLDEN / "llama_gqa_tied"), ids_of(5, 300), ids_of(6, 60), f"q4@0.5+q8*0.3{more}"
    parts = [then[:1], *np.split(then[1:], [40])]

    def wanted(levels: str, length: int = length, parts: list[np.ndarray] = parts) -> np.ndarray:
        model = Reference(path, folds=derived(path, "lowrank"))
        caches = model.new_cache("lowrank", levels)
        if length:
            model.append(ids, caches)
        for cache in caches:
            if length:
                cache.truncate(length)
        return np.concatenate([model.append(part, caches) for part in parts])

    engine = open_engine(path, "lowrank", levels, n_ctx=N_CTX + 40, n_seqs=2)
    sequence, _ = appended_at_once(engine, ids)
    copy = engine.fork(sequence)
    engine.truncate(sequence, length)
    got = np.concatenate([engine.append([(sequence, part)], all_logits=True) for part in parts])
    assert near(got, wanted, levels)
    assert engine.length(copy) == 300  # untouched by what the other did
    got = engine.append([(copy, then[:1])])
    assert near(got, partial(wanted, length=300, parts=[then[:1]]), levels)


def test_an_append_that_fails_leaves_no_trace(convert):
    path, ids = convert(GOLDEN / "llama_gqa_tied"), ids_of(4, 300)
    engine = engine_of(path, USUAL, n_seqs=2, n_batch=32)
    sequence, twin = engine.new_sequence(), engine.new_sequence()
    for each in (sequence, twin):
        engine.append([(each, ids[:150])])
    saved = engine.save_sequence(sequence)
    for n, after in ((140, 40), (20, 1), (140, 140)):
        interrupted(engine, sequence, ids[150 : 150 + n], after)
        assert np.array_equal(engine.save_sequence(sequence), saved)
    for each in (sequence, twin):
        engine.append([(each, ids[150:])])
    assert np.array_equal(engine.save_sequence(sequence), engine.save_sequence(twin))


def test_saved_rows_are_of_their_levels_and_latent(convert):
    path = convert(GOLDEN / "llama_mha")
    engine = engine_of(path, USUAL)
    saved = engine.save_sequence(appended_at_once(engine, ids_of(7, 200))[0])
    ids = ids_of(8, 40)
    again = engine_of(path, USUAL)
    logits = [appended(e, e.load_sequence(saved), ids, 1) for e in (again, engine_of(path, USUAL))]
    assert np.array_equal(*logits)
    for levels in ("q2@0.25+q4*0.1", "q2@0.5+q4*0.2", f"{USUAL}+sinks=5", f"{USUAL}+recent=1", "q2@0.5+q8*0.1",
                   f"{USUAL}+predict"):  # fmt: skip
        with pytest.raises(slimrt.ModelFormatError, match="of another model or cache"):
            engine_of(path, levels).load_sequence(saved)
    other = {name: -tensor for name, tensor in derived(path, "lowrank").items()}
    with pytest.raises(slimrt.ModelFormatError, match="of another model or cache"):
        engine_of(path, USUAL, derived=other).load_sequence(saved)


@pytest.mark.parametrize(
    "levels", ["q8@0.5+q8@0.75*0.2+f16*0.3", "q8@0.5+q8*0.5+sinks=40+recent=40", "q8@0.5+q8@0.75*0.2+q8*0.3+predict"]
)
def test_random_operations(levels, convert):
    class LowRank(Operations):
        path, mode = convert(GOLDEN / "llama_gqa_tied"), "lowrank"

    LowRank.dtype = levels
    run_operations(LowRank, 8)
