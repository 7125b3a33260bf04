# SPDX-License-Identifier: Apache-2.0
"""slimrt.Model, Session, plan: what they promise beyond the numbers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import slimrt
from conftest import relative, third_party
from slimrt.generate import StopFilter
from slimrt.units import format_bytes, parse_bytes
from tiny_model import BOS, EOS, FIRST_BYTE, write_tiny

PROMPT = "the cat sat"
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Multi-head attention with RoPE: kv and k are legal."""
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    """Grouped-query attention: only kv is legal."""
    return write_tiny(tmp_path_factory.mktemp("model") / "grouped.gguf", n_kv_heads=2)


@pytest.fixture(scope="module")
def model(tiny):
    with slimrt.Model(tiny, n_ctx=64) as model:
        yield model


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


# ---------------------------------------------------------------- generate
def test_published_text_of_stories260k():
    folder = third_party("models/stories260K")
    with slimrt.Model(folder / "stories260K.gguf", n_ctx=256) as model:
        text = model.generate("", max_tokens=200, temperature=0).text
    assert text == (folder / "expected_greedy_200.txt").read_text().removesuffix("\n")


def test_result(model):
    result = model.generate(PROMPT, max_tokens=7, seed=3)
    n = len(model.tokenize(PROMPT))
    assert (result.finish_reason, result.truncated, result.seed) == ("length", False, 3)
    assert dataclasses.astuple(result.usage) == (n, 0, 7)
    assert len(result.tokens) == 7
    assert result.timings.ttft > 0 and result.timings.prefill_tok_s > 0 and result.timings.decode_tok_s > 0
    assert result.cache.bytes == (n + 6) * model.memory()["cache_bytes_per_token"]
    assert (result.cache.modes, result.cache.types) == (("kv", "kv"), ("f16", "f16"))
    json.dumps(result.to_dict())
    with pytest.raises(dataclasses.FrozenInstanceError):
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


def test_others_may_use_the_model_between_the_pieces_of_a_stream(tiny):
    with slimrt.Model(tiny, n_ctx=64, n_seqs=2) as model:
        alone = model.generate(PROMPT, max_tokens=20, **GREEDY).text
        text = ""
        for piece in model.stream(PROMPT, max_tokens=20, **GREEDY):
            text += piece
            assert alone.startswith(model.generate(PROMPT, max_tokens=2, **GREEDY).text.rstrip("\ufffd"))
        assert text == alone


def test_seeds(tiny, model):
    same = [model.generate(PROMPT, max_tokens=20, seed=1).tokens for _ in range(2)]
    assert same[0] == same[1] != model.generate(PROMPT, max_tokens=20, seed=2).tokens
    runs = []
    for _ in range(2):
        with slimrt.Model(tiny, n_ctx=64, seed=7) as seeded:
            runs.append([seeded.generate(PROMPT, max_tokens=20).tokens for _ in range(2)])
    assert runs[0] == runs[1] and runs[0][0] != runs[0][1]
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
        with pytest.raises(slimrt.ContextOverflowError):
            model.generate([BOS] * 60, max_tokens=1)


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
        assert [p for _, p in one.top] == sorted((p for _, p in one.top), reverse=True)
        assert len(one.top) == 3 and one.top[0][0] == one.token
    assert model.generate(PROMPT, max_tokens=2).logprobs is None


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


def test_a_callback_must_not_use_the_model(model):
    with pytest.raises(RuntimeError, match="callback"):
        model.generate([BOS] * 4, max_tokens=1, on_progress=lambda *call: model.logits([BOS]))
    assert model.generate([BOS], max_tokens=1).tokens


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_beams": 4}, slimrt.UnsupportedError, "beam search is not supported.*temperature=0"),
        ({"temperature": -1.0}, ValueError, "temperature"),
        ({"top_p": 2.0}, ValueError, "top_p"),
        ({"max_tokens": -2}, ValueError, "max_tokens"),
        ({"logprobs": -1}, ValueError, "logprobs"),
        ({"seed": -1}, ValueError, "seed"),
        ({"stop": ["a", ""]}, ValueError, "stop string"),
        ({"length_penalty": 1.0}, TypeError, "length_penalty"),
        ({"max_tokens": 2.5}, TypeError, "max_tokens must be a whole number"),
        ({"max_tokens": None}, TypeError, "max_tokens must be a whole number"),
        ({"temperature": "hot"}, TypeError, "temperature must be a number"),
        ({"seed": 1.5}, TypeError, "seed must be a whole number"),
        ({"stop": None}, TypeError, "stop must be text"),
        ({"stop": ["a", 3]}, TypeError, "stop must be text"),
        ({"on_progress": 3}, TypeError, "on_progress must be a function"),
        ({"session": 3}, TypeError, "session must be one that"),
    ],
)
def test_bad_options(model, options, error, message):
    with pytest.raises(error, match=message):
        model.generate(PROMPT, **options)
    with pytest.raises(error, match=message):
        model.stream(PROMPT, **options)


@pytest.mark.parametrize("ids", [[BOS, 10**6], [-1], [[1, 2], [3, 4]], [0.5]])
def test_bad_ids(model, ids):
    with pytest.raises(ValueError):
        model.logits(ids)


def test_chat(model):
    messages = [{"role": "user", "content": "hi"}]
    ids = model.tokenize("<s><|user|>hi<|assistant|>", add_special_tokens=False)
    assert model.render_chat(messages) == ids
    expected = model.generate(ids, max_tokens=5, **GREEDY)
    assert model.chat(messages, max_tokens=5, **GREEDY).tokens == expected.tokens


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


def test_async(model):
    async def both():
        whole = await model.agenerate(PROMPT, max_tokens=12, seed=2)
        return whole, [piece async for piece in model.astream(PROMPT, max_tokens=12, seed=2)]

    whole, pieces = asyncio.run(both())
    assert "".join(pieces) == whole.text == model.generate(PROMPT, max_tokens=12, seed=2).text


def test_async_cancelled(model):
    async def cancel():
        started = asyncio.Event()
        loop = asyncio.get_running_loop()
        work = asyncio.create_task(
            model.agenerate(
                PROMPT, max_tokens=-1, ignore_eos=True, on_progress=lambda *a: loop.call_soon_threadsafe(started.set)
            )
        )
        await started.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        pieces = model.astream(PROMPT, max_tokens=-1, ignore_eos=True)
        async for _ in pieces:
            break
        await pieces.aclose()

    asyncio.run(cancel())
    assert model.generate([BOS] * 60, max_tokens=1).tokens


def test_async_errors_arrive(model):
    async def fail():
        with pytest.raises(slimrt.ContextOverflowError):
            await model.agenerate([BOS] * 99)
        with pytest.raises(slimrt.ContextOverflowError):
            async for _ in model.astream([BOS] * 99):
                pass

    asyncio.run(fail())


# ---------------------------------------------------------------- sessions
def test_session_logits_are_the_model_s(tiny):
    with slimrt.Model(tiny, n_ctx=64, cache_type="f32") as model, model.session() as session:
        ids = model.tokenize("the cat sat on the mat")
        whole = model.logits(ids)
        assert whole.shape == (len(ids), model.n_vocab) and whole.dtype == np.float32
        parts = np.concatenate([session.append(ids[:5]), session.append(ids[5:6]), session.append(ids[6:])])
        assert relative(parts, whole) < 1e-4
        assert session.tokens == tuple(ids) and session.length == len(ids)
        session.truncate(5)
        assert relative(session.append(ids[5:], last_only=True), whole[-1:]) < 1e-4


def test_forks_are_independent(tiny):
    with slimrt.Model(tiny, n_ctx=64, n_seqs=2) as model, model.session() as one:
        one.append(model.tokenize("the cat"))
        with one.fork() as other:
            other.append(model.tokenize(" sat", add_special_tokens=False))
            assert other.length > one.length
            assert other.tokens[: one.length] == one.tokens
            again = one.append([7])
        one.truncate(one.length - 1)
        assert np.array_equal(one.append([7]), again)


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


def test_sessions_that_are_dropped_give_their_rows_back(tiny):
    with slimrt.Model(tiny, n_ctx=64) as model:
        for _ in range(5):
            model.session().append([BOS] * 64)


def test_generate_reuses_what_a_session_holds(model):
    with model.session() as session:
        first = model.generate(PROMPT, max_tokens=6, session=session, **GREEDY)
        ids = [*model.tokenize(PROMPT), *first.tokens]
        assert session.tokens == tuple(ids[:-1])
        longer = [*ids, 9, 9]
        second = model.generate(longer, max_tokens=6, session=session, **GREEDY)
        assert second.usage.cached_tokens == len(ids) - 1
        assert second.tokens == model.generate(longer, max_tokens=6, **GREEDY).tokens
        other = model.generate([*ids[:4], 8], max_tokens=2, session=session, **GREEDY)
        assert other.usage.cached_tokens == 4
        again = model.generate([*ids[:4], 8], max_tokens=2, session=session, **GREEDY)
        assert again.tokens == other.tokens and again.usage.cached_tokens == 4
        with pytest.raises(ValueError, match="one prompt"):
            model.generate(["a", "b"], session=session)


def test_session_file(tiny, tmp_path):
    file = tmp_path / "s.session"
    with slimrt.Model(tiny, n_ctx=64) as model:
        session = model.session()
        session.append(model.tokenize(PROMPT))
        session.save(file)
        expected = session.append([9])
    assert [path.name for path in tmp_path.iterdir()] == ["s.session"]
    with slimrt.Model(tiny, n_ctx=32) as model:
        loaded = model.load_session(file)
        assert loaded.tokens == tuple(model.tokenize(PROMPT))
        assert np.array_equal(loaded.append([9]), expected)


def test_session_files_that_do_not_belong(tiny, grouped, tmp_path):
    file = tmp_path / "s.session"
    with slimrt.Model(tiny, n_ctx=64) as model, model.session() as session:
        session.append([BOS] * 40)
        session.save(file)
    with slimrt.Model(grouped) as other, pytest.raises(slimrt.ModelFormatError, match="another model"):
        other.load_session(file)
    with slimrt.Model(tiny, cache_type="f32") as other, pytest.raises(slimrt.ModelFormatError, match="another cache"):
        other.load_session(file)
    with slimrt.Model(tiny, n_ctx=32) as small, pytest.raises(slimrt.ContextOverflowError):
        small.load_session(file)


def test_damaged_session_files(tiny, tmp_path):
    file, data = tmp_path / "s.session", tmp_path / "bad.session"
    with slimrt.Model(tiny, n_ctx=64) as model, model.session() as session:
        session.append([BOS] * 4)
        session.save(file)
        good = file.read_bytes()
        later = good.replace(b'"version": 1', b'"version": 7')
        swapped = good.replace(b'"tokens": [1, 1, 1, 1]', b'"tokens": [1, 1, 1,-1]')
        for bad in (b"", good[:7], good[:100], good[:-1], good + b"x", b"GGUF" + good[4:], later, swapped):
            data.write_bytes(bad)
            with pytest.raises(slimrt.ModelFormatError):
                model.load_session(data)
        with pytest.raises(FileNotFoundError):
            model.load_session(tmp_path / "none")
        with pytest.raises(FileNotFoundError):
            session.save(tmp_path / "none" / "s")


def test_closed(tiny):
    model = slimrt.Model(tiny, n_ctx=64)
    session, stream = model.session(), model.stream(PROMPT)
    session.close()
    with pytest.raises(ValueError, match="session is closed"):
        session.append([BOS])
    model.close()
    model.close()
    for use in (lambda: model.generate(PROMPT), lambda: model.logits([BOS]), lambda: next(stream), model.session):
        with pytest.raises(ValueError, match="model is closed"):
            use()


# ---------------------------------------------------------------- score
def test_score(model):
    score = model.score(PROMPT)
    ids = model.tokenize(PROMPT)
    logits = model.logits(ids)[:-1].astype(np.float64)
    expected = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))[range(len(ids) - 1), ids[1:]]
    assert score.tokens == tuple(ids) and score.logprobs.dtype == np.float32
    assert np.allclose(score.logprobs, expected, atol=1e-4)
    assert score.log_likelihood == pytest.approx(expected.sum(), rel=1e-4)
    assert score.perplexity == pytest.approx(model.perplexity(PROMPT), rel=1e-5)
    with pytest.raises(ValueError, match="two tokens"):
        model.score([BOS])
    with pytest.raises(slimrt.ContextOverflowError):
        model.score([BOS] * 65)


def test_perplexity_of_a_long_text(tiny):
    """Windows of n_ctx: each token is scored once, with what stands before it in its window."""
    ids = [BOS, *np.random.default_rng(0).integers(FIRST_BYTE, FIRST_BYTE + 256, 99).tolist()]
    with slimrt.Model(tiny, n_ctx=32, cache_type="f32", n_batch=32) as model:
        total, scored, end = 0.0, 1, 32
        while scored < len(ids):
            total += model.score(ids[end - 32 : end]).logprobs[scored - end :].sum(dtype=np.float64)
            scored, end = end, min(end + 10, len(ids))
        assert model.perplexity(ids, stride=10) == pytest.approx(np.exp(-total / 99), rel=1e-4)
        for stride in (0, 32):
            with pytest.raises(ValueError, match="stride"):
                model.perplexity(ids, stride=stride)


# ---------------------------------------------------------------- loading
def test_k_is_folded_while_loading_and_says_so_once(tiny, capsys):
    from slimrt import progress

    progress.note_once.cache_clear()
    with slimrt.Model(tiny, n_ctx=64, cache_type="f32") as kv:
        ids = kv.tokenize(PROMPT)
        expected, size = kv.logits(ids), kv.memory()["cache_bytes_per_token"]
    for _ in range(2):
        with slimrt.Model(tiny, n_ctx=64, cache="k", cache_type="f32") as k, k.session() as session:
            rows = np.concatenate([session.append([id]) for id in ids])
            assert relative(rows, expected) < 1e-3
            assert k.memory()["cache_bytes_per_token"] * 2 == size
    assert capsys.readouterr().err.count("slimrt convert") == 1


def test_a_mode_for_each_layer(tiny):
    with slimrt.Model(tiny, n_ctx=64, cache=["kv", "k"], progress=False) as mixed:
        assert [layer["mode"] for layer in mixed.info()["layers"]] == ["kv", "k"]
        assert mixed.generate(PROMPT, max_tokens=2).cache.modes == ("kv", "k")


@pytest.mark.parametrize("mode", ["v", "x"])
def test_modes_without_rope(tmp_path, mode):
    path = write_tiny(tmp_path / "gpt2.gguf", arch="gpt2")
    with slimrt.Model(path, cache_type="f32") as kv, slimrt.Model(path, cache=mode, cache_type="f32") as other:
        expected = kv.generate(PROMPT, max_tokens=20, **GREEDY).tokens
        assert other.generate(PROMPT, max_tokens=20, **GREEDY).tokens == expected


def test_an_illegal_mode_is_refused_before_the_fold(grouped, monkeypatch):
    import slimrt.tools.fold

    monkeypatch.setattr(slimrt.tools.fold, "fold_layers", lambda *a, **k: pytest.fail("folded"))
    with pytest.raises(slimrt.CacheUnsupportedError, match=r"'k' .*layer 0.*Legal for this model: kv"):
        slimrt.Model(grouped, cache="k")
    with pytest.raises(slimrt.CacheUnsupportedError, match="layer 1"):
        slimrt.Model(grouped, cache=["kv", "k"])


def test_too_little_memory_is_said_before_the_fold(tiny, monkeypatch):
    import slimrt.tools.fold

    monkeypatch.setattr(slimrt.tools.fold, "fold_layers", lambda *a, **k: pytest.fail("folded"))
    with pytest.raises(slimrt.WontFitError):
        slimrt.Model(tiny, cache="k", memory_limit=1000)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"cache": "kk"}, slimrt.UnsupportedError, "'kk'.*did you mean 'k'.*kv, k, v, x"),
        ({"cache": "k+r"}, slimrt.UnsupportedError, r"k\+r"),
        ({"cache": ["kv", "z"]}, slimrt.UnsupportedError, "'z'"),
        ({"cache_type": "q8"}, slimrt.UnsupportedError, "f32, f16, bf16"),
        ({"cache_type_v": "fp16"}, slimrt.UnsupportedError, "did you mean 'f16'"),
        ({"device": "cuda"}, slimrt.UnsupportedError, "auto, cpu"),
        ({"on_overflow": "shift"}, slimrt.UnsupportedError, "error"),
        ({"memory_limit": "lots"}, ValueError, "not a size"),
        ({"n_ctx": -1}, ValueError, "n_ctx"),
        ({"sparse_threshold": 0.1}, TypeError, "sparse_threshold"),
        ({"n_ctx": 1.5}, TypeError, "n_ctx must be a whole number"),
        ({"n_threads": "all"}, TypeError, "n_threads must be a whole number"),
        ({"seed": "abc"}, TypeError, "seed must be a whole number"),
        ({"cache": []}, ValueError, "cache must be a mode"),
        ({"cache": 5}, ValueError, "cache must be a mode"),
        ({"cache": ["kv", None]}, slimrt.UnsupportedError, "'None'"),
        ({"cache_type": None}, slimrt.UnsupportedError, "f32, f16, bf16"),
        ({"device": None}, slimrt.UnsupportedError, "auto, cpu"),
    ],
)
def test_bad_arguments(tiny, arguments, error, message):
    with pytest.raises(error, match=message):
        slimrt.Model(tiny, **arguments)


def test_files_that_are_no_models(tmp_path):
    with pytest.raises(FileNotFoundError):
        slimrt.Model(tmp_path / "none.gguf")
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 64)
    with pytest.raises(slimrt.ModelFormatError):
        slimrt.Model(bad)
    with pytest.raises(slimrt.SlimrtError):
        slimrt.Model(tmp_path)


def test_what_fits_instead(tmp_path):
    tiny = write_tiny(tmp_path / "long.gguf", n_ctx=4096)  # of a long context the cache is the largest part
    whole = slimrt.plan(tiny, n_ctx=4096)
    k = next(row for row in whole.rows if row.cache == "k")
    with pytest.raises(slimrt.WontFitError) as caught:
        slimrt.Model(tiny, n_ctx=4096, memory_limit=k.total)
    error = caught.value
    assert error.needed == whole.asked.total and error.available == k.total
    assert "--cache k" in error.options and error.options[0].startswith("--ctx ")
    assert all(option in str(error) for option in error.options)
    largest = int(error.options[0].removeprefix("--ctx "))
    slimrt.Model(tiny, n_ctx=largest, memory_limit=k.total).close()
    slimrt.Model(tiny, n_ctx=4096, cache="k", memory_limit=k.total, progress=False).close()
    with pytest.raises(slimrt.WontFitError):
        slimrt.Model(tiny, n_ctx=largest + 32, memory_limit=k.total)


def test_default_context(tmp_path, tiny):
    long = write_tiny(tmp_path / "long.gguf", n_ctx=10000)
    with slimrt.Model(long) as model:
        assert model.n_ctx == 4096
        with pytest.raises(slimrt.ContextOverflowError, match="holds 4096.*10000"):
            model.generate([BOS] * 4097)
    with slimrt.Model(tiny) as model:
        assert model.n_ctx == 256


def test_verbose_says_what_was_resolved(tiny, capsys):
    slimrt.Model(tiny, n_ctx=64).close()
    assert capsys.readouterr() == ("", "")
    slimrt.Model(tiny, n_ctx=64, verbose=True).close()
    out, err = capsys.readouterr()
    assert out == "" and "context 64 of 256" in err and "kv f16" in err


def test_a_directory_without_a_tokenizer():
    folder = third_party("models/makemore_lmj9_model")
    golden = json.loads((folder / "golden.json").read_text())
    with slimrt.Model(folder, cache_type="f32") as model:
        with pytest.raises(slimrt.UnsupportedError, match="tokenizer.json"):
            model.tokenize("x")
        with pytest.raises(slimrt.UnsupportedError, match="tokenizer.json"):
            model.generate([0], stop="x")
        assert model.generate([0], max_tokens=3, **GREEDY).text == ""
        assert golden


# ---------------------------------------------------------------- plan
def test_plan_is_what_is_allocated(tiny):
    result = slimrt.plan(tiny, n_ctx=100, n_seqs=2, n_batch=16, cache_type="bf16", memory_limit="1GiB")
    assert [row.cache for row in result.rows] == ["kv", "k"]
    assert [mode for mode, reason in result.refused if reason] == ["v", "x"]
    assert result.fits and result.asked == result.rows[0]
    for row in result.rows:
        with slimrt.Model(
            tiny, n_ctx=100, n_seqs=2, n_batch=16, cache=row.cache, cache_type="bf16", progress=False
        ) as model:
            memory = model.memory()
            parts = (row.weights, row.derived, row.cache_bytes, row.scratch, row.mapped, row.bytes_per_token)
            names = ("weights", "derived", "cache", "scratch", "mapped", "cache_bytes_per_token")
            assert parts == tuple(memory[name] for name in names)
            assert row.total == memory["total"] + memory["mapped"] == sum(parts[:5])
    json.dumps(result.to_dict())


def test_plan_finds_the_largest_context(tiny):
    half = slimrt.plan(tiny, n_ctx=128).asked.total
    row = slimrt.plan(tiny, n_ctx=256, memory_limit=half).asked
    assert not row.fits and row.max_n_ctx == 128
    assert slimrt.plan(tiny, memory_limit=1000).asked.max_n_ctx == 0
    assert slimrt.plan(tiny).asked.max_n_ctx == 256
    assert slimrt.plan(tiny, cache=["kv", "k"]).asked.cache == "mixed"


# ---------------------------------------------------------------- sizes
@pytest.mark.parametrize(
    ("text", "size"),
    [("6GiB", 6 << 30), ("6g", 6 << 30), ("1.5 MiB", 3 << 19), ("2GB", 2 * 10**9), (77, 77), (".5k", 512)],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "6 apples", "1e3"])
def test_bad_sizes(text):
    with pytest.raises(ValueError):
        parse_bytes(text)


def test_sizes_for_people():
    assert [format_bytes(n) for n in (5, 2048, 5 << 20, 5.5 * 2**30, 2**42)] == [
        "5 B", "2.0 KiB", "5.0 MiB", "5.5 GiB", "4.0 TiB",
    ]  # fmt: skip
