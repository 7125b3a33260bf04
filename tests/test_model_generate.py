# SPDX-License-Identifier: Apache-2.0
"""Model.generate, stream and chat: what they promise beyond the numbers."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import slimrt
from conftest import GREEDY, PROMPT, third_party
from slimrt.generation.stops import StopFilter
from tiny_model import BOS, EOS, FIRST_BYTE


def forcing(text: bytes, then: int = EOS):
    """A logits_processor that makes the model write these bytes, then one more token."""
    ids = [FIRST_BYTE + byte for byte in text] + [then]
    start: list[int] = []

    def process(so_far, logits):
        if not start:
            start.append(len(so_far))
        logits[:] = -1e9
        logits[ids[len(so_far) - start[0]]] = 0
        return logits

    return process


def test_published_text_of_stories260k():
    folder = third_party("models/stories260K")
    with slimrt.Model(folder / "stories260K.gguf", n_ctx=256) as model:
        text = model.generate("", max_tokens=200, temperature=0).text
    assert text == (folder / "expected_greedy_200.txt").read_text().removesuffix("\n")


def test_result(model):
    result = model.generate(PROMPT, max_tokens=7, seed=3)
    n = len(model.tokenize(PROMPT))
    assert (result.finish_reason, result.truncated, result.seed) == ("length", False, 3)
    assert dataclasses.astuple(result.usage) == (n, 0, 7, 0, 0)
    assert len(result.tokens) == 7
    assert result.timings.ttft > 0 and result.timings.prefill_tok_s > 0 and result.timings.decode_tok_s > 0
    assert result.cache.bytes == (n + 6) * model.memory()["cache_bytes_per_token"]
    assert (result.cache.modes, result.cache.types) == (("kv", "kv"), ("f16", "f16"))
    json.dumps(result.to_dict())
    with pytest.raises(dataclasses.FrozenInstanceError, match="text"):
        result.text = ""


def test_stream_is_generate_in_pieces(model):
    with model.stream(PROMPT, max_tokens=30, seed=5) as stream:
        pieces = list(stream)
    assert all(pieces)
    assert "".join(pieces) == stream.result.text == model.generate(PROMPT, max_tokens=30, seed=5).text


def test_stream_left_early(model):
    with model.stream(PROMPT, max_tokens=30, **GREEDY) as stream:
        first = next(stream)
    assert stream.result.finish_reason == "unfinished"
    assert stream.result.text == first
    assert list(stream) == []


@pytest.mark.parametrize(("text", "shown"), [(b"xab!", "xab"), ("x€".encode(), "x\ufffd")])
def test_a_stream_left_early_has_what_was_held_back(model, text, shown):
    """What might begin a stop string, and a character that is not complete."""
    with model.stream(PROMPT, stop="ab!", logits_processor=forcing(text)) as stream:
        assert next(stream) == "x"
        stream._loop.wait([stream._ticket], lambda: len(stream.result.tokens) == 3)
        assert stream.result.text == "x"
    assert stream.result.text == shown


def test_seeds(tiny, model):
    same = [model.generate(PROMPT, max_tokens=20, seed=1).tokens for _ in range(2)]
    assert same[0] == same[1] != model.generate(PROMPT, max_tokens=20, seed=2).tokens
    runs = []
    for _ in range(2):
        with slimrt.Model(tiny, n_ctx=64, seed=7) as seeded:
            runs.append([seeded.generate(PROMPT, max_tokens=20).tokens for _ in range(2)])
    assert runs[0] == runs[1] and runs[0][0] != runs[0][1]
    with slimrt.Model(tiny, n_ctx=64, seed=-1) as new, slimrt.Model(tiny, n_ctx=64, seed=-1) as other:
        assert new.generate(PROMPT, max_tokens=1).seed != other.generate(PROMPT, max_tokens=1, seed=-1).seed
    unseeded = model.generate(PROMPT, max_tokens=20)
    assert model.generate(PROMPT, max_tokens=20, seed=unseeded.seed).tokens == unseeded.tokens


@pytest.mark.parametrize("n_seqs", [1, 2, 5])
def test_a_batch_gives_what_each_prompt_gives_alone(tiny, model, n_seqs):
    prompts = ["a", "the cat sat on the mat", "dog", "a longer one than that"]
    alone = [model.generate(p, max_tokens=12, seed=4 + i) for i, p in enumerate(prompts)]
    with slimrt.Model(tiny, n_ctx=64, n_seqs=n_seqs) as many:
        together = many.generate(prompts, max_tokens=12, seed=4)
        assert [r.tokens for r in together] == [r.tokens for r in alone]
        assert [r.usage for r in together] == [r.usage for r in alone]
        ids = [many.tokenize(p) for p in prompts]
        assert [r.text for r in many.generate(ids, max_tokens=12, seed=4)] == [r.text for r in alone]
        assert many.generate([], max_tokens=3) == []


def test_finished_texts_leave_the_batch(tiny):
    """Different lengths: each ends by its own stop string."""
    with slimrt.Model(tiny, n_ctx=64, n_seqs=3) as model:
        prompts = ["a", "b", "c"]
        whole = [r.text for r in model.generate(prompts, max_tokens=24, **GREEDY)]
        stop = whole[0][5]
        stopped = model.generate(prompts, max_tokens=24, stop=stop, **GREEDY)
        assert [r.text for r in stopped] == [text.partition(stop)[0] for text in whole]


def test_ids_as_prompt(model):
    ids = model.tokenize(PROMPT)
    expected = model.generate(PROMPT, max_tokens=5, **GREEDY).tokens
    assert model.generate(ids, max_tokens=5, **GREEDY).tokens == expected
    assert model.generate(np.array(ids), max_tokens=5, **GREEDY).tokens == expected
    assert model.generate(tuple(ids), max_tokens=5, **GREEDY).tokens == expected


def test_end_token(model):
    ended = model.generate(PROMPT, max_tokens=9, logits_processor=forcing(b"hi"))
    assert (ended.text, ended.finish_reason, ended.usage.completion_tokens) == ("hi", "stop", 2)
    assert EOS not in model.generate(PROMPT, max_tokens=9, ignore_eos=True, logits_processor=forcing(b"hi7" * 3)).tokens


def test_pieces_are_whole_characters(model):
    text = "é€😀 ok"
    pieces = list(model.stream(PROMPT, max_tokens=99, logits_processor=forcing(text.encode())))
    assert "".join(pieces) == text
    assert [p for p in pieces if p in "é€😀"] == ["é", "€", "😀"]
    cut = model.generate(PROMPT, max_tokens=2, logits_processor=forcing("a€".encode()))
    assert cut.text == "a\ufffd"


def test_no_part_of_a_stop_string_is_shown(model):
    pieces = list(model.stream(PROMPT, max_tokens=99, stop=["STOP", "END."], logits_processor=forcing(b"go ST END. x")))
    assert "".join(pieces) == "go ST "
    result = model.generate(PROMPT, max_tokens=99, stop="STOP", logits_processor=forcing(b"a STO"))
    assert (result.text, result.finish_reason) == ("a STO", "stop")
    assert model.generate(PROMPT, max_tokens=4, stop="STOP", logits_processor=forcing(b"aSTOP")).text == "aSTO"


@pytest.mark.unsanitized  # Python alone
@given(st.text("ab", max_size=30), st.text("ab", min_size=1, max_size=5), st.data())
def test_stop_filter(text, stop, data):
    """However the text is cut into pieces, what comes out is what stands before the stop string."""
    filter, shown, rest = StopFilter([stop]), "", text
    while rest and not filter.stopped:
        size = data.draw(st.integers(1, len(rest)))
        shown += filter.feed(rest[:size])
        rest = rest[size:]
        assert stop not in shown and text.partition(stop)[0].startswith(shown)
    assert shown + filter.flush() == text.partition(stop)[0]
    assert filter.stopped == (stop in text)


@pytest.mark.parametrize("stops", [["xb", "abc"], ["abc", "xb"]])
def test_stop_filter_takes_the_leftmost(stops):
    filter = StopFilter(stops)
    assert filter.feed("1abcxb") == "1" and filter.stopped and filter.flush() == ""


def test_full_context_keeps_what_there_is(tiny):
    with slimrt.Model(tiny, n_ctx=32) as model:
        n = len(model.tokenize(PROMPT))
        result = model.generate(PROMPT, max_tokens=-1, **GREEDY)
        assert (result.finish_reason, result.truncated) == ("context", True)
        assert len(result.tokens) == 32 - n + 1
        assert result.tokens[:5] == model.generate(PROMPT, max_tokens=5, **GREEDY).tokens


def test_prompt_that_does_not_fit(tiny):
    with slimrt.Model(tiny, n_ctx=32) as model:
        called = []
        with pytest.raises(slimrt.ContextOverflowError, match="33 tokens.* holds 32"):
            model.generate([[BOS], [BOS] * 33], max_tokens=1, on_progress=lambda *a: called.append(a))
        assert called == []
        assert model.generate([BOS] * 32, max_tokens=5, **GREEDY).finish_reason == "context"


def test_other_sequences_may_fill_the_cache(tiny):
    with slimrt.Model(tiny, n_ctx=64) as model, model.session() as session:
        session.append([BOS] * 20)
        result = model.generate(PROMPT, max_tokens=-1, **GREEDY)
        assert result.finish_reason == "context" and result.tokens
        session.append([BOS] * 30)
        with pytest.raises(slimrt.ContextOverflowError, match="0 free blocks of 32 tokens and 2 are needed"):
            model.generate([BOS] * 60, max_tokens=1)


def test_where_the_cache_is_full_the_youngest_text_waits_and_loses_nothing(tiny):
    """A session holds one block of four; where both texts want a second one, there is one."""
    with slimrt.Model(tiny, n_ctx=64, n_seqs=2) as model, model.session() as session:
        session.append([BOS] * 20)
        first, last = model.generate([PROMPT, PROMPT], max_tokens=-1, **GREEDY)
        assert first.finish_reason == last.finish_reason == "context"
        assert first.usage.prompt_tokens + len(first.tokens) >= 64 and last.tokens == first.tokens
        assert session.length == 20 and session.append([BOS]).shape == (1, model.n_vocab)


def test_a_text_that_finds_no_room_ends_where_it_is(tiny):
    """Sessions are their owner's: their rows stay, and a text has what is left."""
    with slimrt.Model(tiny, n_ctx=64, n_seqs=2) as model, model.session() as session, model.session() as other:
        session.append([BOS] * 60)
        other.append([BOS] * 20)
        text = model.generate(PROMPT, max_tokens=-1, **GREEDY)
        assert (text.finish_reason, text.truncated) == ("context", True)
        assert text.usage.prompt_tokens + len(text.tokens) == 33  # the last token takes no row


def test_no_ids_at_all_are_not_said_to_lack_a_bos(model):
    for task in (model.generate, model.embed):
        with pytest.raises(ValueError, match="no tokens: give some text, or a BOS token if the model has one"):
            task([[]])


def test_max_tokens_zero_only_reads_the_prompt(model):
    result = model.generate(PROMPT, max_tokens=0)
    assert (result.text, result.tokens, result.finish_reason) == ("", (), "length")
    assert result.timings.prefill_tok_s > 0


def test_logprobs(model):
    result = model.generate(PROMPT, max_tokens=4, logprobs=3, **GREEDY)
    ids = model.tokenize(PROMPT)
    logits = model.logits([*ids, *result.tokens])[len(ids) - 1 : -1].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for i, one in enumerate(result.logprobs):
        assert one.token == result.tokens[i]
        assert one.logprob == pytest.approx(expected[i, one.token], abs=5e-3)
        assert [top.logprob for top in one.top] == sorted((top.logprob for top in one.top), reverse=True)
        assert len(one.top) == 3 and one.top[0] == slimrt.TopLogprob(one.token, one.text, one.logprob)
        for top in one.top:
            assert top.text == model.tokenizer.token_bytes(top.token).decode("utf-8", "replace")
    assert model.generate(PROMPT, max_tokens=2).logprobs is None


def test_logprobs_are_the_models_own_whatever_changes_the_choice(model):
    options = {"max_tokens": 6, "logprobs": 2, "seed": 1, "temperature": 2.0, "repeat_penalty": 1.5}
    ids = model.tokenize(PROMPT)
    for processor in (None, lambda ids, logits: logits * 0):
        result = model.generate(ids, logits_processor=processor, logit_bias={EOS: -np.inf, 5: 3.0}, **options)
        logits = model.logits([*ids, *result.tokens])[len(ids) - 1 : -1].astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        for i, one in enumerate(result.logprobs):
            assert one.logprob == pytest.approx(expected[i, one.token], abs=2e-2)
            assert one.top[0].logprob == pytest.approx(expected[i].max(), abs=2e-2)


def test_logit_bias_forces_and_bans(model):
    ids = model.tokenize(PROMPT)
    assert model.generate(ids, max_tokens=4, logit_bias={9: 1000.0}).tokens == (9,) * 4
    first = model.generate(ids, max_tokens=1, temperature=0, ignore_eos=True).tokens[0]
    assert model.generate(ids, max_tokens=1, logit_bias={first: -np.inf}, **GREEDY).tokens[0] != first
    assert model.generate(ids, max_tokens=3, logit_bias={EOS: 1000.0}).finish_reason == "stop"
    kept = model.generate(ids, max_tokens=3, logit_bias={EOS: 1000.0}, ignore_eos=True)
    assert kept.finish_reason == "length" and EOS not in kept.tokens  # ignore_eos has the last word


def test_penalties_look_at_prompt_and_text(model):
    """Every token at most once, while they look back that far."""
    ids = model.tokenize(PROMPT)
    for penalty in ({"presence_penalty": 1e4}, {"frequency_penalty": 1e4}):
        tokens = model.generate(ids, max_tokens=20, repeat_last_n=-1, **penalty, **GREEDY).tokens
        assert len({*ids, *tokens}) == len(set(ids)) + len(tokens)
        last = model.generate(ids, max_tokens=20, repeat_last_n=1, **penalty, **GREEDY).tokens
        assert all(a != b for a, b in zip([ids[-1], *last], last, strict=False))
        assert len({*ids, *last}) < len(set(ids)) + len(last)


def test_several_prompts_are_sampled_as_if_each_were_alone(tiny):
    prompts = [[BOS, *range(5, 5 + n)] for n in (3, 9, 5, 7)]
    options = {"max_tokens": 12, "temperature": 1.5, "repeat_penalty": 1.2, "ignore_eos": True, "logprobs": 2}
    with slimrt.Model(tiny, n_ctx=64, n_seqs=3, cache_type="f32") as model:
        together = model.generate(prompts, seed=4, **options)
        alone = [model.generate(one, seed=4 + i, **options) for i, one in enumerate(prompts)]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    for a, b in zip(together, alone, strict=True):
        assert [one.logprob for one in a.logprobs] == pytest.approx([one.logprob for one in b.logprobs], abs=1e-3)


def test_logits_processor_sees_all_ids(model):
    seen = []

    def process(ids, logits):
        seen.append(list(ids))
        return logits

    result = model.generate(PROMPT, max_tokens=3, logits_processor=process, **GREEDY)
    assert seen[-1] == [*model.tokenize(PROMPT), *result.tokens[:2]]
    with pytest.raises(ValueError, match="logits_processor returned shape"):
        model.generate(PROMPT, max_tokens=3, logits_processor=lambda ids, logits: logits[:5])


def test_progress_and_stopping_by_it(tiny):
    calls = []
    with slimrt.Model(tiny, n_ctx=64, n_batch=16) as model:
        model.generate([BOS] * 40, max_tokens=2, on_progress=lambda *call: calls.append(call), **GREEDY)
        prefill = [("prefill", done, 40) for done in (16, 32, 40)]
        assert calls == [*prefill, ("decode", 1, 2), ("decode", 2, 2)]
        for stage in ("prefill", "decode"):

            def stop(now, done, total, stage=stage):
                if now == stage:
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                model.generate([BOS] * 40, max_tokens=2, on_progress=stop)
        assert len(model.generate([BOS] * 60, max_tokens=2, **GREEDY).tokens) == 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_beams": 0}, ValueError, "num_beams must be at least 1"),
        ({"num_beams": 4, "temperature": 0.7}, ValueError, "temperature=0.7 does not go with num_beams=4"),
        ({"num_beams": 4, "top_k": 5}, ValueError, "top_k=5 does not go with num_beams=4"),
        ({"num_beams": 4, "dry_multiplier": 0.5}, ValueError, "dry_multiplier=0.5 does not go with num_beams=4"),
        ({"num_beams": 4, "on_overflow": "shift"}, ValueError, "on_overflow='shift' does not go with num_beams=4"),
        ({"length_penalty": 2.0}, ValueError, "length_penalty=2.0 is for beam search: give num_beams too"),
        ({"num_beams": 2, "length_penalty": 1e300}, ValueError, "length_penalty must be from -40 to 40, got 1e.300"),
        ({"num_beams": 2, "length_penalty": -np.inf}, ValueError, "length_penalty must be from -40 to 40, got -inf"),
        ({"early_stopping": True}, ValueError, "early_stopping=True is for beam search"),
        ({"mirostat": 1}, slimrt.UnsupportedError, "mirostat 1 is not supported: mirostat 2"),
        ({"mirostat": 2, "min_p": 0.1}, ValueError, "min_p=0.1 does not go with mirostat=2"),
        ({"mirostat": 2, "mirostat_tau": -1.0}, ValueError, "mirostat_tau"),
        ({"dry_multiplier": -1.0}, ValueError, "dry_multiplier"),
        ({"dry_sequence_breakers": "ab"}, TypeError, "dry_sequence_breakers must be a sequence of texts"),
        ({"dry_sequence_breakers": ["a", ""]}, ValueError, "dry_sequence_breakers must not be empty"),
        ({"dry_sequence_breakers": ["a"] * 33}, ValueError, "dry_sequence_breakers must be at most 32 texts, got 33"),
        ({"dry_sequence_breakers": ["a", "b" * 41]}, ValueError, "at most 40 characters each, one has 41"),
        ({"xtc_probability": 2.0}, ValueError, "xtc_probability"),
        ({"on_overflow": "shfit"}, ValueError, "on_overflow 'shfit'.*did you mean 'shift'"),
        ({"n_keep": 4}, ValueError, "n_keep=4 says what a shifted context keeps: give on_overflow='shift'"),
        ({"n_keep": -2, "on_overflow": "shift"}, ValueError, "n_keep must be -1"),
        ({"temperature": -1.0}, ValueError, "temperature"),
        ({"top_p": 2.0}, ValueError, "top_p"),
        ({"typical_p": 0.0}, ValueError, "typical_p"),
        ({"repeat_last_n": -2}, ValueError, "repeat_last_n"),
        ({"frequency_penalty": np.inf}, ValueError, "frequency_penalty"),
        ({"presence_penalty": "1"}, TypeError, "presence_penalty must be a number"),
        ({"logit_bias": [(1, 2.0)]}, TypeError, "logit_bias must map token ids to numbers"),
        ({"logit_bias": {"a": 2.0}}, TypeError, "a token id in logit_bias must be a whole number"),
        ({"logit_bias": {1: "2"}}, TypeError, "logit_bias of token 1 must be a number"),
        ({"logit_bias": {1: np.inf}}, ValueError, "logit_bias must be finite"),
        ({"logit_bias": {10**9: 1.0}}, ValueError, "logit_bias names token 1000000000, the vocabulary has"),
        ({"logit_bias": {-1: 1.0}}, ValueError, "logit_bias names token -1, the vocabulary has"),
        ({"max_tokens": -2}, ValueError, "max_tokens"),
        ({"logprobs": -1}, ValueError, "logprobs"),
        ({"seed": -2}, ValueError, "seed"),
        ({"stop": ["a", ""]}, ValueError, "stop string"),
        ({"best_of": 1.0}, TypeError, "best_of"),
        ({"max_tokens": 2.5}, TypeError, "max_tokens must be a whole number"),
        ({"max_tokens": None}, TypeError, "max_tokens must be a whole number"),
        ({"temperature": "hot"}, TypeError, "temperature must be a number"),
        ({"seed": 1.5}, TypeError, "seed must be a whole number"),
        ({"stop": None}, TypeError, "stop must be text"),
        ({"stop": ["a", 3]}, TypeError, "stop must be text"),
        ({"on_progress": 3}, TypeError, "on_progress must be a function"),
        ({"session": 3}, TypeError, "session must be one that"),
        ({"ignore_eos": "false"}, TypeError, "ignore_eos must be true or false, got 'false'"),
        ({"lookup": 1}, TypeError, "lookup must be true or false"),
        ({"top_k": 10**30}, ValueError, "top_k must be less than 2"),
        ({"temperature": 10**400}, ValueError, "temperature must be a number that a float holds"),
        ({"logit_bias": {1: 1e300}}, ValueError, "logit_bias of token 1 is 1e.300, which no float holds"),
    ],
)
def test_bad_options(model, options, error, message):
    with pytest.raises(error, match=message):
        model.generate(PROMPT, **options)
    with pytest.raises(error, match=message):
        model.stream(PROMPT, **options)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([BOS, 10**6], "token id 1000000 is not in the vocabulary"),
        ([-1], "token id -1 is not in the vocabulary"),
        ([BOS, 1 << 70], "token id 1180591620717411303424 is not in the vocabulary"),
        ([[1, 2], [3, 4]], "one-dimensional.* got int64"),
        ([0.5], "sequence of int, got float64"),
    ],
)
def test_bad_ids(model, ids, message):
    with pytest.raises(ValueError, match=message):
        model.logits(ids)


def test_ids_as_objects(model):
    ids = np.array([BOS, 5], dtype=object)
    assert np.array_equal(model.logits(ids), model.logits([BOS, 5]))


@pytest.mark.parametrize("wrong", [5, 1 << 70, 0.5, {"a": 1}, iter("ab"), {"a", "b"}, [{"a": 1}]])
def test_what_is_no_text(model, wrong):
    """They said: token ids are a one-dimensional sequence of int, got object of shape ()."""
    for call in (model.generate, model.score, model.embed):
        with pytest.raises(TypeError, match="a text is str, or its token ids, got"):
            call(wrong)


def test_chat(model):
    messages = [{"role": "user", "content": "hi"}]
    ids = model.tokenize("<s><|user|>hi<|assistant|>", add_special_tokens=False)
    assert model.render_chat(messages) == ids
    expected = model.generate(ids, max_tokens=5, **GREEDY)
    assert model.chat(messages, max_tokens=5, **GREEDY).tokens == expected.tokens
