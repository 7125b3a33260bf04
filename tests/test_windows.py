# SPDX-License-Identifier: Apache-2.0
"""Sliding windows: rows behind them are given back, and nothing that is computed changes. Against float64 masking."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import slimrt
from conftest import GOLDEN, ids_of, open_engine, relative
from gguf_shapes import Shape, write_random, write_sparse
from reference import Reference
from slimrt import _core

SAME = 2e-5  # the order of float32 sums
REFERENCE = 1e-4  # of float32 against float64
WINDOWS = {"mistral_window": 13, "mistral_mha": 11}
BLOCK = 32


def kept_rows(window: int, step: int) -> int:
    """In whole blocks: the rows that the tokens of a step look back to, and their own, wherever a block begins."""
    return ((window - 1 + step + BLOCK - 2) // BLOCK + 1) * BLOCK


def appended(engine: _core.Engine, sequence: int, ids: np.ndarray, n: int) -> np.ndarray:
    """Logits of all tokens, n at a time."""
    parts = [ids[i : i + n] for i in range(0, len(ids), n)]
    return np.concatenate([engine.append([(sequence, part)], all_logits=True) for part in parts])


class Interrupt(Exception):
    pass


def interrupted(engine: _core.Engine, sequence: int, ids: np.ndarray, after: int) -> None:
    """An append that is stopped when so many tokens are computed."""

    def stop(done: int, total: int) -> None:
        if done >= after:
            raise Interrupt

    with pytest.raises(Interrupt):
        engine.append([(sequence, ids)], on_progress=stop)


# ---------------------------------------------------------------- the same logits
@pytest.mark.parametrize("chunk", [1, 7, 16, 300])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_logits_are_those_of_a_mask(chunk, dtype, convert):
    """Prompts in pieces of 1, 7, n_batch and more, at a context many times the rows that are kept."""
    path, ids = convert(GOLDEN / "mistral_window"), ids_of(0, 300)
    engine = open_engine(path, "kv", dtype, n_ctx=1000, n_batch=16)
    assert engine.info()["layers"][0]["max_rows"] == kept_rows(13, 16) == 64
    got = appended(engine, engine.new_sequence(), ids, chunk)
    assert relative(got, Reference(path, 1000).logits(ids)) < (REFERENCE if dtype == "f32" else 5e-3)


@pytest.mark.parametrize(("name", "mode"), [("mistral_mha", "k"), ("mistral_mha", "k+r"), ("mistral_window", "k+r")])
@pytest.mark.parametrize("chunk", [7, 1500])
def test_materialised_modes(name, mode, chunk, convert):
    """They read K or V anew from the rows of a window, and take up to 1024 tokens in a step."""
    path, ids = convert(GOLDEN / name), ids_of(1, 1500)
    engine = open_engine(path, mode, "f32", n_ctx=2048, n_batch=64)
    assert engine.info()["layers"][0]["max_rows"] == kept_rows(WINDOWS[name], 1024) < 1500
    sequence = engine.new_sequence()
    got = np.concatenate([appended(engine, sequence, ids[:1460], chunk), appended(engine, sequence, ids[1460:], 1)])
    assert relative(got, Reference(path, 2048).logits(ids)) < REFERENCE


def test_sequences_of_unequal_lengths_in_a_step(convert):
    engine = open_engine(convert(GOLDEN / "mistral_window"), "kv", "f32", n_ctx=400, n_seqs=4, n_batch=9)
    texts = [ids_of(i, n) for i, n in enumerate([200, 3, 64, 121])]
    together = [engine.new_sequence() for _ in texts]
    engine.append(list(zip(together, texts, strict=True)))
    for token in range(3, 40):
        step = engine.append([(sequence, np.array([token], np.int32)) for sequence in together])
    alone = open_engine(convert(GOLDEN / "mistral_window"), "kv", "f32", n_ctx=400)
    for row, text in zip(step, texts, strict=True):
        whole = np.concatenate([text, np.arange(3, 40, dtype=np.int32)])
        sequence = alone.new_sequence()
        assert relative(row, alone.append([(sequence, whole)])[0]) < SAME
        alone.free_sequence(sequence)


# ---------------------------------------------------------------- what it takes
def test_a_mistral_at_32768_tokens_holds_its_window_and_a_step(tmp_path):
    """Window 4096, n_batch 512: 4640 rows in whole blocks, whatever the context from there on."""
    shape = Shape(4096, 32, 32, 32768, n_kv_heads=8, d_ff=14336, n_vocab=32000)
    path = str(write_sparse(tmp_path / "mistral.gguf", shape, {"attention.sliding_window": 4096}))
    per_token = 2 * 2 * 8 * 128 * 32
    for n_ctx, rows in ((2048, 2048), (4096, 4096), (4640, 4640), (4672, 4640), (8192, 4640), (32768, 4640)):
        for n_seqs in (1, 3):
            plan = _core.plan(path, n_ctx=n_ctx, n_seqs=n_seqs)
            assert plan["cache_bytes_per_token"] == per_token  # at any context
            assert plan["cache"] == n_seqs * rows * per_token
            assert {layer["max_rows"] for layer in plan["layers"]} == {rows}
    assert _core.plan(path, n_ctx=32768, n_batch=64)["cache"] == kept_rows(4096, 64) * per_token
    with pytest.raises(slimrt.WontFitError, match="4640 of 32768 tokens x 131072 bytes"):
        _core.Engine(path, n_ctx=32768, memory_limit=1 << 30)


def test_a_gemma_3_of_4b_at_32768_tokens(tmp_path):
    """Of its 34 layers every sixth keeps all rows: 20 KB a token beyond the windows of the others."""
    shape = Shape(2560, 34, 8, 131072, n_kv_heads=4, head_dim=256, d_ff=10240, n_vocab=262208, arch="gemma3")
    path = str(write_sparse(tmp_path / "gemma.gguf", shape, {"attention.sliding_window": 1024}))
    layer, full = 2 * 4 * 256 * 2, 34 // 6
    for n_ctx in (8192, 32768):
        plan = _core.plan(path, n_ctx=n_ctx)
        assert [one["max_rows"] == n_ctx for one in plan["layers"]] == [(i + 1) % 6 == 0 for i in range(34)]
        assert plan["cache"] == layer * (full * n_ctx + (34 - full) * kept_rows(1024, 512))
    assert full * layer == 20480


def test_a_gpt_oss_of_20b_at_32768_tokens(tmp_path):
    """Of its 24 layers every other one keeps all rows: 24 KB a token beyond the windows of the others. Its layers and
    heads, over a narrower model."""
    shape = Shape(32, 24, 64, 131072, n_kv_heads=8, head_dim=64, d_ff=32, arch="gpt-oss")
    more: dict[str, np.ndarray | None] = {}
    for name, dims in shape.tensors().items():
        prefix, _, part = name.rpartition("blk.")[2].partition(".")
        if part == "ffn_norm.weight":
            more |= {name: None, name.replace("ffn_norm", "post_attention_norm"): np.ones(32, np.float32)}
        elif part.startswith(("attn_q", "attn_k", "attn_v", "attn_output", "ffn_")):
            more[name.replace("weight", "bias")] = np.ones(dims[0], np.float32)
        if part == "attn_norm.weight":
            more[f"blk.{prefix}.attn_sinks.weight"] = np.ones(64, np.float32)
    path = str(write_random(tmp_path / "oss.gguf", shape, {"attention.sliding_window": 128}, more))
    plan, layer = _core.plan(path, n_ctx=32768), 2 * 8 * 64 * 2
    assert plan["cache"] == layer * 12 * (32768 + kept_rows(128, 512))
    assert 12 * layer == 24576


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_modes_and_windows_by_layer(dtype, convert):
    """Rows of x in the layer that knows no positions and sees all, k in one that sees a window, kv in the others."""
    path, ids = convert(GOLDEN / "cohere2"), ids_of(4, 300)
    engine = open_engine(path, ["kv", "k", "kv", "x"], dtype, n_ctx=4096, n_batch=16)
    rows = [layer["max_rows"] for layer in engine.info()["layers"]]
    assert rows[3] == 4096 and max(rows[:3]) < 1100
    got = appended(engine, engine.new_sequence(), ids, 7)
    assert relative(got, Reference(path, 4096).logits(ids)) < (REFERENCE if dtype == "f32" else 1e-2)


def test_pattern_of_the_file_holds(tmp_path):
    """As an array, which says each layer, or as a number; of another length it is refused."""
    shape = Shape(32, 4, 4, 256, n_kv_heads=2, head_dim=8, d_ff=48, n_vocab=101, arch="gemma3")
    ids, window = ids_of(5, 80), {"attention.sliding_window": 9}
    found = {}
    for name, pattern in {"usual": None, "number": 2, "array": [True, False] * 2, "all": 5}.items():
        more = {} if pattern is None else {"attention.sliding_window_pattern": pattern}
        path = write_random(tmp_path / f"{name}.gguf", shape, window | more)
        engine = open_engine(path, "kv", "f32", n_ctx=256)
        found[name] = engine.append([(engine.new_sequence(), ids)], all_logits=True)
        assert relative(found[name], Reference(path, 256).logits(ids)) < REFERENCE, name
    assert np.array_equal(found["number"], found["array"]) and np.array_equal(found["usual"], found["all"])
    assert relative(found["number"], found["usual"]) > 1e-2
    path = write_random(tmp_path / "short.gguf", shape, window | {"attention.sliding_window_pattern": [True] * 3})
    with pytest.raises(slimrt.ModelFormatError, match="sliding_window_pattern' is not an array of 4"):
        open_engine(path, "kv", "f32", n_ctx=64)


def test_plan_is_allocation_and_no_step_takes_more(tmp_path):
    shape = Shape(64, 2, 2, 8192, d_ff=32, n_vocab=128)
    path = str(write_random(tmp_path / "model.gguf", shape, {"attention.sliding_window": 200}))
    options = {"n_ctx": 3000, "n_batch": 100, "n_seqs": 2}
    plan, engine = _core.plan(path, **options), _core.Engine(path, **options)
    memory = engine.memory()
    assert {key: plan[key] for key in memory} == memory
    assert memory["cache"] == 2 * kept_rows(200, 100) * memory["cache_bytes_per_token"]
    sequences = [engine.new_sequence() for _ in range(2)]
    for n in (1, 1500, 70, 100, 101, 1000, 228):
        engine.append([(sequence, np.full(n, 5, np.int32)) for sequence in sequences])
    assert engine.length(sequences[1]) == 3000 and engine.memory() == memory
    with pytest.raises(slimrt.ContextOverflowError, match="n_ctx 3000"):
        engine.append([(sequences[0], np.array([5], np.int32))])


def test_contexts_up_to_the_window_are_as_they_were(convert):
    """A window that reaches over the whole context gives nothing back."""
    engine = open_engine(convert(GOLDEN / "mistral_window"), "kv", n_ctx=13, n_batch=4)
    sequence = engine.new_sequence()
    engine.append([(sequence, ids_of(0, 13))])
    assert all(engine.can_truncate(sequence, length) for length in range(14))


# ---------------------------------------------------------------- sequences
@pytest.fixture
def engine(convert):
    """Window 13, steps of 16: two blocks a sequence."""
    return open_engine(convert(GOLDEN / "mistral_window"), "kv", "f32", n_ctx=400, n_seqs=3, n_batch=16)


def test_truncation_reaches_back_as_far_as_rows_are_kept(engine):
    ids = ids_of(2, 300)
    sequence, alone = engine.new_sequence(), engine.new_sequence()
    engine.append([(sequence, ids[:290])])
    shortest = min(length for length in range(1, 291) if engine.can_truncate(sequence, length))
    assert 290 - kept_rows(13, 16) + 12 <= shortest <= 290 - 16
    assert engine.can_truncate(sequence, 0) and engine.can_truncate(sequence, 290)
    assert not engine.can_truncate(sequence, 291) and not engine.can_truncate(sequence, -1)
    before = engine.save_sequence(sequence)
    with pytest.raises(ValueError, match=rf"before position \d+, which a text shorter than {shortest} tokens needs"):
        engine.truncate(sequence, shortest - 1)
    assert engine.length(sequence) == 290 and np.array_equal(engine.save_sequence(sequence), before)
    engine.truncate(sequence, shortest)
    got = engine.append([(sequence, ids[290:])])
    assert relative(got, engine.append([(alone, np.concatenate([ids[:shortest], ids[290:]]))])) < SAME
    engine.truncate(sequence, 0)
    assert relative(engine.append([(sequence, ids[:50])]), engine.append([(engine.new_sequence(), ids[:50])])) < SAME


@pytest.mark.parametrize("at", [5, 32, 64, 149])
def test_forks_stay_apart_though_blocks_are_given_back(at, engine):
    ids, other = ids_of(3, 300), ids_of(4, 150)
    one = engine.new_sequence()
    engine.append([(one, ids[:at])])
    two = engine.fork(one)
    third = engine.fork(two)
    engine.append([(one, ids[at:150])])
    last = engine.append([(two, other), (one, ids[150:])])
    assert relative(last[:1], Oracle(engine).last(np.concatenate([ids[:at], other]), free=[third])) < SAME
    engine.truncate(two, 0)
    assert relative(last[1:], Oracle(engine).last(ids, free=[two])) < SAME


class Oracle:
    """A text computed at once, in an engine that has room for one sequence more."""

    def __init__(self, engine: _core.Engine):
        self.engine = engine

    def last(self, ids: np.ndarray, free: list[int]) -> np.ndarray:
        for sequence in free:
            self.engine.free_sequence(sequence)
        sequence = self.engine.new_sequence()
        logits = self.engine.append([(sequence, ids)])
        self.engine.free_sequence(sequence)
        return logits


def test_every_sequence_may_be_full_and_one_more_is_refused(engine):
    """Forks too: n_seqs sequences have room for a full context, however they came to be."""
    first = engine.new_sequence()
    engine.append([(first, ids_of(5, 100))])
    sequences = [first, engine.fork(first), engine.fork(first)]
    engine.append([(sequence, ids_of(sequence, 300)) for sequence in sequences])
    one_more = engine.fork(first)
    engine.truncate(one_more, 399)
    with pytest.raises(slimrt.ContextOverflowError, match="window of 13 and .* are needed. .* or end the texts"):
        engine.append([(one_more, np.array([7], np.int32))])
    assert [engine.length(sequence) for sequence in sequences] == [400] * 3 and engine.length(one_more) == 399
    engine.free_sequence(first)
    engine.append([(one_more, np.array([7], np.int32))])


@pytest.mark.parametrize("length", [1, 12, 13, 14, 31, 32, 33, 64, 200, 275])
def test_saved_sequences_hold_a_window(length, engine):
    ids = ids_of(6, 300)
    sequence = engine.new_sequence()
    engine.append([(sequence, ids[:length])])
    saved = engine.save_sequence(sequence)
    twin = engine.load_sequence(saved)
    per_token = engine.memory()["cache_bytes_per_token"]
    empty = engine.save_sequence(engine.new_sequence())
    assert saved.size - empty.size == min(length, 12) * per_token
    assert np.array_equal(engine.save_sequence(twin), saved)
    rest = ids[length:]
    assert np.array_equal(engine.append([(twin, rest)]), engine.append([(sequence, rest)]))
    if length > 13:
        again = engine.load_sequence(saved)
        assert not engine.can_truncate(again, length - 1) and engine.can_truncate(again, length)


def test_a_window_is_part_of_a_saved_sequence(tmp_path):
    engines = []
    for window in (20, 21, None):
        changes = None if window is None else {"attention.sliding_window": window}
        path = write_random(tmp_path / f"{window}.gguf", Shape(32, 1, 2, 128), changes)
        engines.append(_core.Engine(str(path), n_ctx=128))
    sequence = engines[0].new_sequence()
    engines[0].append([(sequence, np.full(60, 5, np.int32))])
    saved = engines[0].save_sequence(sequence)
    for other in engines[1:]:
        with pytest.raises(slimrt.ModelFormatError, match="window:20"):
            other.load_sequence(saved)


def test_tiling_ends_in_a_window_of_copies(engine):
    """Period 64 at 256 tokens: the last window is that of the 64 tokens."""
    sequence = engine.new_sequence()
    engine.append([(sequence, ids_of(7, 64))])
    saved, empty = engine.save_sequence(sequence), engine.save_sequence(engine.new_sequence())
    engine.tile(sequence, 256)
    tiled = engine.save_sequence(sequence)
    assert engine.length(sequence) == 256 and tiled.size == saved.size
    rows = saved.size - empty.size
    assert np.array_equal(tiled[-rows:], saved[-rows:])
    twin = engine.fork(sequence)
    engine.tile(twin, 384)
    assert np.array_equal(engine.save_sequence(twin)[-rows:], saved[-rows:])
    engine.append([(twin, ids_of(8, 16)), (sequence, ids_of(8, 30))])
    assert engine.length(twin) == 400 and engine.length(sequence) == 286


# ---------------------------------------------------------------- an append that is given up
def test_a_step_that_is_given_up_leaves_everything(engine):
    ids = ids_of(9, 320)
    sequence = engine.new_sequence()
    engine.append([(sequence, ids[:290])])
    before = engine.save_sequence(sequence)
    for n in (1, 15, 16):
        interrupted(engine, sequence, ids[290 : 290 + n], 0)
        assert engine.length(sequence) == 290 and np.array_equal(engine.save_sequence(sequence), before)


def test_a_long_append_that_is_given_up_says_what_is_left(engine):
    """Its rows from before are gone: it keeps the steps that were done, and goes on or begins again."""
    ids = ids_of(10, 390)
    sequence, alone = engine.new_sequence(), engine.new_sequence()
    engine.append([(sequence, ids[:100])])
    interrupted(engine, sequence, ids[100:300], 160)
    assert engine.length(sequence) == 260 and not engine.can_truncate(sequence, 100)
    whole = engine.append([(alone, ids)])
    assert relative(engine.append([(sequence, ids[260:])]), whole) < SAME
    new = engine.new_sequence()
    interrupted(engine, new, ids, 160)
    assert engine.length(new) == 0  # which it can always go back to


# ---------------------------------------------------------------- sessions
@pytest.fixture
def windowed(convert) -> Path:
    return convert(GOLDEN / "mistral_window")


def test_sessions_compute_again_what_is_gone(windowed, tmp_path):
    ids = [int(id) for id in ids_of(11, 260)]
    with slimrt.Model(windowed, cache_type="f32", n_ctx=300, n_batch=16, n_seqs=2) as model:
        session = model.session()
        session.append(ids, last_only=True)
        session.truncate(40)
        assert session.tokens == tuple(ids[:40])
        wanted = model.logits([*ids[:40], 9, 8])[-2:]
        assert relative(session.append([9, 8]), wanted) < SAME
        session.append(ids[:200], last_only=True)
        session.truncate(40)
        with session.fork() as twin:
            assert relative(twin.append([9, 8]), wanted) < SAME
        session.append(ids[:200], last_only=True)
        session.truncate(40)
        session.save(tmp_path / "s.session")
        session.close()
        assert relative(model.load_session(tmp_path / "s.session").append([9, 8]), wanted) < SAME


def test_an_interrupted_append_leaves_a_session_as_it_was(windowed, monkeypatch):
    ids = [int(id) for id in ids_of(12, 260)]
    with slimrt.Model(windowed, cache_type="f32", n_ctx=300, n_batch=16) as model:
        wanted = model.logits([*ids[:40], 9])[-1:]
        session = model.session()
        session.append(ids[:40])
        with session.runtime.use() as engine:
            interrupted(engine, session.sequence, np.array(ids[40:], np.int32), 200)
            assert engine.length(session.sequence) > 40
        assert session.length == 40
        assert relative(session.append([9]), wanted) < SAME


def test_generation_with_a_common_prefix_that_is_gone(windowed):
    ids = [int(id) for id in ids_of(13, 200)]
    options = {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True}
    with slimrt.Model(windowed, cache_type="f32", n_ctx=300, n_batch=16, n_seqs=2) as model:
        session = model.session()
        model.generate(ids, session=session, **options)
        near = model.generate([*ids[:195], 9], session=session, **options)
        assert near.usage.cached_tokens == 195
        assert near.tokens == model.generate([*ids[:195], 9], **options).tokens
        far = model.generate([*ids[:50], 9], session=session, **options)
        assert far.usage.cached_tokens == 0 and far.tokens == model.generate([*ids[:50], 9], **options).tokens
        long = model.generate(ids, session=session, **options)
        per_token = model.memory()["cache_bytes_per_token"]
        assert long.cache.bytes == kept_rows(13, 16) * per_token and long.cache.bytes_per_token == per_token
