# SPDX-License-Identifier: Apache-2.0
"""Guesses from the text itself: the same tokens as without, in fewer steps where the text repeats itself."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import slimrt
from slimrt.cli.generate import timings_line
from slimrt.errors import UnsupportedError
from slimrt.generation import drafts
from slimrt.generation.answers import Answer, Root
from slimrt.generation.drafts import DraftedRun
from slimrt.generation.lookup import Lookup
from slimrt.generation.loop import loop_of
from slimrt.generation.options import Options
from slimrt.generation.pace import Pace

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

MODELS = Path(__file__).parents[1] / "models"
STORY = "Anna was a baker in a green valley. She worked in the bakery with her friend Fred. One day"


@pytest.fixture(autouse=True)
def always_pays(monkeypatch):
    """Whatever this machine's steps take."""
    monkeypatch.setattr(Pace, "cost", lambda self, more: 1.0)


@pytest.fixture(scope="module")
def model():
    with slimrt.Model(MODELS / "tale-llama.gguf", n_ctx=512, n_seqs=2, cache_type="f32") as loaded:
        yield loaded


def test_what_followed_last_time_is_guessed():
    known = Lookup()
    known.extend([1, 2, 3, 4, 5, 9, 2, 3, 4])
    assert known.guess(7) == [5, 9, 2, 3, 4] and known.guess(2) == [5, 9]
    known.extend([8, 3, 4])  # three tokens that were never together, then two that were: the last time counts
    assert known.guess(2) == [8, 3]
    known.extend([7])
    assert known.guess(5) == []


def made(model, prompt, **options) -> tuple[DraftedRun, slimrt.Generation]:
    run = model._run(prompt, Options(lookup=True, **options), options.get("seed", 0), None, 0.0)
    loop = loop_of(model._runtime)
    return run, loop.results([loop.submit(run.task(), meter=run.meter)])[0]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 5},
        {"temperature": 1.0, "seed": 9, "repeat_penalty": 1.3, "dry_multiplier": 0.5},
        {"temperature": 1.0, "seed": 2, "mirostat": 2, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.0, "stop": "the"},
        {"temperature": 0.9, "seed": 4, "regex": "([a-d]{3}, )*end"},
    ],
    ids=str,
)
def test_the_tokens_are_those_that_come_without(model, options):
    options |= {"max_tokens": 120}
    if "regex" in options:
        pytest.importorskip("llguidance")
    plain = model.generate(STORY * 3, **options)
    run, guessed = made(model, STORY * 3, **options)
    assert run.drafted > 0 or "stop" in options
    assert (plain.usage.drafted_tokens, plain.usage.accepted_tokens) == (0, 0)
    assert (guessed.tokens, guessed.text, guessed.finish_reason) == (plain.tokens, plain.text, plain.finish_reason)
    if options.get("logprobs"):
        assert [one.logprob for one in guessed.logprobs] == pytest.approx(
            [one.logprob for one in plain.logprobs], abs=1e-3
        )


@pytest.mark.parametrize(
    ("name", "cache"),
    [("tale-llama", "k"), ("tale-llama", "k+r"), ("tale-gpt2", "v"), ("tale-gpt2", "x"), ("tale-gqa", "kv")],
)
def test_in_every_mode(name, cache):
    with slimrt.Model(MODELS / f"{name}.gguf", n_ctx=256, cache=cache, cache_type="f32", allow_lossy=True) as model:
        prompt, options = (
            "one two three one two three one two",
            {"max_tokens": 60, "temperature": 0, "ignore_eos": True},
        )
        run, guessed = made(model, prompt, **options)
        assert run.drafted > 0 and guessed.tokens == model.generate(prompt, **options).tokens


def test_rows_that_age_cannot_be_taken_back():
    with slimrt.Model(MODELS / "tale-llama.gguf", n_ctx=256, cache="kivi") as model:
        run, guessed = made(model, STORY * 2, max_tokens=40, temperature=0)
        assert run.drafted == 0 and guessed.tokens == model.generate(STORY * 2, max_tokens=40, temperature=0).tokens


def test_right_guesses_save_steps(model, monkeypatch):
    """The text is made to repeat its prompt."""
    ids, steps = model.tokenize(STORY, add_special_tokens=False), []
    append = loop_of(model._runtime)._engine.append
    monkeypatch.setattr(loop_of(model._runtime)._engine, "append", lambda *a: steps.append(1) or append(*a))

    def again(so_far, logits):
        logits[ids[len(so_far) % len(ids)]] += 1000
        return logits

    run, result = made(model, ids * 2, max_tokens=len(ids) * 3, temperature=0, ignore_eos=True, logits_processor=again)
    drafted, accepted = result.usage.drafted_tokens, result.usage.accepted_tokens
    assert len(ids) * 3 - len(steps) == accepted <= drafted, "every token comes from a step or from a right guess"
    assert f"({accepted} of {drafted} guesses right)" in timings_line(result)
    assert list(result.tokens) == ids * 3 and run.accepted > len(ids) and len(steps) < len(ids)


def test_a_long_prompt_is_noted_in_parts(model, monkeypatch):
    """Beside the texts of others: noting 131072 tokens at once took a tenth of a second and more."""
    monkeypatch.setattr(drafts, "_LEARNED", 8)
    extend, noted = Lookup.extend, []
    monkeypatch.setattr(Lookup, "extend", lambda self, tokens: noted.append(len(tokens)) or extend(self, tokens))
    plain = model.generate(STORY * 3, max_tokens=120, temperature=0)
    run, guessed = made(model, STORY * 3, max_tokens=120, temperature=0)
    assert max(noted) == 8 and sum(noted) >= len(run.prompt) > 40
    assert run.drafted > 0 and guessed.tokens == plain.tokens


def scripted(model, monkeypatch, prompt, text):
    """The run of a text that goes on with these ids whatever was computed; a token more makes a step longer by 0.3."""
    monkeypatch.setattr(Pace, "cost", lambda self, more: 1 + 0.3 * more)

    def said(so_far, logits):
        logits[text[len(so_far) - len(prompt)]] += 1000
        return logits

    run, result = made(model, prompt, max_tokens=len(text), temperature=0, ignore_eos=True, logits_processor=said)
    assert list(result.tokens) == text
    return run


def test_what_is_found_and_wrong_is_hardly_guessed(model, monkeypatch):
    """Each two tokens of the text stood in the prompt, where another followed; then it says all of that again."""
    text = list(range(300, 400))
    wrong = [id for first in text for id in (first, first + 1, first + 500)]
    run = scripted(model, monkeypatch, wrong, text)
    assert run.drafted <= 2, "a trial at times"
    run = scripted(model, monkeypatch, wrong[:120], text[:40] * 4)
    assert run.accepted > 70 and run.drafted - run.accepted < 16, "that it is right by now is seen without a guess"


def test_guesses_cost_what_those_of_all_texts_do(model, monkeypatch):
    asked = set()
    monkeypatch.setattr(Pace, "cost", lambda self, more: asked.add((self.n_texts, more)) or 1.0)
    model.generate([STORY * 3, STORY * 3], lookup=True, max_tokens=40, temperature=0, ignore_eos=True)
    assert {(2, 2 * n) for n in range(1, 8)} <= asked <= {(n, k * n) for n in (1, 2) for k in range(1, 8)}


def test_a_session_holds_the_text_and_no_guesses(model):
    with model.session() as session, model.session() as other:
        options = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
        guessed = model.generate(STORY * 2, session=session, lookup=True, **options)
        plain = model.generate(STORY * 2, session=other, **options)
        assert guessed.tokens == plain.tokens and session.tokens == other.tokens
        again = model.generate(STORY * 2 + guessed.text + " and so", session=session, lookup=True, **options)
        assert again.usage.cached_tokens > 60


def test_up_to_the_end_of_the_context():
    with slimrt.Model(MODELS / "tale-llama.gguf", n_ctx=128, cache_type="f32") as model:
        options = {"max_tokens": -1, "temperature": 0, "ignore_eos": True}
        run, guessed = made(model, STORY, **options)
        assert guessed.finish_reason == "context" and guessed.tokens == model.generate(STORY, **options).tokens


@pytest.mark.parametrize("on_overflow", ["error", "shift"])
def test_guesses_take_no_room_of_tokens_that_a_grammar_forces(on_overflow):
    """Which fill the context in one step, with guesses of that step behind the text."""
    pytest.importorskip("llguidance")
    forced = "[.] One bakery" + " had a big horse and a red boat and a long rope and a warm coat" * 4 + "[a-z .]{20,99}"
    options = {"max_tokens": 120, "temperature": 0, "regex": f"Tom was (sad|glad){forced}", "on_overflow": on_overflow}
    with slimrt.Model(MODELS / "tale-llama.gguf", n_ctx=112, cache_type="f32") as model:
        plain = model.generate("Tom was sad. " * 10, **options)
        run, guessed = made(model, "Tom was sad. " * 10, **options)
    assert run.drafted > 0 and (plain.shifted > 0 if on_overflow == "shift" else plain.truncated)
    assert (guessed.tokens, guessed.shifted) == (plain.tokens, plain.shifted)


def test_texts_that_wait_or_are_done_keep_no_table(model):
    """A table of n-grams takes forty times the memory of the ids, and a request may ask for 256 answers."""
    ids = list(np.random.default_rng(0).integers(300, 1600, 400))
    root, options = Root(ids), Options(lookup=True, max_tokens=3, temperature=0, ignore_eos=True)
    tracemalloc.start()
    runs = [Answer(model._runtime, root, i, options, 0, 0.0) for i in range(100)]
    waiting = tracemalloc.get_traced_memory()[0]
    loop_of(model._runtime).run([(1, run.task()) for run in runs])
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert max(waiting, taken) < 2_000_000 and all(len(run.tokens) == 3 for run in runs)


def test_answers_to_one_prompt_look_up_each_its_own(model):
    options = {"n": 3, "max_tokens": 60, "temperature": 0.7, "seed": 3, "ignore_eos": True}
    plain, guessed = (model.generate(STORY * 3, lookup=lookup, **options) for lookup in (False, True))
    assert [one.tokens for one in guessed] == [one.tokens for one in plain] and len({one.tokens for one in plain}) == 3
    assert all(one.usage.drafted_tokens > 0 for one in guessed)


def test_what_it_does_not_go_with(model):
    with pytest.raises(ValueError, match="lookup"):
        model.generate(STORY, num_beams=2, temperature=0, lookup=True)
    with slimrt.Model(MODELS / "tale-t5.gguf") as t5, pytest.raises(UnsupportedError, match="lookup"):
        t5.text2text("a", lookup=True)
