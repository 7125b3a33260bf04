# SPDX-License-Identifier: Apache-2.0
"""What a scheduler needs of the core: one pool of rows for all sequences, what room there is in it, logits of those
tokens that somebody reads, and rows of a part of a sequence as bytes."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import slimrt
from conftest import GOLDEN, ids_of, open_engine, relative
from slimrt import _core

SAME = 2e-5  # the order of float32 sums
OWN = 1e-3  # of trained models in modes that invert a matrix; rows of another text are much farther off
BLOCK = 32
MODELS = Path(__file__).parent.parent / "models"
LLAMA, GPT2 = MODELS / "tale-llama.gguf", MODELS / "tale-gpt2.gguf"
EACH_MODE = [("kv", LLAMA), ("k", LLAMA), ("k+r", LLAMA), ("v", GPT2), ("x", GPT2)]
each_mode = pytest.mark.parametrize(("mode", "path"), EACH_MODE, ids=[mode for mode, _ in EACH_MODE])
OPTIONS = {"n_ctx": 96, "n_seqs": 4, "cache_tokens": 7 * BLOCK, "n_batch": 40}


def filled(engine: _core.Engine, n: int, seed: int = 0) -> int:
    """A new sequence of so many tokens."""
    sequence = engine.new_sequence()
    engine.append([(sequence, ids_of(seed, n))], outputs=[0])
    return sequence


# ---------------------------------------------------------------- the pool
POOLS = [
    ("llama_gqa_tied", "kv", "f16"),
    ("llama_mha", "k", "f16"),
    ("mistral_window", "kv", "f16"),
    ("gemma3", "kv", "f16"),
    ("gpt2_tanh", ["kv", "x", "kv"], "q8"),
    ("llama_gqa_tied", "kivi", "q4"),
    ("llama_mha", "lowrank", "q2@0.5+q4@0.75*0.3+q8*0.2"),
    ("llama_mha", "lowrank", "q2@0.5+q4*64"),
]


@pytest.mark.parametrize(("name", "mode", "types"), POOLS)
@pytest.mark.parametrize(("n_seqs", "cache_tokens"), [(3, 128), (3, 200), (5, 500), (2, 1000)])
def test_what_is_planned_is_allocated(name, mode, types, n_seqs, cache_tokens, convert):
    options = {"n_ctx": 128, "n_seqs": n_seqs, "n_batch": 24, "cache_tokens": cache_tokens}
    path = convert(GOLDEN / name)
    engine = open_engine(path, mode, types, **options)
    plan = _core.plan(str(path), cache=mode, cache_type_k=types, cache_type_v=types, **options)
    memory = engine.memory()
    assert {key: plan[key] for key in memory} == memory
    assert engine.info()["cache_tokens"] == plan["cache_tokens"] == cache_tokens
    whole = _core.plan(str(path), cache=mode, cache_type_k=types, cache_type_v=types, **options | {"cache_tokens": 0})
    assert whole["cache_tokens"] == 128 * n_seqs
    blocks = -(-cache_tokens // BLOCK)
    if name == "mistral_window":  # of a window and a step each sequence has 3 blocks, of tokens each 1
        assert plan["cache"] * n_seqs * 3 == whole["cache"] * max(min(n_seqs * 3, blocks), -(-3 * blocks // 4))
    else:
        assert (plan["cache"] < whole["cache"]) == (cache_tokens < 128 * n_seqs)
    # One sequence may always be full, and work at its limits allocates nothing more.
    sequence = filled(engine, 128)
    assert engine.length(sequence) == 128 and engine.memory() == memory


@pytest.mark.parametrize("cache_tokens", [96, 97, 128, 300, 384, 1000])
def test_a_pool_is_whole_blocks(cache_tokens):
    """Beyond n_ctx for each of n_seqs too: sequences that nobody computes keep their rows."""
    engine = open_engine(LLAMA, "kv", "f16", n_ctx=96, n_seqs=4, cache_tokens=cache_tokens)
    blocks = -(-cache_tokens // BLOCK)
    assert engine.n_blocks() == engine.free_blocks() == blocks
    assert engine.memory()["cache"] == blocks * BLOCK * engine.memory()["cache_bytes_per_token"]
    sequences = [filled(engine, BLOCK) for _ in range(blocks)]
    assert engine.free_blocks() == 0 and all(engine.blocks(one) == (1, 1) for one in sequences)


@each_mode
def test_sequences_share_a_pool(mode, path):
    engine, alone = (open_engine(path, mode, **OPTIONS | more) for more in ({}, {"n_seqs": 1, "cache_tokens": 0}))
    lengths = (70, 20, 60, 30)
    texts = [ids_of(seed, n) for seed, n in enumerate(lengths)]
    sequences = [engine.new_sequence() for _ in texts]
    logits = engine.append(list(zip(sequences, texts, strict=True)))
    assert engine.free_blocks() == 7 - 3 - 1 - 2 - 1
    for row, text in zip(logits, texts, strict=True):
        sequence = alone.new_sequence()
        assert relative(row, alone.append([(sequence, text)])[0]) < OWN
        alone.free_sequence(sequence)
    before = [engine.save_sequence(one) for one in sequences]
    assert not engine.has_room([(sequences[3], 3)])
    with pytest.raises(slimrt.ContextOverflowError, match=r"0 free blocks .* 1 are needed\. Raise cache_tokens"):
        engine.append([(sequences[3], ids_of(9, 3))])
    for one, saved in zip(sequences, before, strict=True):
        assert np.array_equal(engine.save_sequence(one), saved)
    engine.free_sequence(sequences[1])
    assert engine.has_room([(sequences[3], 3)]) and engine.append([(sequences[3], ids_of(9, 3))]).shape[0] == 1


def test_what_a_pool_cannot_be():
    for wrong in (1, 95, -5):
        with pytest.raises(ValueError, match=f"cache_tokens {wrong} is less than .* n_ctx 96: raise it"):
            _core.Engine(str(LLAMA), n_ctx=96, cache_tokens=wrong)
    with pytest.raises(ValueError, match="more than the 268435456 tokens"):
        _core.Engine(str(LLAMA), n_ctx=96, cache_tokens=1 << 40)
    with pytest.raises(ValueError, match="cache_tokens 64 is less than"):
        slimrt.Model(LLAMA, n_ctx=96, n_seqs=4, cache_tokens=64)
    with pytest.raises(ValueError, match="cache_tokens 64 is less than"):
        slimrt.plan(LLAMA, n_ctx=96, n_seqs=4, cache_tokens=64)
    with pytest.raises(TypeError, match="cache_tokens must be a whole number"):
        slimrt.Model(LLAMA, n_ctx=96, cache_tokens="many")


def test_models_and_plans_have_a_pool(run):
    with slimrt.Model(LLAMA, n_ctx=96, n_seqs=4, cache_tokens=200) as model:
        assert model.info()["cache_tokens"] == 200
        planned = slimrt.plan(LLAMA, n_ctx=96, n_seqs=4, cache_tokens=200)
        assert planned.asked.cache_bytes == model.memory()["cache"] and planned.cache_tokens == 200
        assert planned.asked.max_n_ctx == 200 and "4 at once in 200 tokens" in planned.table()
        with pickle.loads(pickle.dumps(model)) as twin:
            assert twin.info()["cache_tokens"] == 200
        with model.session() as one, model.session() as other:
            one.append([5] * 96)
            other.append([5] * 96)
            with model.session() as third, pytest.raises(slimrt.ContextOverflowError, match="Raise cache_tokens"):
                third.append([5] * 64)
    code, out, _ = run("plan", LLAMA, "-c", 96, "-np", 4, "--cache-tokens", 200)
    assert code == 0 and "4 at once in 200 tokens" in out
    code, _, err = run("generate", LLAMA, "-p", "The", "-p", "A", "-c", 96, "--cache-tokens", 20)
    assert code == 1 and "cache_tokens 20 is less than" in err


def test_what_does_not_fit_may_have_a_smaller_pool():
    options = {"n_ctx": 512, "n_seqs": 16}
    least = slimrt.plan(LLAMA, **options, cache_tokens=1000).asked.total
    with pytest.raises(slimrt.WontFitError, match="16 sequences") as caught:
        slimrt.Model(LLAMA, **options, memory_limit=least)
    offered = next(one for one in caught.value.options if one.startswith("--cache-tokens"))
    tokens = int(offered.split()[1])
    assert tokens == 1024  # whole blocks
    slimrt.Model(LLAMA, **options, memory_limit=least, cache_tokens=tokens).close()
    with pytest.raises(slimrt.WontFitError, match=r"cache .* \(1056 tokens x 4096 bytes\)"):
        slimrt.Model(LLAMA, **options, memory_limit=least, cache_tokens=tokens + BLOCK)


# ---------------------------------------------------------------- room
SEQUENCES = st.integers(0, 7)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.dictionaries(SEQUENCES, st.integers(1, 70), min_size=1, max_size=6)),
        st.tuples(st.just("fork"), SEQUENCES),
        st.tuples(st.just("truncate"), SEQUENCES, st.floats(0, 1)),
        st.tuples(st.just("free"), SEQUENCES),
    ),
    max_size=25,
)


class Pool:
    """An engine and the texts of its sequences; every append is asked about before."""

    def __init__(self, engine: _core.Engine, oracle: _core.Engine, grouped: bool):
        self.engine, self.oracle, self.grouped = engine, oracle, grouped
        self.texts: dict[int, list[int]] = {engine.new_sequence(): [] for _ in range(3)}

    def pick(self, index: int) -> int:
        return list(self.texts)[index % len(self.texts)]

    def append(self, counts: dict[int, int]) -> None:
        items = {self.pick(index): ids_of(index + n, n) for index, n in counts.items()}
        growth, free = [(one, len(ids)) for one, ids in items.items()], self.engine.free_blocks()
        if not self.engine.has_room(growth):
            with pytest.raises(slimrt.ContextOverflowError):
                self.engine.append(list(items.items()))
            assert self.engine.free_blocks() == free
            return
        logits = self.engine.append(list(items.items()))
        for row, (one, ids) in zip(logits, items.items(), strict=True):
            self.texts[one] += ids.tolist()
            alone = self.oracle.new_sequence()
            wanted = self.oracle.append([(alone, np.array(self.texts[one], np.int32))])[0]
            self.oracle.free_sequence(alone)
            assert relative(row, wanted) < OWN

    def fork(self, index: int) -> None:
        if len(self.texts) < 8:
            self.texts[self.engine.fork(self.pick(index))] = list(self.texts[self.pick(index)])

    def truncate(self, index: int, share: float) -> None:
        sequence = self.pick(index)
        length = round(share * len(self.texts[sequence]))
        length = length if self.engine.can_truncate(sequence, length) else 0
        self.engine.truncate(sequence, length)
        del self.texts[sequence][length:]

    def free(self, index: int) -> None:
        """Gives back what it holds alone."""
        if len(self.texts) == 1:
            return
        sequence, free = self.pick(index), self.engine.free_blocks()
        held, alone = self.engine.blocks(sequence)
        assert 0 <= alone <= held <= self.engine.n_blocks() - free
        self.engine.free_sequence(sequence)
        assert self.grouped or self.engine.free_blocks() == free + alone
        del self.texts[sequence]


@pytest.mark.parametrize(
    ("mode", "path"), [*EACH_MODE, ("kv", "mistral_window"), ("kv", "gemma3")], ids=lambda x: Path(str(x)).stem
)
def test_room_is_exact(mode, path, convert):
    """Whether there is room is what append finds, and each text stays its own."""
    path, grouped = (path, False) if isinstance(path, Path) else (convert(GOLDEN / path), True)
    oracle = open_engine(path, mode, n_ctx=OPTIONS["n_ctx"])

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(OPERATIONS)
    def check(operations) -> None:
        pool = Pool(engine, oracle, grouped)
        try:
            for name, *arguments in operations:
                getattr(pool, name)(*arguments)
        finally:
            for sequence in pool.texts:
                engine.free_sequence(sequence)
        assert engine.free_blocks() == engine.n_blocks()

    engine = open_engine(path, mode, **OPTIONS)
    check()


@pytest.mark.parametrize("cache_tokens", [256, 320])
def test_room_for_rows_that_age(cache_tokens, convert):
    """Of short sequences and of long ones: none finds less than it was told."""
    engine = open_engine(
        convert(GOLDEN / "llama_mha"), "lowrank", "q2@0.5+q4@0.75*0.3+q8*0.2", n_ctx=256, n_seqs=6,
        cache_tokens=cache_tokens, n_batch=48,
    )  # fmt: skip
    refused = 0
    for seed in range(12):
        random = np.random.default_rng(seed)
        sequences = [engine.new_sequence() for _ in range(6)]
        for _ in range(12):
            growth = [(one, int(random.integers(1, 90))) for one in sequences if random.random() < 0.5]
            items = [(one, ids_of(seed, n)) for one, n in growth]
            if growth and engine.has_room(growth):
                engine.append(items)
            elif growth:
                refused += 1
                with pytest.raises(slimrt.ContextOverflowError):
                    engine.append(items)
        for one in sequences:
            engine.free_sequence(one)
        assert engine.free_blocks() == engine.n_blocks()
    assert refused > 12


def test_room_counts_shared_blocks_once():
    engine = open_engine(LLAMA, "kv", "f16", **OPTIONS)
    first = filled(engine, 40)
    forks = [engine.fork(first) for _ in range(3)]
    assert engine.free_blocks() == 5 and engine.blocks(first) == (2, 0)
    assert engine.has_room([(one, 1) for one in (first, *forks)])  # three copies of the tail: the last keeps it
    engine.append([(one, ids_of(1, 1)) for one in (first, *forks)])
    assert engine.free_blocks() == 2 and engine.blocks(first) == (2, 1)
    assert engine.has_room([(first, 55)]) and not engine.has_room([(one, 24) for one in (first, *forks)])
    assert not engine.has_room([(first, 56)])  # n_ctx
    assert engine.has_room([]) and engine.has_room([(first, 0)])
    assert not engine.has_room([(first, (1 << 63) - 1)])


def test_room_is_asked_of_sequences_that_there_are():
    engine = open_engine(LLAMA, "kv", "f16", **OPTIONS)
    one = filled(engine, 4)
    for growth, words in (([(one, -1)], "cannot grow by -1"), ([(one, 1), (one, 1)], "listed twice")):
        with pytest.raises(ValueError, match=words):
            engine.has_room(growth)
    for call in (lambda: engine.has_room([(99, 1)]), lambda: engine.blocks(99)):
        with pytest.raises(ValueError, match="no sequence 99"):
            call()


# ---------------------------------------------------------------- outputs
def together(engine: _core.Engine, **options) -> np.ndarray:
    """Appended after prompts: pieces of four sequences, as one call."""
    sequences = [filled(engine, 20, seed) for seed in range(4)]
    items = [(one, ids_of(10 + n, n)) for one, n in zip(sequences, (1, 33, 9, 4), strict=True)]
    found = engine.append(items, **options)
    assert [engine.length(one) for one in sequences] == [21, 53, 29, 24]
    for one in sequences:
        engine.free_sequence(one)
    return found


@each_mode
@pytest.mark.parametrize("n_batch", [512, 16])
@pytest.mark.parametrize("states", [False, True], ids=["logits", "states"])
def test_outputs_are_rows_of_all(mode, path, n_batch, states):
    engine = open_engine(path, mode, **OPTIONS | {"n_batch": n_batch, "cache_tokens": 0})
    rows = together(engine, all_logits=True, states=states)
    starts, ends = (0, 1, 34, 43), (1, 34, 43, 47)
    for outputs in ([1, 1, 1, 1], [0, 0, 9, 2], [-1, 0, 3, 0], [-1] * 4, [1, 20, 0, 4], [0] * 4):
        kept = [
            rows[end - (end - start if n == -1 else n) : end]
            for start, end, n in zip(starts, ends, outputs, strict=True)
        ]
        found = together(engine, outputs=outputs, states=states)
        wanted = np.concatenate(kept)
        assert found.dtype == np.float32 and found.shape == wanted.shape
        if states or outputs == [-1] * 4:
            assert np.array_equal(found, wanted)
        elif sum(outputs):  # the head multiplies another number of rows at once
            assert relative(found, wanted) < SAME
    assert np.array_equal(together(engine, states=states), together(engine, outputs=[1] * 4, states=states))
    width = engine.info()["d_model"] if states else engine.info()["n_vocab"]
    assert together(engine, outputs=[0] * 4, states=states).shape == (0, width)


def test_outputs_go_where_they_are_wanted():
    engine = open_engine(LLAMA, "kv", "f16", **OPTIONS)
    wanted = together(engine, outputs=[1, 2, 0, 1])
    out = np.full((6, engine.info()["n_vocab"]), 7, np.float32)
    found = together(engine, outputs=[1, 2, 0, 1], out=out)
    assert found.base is out and np.shares_memory(found, out) and np.array_equal(found, wanted)
    assert np.array_equal(out[:4], wanted) and (out[4:] == 7).all()
    assert together(engine, outputs=[0] * 4, out=out).shape == (0, out.shape[1])


def test_outputs_that_cannot_be():
    engine = open_engine(LLAMA, "kv", "f16", **OPTIONS)
    one, ids, vocab = engine.new_sequence(), ids_of(0, 3), engine.info()["n_vocab"]
    for outputs in ([4], [-2], [1 << 60]):
        with pytest.raises(ValueError, match=f"outputs of an item of 3 tokens: .* not {outputs[0]}"):
            engine.append([(one, ids)], outputs=outputs)
    for options in ({"outputs": []}, {"outputs": [1, 1]}, {"outputs": [1], "all_logits": True}):
        with pytest.raises(ValueError, match="a number for each of 1 items, and goes without all_logits"):
            engine.append([(one, ids)], **options)
    fixed = np.zeros((3, vocab), np.float32)
    fixed.flags.writeable = False
    for out in (
        np.zeros((2, vocab), np.float32),
        np.zeros((3, vocab + 1), np.float32),
        np.zeros((3, vocab)),
        np.zeros(3 * vocab, np.float32),
        np.zeros((3, 2 * vocab), np.float32)[:, ::2],
        fixed,
        "out",
    ):
        with pytest.raises(ValueError, match=rf"out must be a float32 array \[3 or more, {vocab}\]"):
            engine.append([(one, ids)], outputs=[3], out=out)
    with pytest.raises(TypeError):
        engine.append([(one, ids)], outputs=["1"])
    with pytest.raises(ValueError, match="an item has no tokens"):
        engine.append([(one, ids[:0])], outputs=[0])
    assert engine.length(one) == 0


# ---------------------------------------------------------------- rows
@pytest.mark.parametrize("dtype", ["f32", "f16", "q8", "q4"])
@each_mode
def test_rows_of_a_part_come_back(mode, path, dtype):
    engine = open_engine(path, mode, dtype, **OPTIONS | {"n_seqs": 3, "cache_tokens": 10 * BLOCK})
    first = filled(engine, 77)
    saved = {begin: engine.save_rows(first, begin) for begin in (0, 32, 64)}
    assert np.array_equal(saved[0], engine.save_sequence(first))
    per_token = engine.memory()["cache_bytes_per_token"]
    assert [len(saved[0]) - len(one) for one in saved.values()] == [0, 32 * per_token, 64 * per_token]
    step = engine.append([(engine.fork(first), ids_of(3, 5))])
    for begin, rows in saved.items():
        twin = engine.fork(first)
        engine.truncate(twin, begin)
        engine.load_rows(twin, rows)
        assert engine.length(twin) == 77 and engine.blocks(twin) == (3, 3 - begin // BLOCK)
        assert np.array_equal(engine.save_sequence(twin), saved[0])
        assert np.array_equal(engine.append([(twin, ids_of(3, 5))]), step)
        engine.free_sequence(twin)
    assert np.array_equal(engine.save_sequence(first), saved[0])


def test_parts_make_a_sequence_elsewhere():
    """Block by block, into another process's engine as it were."""
    one, other = (open_engine(LLAMA, "kv", "q8", **OPTIONS) for _ in range(2))
    first, twin = filled(one, 90), other.new_sequence()
    for begin in (0, 32, 64):
        part = one.fork(first)
        one.truncate(part, min(begin + 32, 90))
        other.load_rows(twin, one.save_rows(part, begin))
        one.free_sequence(part)
    assert np.array_equal(other.save_sequence(twin), one.save_sequence(first))
    assert np.array_equal(other.append([(twin, ids_of(3, 5))]), one.append([(first, ids_of(3, 5))]))
    empty = one.fork(first)
    one.truncate(empty, 64)
    nothing = one.save_rows(empty, 64)
    one.load_rows(empty, nothing)
    assert one.length(empty) == 64


def test_parts_that_cannot_be_saved():
    engine = open_engine(LLAMA, "kv", "f16", **OPTIONS)
    first = filled(engine, 77)
    for begin in (1, 31, 33, -32, 96, 1 << 40):
        with pytest.raises(ValueError, match=f"a multiple of 32 tokens on, of the 77 that there are, not from {begin}"):
            engine.save_rows(first, begin)


@pytest.mark.parametrize(
    ("name", "mode", "dtype"),
    [("mistral_window", "kv", "f16"), ("gemma3", "kv", "f16"), ("llama_gqa_tied", "kivi", "q4")],
)
def test_parts_of_what_forgets_are_refused(name, mode, dtype, convert):
    engine = open_engine(convert(GOLDEN / name), mode, dtype, n_ctx=96, n_seqs=2)
    first = filled(engine, 77)
    with pytest.raises(slimrt.UnsupportedError, match="the whole sequence alone"):
        engine.save_rows(first, 32)
    whole, twin = engine.save_rows(first, 0), engine.new_sequence()
    engine.load_rows(twin, whole)
    assert np.array_equal(engine.save_sequence(twin), engine.save_sequence(first))
    # Rows that claim to be a part, as no save writes them.
    whole[4] = 32
    engine.truncate(twin, 0)
    part = filled(engine, 32)
    with pytest.raises(slimrt.UnsupportedError, match="the whole sequence alone"):
        engine.load_rows(part, whole)
    assert engine.length(part) == 32


def test_rows_go_to_the_end_of_their_own_beginning():
    engine = open_engine(LLAMA, "kv", "f16", **OPTIONS)
    first = filled(engine, 77)
    part, free = engine.save_rows(first, 64), engine.free_blocks()
    for n in (0, 32, 63, 77):
        other = engine.fork(first)
        engine.truncate(other, n)
        with pytest.raises(ValueError, match=f"go on from 64 tokens, and sequence {other} has {n}"):
            engine.load_rows(other, part)
        assert engine.length(other) == n
        engine.free_sequence(other)
    with pytest.raises(ValueError, match="go on from 64 tokens"):
        engine.load_sequence(part)
    with pytest.raises(ValueError, match="no sequence 99"):
        engine.load_rows(99, part)
    assert engine.free_blocks() == free
    others = [filled(engine, n, 1) for n in (96, 32)]  # fill the pool
    twin = engine.fork(first)
    engine.truncate(twin, 64)
    with pytest.raises(slimrt.ContextOverflowError, match="Raise cache_tokens"):
        engine.load_rows(twin, part)
    assert engine.length(twin) == 64
    engine.free_sequence(others[1])
    engine.load_rows(twin, part)
    assert np.array_equal(engine.save_sequence(twin), engine.save_sequence(first))


def test_parts_of_another_model_or_cache_are_refused(convert):
    engine = open_engine(convert(GOLDEN / "llama_mha"), "kv", "f16", n_ctx=96)
    part = engine.save_rows(filled(engine, 77), 64)
    for name, mode, dtype in (
        ("llama_mha", "kv", "bf16"),
        ("llama_mha", "k", "f16"),
        ("llama_bias", "kv", "f16"),
        ("llama_linear", "kv", "f16"),
    ):
        other = open_engine(convert(GOLDEN / name), mode, dtype, n_ctx=96)
        sequence = filled(other, 64)
        with pytest.raises(slimrt.ModelFormatError, match="another model or cache|other rotary frequencies"):
            other.load_rows(sequence, part)
        assert other.length(sequence) == 64
    small = open_engine(convert(GOLDEN / "llama_mha"), "kv", "f16", n_ctx=64)
    with pytest.raises(slimrt.ContextOverflowError, match="has 77 tokens, n_ctx is 64"):
        small.load_rows(filled(small, 64), part)


def test_damaged_parts_change_nothing():
    """Cut anywhere, or with any byte of what precedes the rows changed: a typed error, or nothing was lost by it."""
    engine = open_engine(LLAMA, "kv", "f16", **OPTIONS)
    first = filled(engine, 77)
    part, whole = engine.save_rows(first, 64), engine.save_sequence(first)
    head = len(part) - 13 * engine.memory()["cache_bytes_per_token"]
    twin = engine.fork(first)
    engine.truncate(twin, 64)
    free = engine.free_blocks()
    cut = [part[:n] for n in [*range(0, head + 2, 7), len(part) - 1]] + [np.concatenate([part, part[:1]])]
    random, changed = np.random.default_rng(0), []
    for at in range(head):
        changed.append(part.copy())
        changed[-1][at] ^= 1 << random.integers(8)
    for data in (*cut, *changed):
        with pytest.raises((slimrt.ModelFormatError, slimrt.ContextOverflowError, ValueError)):
            engine.load_rows(twin, np.ascontiguousarray(data))
        assert engine.length(twin) == 64 and engine.free_blocks() == free
    engine.load_rows(twin, part)
    assert np.array_equal(engine.save_sequence(twin), whole)
