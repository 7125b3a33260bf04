# SPDX-License-Identifier: Apache-2.0
"""A model in several hands: threads, callbacks, asyncio."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

import slimrt
from conftest import GREEDY, PROMPT
from tiny_model import BOS, EOS


def test_threads(model):
    expected = model.generate(PROMPT, max_tokens=15, **GREEDY).tokens
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(model.generate(PROMPT, max_tokens=15, **GREEDY).tokens))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


def test_others_may_use_the_model_between_the_pieces_of_a_stream(tiny):
    with slimrt.Model(tiny, n_ctx=64, n_seqs=2) as model:
        alone = model.generate(PROMPT, max_tokens=20, **GREEDY).text
        text = ""
        for piece in model.stream(PROMPT, max_tokens=20, **GREEDY):
            text += piece
            assert alone.startswith(model.generate(PROMPT, max_tokens=2, **GREEDY).text.rstrip("\ufffd"))
        assert text == alone


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_a_stream_ends_for_its_reader_when_another_thread_ends_it(model, end):
    """The reader got an error that is no part of the interface."""
    pieces = model.stream(PROMPT, max_tokens=40, on_progress=lambda *call: time.sleep(0.01), **GREEDY)
    ending = threading.Timer(0.05, getattr(pieces, end))
    ending.start()
    text = "".join(pieces)
    ending.join()
    result = pieces.result
    assert result.finish_reason == "unfinished" and result.text.startswith(text) and len(result.tokens) < 40
    assert list(pieces) == []


def test_logits_wait_for_rows_that_others_hold_for_a_while(tiny):
    """Room for one of these texts at a time: they came as ContextOverflowError."""
    ids = [BOS, *range(10, 90)]
    with slimrt.Model(tiny, n_ctx=128, n_seqs=2, cache_tokens=160) as model:
        expected, found = model.logits(ids), []

        def ask():
            for _ in range(10):
                found.append(model.logits(ids))
                model.generate(ids, max_tokens=20, ignore_eos=True)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 30 and all(np.abs(one - expected).max() < 1e-2 for one in found)
        with model.session() as one, model.session() as other:  # these are held until they are closed
            one.append(ids)
            with pytest.raises(slimrt.ContextOverflowError, match="close the sessions that hold the others"):
                other.append(ids)


def test_a_session_notes_its_tokens_before_other_threads_may_use_it(tiny):
    """Else the other thread takes the new rows for left-overs of a Ctrl-C, and drops them."""
    with slimrt.Model(tiny, n_ctx=64) as model, model.session() as session:

        class Watched(list):
            def extend(self, ids):
                free = []
                thread = threading.Thread(target=lambda: free.append(session.runtime.lock.acquire(blocking=False)))
                thread.start()
                thread.join()
                assert free == [False]
                super().extend(ids)

        session._tokens = Watched()
        session.append([BOS, EOS])
        assert session.tokens == (BOS, EOS)


def test_a_callback_must_not_use_the_model(model):
    with pytest.raises(RuntimeError, match="callback"):
        model.generate([BOS] * 4, max_tokens=1, on_progress=lambda *call: model.logits([BOS]))
    assert model.generate([BOS], max_tokens=1).tokens


def test_async(model):
    async def both():
        whole = await model.agenerate(PROMPT, max_tokens=12, seed=2)
        return whole, [piece async for piece in model.astream(PROMPT, max_tokens=12, seed=2)]

    whole, pieces = asyncio.run(both())
    assert "".join(pieces) == whole.text == model.generate(PROMPT, max_tokens=12, seed=2).text


def test_async_texts_are_decoded_together(tiny, monkeypatch):
    """As many as the model has sequences have a thread, whatever asyncio's own pool has."""
    with slimrt.Model(tiny, n_ctx=32, n_seqs=40) as model:
        generate, together = model._generate, threading.Barrier(40, timeout=5)

        def wait_for_all(*given):
            together.wait()
            return generate(*given)

        async def many():
            return await asyncio.gather(*(model.agenerate([BOS, i], max_tokens=2, **GREEDY) for i in range(40)))

        expected = [model.generate([BOS, i], max_tokens=2, **GREEDY).tokens for i in range(40)]
        monkeypatch.setattr(model, "_generate", wait_for_all)
        assert [one.tokens for one in asyncio.run(many())] == expected


class Paused:
    """An on_progress that, from its `after`-th call on, holds the thread that computes until it may go on."""

    def __init__(self, after: int) -> None:
        self.after, self.calls, self.go_on = after, 0, threading.Event()
        self.reached, self.loop = asyncio.Event(), asyncio.get_running_loop()

    def __call__(self, *progress) -> None:
        self.calls += 1
        if self.calls >= self.after:
            self.loop.call_soon_threadsafe(self.reached.set)
            assert self.go_on.wait(30)


def test_async_cancelled(model):
    """Nothing is computed after the step that was under way."""

    async def cancel():
        paused = Paused(3)
        work = asyncio.create_task(model.agenerate(PROMPT, max_tokens=-1, ignore_eos=True, on_progress=paused))
        await paused.reached.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        paused.go_on.set()
        return paused

    paused = asyncio.run(cancel())
    assert model.generate([BOS] * 60, max_tokens=1).tokens  # waits for the thread, and has room
    assert paused.calls == 3


def test_async_stream_closed(model):
    """Nothing is computed after the step that was under way."""

    async def close():
        paused = Paused(8)
        pieces = model.astream(PROMPT, max_tokens=-1, ignore_eos=True, on_progress=paused)
        async for _ in pieces:
            break
        await paused.reached.wait()
        closing = asyncio.create_task(pieces.aclose())
        await asyncio.sleep(0)  # it says so, and waits for the thread
        paused.go_on.set()
        await closing
        return paused

    assert asyncio.run(close()).calls == 8


def test_async_streams_that_wait_for_others_are_closed_at_once(tiny):
    """For their turn, or for a thread: closing them waited for the text before them."""

    async def next_piece(pieces):
        return await anext(pieces)

    async def close(model):
        first = asyncio.create_task(
            model.agenerate(PROMPT, max_tokens=-1, on_progress=lambda *call: time.sleep(0.02), **GREEDY)
        )
        waiting = [asyncio.create_task(next_piece(model.astream(PROMPT))) for _ in range(8)]
        await asyncio.sleep(0.1)
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert not first.done()
        return await first

    with slimrt.Model(tiny, n_ctx=64) as model:
        assert asyncio.run(close(model)).finish_reason == "context"


def test_async_errors_arrive(model):
    async def fail():
        with pytest.raises(slimrt.ContextOverflowError, match="prompt has 99 tokens, the context holds 64"):
            await model.agenerate([BOS] * 99)
        with pytest.raises(slimrt.ContextOverflowError, match="prompt has 99 tokens, the context holds 64"):
            async for _ in model.astream([BOS] * 99):
                pass

    asyncio.run(fail())
