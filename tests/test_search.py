# SPDX-License-Identifier: Apache-2.0
"""Searches over a toy distribution, against all its sequences, and the batch that forms of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from scripted import ScriptedEngine, run
from slimrt import _core
from slimrt.generation.search import Append, Encode, Hypothesis, beam_search, follow
from slimrt.plumbing.numbers import log_softmax

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

N, END, LIMIT = 5, 4, 4
ENDS = frozenset({END})


def toy(seed: int):
    """A distribution that depends on the source and on all tokens, the first (the start) included."""

    def logits(source, tokens):
        return np.random.default_rng([seed, int(source[0]), *tokens]).normal(size=N).astype(np.float32) * 2

    return logits


def anything(row, tokens):
    pass


def every_sequence(logits, source, penalty, forced=0):
    """Score and tokens of every sequence that ends, or is as long as it may be; best first. forced: before it."""
    found = []

    def extend(tokens, total):
        logprobs = log_softmax(logits(source, [0, *tokens]))
        for token in range(N):
            score, length = total + logprobs[token], len(tokens) + 1
            if token == END:
                found.append((score / (forced + length) ** penalty, tuple(tokens)))
            elif length == LIMIT:
                found.append((score / (forced + length) ** penalty, (*tokens, token)))
            else:
                extend([*tokens, token], score)

    extend([], 0.0)
    return sorted(found, reverse=True)


def search(engine, source, make):
    sequence = engine.new_sequence()
    try:
        yield Encode(sequence, np.array([source], np.int32))
        row = (yield Append([(sequence, [0])]))[0]
        return (yield from make(sequence, row))
    finally:
        engine.free_sequence(sequence)


def beams(engine, source, num_beams, **options):
    return search(engine, source, lambda sequence, row: beam_search(
        engine, sequence, row, anything, ENDS, LIMIT, num_beams=num_beams, **options))  # fmt: skip


def greedy(engine, source, limit=LIMIT):
    sampler = _core.Sampler(temperature=0.0)
    return search(engine, source, lambda sequence, row: follow(sequence, row, anything, sampler, ENDS, limit))


@pytest.mark.parametrize(("penalty", "forced"), [(0.0, 0), (1.0, 0), (1.0, 2)])
@pytest.mark.parametrize("seed", range(20))
def test_wide_beams_find_the_best_of_all_sequences(seed, penalty, forced):
    engine = ScriptedEngine(toy(seed))
    width = N**LIMIT
    found = run(engine, [(width, beams(engine, 7, width, length_penalty=penalty, given=forced))], width)[0]
    wanted = every_sequence(toy(seed), [7], penalty, forced)
    assert [one.tokens for one in found[:10]] == [tokens for _, tokens in wanted[:10]]
    np.testing.assert_allclose(
        [one.score(penalty, forced) for one in found[:10]], [s for s, _ in wanted[:10]], atol=1e-5
    )
    assert not engine.live


@pytest.mark.parametrize("seed", range(10))
def test_one_beam_is_greedy_and_more_are_no_worse(seed):
    engine = ScriptedEngine(toy(seed))
    alone = run(engine, [(1, greedy(engine, 3))], 1)[0]
    one = run(engine, [(1, beams(engine, 3, 1, early_stopping=True))], 1)[0][0]
    assert one.tokens == alone.tokens and one.ended == alone.ended
    np.testing.assert_allclose(one.logprobs, alone.logprobs, rtol=1e-6)


def test_patience_waits_for_more_results():
    """The likeliest ends of a step come at once; a likelier text needs two more tokens."""

    def logits(source, tokens):
        p = {0: [0.45, 0, 0, 0, 0.55], 1: [0, 0.9, 0, 0, 0.1], 2: [0, 0, 0.99, 0, 0.01]}.get(
            len(tokens) - 1, [0, 0, 0, 0, 1.0]
        )
        return np.log(np.maximum(np.array(p, np.float32), 1e-9))

    engine, options = ScriptedEngine(logits), {"length_penalty": 1.0, "early_stopping": True}
    soon, later = run(engine, [(2, beams(engine, 1, 2, patience=p, **options)) for p in (1.0, 2.0)], 4)
    assert [one.tokens for one in soon] == [(), (0,)]
    assert [one.tokens for one in later] == [(0, 1, 2), (), (0,), (0, 1)] and not engine.live
    one = run(engine, [(2, beams(engine, 1, 2, patience=0.5, **options))], 2)[0]
    assert [found.tokens for found in one] == [()]


def test_early_stopping_ends_with_the_first_results():
    """Ending at once has probability 0.6; the better sequence takes longer."""

    def logits(source, tokens):
        p = {0: [0.4, 0, 0, 0, 0.6], 1: [0, 0.99, 0, 0, 0.01]}.get(len(tokens) - 1, [0, 0, 0, 0, 1.0])
        return np.log(np.maximum(np.array(p, np.float32), 1e-9))

    engine = ScriptedEngine(logits)
    quick, patient = run(
        engine,
        [
            (2, beams(engine, 1, 1, length_penalty=2.0, early_stopping=True)),
            (2, beams(engine, 1, 1, length_penalty=2.0)),
        ],
        4,
    )
    assert quick[0].tokens == () and quick[0].ended
    assert patient[0].tokens == ()  # one beam follows the likeliest that does not end, and finds nothing better
    wide = run(engine, [(2, beams(engine, 1, 2, length_penalty=2.0))], 2)[0]
    assert wide[0].tokens == (0, 1) and wide[0].score(2.0) > patient[0].score(2.0)


def test_a_batch_decodes_as_one_by_one():
    tasks = range(12)
    alone = []
    for source in tasks:
        engine = ScriptedEngine(toy(1))
        alone.append(run(engine, [(3, beams(engine, source, 3))], 3)[0])
    engine = ScriptedEngine(toy(1))
    assert run(engine, [(3, beams(engine, source, 3)) for source in tasks], 12) == alone
    assert engine.encodes[0] == 4 and not engine.live
    assert engine.most <= 4 * (3 + 1)  # beams and the sequence they are forks of


def test_those_who_end_leave_and_others_take_their_place():
    lengths = [1, 5, 2, 4, 3, 3]

    def logits(source, tokens):
        row = np.zeros(N, np.float32)
        row[END if len(tokens) > lengths[int(source[0])] else 1] = 30
        return row

    engine = ScriptedEngine(logits)
    found = run(engine, [(1, greedy(engine, i, limit=99)) for i in range(6)], 2)
    assert [len(one.tokens) for one in found] == lengths
    assert max(engine.appends) == 2 and sum(engine.appends) == sum(length + 1 for length in lengths)
    assert engine.most == 2 and len(engine.appends) == 14  # steps 0-2-5-10-14 in one place, 0-6-10 in the other


def test_one_that_needs_more_than_there_is_runs_alone():
    engine = ScriptedEngine(toy(2))
    found = run(engine, [(1, greedy(engine, 1)), (9, beams(engine, 2, 2)), (1, greedy(engine, 3))], 2)
    assert isinstance(found[0], Hypothesis) and isinstance(found[1], list) and isinstance(found[2], Hypothesis)
    assert engine.encodes == [1, 1, 1] and engine.most == 3  # its beams and the sequence they are forks of


def test_an_error_frees_every_sequence():
    def logits(source, tokens):
        if len(tokens) == 3:
            raise KeyboardInterrupt
        return toy(3)(source, tokens)

    engine = ScriptedEngine(logits)
    with pytest.raises(KeyboardInterrupt):
        run(engine, [(2, beams(engine, i, 2)) for i in range(3)], 6)
    assert not engine.live


def test_rules_apply_to_every_row():
    def no_two_alike(row, tokens):
        row[list(tokens)] = -np.inf

    engine = ScriptedEngine(toy(4))
    task = search(engine, 1, lambda sequence, row: beam_search(
        engine, sequence, row, no_two_alike, ENDS, LIMIT, num_beams=8))  # fmt: skip
    found = run(engine, [(8, task)], 8)[0]
    assert len(found) == 8 and all(len(set(one.tokens)) == len(one.tokens) for one in found)
    possible = {p for n in range(LIMIT) for p in itertools.permutations(range(4), n)}
    assert all(one.tokens in possible for one in found if one.ended)
