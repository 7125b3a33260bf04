# SPDX-License-Identifier: Apache-2.0
"""Models that nobody holds any more: their memory is given back without close()."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager

import pytest

import slimrt
from conftest import GREEDY, PROMPT
from tiny_model import BOS

USES = {
    "generate": lambda model: model.generate(PROMPT, max_tokens=2, **GREEDY),
    "lookup": lambda model: model.generate(PROMPT, max_tokens=2, lookup=True, **GREEDY),
    "beams": lambda model: model.generate(PROMPT, max_tokens=2, num_beams=2, **GREEDY),
    "answers": lambda model: model.generate(PROMPT, max_tokens=2, n=2, seed=1),
    "prefixes": lambda model: model.generate([BOS] * 40, max_tokens=2, cache_prompt=True, **GREEDY),
    "stream": lambda model: list(model.stream(PROMPT, max_tokens=2, **GREEDY)),
    "embed": lambda model: model.embed([PROMPT, "a"]),
    "score": lambda model: model.score(PROMPT),
    "session": lambda model: model.session().append([BOS]),
}


@contextmanager
def no_collector():
    """Only counts of references free anything."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("use", USES)
def test_a_model_that_nobody_holds_is_freed_at_once(tiny, use):
    """The collector counts objects, not their bytes: a second model would not fit beside one that waits for it."""
    with no_collector():
        model = slimrt.Model(tiny, n_ctx=64, n_seqs=2)
        USES[use](model)
        runtime = weakref.ref(model._runtime)
        del model
        assert runtime() is None


@pytest.mark.parametrize("by_itself", [True, False])
def test_a_model_with_drafts_is_freed_at_once(tiny, by_itself):
    with no_collector():
        model = slimrt.Model(tiny, n_ctx=64, draft_model="self" if by_itself else tiny)
        model.generate(PROMPT, max_tokens=2, **GREEDY)
        runtime = weakref.ref(model._runtime)
        del model
        assert runtime() is None


def test_a_stream_and_a_session_keep_their_model(tiny):
    stream = slimrt.Model(tiny, n_ctx=64).stream(PROMPT, max_tokens=5, **GREEDY)
    session = slimrt.Model(tiny, n_ctx=64).session()
    gc.collect()
    assert "".join(stream) == stream.result.text
    assert session.append([BOS]).shape[0] == 1


def test_a_stream_that_was_left_keeps_no_model(tiny):
    model = slimrt.Model(tiny, n_ctx=64)
    next(model.stream(PROMPT, max_tokens=9, **GREEDY))
    runtime = weakref.ref(model._runtime)
    del model
    gc.collect()
    assert runtime() is None


def test_a_callback_of_who_holds_the_stream_keeps_neither(tiny):
    class Window:
        def __init__(self):
            self.stream = slimrt.Model(tiny, n_ctx=64).stream(PROMPT, on_progress=self.show, **GREEDY)

        def show(self, stage, done, total):
            pass

    window = Window()
    next(window.stream)
    left = weakref.ref(window)
    del window
    gc.collect()
    assert left() is None
