# SPDX-License-Identifier: Apache-2.0
"""Any order of operations on sequences leaves each with the logits of its own text (hypothesis finds the order)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

import slimrt
from conftest import GOLDEN, open_engine, relative

SAME = 2e-5  # the order of float32 sums
WINDOWS = ("mistral_window", "mistral_mha")


def last_logits(engine, sequence: int, ids: np.ndarray) -> np.ndarray:
    return engine.append([(sequence, np.asarray(ids, np.int32))])


class Operations(RuleBasedStateMachine):
    """Any order of operations leaves every sequence with the logits of its own text."""

    sequences = Bundle("sequences")
    path, mode, n_ctx, window = None, "kv", 80, False

    @initialize(batch=st.sampled_from([3, 16, 512]))
    def load(self, batch: int) -> None:
        self.engine = open_engine(self.path, self.mode, "f32", n_ctx=self.n_ctx, n_seqs=12, n_batch=batch)
        self.oracle = open_engine(self.path, self.mode, "f32", n_ctx=self.n_ctx, n_seqs=1)
        self.texts: dict[int, list[int]] = {}

    def check(self, sequence: int, logits: np.ndarray) -> None:
        alone = self.oracle.new_sequence()
        wanted = last_logits(self.oracle, alone, np.array(self.texts[sequence]))
        self.oracle.free_sequence(alone)
        assert relative(logits, wanted) < SAME

    @precondition(lambda self: len(self.texts) < 12)
    @rule(target=sequences)
    def new(self) -> int:
        sequence = self.engine.new_sequence()
        self.texts[sequence] = []
        return sequence

    @precondition(lambda self: len(self.texts) < 12)
    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence: int) -> int:
        twin = self.engine.fork(sequence)
        self.texts[twin] = list(self.texts[sequence])
        return twin

    @rule(sequence=sequences, ids=st.lists(st.integers(3, 100), min_size=1, max_size=45))
    def append(self, sequence: int, ids: list[int]) -> None:
        if len(self.texts[sequence]) + len(ids) > self.n_ctx:
            with pytest.raises(slimrt.ContextOverflowError, match="the context is full"):
                last_logits(self.engine, sequence, np.array(ids))
            return
        logits = last_logits(self.engine, sequence, np.array(ids))
        self.texts[sequence] += ids
        self.check(sequence, logits)

    @rule(sequence=sequences, ids=st.lists(st.integers(3, 100), min_size=1, max_size=45), after=st.integers(0, 45))
    def append_until_interrupted(self, sequence: int, ids: list[int], after: int) -> None:
        before = len(self.texts[sequence])

        def stop(done: int, total: int) -> None:
            if done >= min(after, total):
                raise KeyError

        if before + len(ids) <= self.n_ctx:
            with pytest.raises(KeyError):
                self.engine.append([(sequence, np.array(ids, np.int32))], on_progress=stop)
            kept = self.engine.length(sequence) - before
            assert kept == 0 or self.window and not self.engine.can_truncate(sequence, before)
            self.texts[sequence] += ids[:kept]

    @rule(ids=st.lists(st.integers(3, 100), min_size=12, max_size=12))
    def append_one_to_each_that_has_room(self, ids: list[int]) -> None:
        items = [
            (s, [token]) for (s, text), token in zip(self.texts.items(), ids, strict=False) if len(text) < self.n_ctx
        ]
        if not items:
            return
        logits = self.engine.append([(s, np.array(one, np.int32)) for s, one in items])
        for row, (sequence, one) in enumerate(items):
            self.texts[sequence] += one
            self.check(sequence, logits[row : row + 1])

    @rule(sequence=sequences, share=st.floats(0, 1))
    def truncate(self, sequence: int, share: float) -> None:
        length = round(share * len(self.texts[sequence]))
        if not self.engine.can_truncate(sequence, length):
            assert self.window and length > 0
            with pytest.raises(ValueError, match="window"):
                self.engine.truncate(sequence, length)
            return
        self.engine.truncate(sequence, length)
        del self.texts[sequence][length:]

    @precondition(lambda self: len(self.texts) < 12)
    @rule(target=sequences, sequence=sequences)
    def save_and_load(self, sequence: int) -> int:
        copy = self.engine.load_sequence(self.engine.save_sequence(sequence))
        self.texts[copy] = list(self.texts[sequence])
        return copy

    @rule(sequence=consumes(sequences))
    def free(self, sequence: int) -> None:
        self.engine.free_sequence(sequence)
        del self.texts[sequence]

    @invariant()
    def lengths(self) -> None:
        for sequence, text in getattr(self, "texts", {}).items():
            assert self.engine.length(sequence) == len(text)


@pytest.mark.parametrize(
    ("name", "mode", "examples"),
    [
        ("llama_gqa_tied", "kv", 25),
        ("llama_gqa_tied", "k+r", 8),
        ("olmo2", "k+r", 8),
        ("phi2", "xr", 8),
        ("mistral_window", "kv", 40),
        ("mistral_mha", "k", 8),
    ],
)
def test_random_operations(name, mode, examples, convert):
    Operations.path, Operations.mode, Operations.window = convert(GOLDEN / name), mode, name in WINDOWS
    Operations.n_ctx = 240 if Operations.window else 80  # several times what a window keeps
    Operations.TestCase.settings = settings(
        max_examples=examples, stateful_step_count=25, deadline=None, derandomize=True
    )
    case = Operations.TestCase()
    case.runTest()
