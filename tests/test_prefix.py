# SPDX-License-Identifier: Apache-2.0
"""Prefix reuse: what is taken from the tree goes on as what was computed anew, in every mode, and nothing leaks."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

import slimrt
from conftest import GOLDEN, relative
from slimrt.generation.prefix import BLOCK, PrefixTree
from slimrt.runtime.session import Session

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

MODELS = Path(__file__).parent.parent / "models"
LLAMA = MODELS / "tale-llama.gguf"
SAME = 2e-5  # the order of float32 sums
FOLDERS: list[TemporaryDirectory[str]] = []


@cache
def text() -> list[int]:
    """Some 12,000 tokens."""
    with slimrt.Model(LLAMA, n_ctx=64) as model:
        return model.tokenize((MODELS / "heldout.txt").read_text(), add_special_tokens=False)


@cache
def exact_llama() -> Path:
    """With f32 weights: products of f16 ones with 128 tokens and more are rounded to 14 bits on AVX-512."""
    FOLDERS.append(TemporaryDirectory())
    out = Path(FOLDERS[-1].name) / LLAMA.name
    slimrt.convert(LLAMA, out, outtype="f32")
    return out


def open_tree(path: Path | None = None, **options) -> tuple[slimrt.Model, PrefixTree]:
    path = path or exact_llama()
    model = slimrt.Model(path, **{"n_ctx": 256, "cache_type": "f32", "progress": False} | options)
    return model, PrefixTree(model._runtime)


def free_blocks(model: slimrt.Model) -> int:
    with model._runtime.use() as engine:
        return engine.free_blocks()


def n_blocks(model: slimrt.Model) -> int:
    with model._runtime.use() as engine:
        return engine.n_blocks()


def continued(session: Session, ids: list[int], n: int = 3) -> np.ndarray:
    """Logits (n + 1, vocab) after these tokens and n greedy ones."""
    rows = [session.append(session.keep_common(ids), last_only=True)[0]]
    for _ in range(n):
        rows.append(session.append([int(rows[-1].argmax())], last_only=True)[0])
    return np.array(rows)


def begun(model: slimrt.Model, tree: PrefixTree, ids: list[int], key: str = "") -> tuple[Session, int]:
    """A session for a text, and how many of its tokens it has."""
    session = tree.take(ids, key) or Session.new(model._runtime)
    assert list(session.tokens) == ids[: session.length] and session.length < len(ids)
    return session, session.length


def give(model: slimrt.Model, tree: PrefixTree, ids: list[int], key: str = "") -> None:
    session, _ = begun(model, tree, ids, key)
    session.append(ids[session.length :], last_only=True)
    tree.give(session, key)


# ---------------------------------------------------------------- any order
class Operations(RuleBasedStateMachine):
    """Whatever was taken, given and evicted, a text goes on as it does in a session of its own."""

    running = Bundle("running")
    alone: slimrt.Model
    known: dict[tuple[int, ...], np.ndarray]
    path: Path | None = None
    options: dict[str, object] = {}
    exact = True  # a block is a block: there are no windows, and rows do not age

    @initialize(n_seqs=st.sampled_from([2, 5]))
    def load(self, n_seqs: int) -> None:
        self.model, self.tree = open_tree(self.path, n_seqs=n_seqs, **self.options)
        self.sessions: set[Session] = set()
        self.twice = False  # whether rows may have been computed that the tree had

    def wanted(self, ids: list[int]) -> np.ndarray:
        if tuple(ids) not in self.known:
            with self.alone.session() as session:
                self.known[tuple(ids)] = continued(session, ids)
        return self.known[tuple(ids)]

    @precondition(lambda self: len(self.sessions) < 4)
    @rule(
        target=running,
        head=st.sampled_from([0, 300]),
        n_head=st.sampled_from([5, 33, 64, 100]),
        tail=st.sampled_from([300, 600]),
        n_tail=st.sampled_from([1, 20, 32, 64, 130]),
        key=st.sampled_from(["", "", "", "other"]),
    )
    def begin(self, head: int, n_head: int, tail: int, n_tail: int, key: str) -> tuple[Session, str]:
        ids = text()[head : head + n_head] + text()[tail : tail + n_tail]
        ids = [3 + id % (self.model.n_vocab - 3) for id in ids]
        session, _ = begun(self.model, self.tree, ids, key)
        self.twice |= bool(self.sessions) or session.length == len(ids) - 1 or len(ids) <= BLOCK
        while True:
            try:
                got = continued(session, ids)
                break
            except slimrt.ContextOverflowError:
                self.twice = True
                if not self.tree.evict(1):  # others that run have all there is
                    self.sessions.add(session)
                    return session, key
        wanted = self.wanted(ids)
        assert relative(got, wanted) < SAME
        assert np.array_equal(got.argmax(axis=1), wanted.argmax(axis=1))
        self.sessions.add(session)
        return session, key

    @precondition(lambda self: len(self.sessions) < 4)
    @rule(
        n_head=st.sampled_from([31, 32, 33, 64, 100]),
        tail=st.sampled_from([300, 600]),
        n_tail=st.sampled_from([1, 20, 64, 130]),
        key=st.sampled_from(["", "", "", "other"]),
    )
    def serve(self, n_head: int, tail: int, n_tail: int, key: str) -> None:
        self.finish(self.begin(0, n_head, tail, n_tail, key))

    @rule(one=consumes(running))
    def finish(self, one: tuple[Session, str]) -> None:
        session, key = one
        self.sessions.remove(session)
        self.tree.give(session, key)
        with pytest.raises(ValueError, match="closed"):
            session.append([5])

    @rule(one=consumes(running))
    def cancel(self, one: tuple[Session, str]) -> None:
        self.sessions.remove(one[0])
        one[0].close()

    @rule(blocks=st.integers(1, 12))
    def evict(self, blocks: int) -> None:
        before, (held, tokens) = free_blocks(self.model), self.tree.held
        freed = self.tree.evict(blocks)
        assert self.tree.held[1] < tokens or freed == 0
        assert freed > 0 or tokens == 0 or self.sessions
        if self.exact:
            assert free_blocks(self.model) - before == freed
            assert freed >= min(blocks, held) or self.sessions
            assert freed <= blocks or self.twice

    @rule()
    def clear(self) -> None:
        self.tree.clear()
        assert self.tree.held == (0, 0)

    @invariant()
    def every_block_is_free_or_held(self) -> None:
        if hasattr(self, "tree") and not self.sessions and self.exact:
            taken = n_blocks(self.model) - free_blocks(self.model)
            # What was computed twice is not always worth to be copied, and a full cache has no room for it.
            assert self.tree.held[0] <= taken if self.twice else self.tree.held[0] == taken

    def teardown(self) -> None:
        if hasattr(self, "tree"):
            for session in self.sessions:
                session.close()
            self.tree.clear()
            assert free_blocks(self.model) == n_blocks(self.model)
            self.model.close()


@pytest.mark.parametrize(
    ("name", "options", "examples"),
    [
        ("tale-llama", {}, 30),
        ("tale-llama", {"cache": "kivi:f32", "cache_type": "auto"}, 10),
        ("mistral_window", {"n_batch": 16}, 30),
    ],
)
def test_random_operations(name, options, examples, convert):
    class Machine(Operations):
        path = exact_llama() if name == "tale-llama" else convert(GOLDEN / name)
        known = {}
        exact = not options

    Machine.options = options
    Machine.TestCase.settings = settings(max_examples=examples, stateful_step_count=30, deadline=None, derandomize=True)
    with slimrt.Model(Machine.path, n_ctx=256, cache_type="f32") as Machine.alone:
        Machine.TestCase().runTest()


# ---------------------------------------------------------------- modes
MODES = [
    ("tale-llama", "kv:f16"),
    ("tale-llama", "kv:q8"),
    ("tale-llama", "kv:q4"),
    ("tale-llama", "k:f32"),
    ("tale-llama", "k+r:q8"),
    ("tale-llama", "kivi:q4"),
    ("tale-llama", "lowrank:q4@0.5+q8*0.3+sinks=4"),
    ("tale-gpt2", "v:f32"),
    ("tale-gpt2", "x:q8"),
    ("tale-neox", "xr:f16"),
]


@pytest.mark.parametrize(("name", "kind"), MODES)
def test_goes_on_as_the_session_itself_does(name, kind):
    """At its end, in rows that are as they were written, and among those that have aged: to the bit."""
    model, tree = open_tree(MODELS / f"{name}.gguf", n_seqs=3, cache=kind, cache_type="auto")
    with model:
        first, then = ([5 + id % (model.n_vocab - 6) for id in ids] for ids in (text()[:230], text()[400:420]))
        for shared in (230, 203, 96, 50):
            second = [*first[:shared], model.n_vocab - 1, *then]  # which is none of the others
            give(model, tree, first)
            with Session.new(model._runtime) as own:
                own.append(first, last_only=True)
                taken, reused = begun(model, tree, second)
                assert reused == shared
                assert np.array_equal(continued(taken, second), continued(own, second))
            tree.give(taken)
            again, reused = begun(model, tree, second)
            assert reused == len(second) - 1
            again.close()
            tree.clear()
            assert free_blocks(model) == n_blocks(model)


def test_behind_a_window_it_goes_on_where_it_can(convert):
    path = convert(GOLDEN / "mistral_window")
    model, tree = open_tree(path, n_ctx=240, n_seqs=4, n_batch=16)
    with model:
        ids = [3 + id % 90 for id in text()[:240]]
        give(model, tree, ids[:200])
        other = [*ids[:70], 99, 98]
        assert tree.take(other) is None  # the rows before position 70 are gone
        own = Session.new(model._runtime)
        own.append(ids[:64], last_only=True)
        tree.give(own)
        for wanted, reused in ((other, 64), (ids[:220], 200), (ids[:200], 199), (ids[:64], 63)):
            session, found = begun(model, tree, wanted)
            assert found == reused
            with Session.new(model._runtime) as fresh:
                assert relative(continued(session, wanted), continued(fresh, wanted)) < SAME
            session.close()
        assert tree.evict(100) > 0
        assert tree.held == (0, 0) and free_blocks(model) == n_blocks(model)


def test_rows_that_are_forgotten():
    model, tree = open_tree(n_seqs=3, cache="kivi:none+f16*64+sinks=5+recent=40", cache_type="auto")
    with model:
        give(model, tree, text()[:220])
        assert tree.take([*text()[:100], 7, 8]) is None
        session, reused = begun(model, tree, text()[:240])
        assert reused == 220
        tree.give(session)


def test_a_model_with_an_encoder_is_refused():
    with slimrt.Model(MODELS / "tale-t5.gguf") as model, pytest.raises(slimrt.UnsupportedError, match="encoder"):
        PrefixTree(model._runtime)


# ---------------------------------------------------------------- what stays
def test_less_than_a_block_is_not_shared():
    model, tree = open_tree(n_seqs=2)
    with model:
        give(model, tree, text()[: BLOCK - 1])
        assert tree.held == (0, 0)
        give(model, tree, text()[:BLOCK])
        assert tree.held == (1, BLOCK)
        assert tree.take(text()[:BLOCK]) is None  # one of them is to be computed
        session, reused = begun(model, tree, text()[: BLOCK + 1])
        assert reused == BLOCK and (tree.hits, tree.misses, tree.reused) == (1, 3, BLOCK)
        session.close()


def test_least_recently_used_goes_first():
    model, tree = open_tree(n_seqs=4)
    with model:
        head, texts = text()[:64], [text()[300 + 100 * i :][:64] for i in range(3)]
        for tail in texts:
            give(model, tree, head + tail)
        assert tree.held == (8, 64 * 4)
        tree.take(head + texts[0] + [7]).close()
        assert tree.evict(1) == 1  # of the second text, from its end on
        assert [begun(model, tree, head + tail + [7])[1] for tail in texts] == [128, 96, 128]
        tree.take(head + texts[1] + [7]).close()
        tree.take(head + [7]).close()  # what they share
        assert tree.evict(5) == 5
        assert [begun(model, tree, head + tail + [7])[1] for tail in texts] == [64, 64, 64]
        assert tree.held == (2, 64) and tree.evicted == 6
        assert tree.evict(9) == 2 and tree.held == (0, 0)


def test_blocks_of_those_who_run_are_not_free():
    """Evicting what they share makes nothing free, so it stays."""
    model, tree = open_tree(n_seqs=2)
    with model:
        give(model, tree, text()[:128])
        session, _ = begun(model, tree, text()[:97])
        assert tree.evict(4) == 1
        assert tree.held == (3, 96)
        session.close()
        assert tree.evict(4) == 3


def test_keys_share_nothing():
    model, tree = open_tree(n_seqs=3)
    with model:
        give(model, tree, text()[:64], "one")
        assert tree.take(text()[:65], "other") is None and tree.take(text()[:65]) is None
        give(model, tree, text()[:64], "other")
        assert tree.held == (4, 128)
        assert begun(model, tree, text()[:65], "one")[1] == 64


def test_what_was_computed_twice_is_kept_once():
    """Two texts that began before either was done."""
    model, tree = open_tree(n_seqs=4)
    with model:
        texts = [text()[:70] + text()[300:350], text()[:70] + text()[600:650], text()[:70]]
        sessions = [Session.new(model._runtime) for _ in texts]
        for session, ids in zip(sessions, texts, strict=True):
            session.append(ids, last_only=True)
        for session in sessions:
            tree.give(session)
        assert tree.held == (6, 170) and n_blocks(model) - free_blocks(model) == 6
        for ids in texts[:2]:
            session, reused = begun(model, tree, [*ids, 7])
            assert reused == 120
            with Session.new(model._runtime) as fresh:
                assert relative(continued(session, [*ids, 7]), continued(fresh, [*ids, 7])) < SAME
            session.close()


# ---------------------------------------------------------------- conversations
def conversations(n_seqs: int, n: int = 20, turns: int = 10) -> tuple[float, int]:
    """The share of what could be reused that was, of conversations whose turns come in any order; and the tokens of
    all."""
    model, tree = open_tree(n_seqs=n_seqs, n_ctx=320)
    rng, possible = random.Random(1), 0
    with model:
        system = text()[:64]
        so_far = [list(system) for _ in range(n)]
        seen = 0
        for i in rng.sample([i for i in range(n) for _ in range(turns)], n * turns):
            possible += len(so_far[i]) if len(so_far[i]) > 64 or seen else 0
            seen += 1
            at = rng.randrange(1000, 10000)
            ids = so_far[i] + text()[at : at + rng.randrange(8, 16)]
            session, _ = begun(model, tree, ids)
            while not has_room(model, session, len(ids) + 8 - session.length):
                assert tree.evict(1) > 0
            session.append(ids[session.length :], last_only=True)
            session.append(text()[at + 100 : at + 108], last_only=True)  # the answer
            so_far[i] = list(session.tokens)
            tree.give(session)
        assert tree.misses <= n * turns
        return tree.reused / possible, 64 + sum(len(ids) - 64 for ids in so_far)


def has_room(model: slimrt.Model, session: Session, n: int) -> bool:
    with model._runtime.use() as engine:
        return engine.has_room([(session.sequence, n)])


def test_conversations():
    """With room for all of them what could be reused is; with room for half of them at least a third."""
    share, tokens = conversations(20)
    assert share >= 0.95
    half, _ = conversations(tokens // 2 // 320)
    assert 0.33 < half < share


def test_tokens_in_the_same_memory():
    """k+r q8 keeps 3.2 times the tokens of kv f16."""
    kept = {}
    for cache_name, n_seqs in (("kv:f16", 5), ("k+r:q8", 17)):
        model, tree = open_tree(n_ctx=512, n_seqs=n_seqs, cache=cache_name, cache_type="auto")
        with model:
            for begin in range(0, 512 * (n_seqs + 2), 512):
                ids = text()[begin : begin + 512]
                session, _ = begun(model, tree, ids)
                tree.evict(max(0, 16 - free_blocks(model)))
                session.append(ids[session.length :], last_only=True)
                tree.give(session)
            kept[cache_name] = tree.held[1], model.memory()["cache"]
    (tokens, size), (more, same) = kept["kv:f16"], kept["k+r:q8"]
    assert same <= size
    assert more >= 3.2 * tokens
