# SPDX-License-Identifier: Apache-2.0
"""Several answers to a prompt, beams, and contexts that are shifted."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import slimrt
from conftest import GREEDY, PROMPT
from slimrt.generation.breakers import breaker_tokens
from slimrt.plumbing.numbers import log_softmax
from tiny_model import BOS, EOS, FIRST_BYTE

LONG = [BOS, *range(5, 45)]


@pytest.fixture(scope="module")
def several(tiny):
    with slimrt.Model(tiny, n_ctx=64, n_seqs=3, cache_type="f32") as model:
        yield model


@pytest.mark.parametrize("n", [1, 2, 3, 5])  # more than n_seqs wait
def test_answers_are_what_their_seeds_give_alone(several, n):
    options = {"max_tokens": 9, "temperature": 1.5, "repeat_penalty": 1.2, "logprobs": 2}
    answers = several.generate(LONG, n=n, seed=4, **options)
    alone = [several.generate(LONG, seed=4 + i, **options) for i in range(n)]
    assert [one.tokens for one in answers] == [one.tokens for one in alone]
    assert [one.logprobs[0] for one in answers] == [one.logprobs[0] for one in alone]
    assert [one.seed for one in answers] == list(range(4, 4 + n))
    assert [one.usage.cached_tokens for one in answers] == [0] + [len(LONG)] * (n - 1)


def test_the_prompt_of_answers_is_computed_once(several):
    calls = []
    several.generate(LONG, n=3, max_tokens=2, ignore_eos=True, on_progress=lambda *call: calls.append(call))
    assert [call for call in calls if call[0] == "prefill"] == [("prefill", len(LONG), len(LONG))]


def test_answers_to_several_prompts(several):
    prompts, options = [PROMPT, "dog"], {"max_tokens": 6, "temperature": 1.5}
    found = several.generate(prompts, n=2, seed=10, **options)
    for i, answers in enumerate(found):
        alone = several.generate(prompts[i], n=2, seed=10 + 2 * i, **options)
        assert [one.text for one in answers] == [one.text for one in alone]
    assert several.generate([], n=2) == []


def test_answers_with_a_processor_end_each_by_itself(several):
    def ends_after_three(ids, logits):
        logits[EOS] = 1e4 if len(ids) == len(LONG) + 3 else -1e4
        return logits

    answers = several.generate(LONG, n=3, seed=1, temperature=2.0, max_tokens=9, logits_processor=ends_after_three)
    assert [(one.finish_reason, len(one.tokens)) for one in answers] == [("stop", 3)] * 3
    assert len({one.tokens for one in answers}) > 1


def test_answers_leave_no_rows_behind(several):
    full = [BOS] * 64
    for _ in range(3):
        answers = several.generate(full, n=3, max_tokens=5, ignore_eos=True)
        assert [(one.finish_reason, len(one.tokens)) for one in answers] == [("context", 1)] * 3
    with pytest.raises(slimrt.ContextOverflowError, match="65 tokens"):
        several.generate([BOS] * 65, n=3)
    assert len(several.generate([full[:60]] * 3, max_tokens=3, ignore_eos=True)) == 3  # all rows are free


@pytest.mark.parametrize(("n", "error", "message"), [(0, ValueError, "n must be at least 1"),
                                                     (1.5, TypeError, "n must be a whole number")])  # fmt: skip
def test_bad_numbers_of_answers(several, n, error, message):
    with pytest.raises(error, match=message):
        several.generate(PROMPT, n=n)


def test_a_session_continues_one_text(several):
    with several.session() as session, pytest.raises(ValueError, match="does not go with n or num_beams"):
        several.generate(PROMPT, session=session, n=2)
    with several.session() as session, pytest.raises(ValueError, match="does not go with n or num_beams"):
        several.generate(PROMPT, session=session, num_beams=2)


def total(model, prompt, tokens) -> float:
    logprobs = log_softmax(model.logits([*prompt, *tokens])[len(prompt) - 1 : -1].astype(np.float64))
    return float(logprobs[np.arange(len(tokens)), list(tokens)].sum())


def test_beams_find_the_likeliest_of_all_texts(several):
    """Of three allowed tokens every text of three: three beams find what a search for all of them does."""
    prompt, allowed = several.tokenize(PROMPT), [FIRST_BYTE + 97, FIRST_BYTE + 98, FIRST_BYTE + 99]

    def only(ids, logits):
        masked = np.full_like(logits, -np.inf)
        masked[allowed] = logits[allowed]
        return masked

    def score(tokens):
        rows = several.logits([*prompt, *tokens])[len(prompt) - 1 : -1][:, allowed].astype(np.float64)
        return sum(log_softmax(row)[allowed.index(token)] for row, token in zip(rows, tokens, strict=True))

    best = max(itertools.product(allowed, repeat=2), key=score)
    found = several.generate(prompt, num_beams=3, n=3, max_tokens=2, logits_processor=only)
    assert found[0].tokens == best
    assert [one.finish_reason for one in found] == ["length"] * 3
    scores = [score(one.tokens) for one in found]
    assert scores == sorted(scores, reverse=True) and len({one.tokens for one in found}) == 3


def test_more_beams_find_no_less_likely_texts_than_greedy(several):
    for prompt in ("a", "the dog", PROMPT):
        ids = several.tokenize(prompt)
        greedy = several.generate(ids, max_tokens=8, **GREEDY)
        beams = several.generate(ids, max_tokens=8, ignore_eos=True, num_beams=3)
        assert isinstance(beams, slimrt.Generation) and len(beams.tokens) == 8
        assert total(several, ids, beams.tokens) >= total(several, ids, greedy.tokens) - 1e-4
        assert beams.text == several.generate(ids, max_tokens=8, ignore_eos=True, num_beams=3, n=2)[0].text
        assert (beams.usage.prompt_tokens, beams.usage.completion_tokens) == (len(ids), 8)


def test_beams_of_several_prompts_are_those_of_each(several):
    with slimrt.Model(several._runtime.source.path, n_ctx=64, n_seqs=4, cache_type="f32") as wide:
        together = wide.generate([PROMPT, "dog", "a"], num_beams=2, max_tokens=6)
        assert [one.tokens for one in together] == [
            several.generate(prompt, num_beams=2, max_tokens=6).tokens for prompt in (PROMPT, "dog", "a")
        ]


def test_beams_fill_the_context_and_say_so(several):
    found = several.generate(LONG, num_beams=3, max_tokens=-1, ignore_eos=True)
    assert (found.finish_reason, found.truncated, len(found.tokens)) == ("context", True, 64 - len(LONG) + 1)
    assert several.generate(LONG, num_beams=2, max_tokens=0).tokens == ()


def test_beams_that_cannot_be(several):
    with pytest.raises(ValueError, match="num_beams or best_of 4 needs 4 sequences at once.*n_seqs=4"):
        several.generate(PROMPT, num_beams=4)
    with pytest.raises(ValueError, match="n=3 answers need as many beams, num_beams is 2"):
        several.generate(PROMPT, num_beams=2, n=3)
    with pytest.raises(slimrt.UnsupportedError, match="cannot be streamed: use generate"):
        several.stream(PROMPT, num_beams=2)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_beams_refuse_logits_that_are_no_numbers(several, broken):
    """As texts that are drawn do; a NaN came out as texts of probability NaN."""

    def processor(ids, logits):
        logits[FIRST_BYTE] = broken
        return logits

    for beams in (1, 2):
        with pytest.raises(slimrt.ModelFormatError, match="the weights .or a logits_processor. are broken"):
            several.generate(PROMPT, num_beams=beams, max_tokens=3, temperature=0.0, logits_processor=processor)


def shifted(context: list[int], keep: int) -> list[int]:
    return context[:keep] + context[keep + (len(context) - keep) // 2 :]


@pytest.mark.parametrize("cache", ["kv:q8", "k", "kivi"])
@pytest.mark.parametrize(("n_keep", "kept"), [(0, 1), (5, 5), (-1, 20)])  # BOS always stays
def test_a_shifted_context_goes_on_as_a_prompt_of_what_stayed(tiny, cache, n_keep, kept):
    prompt, options = [BOS, *range(5, 24)], GREEDY
    with slimrt.Model(tiny, n_ctx=32, cache=cache, allow_lossy=True) as model:
        result = model.generate(prompt, max_tokens=40, on_overflow="shift", n_keep=n_keep, **options)
        assert (result.finish_reason, result.truncated, len(result.tokens)) == ("length", False, 40)
        tokens, context, dropped = list(result.tokens), list(prompt), 0
        while tokens:
            part = model.generate(context, max_tokens=len(tokens), **options).tokens
            assert list(part) == tokens[: len(part)]
            context, tokens = context + tokens[: len(part)], tokens[len(part) :]
            if tokens:  # the context is full, and its newest token is not computed yet
                assert len(context) == 33
                dropped += 33 - len(shifted(context, kept))
                context = shifted(context, kept)
        assert result.shifted == dropped > 0


def test_a_shift_is_asked_for_and_counted(tiny):
    with slimrt.Model(tiny, n_ctx=32) as model:
        plain = model.generate(PROMPT, max_tokens=50, **GREEDY)
        assert (plain.finish_reason, plain.shifted) == ("context", 0)
        pieces = model.stream(PROMPT, max_tokens=50, on_overflow="shift", **GREEDY)
        text = "".join(pieces)
        assert text.startswith(plain.text) and pieces.result.shifted > 0 and len(pieces.result.tokens) == 50
        with pytest.raises(slimrt.ContextOverflowError, match="33 tokens"):
            model.generate([BOS] * 33, on_overflow="shift")
        whole = model.generate([BOS] * 32, max_tokens=5, on_overflow="shift", n_keep=-1, ignore_eos=True)
        assert whole.finish_reason == "context"  # nothing may go


def test_a_session_holds_what_a_shift_left(tiny):
    with slimrt.Model(tiny, n_ctx=32) as model, model.session() as session:
        ids = model.tokenize(PROMPT)
        result = model.generate(ids, session=session, max_tokens=30, on_overflow="shift", **GREEDY)
        context = [*ids, *result.tokens]
        assert session.tokens[0] == BOS
        assert list(session.tokens[1:]) == context[1 + result.shifted : -1]


def test_a_model_may_shift_by_itself(tiny):
    with slimrt.Model(tiny, n_ctx=32, on_overflow="shift") as model:
        assert model.generate(PROMPT, max_tokens=50, ignore_eos=True).shifted > 0
        assert model.generate(PROMPT, max_tokens=50, ignore_eos=True, on_overflow="error").truncated
    with pytest.raises(ValueError, match="on_overflow 'drop' is not supported"):
        slimrt.Model(tiny, on_overflow="drop")


def test_breakers_are_the_tokens_that_write_a_text(model):
    tokenizer = model.tokenizer
    for text in ("\n", "e", "the", "a b"):
        sequences = breaker_tokens(tokenizer, [text])
        for sequence in sequences:
            assert text.encode() in b"".join(tokenizer.token_bytes(id) for id in sequence)
        inside = [id for id in range(tokenizer.vocab_size) if text.encode() in tokenizer.token_bytes(id)]
        assert [sequence[0] for sequence in sequences if len(sequence) == 1] == inside
    spelt = [FIRST_BYTE + byte for byte in b"the"]
    assert any(sequence[0] == spelt[0] for sequence in breaker_tokens(tokenizer, ["the"]))


def test_only_the_last_few_breakers_are_kept(model):
    first = breaker_tokens(model.tokenizer, ["a"])
    for i in range(40):
        breaker_tokens(model.tokenizer, ["n", str(i)])
        assert breaker_tokens(model.tokenizer, ["a"]) is first  # asked for just before
    for i in range(40):
        breaker_tokens(model.tokenizer, ["n", str(i)])
    again = breaker_tokens(model.tokenizer, ["a"])
    assert again == first and again is not first


def test_dry_ends_a_loop(model):
    """A processor wants "ab" again and again; DRY has it stop, unless a breaker stands between."""

    def looping(ids, logits):
        logits[:] = 0
        logits[FIRST_BYTE + (98 if ids[-1] == FIRST_BYTE + 97 else 97)] = 5
        return logits

    options = {"max_tokens": 24, "logits_processor": looping, "repeat_penalty": 1.0, **GREEDY}
    assert model.generate("x", **options).text == "ab" * 12
    assert model.generate("x", dry_multiplier=1.0, **options).text != "ab" * 12
    assert model.generate("x", dry_multiplier=1.0, dry_sequence_breakers=["a"], **options).text == "ab" * 12
