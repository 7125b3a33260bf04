# SPDX-License-Identifier: Apache-2.0
"""What is read and not continued (embeddings, scored prompts, forecasts) shares the loop's steps with texts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import slimrt
from conftest import relative
from slimrt.cache.server_sizes import ROWS_OF_A_PIECE
from slimrt.forecast.predict import _bolt_quantiles, read_bolt
from slimrt.generation.embed import embeddings
from slimrt.generation.generate import Run
from slimrt.generation.loop import Loop, loop_of
from slimrt.generation.options import Options
from slimrt.generation.pace import LEAST
from slimrt.generation.parts import FEW
from slimrt.generation.scored import prompt_logprobs, scored
from slimrt.generation.sequences import BLOCK, Sequences
from slimrt.generation.tickets import Call, Ticket

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

MODELS = Path(__file__).parents[1] / "models"
STORY = "Anna was a baker in a green valley. She worked in the bakery with her friend Fred. One day "
LONG = STORY * 12


def load(n_batch: int) -> slimrt.Model:
    loaded = slimrt.Model(MODELS / "tale-llama.gguf", n_ctx=512, n_seqs=4, n_batch=n_batch, cache_type="f32")
    loop_of(loaded._runtime).pace.stall = 0.0  # pieces are as small as they may be
    return loaded


@pytest.fixture
def model() -> Iterator[slimrt.Model]:
    with load(LEAST) as loaded:  # so that whoever is alone has steps as large
        yield loaded


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """Tokens, rows and kind of each call of the engine."""
    seen, append = list[tuple[int, int, bool]](), Sequences.append

    def watched(self: Sequences, items: Any, outputs: Any, told: Any, **kind: bool) -> Any:
        seen.append((sum(len(ids) for _, ids in items), sum(outputs), "states" in kind))
        return append(self, items, outputs, told, **kind)

    monkeypatch.setattr(Sequences, "append", watched)
    return seen


def finish(loop: Loop, *tickets: Ticket[Any]) -> list[Any]:
    while not all(one.done for one in tickets):
        assert loop.step()
    return [one.result() for one in tickets]


def text(model: slimrt.Model, max_tokens: int) -> Run:
    options = Options(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Run(model._runtime, model.tokenize("The sailor"), options, 0, None, 0.0)


def test_a_long_text_is_embedded_beside_one_that_goes_on(model, steps):
    wanted, alone = model.embed(LONG), model.generate("The sailor", max_tokens=40, temperature=0.0, ignore_eos=True)
    steps.clear()
    loop, run = loop_of(model._runtime), text(model, 40)
    going_on = loop.submit(run.task(), eager=True)
    loop.step()
    (task,) = embeddings(model._runtime, [model.tokenize(LONG)], "mean", True)
    read = loop.submit(task, eager=True)
    while not read.done:
        made = len(run.tokens)
        loop.step()
        assert going_on.done or len(run.tokens) > made  # each step of the embedding is one of the text too
    vector, result = finish(loop, read, going_on)
    assert relative(vector, wanted) < 1e-5 and result.tokens == alone.tokens
    assert len(model.tokenize(LONG)) > 3 * LEAST >= 3 * max(n for n, _, states in steps if states)


@pytest.mark.parametrize("pooling", ["mean", "last", None])
def test_rows_that_were_given_up_are_not_told_twice(model, pooling):
    (ids,) = batch = [model.tokenize(LONG)]
    wanted = model.embed(batch, pooling=pooling)[0]
    loop, other = loop_of(model._runtime), text(model, 60)
    going_on = loop.submit(other.task(), eager=True)
    read = loop.submit(embeddings(model._runtime, batch, pooling, True)[0], eager=True)
    gave_up = 0
    while not read.done:
        loop.step()
        if gave_up < 3 and not read.done and loop._engine.gives_up(read.wants):
            loop.room.give_up(read)
            gave_up += 1
    (found,) = finish(loop, read)
    assert gave_up == 3 and found.shape == wanted.shape and relative(found, wanted) < 1e-5
    loop.end([going_on])
    assert len(ids) > 3 * LEAST


def test_prompts_are_scored_a_piece_at_a_time(steps):
    """As their logits say; and of several prompts one has rows in a step, of however many tokens that may be."""
    with load(n_batch=512) as model:
        _check_scores(model, steps)


def _check_scores(model: slimrt.Model, steps: list[tuple[int, int, bool]]) -> None:
    ids = model.tokenize(LONG)
    with model.session() as session:
        rows = session.append(ids)
    expected = (
        rows - np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True)) - rows.max(1, keepdims=True)
    )
    steps.clear()
    loop, run = loop_of(model._runtime), text(model, 30)
    tickets = [loop.submit(scored(model._runtime, ids[i:], 2), eager=True) for i in (0, 1, 2)]
    tickets.append(loop.submit(run.task(), eager=True))
    *told, result = finish(loop, *tickets)
    first, tokens = told[0]
    assert first + "".join(one.text for one in tokens) == model.detokenize(ids)
    wanted = [expected[at, id] for at, id in enumerate(ids[1:])]
    np.testing.assert_allclose([one.logprob for one in tokens], wanted, atol=0.02)  # f16 weights, other steps
    assert all(len(one.top) == 2 for one in tokens) and len(told[2][1]) == len(ids) - 3
    assert max(rows for _, rows, _ in steps) <= ROWS_OF_A_PIECE + 1 and len(result.tokens) == 30
    assert prompt_logprobs(model._runtime, ids[:1], 1) == (model.detokenize(ids[:1]), [])
    with pytest.raises(slimrt.ContextOverflowError, match="the text has 513 tokens"):
        scored(model._runtime, [5] * 513, 1)


@pytest.mark.parametrize("read", [lambda model, ids: model.score(ids[:100]).logprobs,
                                  lambda model, ids: model.perplexity(ids, stride=60)])  # fmt: skip
def test_a_score_waits_for_room_that_another_text_has(read):
    """Beside another caller's text, which has a block that the score needs."""
    with slimrt.Model(MODELS / "tale-llama.gguf", n_ctx=128, n_seqs=2, cache_tokens=128, cache_type="f32") as model:
        ids = model.tokenize(LONG)[:180]
        wanted = read(model, ids)
        loop, run = loop_of(model._runtime), text(model, 20)
        other = loop.submit(run.task(), eager=True)
        while len(run.tokens) < 2:
            loop.step()
        np.testing.assert_allclose(read(model, ids), wanted, atol=0.02)  # f16 weights, other steps
        assert len(finish(loop, other)[0].tokens) == 20


def test_a_prompt_that_gives_up_its_rows_in_a_step_begins_again():
    """For a text's next token, in a step that would have computed the rest of the prompt."""
    with slimrt.Model(MODELS / "tale-llama.gguf", n_ctx=160, n_seqs=2, cache_tokens=160, cache_type="f32") as model:
        ids = model.tokenize(LONG)[:140]
        wanted = model.score(ids).logprobs
        loop, run = loop_of(model._runtime), text(model, 60)
        older = loop.submit(run.task())
        loop.wait([older], lambda: len(run.prompt) + len(run.tokens) == BLOCK + 1)  # its next token needs a block
        read = loop.submit(scored(model._runtime, ids, 1), eager=True)
        for _ in range(2):
            loop.step()
        assert loop._engine.free_blocks() == 0 and FEW < len(read.left[0][1]) < ROWS_OF_A_PIECE
        loop.wait([older, read], lambda: older.done and read.done)
        assert read.preemptions == 1 and len(older.result().tokens) == 60
        np.testing.assert_allclose([one.logprob for one in read.result()[1]], wanted, atol=0.02)


def test_a_forecast_of_many_series_leaves_room_for_another(steps):
    series = [np.sin(np.arange(60 + i) / 3) for i in range(40)]
    with slimrt.Model(MODELS / "tale-chronos.gguf", n_seqs=2) as model:
        wanted = model.predict_quantiles(series[:3], 5, [0.5])
        runtime, bolt = model._runtime, read_bolt(model._runtime.source.file)
        loop, engine, many, one = loop_of(runtime), Sequences(runtime), Call(), Call()
        before = [loop.submit(_bolt_quantiles(engine, runtime, bolt, row), call=many, eager=True) for row in series]
        late = loop.submit(_bolt_quantiles(engine, runtime, bolt, series[0]), call=one, eager=True)
        n = 0
        while not late.done:
            assert loop.step()
            n += 1
        assert n <= 6 and sum(ticket.done for ticket in before) < 8
        for got, row in zip(finish(loop, *before)[:3], wanted, strict=True):
            np.testing.assert_allclose(got[len(got) // 2][:5], row[:, 0], rtol=1e-4)
        with runtime.use() as used:
            assert used.free_blocks() == used.n_blocks()


def test_encoders_read_as_many_sources_as_a_step_has_time_for(monkeypatch):
    seen, encode = list[int](), Sequences.encode

    def watched(self: Sequences, items: Any, states: bool = False) -> Any:
        seen.append(sum(len(source) for _, source, *_ in items))
        return encode(self, items, states)

    monkeypatch.setattr(Sequences, "encode", watched)
    with slimrt.Model(MODELS / "tale-t5.gguf", n_seqs=4) as model:
        texts = [model.tokenize("Anna was a baker in a green valley.")] * 4
        wanted, loop = model.embed(texts), loop_of(model._runtime)
        assert seen == [4 * len(texts[0])]
        loop.pace.batch = 2 * len(texts[0])
        tickets = [loop.submit(one, eager=True) for one in embeddings(model._runtime, texts, "mean", True)]
        np.testing.assert_allclose(finish(loop, *tickets), wanted, atol=1e-4)
        assert seen[1:] == [2 * len(texts[0])] * 2
