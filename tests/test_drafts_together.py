# SPDX-License-Identifier: Apache-2.0
"""Guesses of a draft model for several texts: made in the same steps, and the tokens are those that come without."""

from __future__ import annotations

from pathlib import Path

import pytest

import slimrt
from slimrt.generation import draft_model, guesser
from slimrt.generation.loop import loop_of
from slimrt.generation.options import Options
from slimrt.generation.pace import Pace
from slimrt.generation.parts import FEW
from slimrt.generation.search import Guess
from slimrt.generation.tickets import Call
from slimrt.runtime.session import common_length

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

MODELS = Path(__file__).parents[1] / "models"
TALE, OTHER, GPT2 = MODELS / "tale-llama.gguf", MODELS / "tale-gqa.gguf", MODELS / "tale-gpt2.gguf"
STORY = "Anna was a baker in a green valley. She worked in the bakery with her friend Fred. One day"
PROMPTS = [STORY, "One two three one two three", "The sailor had a red boat.", "Fred was"]


cost = guesser.Guesser.cost


@pytest.fixture(autouse=True)
def always_pays(monkeypatch):
    """Whatever this machine's steps take."""
    monkeypatch.setattr(guesser.Guesser, "cost", lambda self, n, n_texts, pace: 1.0)


@pytest.fixture
def going(monkeypatch) -> list[int]:
    """How many texts each step of a draft model goes on with."""
    steps, append = list[int](), draft_model.DraftModel.append

    def watched(self, going):
        steps.append(len(going))
        return append(self, going)

    monkeypatch.setattr(draft_model.DraftModel, "append", watched)
    return steps


def loaded(path: Path, draft: Path | None, **options) -> slimrt.Model:
    sizes = {"n_ctx": 256, "n_seqs": 4, "cache_type": "f32", "allow_lossy": True}
    return slimrt.Model(path, draft_model=draft, **sizes | options)


SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.0, "seed": 9, "repeat_penalty": 1.3, "dry_multiplier": 0.5, "frequency_penalty": 0.2},
    {"temperature": 0.9, "seed": 4, "mirostat": 2, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
]


@pytest.mark.parametrize(
    ("path", "draft", "cache"),
    [(TALE, OTHER, "kv"), (TALE, OTHER, "k"), (TALE, TALE, "k+r"), (OTHER, TALE, "kv"), (GPT2, GPT2, "v"),
     (GPT2, GPT2, "x")],
)  # fmt: skip
def test_texts_that_begin_and_end_at_different_steps(path, draft, cache, going):
    """With options of their own, in a few modes."""
    wanted = []
    with loaded(path, None, cache=cache) as alone:
        for prompt, options in zip(PROMPTS, SETTINGS, strict=True):
            wanted.append(alone.generate(prompt, max_tokens=70 + 8 * len(wanted), ignore_eos=True, **options))
    with loaded(path, draft, cache=cache) as model:
        loop, tickets = loop_of(model._runtime), []
        for prompt, options in zip(PROMPTS, SETTINGS, strict=True):
            settings = Options(max_tokens=70 + 8 * len(tickets), ignore_eos=True, **options)
            run = model._run(prompt, settings, options.get("seed", 0), None, 0.0)
            tickets.append(loop.submit(run.task(), meter=run.meter, eager=True))
            loop.step()
        while not all(one.done for one in tickets):
            loop.step()
        found = [one.result() for one in tickets]
    assert [one.tokens for one in found] == [one.tokens for one in wanted]
    assert all(one.usage.drafted_tokens > 0 for one in found) and {1, 2, 3, 4} <= set(going)


def test_a_guess_more_for_all_is_a_step(going):
    options = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
    with loaded(TALE, TALE) as model, loaded(TALE, None) as alone:
        found = model.generate(PROMPTS, **options)
        assert [one.tokens for one in found] == [one.tokens for one in alone.generate(PROMPTS, **options)]
    drafted = sum(one.usage.drafted_tokens for one in found)
    assert sum(going) == drafted and len(going) < drafted / 3


def test_a_text_stops_guessing_where_it_has_enough_or_would_end(going):
    """Three tokens are wanted of one, so that it needs two guesses; another's text is at its end."""
    with loaded(TALE, TALE) as model, loaded(TALE, None) as alone:
        whole = alone.generate(STORY, max_tokens=200, temperature=0)
        assert whole.finish_reason == "stop"
        near = model.tokenize(STORY) + list(whole.tokens[:-3])
        loop, call = loop_of(model._runtime), Call()
        runs = [model._run(near, Options(max_tokens=20, temperature=0.0), 0, None, 0.0),
                model._run("Fred", Options(max_tokens=4, temperature=0.0, ignore_eos=True), 0, None, 0.0)]  # fmt: skip
        first, second = loop.results([loop.submit(run.task(), meter=run.meter, call=call) for run in runs])
    assert first.tokens == whole.tokens[-3:] and first.finish_reason == "stop"
    assert (first.usage.drafted_tokens, second.usage.drafted_tokens) == (2, 2) and going == [2, 2, 1]


def test_answers_share_the_prompt_in_the_draft_model(going, monkeypatch):
    caught_up, append = list[int](), draft_model.append_together

    def watched(runtime, items):
        caught_up.extend(len(ids) for _, ids in items if len(ids) > FEW)
        return append(runtime, items)

    monkeypatch.setattr(draft_model, "append_together", watched)
    options = {"max_tokens": 20, "temperature": 0.8, "seed": 2, "ignore_eos": True}
    with loaded(TALE, OTHER) as model, loaded(TALE, None) as alone:
        prompt = model.tokenize(STORY * 2)
        with model._runtime.draft.runtime.use() as engine:
            free = engine.free_blocks()
        found, wanted = (one.generate(prompt, n=4, **options) for one in (model, alone))
        with model._runtime.draft.runtime.use() as engine:
            assert engine.free_blocks() == free
    assert [one.tokens for one in found] == [one.tokens for one in wanted]
    assert all(one.usage.drafted_tokens > 0 for one in found) and 4 in going
    assert caught_up == [len(prompt)]


def test_texts_that_give_up_their_rows(going):
    """The cache holds two of four texts, and so does the draft's: who finds no room goes without guesses."""
    options = Options(max_tokens=60, temperature=0.0, ignore_eos=True)
    with loaded(TALE, OTHER, n_ctx=128, cache_tokens=192) as model, loaded(TALE, None, n_ctx=128) as alone:
        loop = loop_of(model._runtime)
        runs = [model._run(prompt, options, 0, None, 0.0) for prompt in PROMPTS]
        tickets = [loop.submit(run.task(), meter=run.meter, eager=True) for run in runs]
        while not all(one.done for one in tickets):
            loop.step()
        wanted = [alone.generate(one, max_tokens=60, temperature=0, ignore_eos=True).tokens for one in PROMPTS]
    assert [one.result().tokens for one in tickets] == wanted
    assert sum(one.preemptions for one in tickets) > 0 and max(going) > 1


def test_rows_are_given_up_while_guesses_are_waited_for():
    """By a text that nobody waits for, in the middle."""
    options = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    with loaded(TALE, OTHER) as model:
        run = model._run(STORY, Options(**options), 0, None, 0.0)
        loop = loop_of(model._runtime)
        ticket, times = loop.submit(run.task(), meter=run.meter, eager=True), 0
        while not ticket.done:
            loop.step()
            if isinstance(ticket.wants, Guess) and times < 3:
                assert loop._engine.gives_up(ticket.wants)
                loop.room.give_up(ticket)
                times += 1
        assert times == 3 and ticket.result().tokens == model.generate(STORY, **options).tokens
    with loaded(TALE, None) as alone:
        assert ticket.result().tokens == alone.generate(STORY, **options).tokens


def test_a_draft_model_that_fails_is_told_to_those_who_asked(monkeypatch):
    with loaded(TALE, OTHER) as model:
        with monkeypatch.context() as broken:
            broken.setattr(draft_model.DraftModel, "append", lambda self, going: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model.generate(PROMPTS, max_tokens=20, temperature=0, ignore_eos=True)
        found = model.generate(PROMPTS, max_tokens=20, temperature=0, ignore_eos=True)
        assert all(one.usage.drafted_tokens > 0 for one in found)


def test_one_of_sixteen_rounds_is_measured_without(going, monkeypatch):
    rounds, guess = [], guesser.Guesser.guess
    kept = lambda self, *given: rounds.append(guess(self, *given)) or rounds[-1]  # noqa: E731
    monkeypatch.setattr(guesser.Guesser, "guess", kept)
    with loaded(TALE, OTHER) as model:
        model.generate(PROMPTS, max_tokens=100, temperature=0, ignore_eos=True)
    assert len(rounds) > 32 and not any(rounds[15]) and not any(rounds[31]) and all(rounds[14])


def test_what_guesses_cost():
    """Steps of the draft model are shared by the texts, and so is the step that checks them."""
    pace, model = Pace(), object.__new__(draft_model.DraftModel)
    guesser.Guesser.__init__(model, 100)
    assert cost(model, 2, 4, pace) == float("inf"), "what a step takes is not known yet"
    for _ in range(3):
        pace.note(0.1, 0, 4, 4)
    pace.note(0.15, 0, 4, 12)
    model.steps[4].note(0.02)
    assert cost(model, 2, 4, pace) == pytest.approx(1.5 + 2 * 0.2)


def test_how_lists_begin_alike():
    long = list(range(1000))
    for other, n in (([], 0), (long, 1000), (long[:256], 256), ([*long[:255], 7, *long[256:]], 255), ([3], 0)):
        assert common_length(long, other) == common_length(tuple(other), long) == n
