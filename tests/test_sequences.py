# SPDX-License-Identifier: Apache-2.0
"""Sequences: append in pieces, batches, fork, truncate, free, overflow, save; against recomputation.

In float32 rows a token's logits depend on its own text only, up to the order of float32 sums (SAME). In float16 they
depend on which tokens were appended together, so there the same operations in the same pieces must agree.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest

import slimrt
from conftest import GOLDEN, decode, ids_of, open_engine, relative

SAME = 2e-5
MODELS = [("llama_gqa_tied", "kv"), ("llama_mha", "k"), ("mistral_window", "kv"), ("gpt2_erf", "x"), ("gpt2_erf", "v")]
MODELS += [
    ("llama_gqa_tied", "k+r"),
    ("mistral_window", "k+r"),
    ("olmo2", "k+r"),
    ("qwen3", "k"),
    ("phi2", "xr"),
    ("bloom", "x"),
    ("mpt", "v"),
]
each_model = pytest.mark.parametrize(("name", "mode"), MODELS, ids=[f"{n}-{m}" for n, m in MODELS])


def last(engine, sequence: int, ids: np.ndarray) -> np.ndarray:
    return engine.append([(sequence, np.asarray(ids, np.int32))])


@pytest.fixture
def engine_of(convert):
    return lambda name, mode="kv", dtype="f32", **options: open_engine(convert(GOLDEN / name), mode, dtype, **options)


# ---------------------------------------------------------------- pieces and batches
@each_model
def test_pieces_equal_at_once(name, mode, engine_of):
    engine, ids = engine_of(name, mode, n_ctx=96, n_seqs=2), ids_of(0, 90)
    at_once = decode(engine, ids, 90)
    sequence = engine.new_sequence()
    cuts = [0, 1, 2, 5, 31, 32, 33, 64, 90]
    pieces = [engine.append([(sequence, ids[a:b])], all_logits=True) for a, b in zip(cuts, cuts[1:], strict=False)]
    assert relative(np.concatenate(pieces), at_once) < SAME
    assert engine.length(sequence) == 90


@each_model
def test_batch_of_unequal_lengths_equals_one_by_one(name, mode, engine_of):
    engine = engine_of(name, mode, n_ctx=96, n_seqs=8)
    texts = [ids_of(i, n) for i, n in enumerate([70, 1, 33, 9])]
    alone = []
    for ids in texts:
        sequence = engine.new_sequence()
        alone.append([engine.append([(sequence, part)], all_logits=True) for part in (ids, ids[:1], ids[:3])])
        engine.free_sequence(sequence)
    together = [engine.new_sequence() for _ in texts]
    for step, part in enumerate((slice(None), slice(1), slice(3))):
        items = [(s, ids[part]) for s, ids in zip(together, texts, strict=True)]
        wanted = [logits[step] for logits in alone]
        # The same batch twice: every row, or only the last of each item.
        forks = [(engine.fork(s), ids) for s, ids in items]
        only_last = engine.append(forks)
        assert relative(only_last, np.stack([w[-1] for w in wanted])) < SAME
        for sequence, _ in forks:
            engine.free_sequence(sequence)
        assert relative(engine.append(items, all_logits=True), np.concatenate(wanted)) < SAME


@pytest.mark.parametrize("n_batch", [1, 2, 7])
@pytest.mark.parametrize(("name", "mode"), [("llama_gqa_tied", "kv"), ("llama_gqa_tied", "k+r"), ("phi2", "xr")])
def test_batch_in_small_chunks(name, mode, n_batch, engine_of):
    texts = [ids_of(i, n) for i, n in enumerate([20, 3, 1, 11])]
    wanted = [decode(engine_of(name, mode, n_ctx=64), ids, len(ids)) for ids in texts]
    engine = engine_of(name, mode, n_ctx=64, n_seqs=4, n_batch=n_batch)
    items = [(engine.new_sequence(), ids) for ids in texts]
    assert relative(engine.append(items, all_logits=True), np.concatenate(wanted)) < SAME
    items = [(engine.new_sequence(), ids[:1]) for ids in texts[:0]] + [(s, ids[:1]) for s, ids in items]
    assert engine.append(items).shape == (4, wanted[0].shape[1])


# ---------------------------------------------------------------- fork, truncate, free
@each_model
@pytest.mark.parametrize("at", [1, 31, 32, 33, 50, 64])
def test_fork_is_a_copy_and_stays_apart(name, mode, at, engine_of):
    engine, ids = engine_of(name, mode, n_ctx=96, n_seqs=4), ids_of(1, 80)
    original = engine.new_sequence()
    last(engine, original, ids[:at])
    fork = engine.fork(original)
    assert engine.length(fork) == at
    other = ids_of(7, 9)
    last(engine, original, other[:5])  # must not be seen by the fork, nor the fork's by the original
    wanted = decode(engine, ids, at)[at:]
    assert relative(decode(engine, ids[at:], 0, fork), wanted) < SAME
    whole = np.concatenate([ids[:at], other])
    assert relative(last(engine, original, other[5:]), decode(engine, whole, at + 9)[-1:]) < SAME
    engine.free_sequence(original)
    assert engine.length(fork) == 80


@each_model
@pytest.mark.parametrize("to", [0, 1, 31, 32, 40, 69, 70])
def test_truncate_then_another_way(name, mode, to, engine_of):
    engine, ids, other = engine_of(name, mode, n_ctx=96, n_seqs=2), ids_of(2, 70), ids_of(3, 20)
    sequence = engine.new_sequence()
    last(engine, sequence, ids)
    engine.truncate(sequence, to)
    assert engine.length(sequence) == to
    text = np.concatenate([ids[:to], other])
    got = engine.append([(sequence, other)], all_logits=True)
    assert relative(got, decode(engine, text, len(text))[to:]) < SAME


@pytest.mark.parametrize("to", [0, 32, 41])
def test_truncating_a_fork_leaves_the_original(to, engine_of):
    engine, ids = engine_of("llama_gqa_tied", dtype="f16", n_ctx=96, n_seqs=3), ids_of(4, 60)
    sequence = engine.new_sequence()
    last(engine, sequence, ids)
    twin = engine.fork(sequence)
    engine.truncate(twin, to)
    last(engine, twin, ids_of(5, 30))
    fresh = engine.new_sequence()
    last(engine, fresh, ids)
    token = ids[:1]
    assert np.array_equal(last(engine, sequence, token), last(engine, fresh, token))


def test_freed_blocks_serve_again(engine_of):
    """Much more is appended in all than the cache holds."""
    engine, ids = engine_of("llama_gqa_tied", dtype="f16", n_ctx=64, n_seqs=2), ids_of(6, 64)
    wanted = None
    for round_ in range(6):
        pair = [engine.new_sequence(), engine.new_sequence()]
        got = engine.append([(s, ids) for s in pair])
        assert np.array_equal(got[0], got[1])
        wanted = got if wanted is None else wanted
        assert np.array_equal(got, wanted)
        if round_ % 2:
            engine.truncate(pair[0], 0)
            # One sequence in a step may take other kernels than two: equal up to float32's sums.
            assert relative(last(engine, pair[0], ids), wanted[:1]) < SAME
        for sequence in pair:
            engine.free_sequence(sequence)


def test_truncated_blocks_serve_others(engine_of):
    """Two sequences fill the cache; what one gives up, a third one may take."""
    engine, ids = engine_of("llama_gqa_tied", n_ctx=96, n_seqs=2), ids_of(18, 96)
    full = [engine.new_sequence(), engine.new_sequence(), engine.new_sequence()]
    engine.append([(s, ids) for s in full[:2]])
    engine.truncate(full[0], 31)
    assert (
        relative(last(engine, full[2], ids[:64]), decode(engine_of("llama_gqa_tied", n_ctx=96), ids, 64)[63:64]) < SAME
    )
    with pytest.raises(slimrt.ContextOverflowError, match="0 free blocks of 32 tokens and 1 are needed"):
        last(engine, full[0], ids[:2])
    assert engine.length(full[0]) == 31


def test_unknown_sequences_and_bad_arguments(engine_of):
    engine = engine_of("llama_mha", n_ctx=32, n_seqs=2)
    sequence = engine.new_sequence()
    token = np.array([5], np.int32)
    freed = engine.new_sequence()
    engine.free_sequence(freed)
    for bad in (freed, 12345, -1):
        for call in (engine.free_sequence, engine.fork, engine.length, engine.save_sequence):
            with pytest.raises(ValueError, match=f"no sequence {bad}"):
                call(bad)
        with pytest.raises(ValueError, match=f"no sequence {bad}"):
            engine.append([(bad, token)])
        with pytest.raises(ValueError, match=f"no sequence {bad}"):
            engine.truncate(bad, 0)
    with pytest.raises(ValueError, match="no tokens"):
        last(engine, sequence, np.array([], np.int32))
    for id in (101, -1, 2**31 - 1):
        with pytest.raises(ValueError, match=f"token {id} is outside the vocabulary of 101"):
            last(engine, sequence, np.array([id], np.int32))
    with pytest.raises(ValueError, match=f"sequence {sequence} is listed twice"):
        engine.append([(sequence, token), (sequence, token)])
    with pytest.raises(ValueError, match=f"no sequence {freed}"):
        engine.append([(sequence, token), (freed, token)])
    for length in (1, -1):
        with pytest.raises(ValueError, match=f"truncate a sequence of 0 tokens to {length}"):
            engine.truncate(sequence, length)
    assert engine.length(sequence) == 0 and last(engine, sequence, token).shape == (1, 101)


# ---------------------------------------------------------------- the end of the context
@pytest.mark.parametrize("n_ctx", [1, 31, 32, 33, 40])
def test_exactly_n_ctx_fits_and_one_more_does_not(n_ctx, engine_of):
    engine, ids = engine_of("llama_gqa_tied", n_ctx=n_ctx), ids_of(8, 50)
    sequence = engine.new_sequence()
    with pytest.raises(slimrt.ContextOverflowError, match=str(n_ctx)):
        last(engine, sequence, ids[: n_ctx + 1])
    assert engine.length(sequence) == 0
    wanted = decode(engine_of("llama_gqa_tied", n_ctx=64), ids[:n_ctx], n_ctx)
    assert relative(decode(engine, ids[:n_ctx], n_ctx // 2, sequence), wanted) < SAME
    with pytest.raises(slimrt.ContextOverflowError, match=f"{n_ctx} tokens are cached and 1 more"):
        last(engine, sequence, ids[:1])
    assert engine.length(sequence) == n_ctx
    engine.truncate(sequence, n_ctx - 1)
    assert relative(last(engine, sequence, ids[n_ctx - 1 : n_ctx]), wanted[-1:]) < SAME


def test_overflow_of_one_item_computes_none(engine_of):
    engine, ids = engine_of("llama_gqa_tied", n_ctx=40, n_seqs=2), ids_of(9, 50)
    short, long = engine.new_sequence(), engine.new_sequence()
    last(engine, long, ids[:30])
    with pytest.raises(slimrt.ContextOverflowError, match="30 tokens are cached and 11 more do not fit in n_ctx 40"):
        engine.append([(short, ids[:5]), (long, ids[:11])])
    assert engine.length(short) == 0 and engine.length(long) == 30


@pytest.mark.parametrize("start", [0, 10, 32, 40])
def test_n_seqs_forks_may_all_be_full(start, engine_of):
    """n_seqs sequences may be full at once, however they came about."""
    engine, ids = engine_of("llama_gqa_tied", dtype="f16", n_ctx=48, n_seqs=3), ids_of(10, 48)
    first = engine.new_sequence()
    if start:
        last(engine, first, ids[:start])
    forks = [first, engine.fork(first), engine.fork(first)]
    got = engine.append([(s, ids[start:]) for s in forks])
    assert [engine.length(s) for s in forks] == [48] * 3
    assert np.array_equal(got[0], got[1]) and np.array_equal(got[0], got[2])


def test_one_sequence_too_many_overflows_and_changes_nothing(engine_of):
    engine, ids = engine_of("llama_gqa_tied", n_ctx=32, n_seqs=2), ids_of(11, 32)
    pair = [engine.new_sequence(), engine.new_sequence()]
    engine.append([(s, ids) for s in pair])
    third = engine.new_sequence()
    with pytest.raises(slimrt.ContextOverflowError, match="0 free blocks of 32 tokens and 1 are needed"):
        last(engine, third, ids[:1])
    assert engine.length(third) == 0
    engine.free_sequence(pair[0])
    assert last(engine, third, ids).shape[0] == 1


# ---------------------------------------------------------------- save and load, interruption, threads
@pytest.mark.parametrize("length", [1, 32, 50])
@each_model
def test_saved_sequence_goes_on_alike(name, mode, length, engine_of):
    engine, ids = engine_of(name, mode, "f16", n_ctx=96, n_seqs=3), ids_of(12, 80)
    sequence = engine.new_sequence()
    last(engine, sequence, ids[:length])
    saved = engine.save_sequence(sequence)
    wanted = decode(engine, ids[length:], 3, sequence)
    for other in (engine, engine_of(name, mode, "f16", n_ctx=128)):
        loaded = other.load_sequence(saved)
        assert other.length(loaded) == length
        assert relative(decode(other, ids[length:], 3, loaded), wanted) < SAME


@pytest.mark.parametrize("dtype", ["bf16", "q8", "fp8_e4m3", "fp8_e5m2", "q4"])
@each_model
def test_rows_of_every_type_survive(name, mode, dtype, engine_of):
    """Forked in the middle of a block, copied on write, truncated, saved and loaded: the same bits are read."""
    engine, ids = engine_of(name, mode, dtype, n_ctx=96, n_seqs=4), ids_of(19, 80)
    first = engine.new_sequence()
    last(engine, first, ids[:50])
    twin = engine.fork(first)
    last(engine, twin, ids[50:60])
    engine.truncate(twin, 50)
    loaded = engine.load_sequence(engine.save_sequence(first))
    assert np.array_equal(engine.save_sequence(twin), engine.save_sequence(loaded))
    steps = [decode(engine, ids[50:], 3, s) for s in (first, twin, loaded)]
    assert np.array_equal(steps[0], steps[1]) and np.array_equal(steps[0], steps[2])


def test_saved_sequence_of_another_kind_is_refused(engine_of):
    engine = engine_of("llama_mha", dtype="f16", n_ctx=64)
    sequence = engine.new_sequence()
    last(engine, sequence, ids_of(13, 40))
    saved = np.asarray(engine.save_sequence(sequence))
    for other in (
        engine_of("llama_mha", dtype="bf16", n_ctx=64),
        engine_of("llama_mha", "k", "f16", n_ctx=64),
        engine_of("llama_mha", "k+r", "f16", n_ctx=64),
        engine_of("llama_bias", dtype="f16", n_ctx=64),
        engine_of("gpt2_tanh", dtype="f16", n_ctx=64),
    ):
        with pytest.raises(slimrt.ModelFormatError, match="another model or cache"):
            other.load_sequence(saved)
    engine.free_sequence(sequence)
    damaged = [(saved[:n], "the saved sequence is truncated") for n in (0, 1, 15, 16, 40)]
    damaged += [(saved[:-1], "need 15360 bytes, the data has 15359")]
    damaged += [(np.concatenate([saved, saved[:1]]), "need 15360 bytes, the data has 15361")]
    damaged += [(np.zeros(100, np.uint8), "another model or cache: it has ''")]
    damaged += [(np.full(100, 255, np.uint8), "truncated or not one of slimrt's")]
    for data, words in damaged:
        with pytest.raises(slimrt.ModelFormatError, match=words):
            engine.load_sequence(np.ascontiguousarray(data))
    huge = saved.copy()
    huge[8:16] = 255
    with pytest.raises(slimrt.ContextOverflowError, match="has 18446744073709551615 tokens, n_ctx is 64"):
        engine.load_sequence(huge)
    with pytest.raises(slimrt.ContextOverflowError, match="has 40 tokens, n_ctx is 32"):
        engine_of("llama_mha", dtype="f16", n_ctx=32).load_sequence(saved)
    assert engine.length(engine.load_sequence(saved)) == 40


def test_progress_counts_and_may_stop(engine_of):
    engine, ids = engine_of("llama_gqa_tied", n_ctx=64, n_batch=10), ids_of(14, 45)
    sequence, seen = engine.new_sequence(), []
    last(engine, sequence, ids[:5])
    engine.append([(sequence, ids[5:])], on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(10, 40), (20, 40), (30, 40), (40, 40)]
    engine.truncate(sequence, 5)

    def stop(done: int, total: int) -> None:
        if done >= 20:
            raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        engine.append([(sequence, ids[5:])], on_progress=stop)
    assert engine.length(sequence) == 5
    wanted = decode(engine_of("llama_gqa_tied", n_ctx=64), ids, 45)[5:]
    assert relative(engine.append([(sequence, ids[5:])], all_logits=True), wanted) < SAME


def test_two_engines_in_two_threads(engine_of):
    engines = [engine_of("llama_gqa_tied", dtype="f16", n_ctx=96, n_threads=2) for _ in range(2)]
    ids, results = ids_of(15, 90), [None, None]
    wanted = decode(engines[0], ids, 40, None)
    engines[0].free_sequence(0)

    def work(i: int) -> None:
        results[i] = decode(engines[i], ids, 40)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert all(np.array_equal(result, wanted) for result in results)


def test_attention_inputs_are_the_normed_inputs(convert):
    from reference import Reference, rms_norm

    path = convert(GOLDEN / "llama_gqa_tied")
    engine, ids, model = open_engine(path, n_ctx=64, n_batch=13), ids_of(16, 30), Reference(path)
    got = engine.attention_inputs(ids)
    assert got.shape == (2, 30, 48)
    wanted = rms_norm(model.w.embed[ids], model.w.layers[0].attn_norm, model.w.eps)
    assert relative(got[0], wanted) < 1e-6


# ---------------------------------------------------------------- tiled
def test_tiling_repeats_whole_blocks_and_leaves_others_alone(engine_of):
    engine = engine_of("gpt2_erf", "x", n_ctx=128, n_seqs=2)
    sequence = engine.new_sequence()
    last(engine, sequence, ids_of(17, 64))
    twin = engine.fork(sequence)
    before = np.array(engine.save_sequence(sequence))
    engine.tile(sequence, 128)
    assert engine.length(sequence) == 128
    layers, size = engine.info()["n_layers"], engine.memory()["cache_bytes_per_token"]
    rows = np.array(engine.save_sequence(sequence))[-128 * size :].reshape(layers, 4, -1)  # 4 blocks of one plane
    assert np.array_equal(rows[:, :2], before[-64 * size :].reshape(layers, 2, -1))
    assert rows.any() and np.array_equal(rows, rows[:, [0, 1, 0, 1]])
    engine.truncate(sequence, 64)
    for one in (sequence, twin):
        assert np.array_equal(engine.save_sequence(one), before)


def test_tiling_refuses_what_is_no_whole_block(engine_of):
    engine = engine_of("llama_mha", n_ctx=96)
    sequence = engine.new_sequence()
    for ids, length in ((0, 64), (31, 64), (1, 33), (0, 0)):
        if ids:
            last(engine, sequence, ids_of(18, ids))
        with pytest.raises(ValueError, match="multiples of 32"):
            engine.tile(sequence, length)
    with pytest.raises(slimrt.ContextOverflowError, match="32 tokens are cached and 96 more"):
        engine.tile(sequence, 128)
    assert engine.length(sequence) == 32
