# SPDX-License-Identifier: Apache-2.0
"""Rows that age: mode kivi keeps recent rows as they were written and older ones in few bits. Against float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, precondition, rule

import slimrt
from conftest import GOLDEN, decode, derived, ids_of, open_engine, relative, rms
from pairwise import pairwise
from reference import Reference
from reference_modes import BLOCK, RECENT
from remembered import remembered
from slimrt import _core
from test_windows import interrupted

FLOAT32 = 2e-6  # of all logits: sums in float32
SAME_ROUNDING = 0.5  # of what rounding does to them, see test_cache_modes.py
SAME = 2e-5  # the order of float32 sums
N_CTX = 320
SHIPPED = Path(__file__).parent.parent / "models"
MODELS = ["llama_mha", "llama_gqa_tied", "olmo2", "phi2", "bloom"]
TYPES = ["f32", "f16", "bf16", "q8", "fp8_e4m3", "fp8_e5m2", "q4", "q3", "q2"]
TYPES += ["q2+q4*0.1+sinks=4", "q4/q8+q8*0.3+q8*0.2+recent=20+sinks=40"]  # levels


@remembered
def exact(path, seed: int, n: int) -> np.ndarray:
    return Reference(path).logits(ids_of(seed, n))


@remembered
def predicted(path, dtype: str, seed: int, n: int, n_prefill: int) -> np.ndarray:
    return Reference(path).logits_cached(ids_of(seed, n), n_prefill, "kivi", dtype)


def same_rounding(got: np.ndarray, wanted: np.ndarray, exact: np.ndarray, dtype: str) -> bool:
    """Nearer to the reference that rounds than rounding is to none."""
    of_rounding = 0 if dtype == "f32" else rms(wanted - exact)
    return rms(got - wanted) <= FLOAT32 * rms(exact) + SAME_ROUNDING * of_rounding


@pairwise(name=MODELS, dtype=TYPES, n_prefill=[1, 100, 190])
def test_prompt_then_steps(name, dtype, n_prefill, convert):
    """What has aged before, within and after the prompt is read as the reference stores it."""
    path, n = convert(GOLDEN / name), 230
    # Pieces of a prompt read each other's rows in f16 or bf16: much, beside what such rows themselves lose.
    n_batch = 256 if dtype in ("f16", "bf16") else 48
    got = decode(open_engine(path, "kivi", dtype, n_ctx=N_CTX, n_batch=n_batch), ids_of(0, n), n_prefill)
    assert same_rounding(got, predicted(path, dtype, 0, n, n_prefill), exact(path, 0, n), dtype)


@pytest.mark.parametrize("dtype", ["f32", "q8", "q4"])
def test_many_queries_over_aged_rows(dtype, convert):
    """A second prompt reads what the first has left behind: in one piece, and longer than a batch."""
    path, ids = convert(GOLDEN / "llama_gqa_tied"), ids_of(1, 300)
    model = Reference(path)
    caches = model.new_cache("kivi", dtype)
    parts = np.split(ids, [200, 230])
    wanted = np.concatenate([model.append(part, caches) for part in parts])
    engine = open_engine(path, "kivi", dtype, n_ctx=N_CTX, n_batch=40)
    sequence = engine.new_sequence()
    got = np.concatenate([engine.append([(sequence, part)], all_logits=True) for part in parts])
    assert same_rounding(got, wanted, model.logits(ids), dtype)


@pytest.mark.parametrize("n_batch", [1, 7, 33, 512])
def test_a_prompt_is_exact(n_batch, convert):
    """However rows will be stored, and in whatever pieces it is computed: they read each other's rows in f16, as kv."""
    path, ids = convert(GOLDEN / "llama_gqa_tied"), ids_of(2, 300)
    logits = {}
    for mode, dtype in (("kv", "f16"), ("kivi", "f16"), ("kivi", "q4")):
        engine = open_engine(path, mode, dtype, n_ctx=N_CTX, n_batch=n_batch)
        logits[mode, dtype] = engine.append([(engine.new_sequence(), ids)], all_logits=True)
    assert np.array_equal(logits["kivi", "f16"], logits["kivi", "q4"])
    assert relative(logits["kivi", "q4"], logits["kv", "f16"]) < SAME
    if n_batch > len(ids):
        assert relative(logits["kivi", "q4"], Reference(path).logits(ids)) < SAME


def test_nothing_ages_while_it_is_recent(convert):
    path, ids = convert(GOLDEN / "llama_mha"), ids_of(3, RECENT + BLOCK - 1)
    kv, kivi = (open_engine(path, mode, dtype, n_ctx=N_CTX) for mode, dtype in (("kv", "f16"), ("kivi", "q4")))
    n_prompt = 20  # so many that kv, too, computes them tile by tile: else some rows round to another f16
    assert relative(decode(kivi, ids, n_prompt), decode(kv, ids, n_prompt)) < SAME


def test_beside_layers_whose_rows_stay(convert):
    """Groups of both kinds in one step: a long one has slots in one of them alone."""
    path, ids = convert(GOLDEN / "llama_mha"), ids_of(10, 230)
    engine = open_engine(path, ["kivi", "kv"], "f32", n_ctx=N_CTX, n_batch=48)
    assert relative(decode(engine, ids, 190), Reference(path).logits(ids)) < SAME


def test_beside_an_encoder():
    """T5: a bias by distance, which is the same in every region."""
    ids, logits = ids_of(11, 230) % 27 + 3, {}
    for mode in ("kv", "kivi"):
        types = {"cache_type_k": "f32", "cache_type_v": "f32"}
        engine = _core.Engine(str(SHIPPED / "tale-t5.gguf"), cache=mode, n_ctx=N_CTX, n_batch=48, **types)
        sequence = engine.new_sequence()
        engine.encode([(sequence, np.arange(3, 20, dtype=np.int32))])
        logits[mode] = decode(engine, ids, 190, sequence)
    assert relative(logits["kivi"], logits["kv"]) < SAME


# ---------------------------------------------------------------- sequences
def test_the_last_to_share_a_block_keeps_it(convert):
    """Two sequences that are as many as there may be, one a fork, fit into their cache and grow together."""
    path, ids, more = convert(GOLDEN / "llama_gqa_tied"), ids_of(12, 13), ids_of(13, 20)
    engine = open_engine(path, "kivi", "f32", n_ctx=40, n_seqs=2)
    sequence = engine.new_sequence()
    engine.append([(sequence, ids)])
    copy = engine.fork(sequence)
    got = engine.append([(sequence, more), (copy, more[::-1])])
    wanted = [Reference(path).logits(np.concatenate([ids, text]))[-1] for text in (more, more[::-1])]
    assert relative(got, np.array(wanted)) < SAME


def test_an_append_that_fails_leaves_no_trace(convert):
    path, ids = convert(GOLDEN / "llama_gqa_tied"), ids_of(4, 300)
    engine = open_engine(path, "kivi", "q4", n_ctx=N_CTX, n_seqs=2, n_batch=32)
    sequence, twin = engine.new_sequence(), engine.new_sequence()
    for each in (sequence, twin):
        engine.append([(each, ids[:150])])
    saved = engine.save_sequence(sequence)
    for n, after in ((140, 40), (20, 1), (140, 140)):  # of rows that go where they belong, and that age later
        interrupted(engine, sequence, ids[150 : 150 + n], after)
        assert np.array_equal(engine.save_sequence(sequence), saved)
    for each in (sequence, twin):
        engine.append([(each, ids[150:])])
    assert np.array_equal(engine.save_sequence(sequence), engine.save_sequence(twin))


@pytest.mark.parametrize("length", [0, 100, 159, 160, 161, 250, 299])
def test_truncated_among_aged_rows(length, convert):
    """Of a block that is cut the rest is recent again; the text goes on as the reference's does."""
    path, ids, more = convert(GOLDEN / "llama_gqa_tied"), ids_of(5, 300), ids_of(6, 60)
    model = Reference(path)
    caches = model.new_cache("kivi", "q8")
    model.append(ids, caches)
    for cache in caches:
        cache.truncate(length)
    parts = [more[:1], *np.split(more[1:], [40])]
    wanted = np.concatenate([model.append(part, caches) for part in parts])
    engine = open_engine(path, "kivi", "q8", n_ctx=N_CTX + 40)
    sequence = engine.new_sequence()
    engine.append([(sequence, ids)])
    engine.truncate(sequence, length)
    got = np.concatenate([engine.append([(sequence, part)], all_logits=True) for part in parts])
    whole = model.logits(np.concatenate([ids[:length], more]))[length:]
    assert same_rounding(got, wanted, whole, "q8")


class Operations(RuleBasedStateMachine):
    """Any order of operations on sequences leaves each with the logits of the reference that did the same."""

    sequences = Bundle("sequences")
    path, mode, dtype = None, "kivi", "q8"

    @initialize(batch=st.sampled_from([16, 512]))
    def load(self, batch: int) -> None:
        self.engine = open_engine(self.path, self.mode, self.dtype, n_ctx=N_CTX, n_seqs=4, n_batch=batch)
        self.model = Reference(self.path, folds=derived(self.path, self.mode))
        self.texts: dict[int, list[int]] = {}
        self.caches: dict[int, list] = {}

    def add(self, sequence: int, ids: np.ndarray, got: np.ndarray) -> None:
        wanted = self.model.append(ids, self.caches[sequence], self.engine.info()["n_batch"])[-1:]
        self.texts[sequence] += ids.tolist()
        assert relative(got, wanted) < 2e-3  # q8 on either side of a boundary; other scales put it off by 2e-2

    def copy(self, of: int, to: int) -> int:
        from copy import deepcopy

        self.texts[to], self.caches[to] = list(self.texts[of]), deepcopy(self.caches[of])
        return to

    @precondition(lambda self: len(self.texts) < 4)
    @rule(target=sequences)
    def new(self) -> int:
        sequence = self.engine.new_sequence()
        self.texts[sequence], self.caches[sequence] = [], self.model.new_cache(self.mode, self.dtype)
        return sequence

    @precondition(lambda self: len(self.texts) < 4)
    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence: int) -> int:
        return self.copy(sequence, self.engine.fork(sequence))

    @precondition(lambda self: len(self.texts) < 4)
    @rule(target=sequences, sequence=sequences)
    def save_and_load(self, sequence: int) -> int:
        return self.copy(sequence, self.engine.load_sequence(self.engine.save_sequence(sequence)))

    @rule(sequence=sequences, n=st.sampled_from([1, 5, 31, 70, 140, 200]), seed=st.integers(0, 99))
    def append(self, sequence: int, n: int, seed: int) -> None:
        ids = ids_of(seed, n)
        if len(self.texts[sequence]) + n > N_CTX:
            with pytest.raises(slimrt.ContextOverflowError, match="context is full"):
                self.engine.append([(sequence, ids)])
            return
        self.add(sequence, ids, self.engine.append([(sequence, ids)]))

    @rule(n=st.sampled_from([1, 9]), seed=st.integers(0, 99))
    def append_to_all(self, n: int, seed: int) -> None:
        items = [(s, ids_of(seed + s, n)) for s, text in self.texts.items() if len(text) + n <= N_CTX]
        if not items:
            return
        for (sequence, ids), got in zip(items, self.engine.append(items), strict=True):
            self.add(sequence, ids, got[None])

    @rule(sequence=sequences, share=st.floats(0, 1))
    def truncate(self, sequence: int, share: float) -> None:
        length = round(share * len(self.texts[sequence]))
        if not self.engine.can_truncate(sequence, length):
            assert "none" in self.dtype and length > 0
            with pytest.raises(ValueError, match="are forgotten"):
                self.engine.truncate(sequence, length)
            return
        self.engine.truncate(sequence, length)
        del self.texts[sequence][length:]
        self.caches[sequence] = self.caches[sequence] if length else self.model.new_cache(self.mode, self.dtype)
        for cache in self.caches[sequence]:
            if length:
                cache.truncate(length)

    @rule(sequence=consumes(sequences))
    def free(self, sequence: int) -> None:
        self.engine.free_sequence(sequence)
        del self.texts[sequence], self.caches[sequence]


def run_operations(machine: type[Operations], n: int) -> None:
    machine.TestCase.settings = settings(
        max_examples=n,
        stateful_step_count=16,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    machine.TestCase().runTest()


@pytest.mark.parametrize("dtype", ["q8", "q8+f16*0.4+sinks=5+recent=40", "none+f16*64+sinks=5+recent=40"])
def test_random_operations(dtype, convert):
    class Aging(Operations):
        path = convert(GOLDEN / "llama_gqa_tied")

    Aging.dtype = dtype
    run_operations(Aging, 12 if dtype == "q8" else 8)


# ---------------------------------------------------------------- memory
def bytes_of_aged_rows(rows: int, heads: int, dim: int) -> int:
    """q4: K with a float16 scale and minimum for each channel of a block, V for each 32 columns of a head."""
    k = rows * heads * dim // 2 + rows // BLOCK * heads * dim * 4
    return k + rows * heads * (dim // 2 + -(-dim // 32) * 4)


def test_bytes_are_those_of_the_regions(convert):
    """Planned, allocated, and saved."""
    path, n = convert(GOLDEN / "llama_gqa_tied"), 300
    engine = open_engine(path, "kivi", "q4", n_ctx=4096, n_batch=32)
    heads, dim, layers = 2, 12, len(engine.info()["layers"])
    sequence = engine.new_sequence()
    sizes = []
    for part in np.split(ids_of(7, n), [200]):
        engine.append([(sequence, part)])
        sizes.append(len(engine.save_sequence(sequence)))
    aged = [(length - RECENT) // BLOCK * BLOCK for length in (200, n)]
    wanted = [
        layers * (bytes_of_aged_rows(old, heads, dim) + (length - old) * heads * dim * 4)
        for length, old in zip((200, n), aged, strict=True)
    ]
    assert sizes[1] - sizes[0] == wanted[1] - wanted[0]
    memory = engine.memory()
    planned = _core.plan(str(path), cache="kivi", cache_type_k="q4", cache_type_v="q4", n_ctx=4096, n_batch=32)
    assert planned["cache"] == memory["cache"] and planned["scratch"] == memory["scratch"]
    kept = layers * bytes_of_aged_rows((4096 - RECENT) // BLOCK * BLOCK, heads, dim)
    assert kept < memory["cache"] < kept + layers * 3 * (RECENT + 64) * heads * dim * 4


def test_a_long_context_is_tiled(convert):
    """For measurements: the newest rows stay what they are, so the text goes on after them."""
    path, ids = convert(GOLDEN / "llama_gqa_tied"), ids_of(8, 256)
    engine = open_engine(path, "kivi", "q4", n_ctx=2048, n_seqs=2)
    sequence = engine.new_sequence()
    engine.append([(sequence, ids[:128])])
    with pytest.raises(ValueError, match="region"):
        engine.tile(sequence, 1024)
    engine.append([(sequence, ids[128:])])
    engine.tile(sequence, 1024)
    assert engine.length(sequence) == 1024
    copy = engine.load_sequence(engine.save_sequence(sequence))
    rows = [engine.append([(each, ids_of(9, 200))]) for each in (sequence, copy)]
    assert np.array_equal(*rows) and np.isfinite(rows[0]).all()


# ---------------------------------------------------------------- rows that are forgotten
FORGETFUL = "none+f32*64+recent=20+sinks=4"


@pytest.mark.parametrize("parts", [[1] * 230, [100] + [1] * 130, [150, 40, 1, 1], [300, 1]])
def test_forgotten_rows_are_not_read(parts, convert):
    """The oldest but for the sinks, by steps and by prompts of one piece and of several; within a prompt none is."""
    path, model = convert(GOLDEN / "llama_gqa_tied"), Reference(convert(GOLDEN / "llama_gqa_tied"))
    caches, engine = model.new_cache("kivi", FORGETFUL), open_engine(path, "kivi", FORGETFUL, n_ctx=N_CTX, n_batch=64)
    sequence = engine.new_sequence()
    pieces = np.split(ids_of(14, sum(parts)), np.cumsum(parts)[:-1])
    got, wanted = (
        np.concatenate([append(piece) for piece in pieces])
        for append in (
            lambda piece: engine.append([(sequence, piece)], all_logits=True),
            lambda piece: model.append(piece, caches),
        )
    )
    assert relative(got, wanted) < SAME
    assert relative(wanted, model.logits(np.concatenate(pieces))) > 10 * SAME  # they would have been


def test_no_sinks_and_nothing_else(convert):
    """The newest rows alone, as a window of 52 to 83."""
    path = convert(GOLDEN / "llama_mha")
    model, levels = Reference(path), "none+f32*32+recent=20"
    caches = model.new_cache("kivi", levels)
    parts = np.split(ids_of(15, 200), [90, 140, 141])
    wanted = np.concatenate([model.append(part, caches) for part in parts])
    engine = open_engine(path, "kivi", levels, n_ctx=N_CTX)
    sequence = engine.new_sequence()
    got = np.concatenate([engine.append([(sequence, part)], all_logits=True) for part in parts])
    assert relative(got, wanted) < SAME


def test_what_is_forgotten_takes_no_room(convert):
    path = convert(GOLDEN / "llama_gqa_tied")
    small, large = (
        _core.plan(str(path), cache="kivi", cache_type_k=FORGETFUL, cache_type_v=FORGETFUL, n_ctx=n_ctx)
        for n_ctx in (1024, 1 << 20)
    )
    assert small["cache"] == large["cache"]
    assert small["layers"][0]["bytes_held"] == large["layers"][0]["bytes_held"]
    engine = open_engine(path, "kivi", FORGETFUL, n_ctx=N_CTX)
    sequence, sizes = engine.new_sequence(), []
    for n in (132, 32, 96, 1):
        engine.append([(sequence, ids_of(16, n))])
        sizes.append(len(engine.save_sequence(sequence)))
    assert sizes[0] == sizes[1] == sizes[2] < sizes[3]


def test_cut_where_rows_are_forgotten(convert):
    """As far as every row is there that the text then reads; else it says so, and from the start all is possible."""
    engine = open_engine(convert(GOLDEN / "llama_gqa_tied"), "kivi", FORGETFUL, n_ctx=N_CTX)
    sequence = engine.new_sequence()
    engine.append([(sequence, ids_of(17, 300))])
    shortest = min(length for length in range(5, 300) if engine.can_truncate(sequence, length))
    # sinks 4, recent 20: of 276 rows that aged 8 blocks of 32, 6 of them forgotten; as soon as 8 blocks have aged
    assert shortest == 4 + 20 + 8 * BLOCK
    before = engine.save_sequence(sequence)
    for length in (shortest - 1, 5):
        with pytest.raises(ValueError, match=f"300 tokens to {length}: rows before position 196 are forgotten"):
            engine.truncate(sequence, length)
    assert np.array_equal(engine.save_sequence(sequence), before)
    for length in (shortest, 4, 0):
        engine.truncate(sequence, length)
        assert engine.length(sequence) == length


# ---------------------------------------------------------------- what is refused
def test_windows_refuse(convert):
    with pytest.raises(slimrt.CacheUnsupportedError, match="rows behind a window are given back"):
        open_engine(convert(GOLDEN / "mistral_window"), "kivi", "q4")


def test_saved_regions_that_cannot_be(convert):
    path = convert(GOLDEN / "llama_gqa_tied")
    engine = open_engine(path, "kivi", "q4", n_ctx=N_CTX)
    sequence = engine.new_sequence()
    engine.append([(sequence, ids_of(0, 200))])
    saved = engine.save_sequence(sequence).tobytes()
    end = saved.index(np.int64(64).tobytes(), 16)

    def load(wrong: int) -> None:
        changed = saved[:end] + np.int64(wrong).tobytes() + saved[end + 8 :]
        engine.load_sequence(np.frombuffer(changed, np.uint8))

    for wrong in (-32, 63, 32, 224, 1 << 40):
        with pytest.raises(slimrt.ModelFormatError, match="a region cannot end at"):
            load(wrong)
    with pytest.raises(slimrt.ModelFormatError, match="need"):
        load(96)


def test_a_text_that_was_cut_has_more_aged_rows_than_a_small_context(convert):
    """Which is said of n_ctx: the file is sound, and loads where there is room for them."""
    path = convert(GOLDEN / "llama_gqa_tied")
    engine = open_engine(path, "kivi", "q4", n_ctx=N_CTX)
    sequence = engine.new_sequence()
    engine.append([(sequence, ids_of(0, 190))])
    engine.truncate(sequence, 100)  # of as many none have aged where a text grows
    saved = engine.save_sequence(sequence)
    assert engine.length(open_engine(path, "kivi", "q4", n_ctx=N_CTX).load_sequence(saved)) == 100
    small = open_engine(path, "kivi", "q4", n_ctx=128)
    with pytest.raises(slimrt.ContextOverflowError, match="cut from a longer one.*raise n_ctx"):
        small.load_sequence(saved)
    assert small.free_blocks() == small.n_blocks()
